/** Logs: records and lines of all processes in the order of time; by words, process, time and request; following. */

import { empty, failure, h, hostile, icon, loadStyle, loading, problems, replace, visible } from "../dom.js";
import { clock, moment, plural } from "../format.js";

const PAGE = 300;
const MOST_LINES = 6000;
const AROUND_S = 5;
const TYPING_MS = 250;
const NEAR_END_PX = 60;
const LIMIT = 600;
const TICKET = /(?<![\w:.])[A-Za-z_]\w*:\d+:\d+:\d+(?![\w:])/g;
const TIME_OF_DAY = /^([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?$/;
const LOUD = { FaultSeen: "bad", ProcessLost: "bad", RunEnded: "bad", IncidentOpened: "bad", FaultNoted: "bad", Alert: "warn", OperationFailed: "warn", FaultHandled: "warn", SlowLink: "warn", SlowProcess: "warn", ProcessBusy: "warn", JournalPaused: "warn", CauseDiagnosed: "note", StrategyChosen: "note", IncidentClosed: "good", StepCommitted: "note", ProcessGone: "note", Span: "quiet", SamplesScored: "quiet", TicketAssigned: "quiet" };

export async function render(root, context) {
  const { api, params, setParams, signal } = context;
  const id = context.run.id;
  const state = { text: params.get("text") ?? "", process: params.get("process") ?? "", request: params.get("request") ?? "", from: timeOf(params.get("from")), to: timeOf(params.get("to")), line: params.get("line"), at: timeOf(params.get("at")) };
  const list = h("ol", { class: "log-lines", tabindex: "0", "aria-label": "Records in the order of time", onscroll: scrolled, onkeydown: keys });
  const status = h("p", { class: "log-status muted", role: "status" });
  const notes = h("div");
  const chips = h("div", { class: "log-chips" });
  let follow = context.run.state === "running" && state.at === null && state.to === null;
  let page = null;
  let wanted = 0;
  let isReading = false;
  let isBehind = false;
  const form = frame();
  await loadStyle("views/logs.css");
  replace(root, h("h2", { class: "visually-hidden" }, "Logs"), form.element, chips, notes, h("section", { class: "log-box" }, list, status));
  await load();
  return {
    update(what) {
      if (!what.includes("logs") || !page) return;
      if (!page.indexed || !page.lines.length) load();
      else if (follow) readNewer();
    },
  };

  // ---- the question

  function frame() {
    const text = h("input", { type: "search", value: state.text, placeholder: "Words, in this order", "aria-label": "Search the records", oninput: later(() => change({ text: text.value.trim() })) });
    const process = h("select", { "aria-label": "Process", onchange: () => change({ process: process.value }) });
    const request = h("input", { type: "text", value: state.request, placeholder: "Ticket, step:7, fault id", "aria-label": "Request", class: "log-request", oninput: later(() => change({ request: request.value.trim() })) });
    const from = timeField("From", state.from, (time) => change({ from: time }), context.run);
    const to = timeField("Until", state.to, (time) => change({ to: time }), context.run);
    const following = h("button", { type: "button", "aria-pressed": String(follow), onclick: toggle }, "Follow");
    const element = h("div", { class: "toolbar log-bar" }, h("span", { class: "searchbox" }, icon("search"), text), process, h("label", "Request ", request), h("label", "From ", from), h("label", "until ", to), h("span", { class: "grow" }), context.run.state === "running" && following);
    return { element, text, process, request, from, to, following };
  }

  function toggle() {
    follow = !follow;
    form.following.setAttribute("aria-pressed", String(follow));
    if (follow) readNewer().then(toEnd);
  }

  function change(changes) {
    Object.assign(state, changes, { line: null, at: null });
    form.text.value = state.text;
    form.request.value = state.request;
    form.from.value = inputTime(state.from);
    form.to.value = inputTime(state.to);
    setParams({ text: state.text, process: state.process, request: state.request, from: state.from, to: state.to, line: null, at: null });
    load();
  }

  function query() {
    const around = state.at !== null ? { from: state.at - AROUND_S, to: state.at + AROUND_S } : { from: state.from, to: state.to };
    return { text: state.text, process: state.process, request: state.request, ...around };
  }

  // ---- reading

  async function load() {
    const mine = ++wanted;
    if (!page) replace(list, h("li", loading("Reading the records")));
    try {
      let answer = await api.logs(id, { ...query(), limit: PAGE }, { signal });
      if (mine === wanted && state.line && state.at === null) answer = await untilFound(answer, mine);
      if (mine !== wanted) return;
      page = answer;
      draw();
    } catch (error) {
      if (mine === wanted && error.name !== "AbortError") replace(list, h("li", failure(error, () => load())));
    }
  }

  /** A line without a known time is looked for in a few pages from the end. */
  async function untilFound(first, mine) {
    let answer = first;
    for (let turn = 0; turn < 8 && answer.next && mine === wanted && !answer.lines.some((line) => line.line === state.line); turn += 1) {
      const before = await api.logs(id, { ...query(), cursor: answer.next, limit: PAGE * 2 }, { signal });
      answer = { ...answer, lines: [...before.lines, ...answer.lines], next: before.next };
    }
    return answer;
  }

  async function readEarlier() {
    if (isReading || !page?.next) return;
    isReading = true;
    const mine = wanted;
    try {
      const answer = await api.logs(id, { ...query(), cursor: page.next, limit: PAGE }, { signal });
      if (mine !== wanted) return;
      page = { ...page, lines: [...answer.lines, ...page.lines], next: answer.next };
      const bottom = list.scrollHeight - list.scrollTop;
      list.querySelector(".log-earlier")?.remove();
      list.prepend(...(answer.next ? [earlierButton()] : []), ...answer.lines.map(lineOf));
      list.scrollTop = list.scrollHeight - bottom;
      tell();
    } catch (error) {
      if (error.name !== "AbortError") status.textContent = error.message;
    } finally {
      isReading = false;
    }
  }

  async function readNewer() {
    if (isReading) {
      isBehind = true;
      return;
    }
    isReading = true;
    const mine = wanted;
    try {
      const answer = await api.logs(id, { ...query(), follow: page.last, limit: PAGE }, { signal });
      if (mine !== wanted) return;
      const atEnd = isAtEnd();
      page = { ...page, lines: [...page.lines, ...answer.lines].slice(-MOST_LINES), last: answer.last ?? page.last };
      list.append(...answer.lines.map(lineOf));
      while (list.childElementCount > MOST_LINES) list.firstElementChild.remove();
      if (atEnd) toEnd();
      tell();
    } catch {
      // The frame says that the connection was lost; the next change reads on from the same place.
    } finally {
      isReading = false;
    }
    if (isBehind) {
      isBehind = false;
      await readNewer();
    }
  }

  // ---- drawing

  function draw() {
    drawProcesses();
    drawChips();
    replace(notes, problems(page.problems));
    if (!page.lines.length) {
      const none = page.indexed ? empty("No record fits", hasFilter() ? "Try fewer words, another process or a longer time." : "Nothing was recorded yet.") : loading("The search index is being built");
      replace(list, h("li", none));
      status.textContent = "";
      return;
    }
    replace(list, page.next && earlierButton(), page.lines.map(lineOf));
    const target = list.querySelector(".log-line.target");
    if (target) list.scrollTop += target.getBoundingClientRect().top - list.getBoundingClientRect().top - list.clientHeight / 2;
    else toEnd();
    tell();
  }

  function hasFilter() {
    return Boolean(state.text || state.process || state.request || state.from !== null || state.to !== null || state.at !== null);
  }

  function drawProcesses() {
    const names = [...new Set([...page.processes, ...(state.process ? [state.process] : [])])];
    const roles = [...new Set(names.map((name) => name.replace(/-\d+$/, "")))].filter((role) => names.filter((name) => name.startsWith(`${role}-`)).length > 1);
    const option = (value, label) => h("option", { value, selected: value === state.process }, label);
    replace(form.process, option("", "All processes"), roles.map((role) => option(role, `all ${role}`)), names.map((name) => option(name, name)));
    form.process.value = state.process;
  }

  function drawChips() {
    const around = state.at !== null && h("span", `${AROUND_S} s around ${clock(state.at, true)}`);
    replace(chips, around && [around, h("button", { type: "button", class: "link", onclick: () => change({ from: state.at - 60, to: state.at + 60 }) }, "a minute around"), h("button", { type: "button", class: "link", onclick: () => change({ process: "" }) }, "all processes and times")]);
    chips.hidden = !around;
  }

  function earlierButton() {
    return h("li", { class: "log-earlier" }, h("button", { type: "button", class: "link", onclick: readEarlier }, "Earlier records"));
  }

  function lineOf(line) {
    const loud = LOUD[line.kind] ?? (line.kind === "log" ? "output" : "");
    return h(
      "li",
      { class: ["log-line", loud && `is-${loud}`, isTarget(line) && "target"] },
      h("time", { datetime: new Date(line.time * 1000).toISOString(), title: `${moment(line.time)}${line.exact ? "" : ": at this time at the latest"}` }, line.exact ? clock(line.time, true) : `~${clock(line.time)}`),
      h("button", { type: "button", class: "link log-process", title: "Only this process", onclick: () => change({ process: line.process }) }, visible(line.process)),
      h("span", { class: "log-kind" }, visible(line.kind)),
      h("div", { class: "log-text" }, withTickets(line.text)),
    );
  }

  function isTarget(line) {
    if (!state.line) return false;
    if (line.line === state.line) return true;
    const isFile = !/:\d+$/.test(state.line);
    return isFile && state.at !== null && line.line.startsWith(state.line) && Math.abs(line.time - state.at) < 0.05;
  }

  /** Text with its tickets as links that show everything about them. */
  function withTickets(text) {
    if (text.length > LIMIT || !text.includes(":")) return hostile(text, { limit: LIMIT });
    const parts = [];
    let from = 0;
    for (const match of text.matchAll(TICKET)) {
      parts.push(visible(text.slice(from, match.index)), h("button", { type: "button", class: "link", title: "Everything about this request", onclick: () => change({ request: match[0] }) }, match[0]));
      from = match.index + match[0].length;
    }
    return h("div", { class: "hostile", dir: "auto" }, h("bdi", parts, visible(text.slice(from))));
  }

  function tell() {
    const first = page.lines[0];
    status.textContent = `${plural(page.lines.length, "record")} from ${moment(first.time)}${page.next ? ", earlier ones above" : ""}${follow ? "; new ones appear below" : ""}`;
  }

  // ---- scrolling

  function isAtEnd() {
    return list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_END_PX;
  }

  function toEnd() {
    list.scrollTop = list.scrollHeight;
  }

  function scrolled() {
    if (list.scrollTop < NEAR_END_PX && page?.next && !isReading && list.childElementCount > 1 && list.scrollHeight > list.clientHeight) readEarlier();
  }

  function keys(event) {
    if (event.target !== list) return;
    if (event.key === "End") toEnd();
    else if (event.key === "Home") list.scrollTop = 0;
    else return;
    event.preventDefault();
  }
}

function timeOf(text) {
  return text === null || text === "" || !Number.isFinite(Number(text)) ? null : Number(text);
}

function later(action) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, TYPING_MS);
  };
}

function inputTime(time) {
  return time === null ? "" : clock(time);
}

/** A field for a time of day, always with 24 hours. */
function timeField(label, time, take, run) {
  const field = h("input", { type: "text", class: "log-time", value: inputTime(time), placeholder: "hh:mm:ss", inputmode: "numeric", "aria-label": label, onchange: read });
  return field;

  function read() {
    const text = field.value.trim();
    const isTime = text === "" || TIME_OF_DAY.test(text);
    field.setAttribute("aria-invalid", String(!isTime));
    if (isTime) take(text === "" ? null : onDayOf(run, text));
  }
}

/** A time of day on the day of the run at which it existed. */
function onDayOf(run, text) {
  const [hours, minutes, seconds = 0] = text.split(":").map(Number);
  const begin = run.started || Date.now() / 1000;
  const end = run.ended ?? Date.now() / 1000;
  const day = new Date(begin * 1000);
  const found = [];
  for (let offset = 0; offset <= Math.min(400, Math.ceil((end - begin) / 86400) + 1); offset += 1) {
    found.push(new Date(day.getFullYear(), day.getMonth(), day.getDate() + offset, hours, minutes, seconds).getTime() / 1000);
  }
  const distance = (time) => Math.max(0, begin - time, time - end);
  return found.reduce((best, time) => (distance(time) < distance(best) ? time : best));
}

/** Time: what every process did, over measured load, with the stages of each step; any window of the run. */

import { empty, failure, h, icon, loadStyle, loading, problems, replace, svg, visible } from "../dom.js";
import { clock, duration, moment } from "../format.js";
import { KINDS, laneCanvas, stageLines } from "./lanes.js";

const LAST_S = 60;
const POINTS = 1200;
const READ_MS = 140;
const STAGES = { generate: "--s0", collect: "--s0", reward: "--s3", train: "--s1", weights: "--s2", publish: "--s2", save: "--s4", evaluate: "--s5", recover: "--bad", wait: "--line-strong", start: "--s7" };

export async function render(root, context) {
  const { api, cursor, params, setParams, signal } = context;
  const id = context.run.id;
  const state = { from: timeOf(params.get("from")), to: timeOf(params.get("to")), colourBy: params.get("colour") === "version" ? "version" : "kind", hidden: new Set((params.get("hide") ?? "").split(",").filter(Boolean)), selected: params.get("process"), heat: params.get("lanes") === null };
  const parts = { toolbar: h("div", { class: "timeline-bar" }), legend: h("ul", { class: "time-legend" }), map: h("div", { class: "time-map" }), steps: h("section", { class: "card time-steps" }), notes: h("div") };
  const lanes = laneCanvas({ onWindow: move, onSelect: select, onStep: (step) => cursor.set(step) });
  let data = null;
  let timer = null;
  let wanted = 0;
  let isFollowing = state.from === null;
  await loadStyle("views/timeline.css");
  replace(root, loading("Reading the time line"));
  const forget = cursor.subscribe((step) => (step === null ? draw() : goTo(step)));
  if (cursor.step !== null && state.from === null) await findStep(cursor.step);
  await read();
  return {
    update(what) {
      if (isFollowing && what.includes("timeline")) readSoon();
    },
    close() {
      forget();
      clearTimeout(timer);
      lanes.close();
    },
  };

  // ---- the window

  /** Without arguments the whole run. */
  function move(from, to) {
    const whole = from === null;
    const span = Math.min(to - from, (data.end - data.begin) * 1.2 || LAST_S);
    state.from = whole ? data.begin : Math.max(data.begin - span * 0.1, Math.min(from, data.end + span * 0.1 - span));
    state.to = whole ? data.end : state.from + span;
    isFollowing = !whole && context.run.state === "running" && state.to >= data.end;
    setParams({ from: state.from.toFixed(3), to: state.to.toFixed(3) });
    draw();
    readSoon();
  }

  function last() {
    state.from = state.to = null;
    isFollowing = true;
    setParams({ from: null, to: null });
    read();
  }

  async function goTo(step) {
    const known = data?.steps.find((each) => each.step === step);
    if (known && known.from >= state.from && known.to <= state.to) {
      draw();
      return;
    }
    await findStep(step);
    await read();
  }

  /** Set the window around a step that may be anywhere in the run. */
  async function findStep(step) {
    const { steps, times } = await api.metrics(id, { keys: ["timing/step"], points: 4000 }, { signal });
    const at = steps.findLastIndex((each) => each <= step);
    if (at < 0) return;
    const before = times[Math.max(0, at - 2)];
    const after = times[Math.min(times.length - 1, at + 2)];
    const margin = Math.max(0.2, (after - before) * 0.25);
    [state.from, state.to, isFollowing] = [before - margin, after + margin, false];
  }

  function readSoon() {
    clearTimeout(timer);
    timer = setTimeout(read, READ_MS);
  }

  async function read() {
    const mine = ++wanted;
    try {
      const follow = isFollowing && state.from !== null ? { from: null, to: null } : { from: state.from, to: state.to };
      const answer = await api.timeline(id, { ...follow, points: POINTS }, { signal });
      if (mine !== wanted) return;
      data = answer;
      if (state.from === null || isFollowing) [state.from, state.to] = [answer.from, Math.max(answer.to, answer.from + 0.1)];
      if (!root.contains(lanes.element)) place();
      draw();
    } catch (error) {
      if (error.name !== "AbortError" && mine === wanted) replace(root, failure(error, () => read()));
    }
  }

  // ---- drawing

  function place() {
    if (!data.lanes.length) {
      replace(root, problems(data.problems), empty("Nothing was recorded yet", "Lanes appear as soon as processes record spans."));
      return;
    }
    replace(root, h("h2", { class: "visually-hidden" }, "Time"), parts.toolbar, parts.notes, parts.map, h("section", { class: "card time-card" }, parts.legend, lanes.element), parts.steps);
  }

  function draw() {
    if (!data?.lanes.length) return;
    drawToolbar();
    drawLegend();
    replace(parts.notes, problems(data.problems));
    replace(parts.map, runMap(data, state, move));
    lanes.show(data, { ...state, heat: state.heat && Boolean(data.heat), step: cursor.step });
    replace(parts.steps, stepBars(data.steps, cursor));
  }

  function drawToolbar() {
    const had = parts.toolbar.contains(document.activeElement) ? document.activeElement.textContent || document.activeElement.getAttribute("aria-label") : null;
    const span = state.to - state.from;
    const middle = (state.from + state.to) / 2;
    const scale = (factor) => () => move(middle - (span * factor) / 2, middle + (span * factor) / 2);
    replace(
      parts.toolbar,
      h("span", { class: "time-window" }, h("b", `${clock(state.from, span < 10)} – ${clock(state.to, span < 10)}`), h("span", { class: "muted" }, duration(span))),
      h("span", { class: "row" }, button("Zoom out", scale(2), "−"), button("Zoom in", scale(0.5), "+"), button("Back", () => move(state.from - span / 2, state.to - span / 2), icon("left")), button("Forward", () => move(state.from + span / 2, state.to + span / 2), icon("chevron"))),
      h("span", { class: "segments", role: "group", "aria-label": "Window" }, pressed("Last minute", isFollowing, last), pressed("Whole run", isWhole(), () => move(null, null))),
      h("span", { class: "segments", role: "group", "aria-label": "Colours" }, pressed("Activity", state.colourBy === "kind", () => colourBy("kind")), pressed("Weight version", state.colourBy === "version", () => colourBy("version"))),
      data.heat && h("span", { class: "segments", role: "group", "aria-label": "Form" }, pressed("Heat map", state.heat, () => form(true)), pressed("Lanes", !state.heat, () => form(false))),
      state.selected && h("button", { type: "button", onclick: () => select(null) }, visible(state.selected), icon("close")),
      h("span", { class: "grow" }),
      h("a", { class: "button", href: api.traceUrl(id), download: "", title: "Trace Event Format: opens in ui.perfetto.dev and chrome://tracing" }, icon("download"), "Perfetto trace"),
    );
    if (had) [...parts.toolbar.querySelectorAll("button")].find((each) => (each.textContent || each.getAttribute("aria-label")) === had)?.focus();
  }

  function isWhole() {
    return !isFollowing && state.from <= data.begin && state.to >= data.end;
  }

  function drawLegend() {
    const present = new Set(data.lanes.flatMap((lane) => lane.spans.map((span) => span.kind)));
    const kinds = Object.keys(KINDS).filter((kind) => present.has(kind) || state.hidden.has(kind));
    const had = parts.legend.contains(document.activeElement) ? document.activeElement.dataset.kind : null;
    replace(
      parts.legend,
      kinds.map((kind) => h("li", h("button", { type: "button", class: `time-kind is-${kind}`, dataset: { kind }, "aria-pressed": String(!state.hidden.has(kind)), title: state.hidden.has(kind) ? `Show ${kind}` : `Hide ${kind}`, onclick: () => toggle(kind) }, h("i", { "aria-hidden": "true", style: { background: `var(${KINDS[kind].colour})` } }), KINDS[kind].label))),
      state.colourBy === "version" && h("li", { class: "muted" }, "Colours stand for versions of the weights: samples in flight at the same time on different colours overlap asynchronously."),
    );
    if (had) parts.legend.querySelector(`[data-kind="${had}"]`)?.focus();
  }

  function toggle(kind) {
    if (!state.hidden.delete(kind)) state.hidden.add(kind);
    setParams({ hide: [...state.hidden].join(",") });
    draw();
  }

  function colourBy(name) {
    state.colourBy = name;
    setParams({ colour: name === "version" ? name : null });
    draw();
  }

  function form(isHeat) {
    state.heat = isHeat;
    setParams({ lanes: isHeat ? null : "1" });
    draw();
  }

  function select(process) {
    state.selected = process === state.selected ? null : process;
    setParams({ process: state.selected });
    draw();
  }
}

function timeOf(text) {
  return text === null || text === "" || !Number.isFinite(Number(text)) ? null : Number(text);
}

function button(label, onclick, content) {
  return h("button", { type: "button", class: "square", "aria-label": label, title: label, onclick }, content);
}

function pressed(label, isOn, onclick) {
  return h("button", { type: "button", "aria-pressed": String(isOn), onclick }, label);
}

// ---- the whole run, with the window on it

const MAP_WIDTH = 1000;

function runMap(data, state, move) {
  const span = data.end - data.begin || 1;
  const at = (time) => Math.min(MAP_WIDTH, Math.max(0, ((time - data.begin) / span) * MAP_WIDTH));
  const incidents = data.marks.filter((mark) => mark.kind === "incident" && mark.time !== null);
  const width = Math.max(3, at(state.to) - at(state.from));
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${MAP_WIDTH} 22`, preserveAspectRatio: "none", role: "img", "aria-label": `Run from ${moment(data.begin)} to ${moment(data.end)}; the window is ${clock(state.from)} to ${clock(state.to)}`, onpointerdown: begin, onpointermove: go },
    svg("rect", { class: "map-run", x: 0, y: 8, width: MAP_WIDTH, height: 6 }),
    svg("rect", { class: "map-window", x: Math.min(MAP_WIDTH - width, at(state.from)), y: 1, width, height: 20 }),
    incidents.map((mark) => svg("rect", { class: "map-incident", x: at(mark.time) - 1, y: 4, width: 2, height: 14 }, svg("title", {}, `${mark.text}, ${clock(mark.time)}`))),
  );
  return [h("span", clock(data.begin)), picture, h("span", clock(data.end))];

  function begin(event) {
    event.preventDefault();
    centre(event);
  }

  function go(event) {
    if (event.buttons & 1) centre(event);
  }

  function centre(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const middle = data.begin + ((event.clientX - box.left) / box.width) * span;
    const half = (state.to - state.from) / 2;
    move(middle - half, middle + half);
  }
}

// ---- stages of the steps

function stepBars(steps, cursor) {
  if (!steps.length) return [h("h2", "Stages of each step"), h("p", { class: "muted" }, "No step ended in this window.")];
  const names = [...new Set(steps.flatMap((step) => Object.keys(step.stages)))];
  const most = Math.max(...steps.map((step) => total(step)), 1e-9);
  const note = h("p", { class: "muted", role: "status" }, hint(steps));
  return [
    h("div", { class: "time-steps-head" }, h("h2", "Stages of each step"), h("ul", { class: "time-legend" }, names.map((name) => h("li", h("i", { "aria-hidden": "true", style: { background: stageColour(name, names) } }), name)))),
    h(
      "div",
      { class: "step-bars", onpointerleave: () => (note.textContent = hint(steps)) },
      [1, 0.5].map((part) => h("span", { class: "step-scale", "aria-hidden": "true", style: { bottom: `${part * 100}%` } }, duration(most * part))),
      steps.map((step) =>
        h(
          "button",
          { type: "button", class: "step-bar", "aria-pressed": String(step.step === cursor.step), "aria-label": `Step ${step.step}: ${stageLines(step).join(", ")}`, onclick: () => cursor.set(step.step), onpointerenter: () => tell(step), onfocus: () => tell(step) },
          h("span", { class: "step-stack", style: { height: `${(total(step) / most) * 100}%` } }, names.filter((name) => step.stages[name]).map((name) => h("i", { style: { "flex-grow": step.stages[name], background: stageColour(name, names) } }))),
        ),
      ),
    ),
    h("div", { class: "step-numbers", "aria-hidden": "true" }, steps.map((step, index) => h("span", isLabelled(index, steps.length) ? String(step.step) : ""))),
    note,
  ];

  function tell(step) {
    note.textContent = `Step ${step.step}: ${duration(step.to - step.from)}; ${stageLines(step).join(", ")}`;
  }
}

const MOST_LABELS = 24;

/** Steps are numbered below their bars, as many as there is room for. */
function isLabelled(index, amount) {
  return index % Math.ceil(amount / MOST_LABELS) === 0;
}

function hint(steps) {
  const slow = steps.reduce((one, two) => (total(two) > total(one) ? two : one));
  return `The slowest of these steps is ${slow.step}: ${stageLines(slow).join(", ")}. A click moves the step cursor.`;
}

function total(step) {
  return Object.values(step.stages).reduce((sum, seconds) => sum + seconds, 0);
}

function stageColour(name, names) {
  return `var(${STAGES[name] ?? ["--s6", "--s7", "--s5", "--s3", "--s4"][names.indexOf(name) % 5]})`;
}

/** The frame around the views: routes, header of the run, step cursor, live changes, theme, keyboard.
 *
 * A view is a module `export async function render(root, context)` that returns `{ update(what), close() }`; both may be
 * left out. `context` has
 *   run       header of the run (RunHeader in schema.py), null where the view is not about one run
 *   api       client of the server (api.js)
 *   params    URLSearchParams of the route; setParams({ text: "x", page: null }) changes the URL without a new render
 *   cursor    { step, set(step | null), subscribe(listener) → unsubscribe }: the step that the whole page looks at
 *   onChange  onChange(listener): called with the list of what changed; ended with the view
 *   navigate  navigate("/run/ID/logs", { process: "model-0" }): opens another route; keeps the step of the same run
 *   href      href("/run/ID/logs", { process: "model-0" }): the address of the same, for links
 *   signal    aborted when the view is closed; pass it to requests: api.health(run.id, { signal })
 *   session   { role, may, version, csrf }
 */

import { api } from "./api.js";
import { empty, failure, h, icon, loading, problems, redraw, replace, stateBadge, visible } from "./dom.js";
import { compact, count, duration, interval, moment, number, percent } from "./format.js";

const VIEWS = [
  { route: "learning", label: "Learning", module: "learning", key: "1" },
  { route: "rollouts", label: "Rollouts", module: "rollouts", key: "2" },
  { route: "time", label: "Time", module: "timeline", key: "3" },
  { route: "health", label: "Health", module: "health", key: "4" },
  { route: "incidents", label: "Incidents", module: "incidents", key: "5" },
  { route: "logs", label: "Logs", module: "logs", key: "6" },
  { route: "levels", label: "Service levels", module: "service_levels", key: "7" },
];
const STATE_REFRESH_MS = 2000;
const NEWS_REFRESH_MS = 300;

const app = document.getElementById("app");
const bar = h("header", { class: "bar" });
const banner = h("div", { class: "banner", role: "status", hidden: true });
const head = h("section", { class: "run-head", "aria-label": "Run" });
const tabs = h("nav", { class: "tabs", "aria-label": "Views of the run" });
const main = h("main", { id: "main", tabindex: "-1" });
const toasts = h("div", { class: "toasts", role: "log", "aria-label": "Notices", "aria-live": "polite" });

let session = { role: "viewer", may: [], version: "", csrf: "" };
let current = null;
let run = null;

// ---- routes

function parse(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decode);
  const params = new URLSearchParams(search);
  if (parts[0] === "run" && parts[1]) {
    const view = VIEWS.find((each) => each.route === (parts[2] ?? "learning"));
    return { name: view ? view.route : "unknown", id: parts[1], module: view?.module, params, rest: parts.slice(3) };
  }
  if (parts[0] === "compare") return { name: "compare", id: null, module: "compare", params };
  return { name: parts.length ? "unknown" : "overview", id: null, module: parts.length ? null : "overview", params };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function href(path, params = {}) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") given.set(name, value);
  }
  const sameRun = run && path.startsWith(`/run/${encodeURIComponent(run.id)}`);
  if (sameRun && cursor.step !== null && !("step" in params)) given.set("step", cursor.step);
  const search = given.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  return `#${path}${search ? `?${search}` : ""}`;
}

function navigate(path, params = {}) {
  location.hash = href(path, params);
}

function writeParams(changes) {
  const params = current.route.params;
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") params.delete(name);
    else params.set(name, value);
  }
  const [path] = location.hash.split("?");
  const search = params.toString().replaceAll("%2C", ",").replaceAll("%2F", "/");
  history.replaceState(null, "", `${path || "#/"}${search ? `?${search}` : ""}`);
}

// ---- the step that the whole page looks at

const cursor = {
  step: null,
  listeners: new Set(),
  set(step) {
    const next = step === null || !Number.isFinite(Number(step)) ? null : Math.max(0, Math.round(Number(step)));
    if (next === cursor.step) return;
    cursor.step = next;
    if (current) writeParams({ step: next });
    drawTabs();
    drawBar();
    for (const listener of [...cursor.listeners]) listener(next);
  },
  subscribe(listener) {
    cursor.listeners.add(listener);
    return () => cursor.listeners.delete(listener);
  },
};

function stepOf(params) {
  const text = params.get("step");
  const step = Number(text);
  return text !== null && text !== "" && Number.isInteger(step) && step >= 0 ? step : null;
}

// ---- opening a route

async function open() {
  const route = parse(location.hash);
  const before = current?.route;
  if (before && onlyStepDiffers(before, route)) {
    current.route = route;
    cursor.set(stepOf(route.params));
    return;
  }
  current?.close();
  const mine = { route, closed: false, view: null, listeners: new Set(), abort: new AbortController(), close };
  current = mine;
  cursor.listeners.clear();
  cursor.step = stepOf(route.params);
  followRun(route.id);
  if (!run || run.id !== route.id) {
    run = null;
    drawHead();
  }
  drawBar();
  drawTabs();
  replace(main, loading());
  try {
    if (route.module === null || route.name === "unknown") throw new NoPage();
    const [module] = await Promise.all([import(`./views/${route.module}.js`), route.id !== null && readRun(route.id)]);
    if (mine.closed) return;
    const root = h("div", { class: `view view-${route.name}` });
    replace(main, root);
    mine.view = (await module.render(root, contextOf(mine))) ?? {};
    if (mine.closed) mine.view.close?.();
  } catch (error) {
    if (!mine.closed && error.name !== "AbortError") showFailure(error);
  }

  function close() {
    mine.closed = true;
    mine.abort.abort();
    mine.view?.close?.();
  }
}

class NoPage extends Error {}

function showFailure(error) {
  const title = run ? null : h("h1", { class: "visually-hidden" }, current?.route.id ?? "Kintsugi");
  if (error instanceof NoPage) {
    replace(main, title, empty("There is no such page", null, h("a", { class: "button", href: "#/" }, "All runs")));
  } else if (error.status === 401 || error.status === 403) replace(main, title, tokenForm(error));
  else replace(main, title, failure(error, reopen));
}

function reopen() {
  current?.close();
  current = null;
  open();
}

function onlyStepDiffers(before, after) {
  if (before.name !== after.name || before.id !== after.id || before.rest?.join() !== after.rest?.join()) return false;
  const [one, two] = [new URLSearchParams(before.params), new URLSearchParams(after.params)];
  if (one.get("step") === two.get("step")) return false;
  one.delete("step");
  two.delete("step");
  one.sort();
  two.sort();
  return one.toString() === two.toString();
}

function contextOf(mine) {
  return {
    get run() {
      return run;
    },
    api,
    session,
    params: mine.route.params,
    setParams: writeParams,
    rest: mine.route.rest ?? [],
    cursor,
    navigate,
    href,
    toast,
    signal: mine.abort.signal,
    onChange(listener) {
      mine.listeners.add(listener);
      return () => mine.listeners.delete(listener);
    },
  };
}

// ---- live changes

let stream = null;
let followed;
let live = "waiting";
let refreshTimer = null;

function followRun(id) {
  if (followed === id) return;
  followed = id;
  stream?.close();
  clearTimeout(refreshTimer);
  refreshTimer = null;
  live = "waiting";
  let wasLive = false;
  stream = api.events(id, {
    onState(state) {
      live = state;
      wasLive ||= state === "live";
      say(state === "waiting" && wasLive ? "The connection to the server was lost. What is shown may be old; connecting again…" : "");
      drawBar();
    },
    onChange(what, runs) {
      const isNews = ["state", "incidents", "learning"].some((each) => what.includes(each));
      if (id !== null) refreshSoon(id, isNews ? NEWS_REFRESH_MS : STATE_REFRESH_MS);
      current?.view?.update?.(what, runs);
      for (const listener of [...(current?.listeners ?? [])]) listener(what, runs);
    },
    onIncident(incident) {
      toast(
        h("span", h("b", "Incident. "), visible(incident.title)),
        h("a", { href: href(`/run/${encodeURIComponent(id)}/incidents`, { incident: incident.id }) }, "Open"),
      );
    },
  });
}

/** Read the header again; figures that change all the time wait longer than news, which come before them. */
function refreshSoon(id, delay) {
  if (refreshTimer !== null && delay !== NEWS_REFRESH_MS) return;
  clearTimeout(refreshTimer);
  refreshTimer = setTimeout(async () => {
    refreshTimer = null;
    try {
      await readRun(id);
    } catch {
      // The connection's own state is shown; the next change tries again.
    }
  }, delay);
}

async function readRun(id) {
  const answer = await api.run(id);
  if (current?.route.id !== id) return;
  run = answer;
  drawHead();
  drawTabs();
  drawBar();
}

// ---- the frame

function drawBar() {
  const id = current?.route.id ?? null;
  const title = id === null ? (current?.route.name === "compare" ? "Compare" : "Runs") : id;
  const view = VIEWS.find((each) => each.route === current?.route.name);
  document.title = id === null ? `${title} · Kintsugi` : `${title} · ${view?.label ?? ""} · Kintsugi`;
  redraw(
    bar,
    h("a", { class: "skip", href: "#main", onclick: skip }, "Skip to content"),
    h("a", { class: "brand", href: "#/", "aria-label": "Kintsugi: all runs" }, seam(), h("span", "kintsugi")),
    id !== null && h("span", { class: "crumb" }, icon("chevron"), h("span", { class: "crumb-name" }, visible(id))),
    current?.route.name === "compare" && h("span", { class: "crumb" }, icon("chevron"), "Compare"),
    h("span", { class: "grow" }),
    session.demo && h("span", { class: "tag" }, "Demo"),
    id !== null && stepControl(),
    liveMark(),
    themeSwitch(),
    h("button", { class: "quiet square", type: "button", "aria-label": "Keyboard shortcuts", title: "Keyboard shortcuts (?)", onclick: showHelp }, icon("help")),
  );
}

function skip(event) {
  event.preventDefault();
  main.focus();
}

function seam() {
  const mark = h("img", { class: "mark", src: "/static/icon.svg", alt: "", width: "20", height: "20" });
  return mark;
}

function liveMark() {
  const over = run && run.state !== "running" && current?.route.id !== null;
  const text = live !== "live" ? "Connecting" : over ? "Up to date" : "Live";
  return h("span", { class: ["live", live, over && "over"], title: "Changes appear without reloading" }, h("i", { "aria-hidden": "true" }), h("span", { class: "live-text" }, text));
}

function stepControl() {
  if (cursor.step === null) return null;
  const last = run?.step ?? Infinity;
  return h(
    "span",
    { class: "step-control", role: "group", "aria-label": "Step cursor" },
    h("button", { class: "quiet square", type: "button", "aria-label": "Previous step", title: "Previous step ([)", disabled: cursor.step <= 0, onclick: () => moveStep(-1) }, icon("left")),
    h("span", { class: "step-number", "aria-live": "polite" }, "Step ", h("b", count(cursor.step))),
    h("button", { class: "quiet square", type: "button", "aria-label": "Next step", title: "Next step (])", disabled: cursor.step >= last, onclick: () => moveStep(1) }, icon("chevron")),
    h("button", { class: "quiet square", type: "button", "aria-label": "Clear the step cursor", title: "Clear (\\)", onclick: () => cursor.set(null) }, icon("close")),
  );
}

function moveStep(by) {
  const last = run?.step ?? Infinity;
  const from = cursor.step ?? (by < 0 ? last + 1 : -1);
  if (Number.isFinite(from)) cursor.set(Math.min(last, Math.max(0, from + by)));
}

const THEMES = [
  { name: "system", label: "as the system" },
  { name: "light", label: "light", symbol: "sun" },
  { name: "dark", label: "dark", symbol: "moon" },
];

function themeSwitch() {
  const now = document.documentElement.dataset.theme ?? "system";
  const theme = THEMES.find((each) => each.name === now);
  return h(
    "button",
    { class: "quiet square", type: "button", "aria-label": `Theme: ${theme.label}. Change`, title: `Theme: ${theme.label} (t)`, onclick: nextTheme },
    icon(theme.symbol ?? "system"),
  );
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  const next = THEMES[(THEMES.findIndex((each) => each.name === now) + 1) % THEMES.length].name;
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "system") localStorage.removeItem("kintsugi.theme");
    else localStorage.setItem("kintsugi.theme", next);
  } catch {
    // Storage may be forbidden; the choice then ends with the page.
  }
  drawBar();
}

function drawTabs() {
  const id = current?.route.id ?? null;
  tabs.hidden = id === null;
  if (id === null) return;
  redraw(
    tabs,
    VIEWS.map((view) =>
      h(
        "a",
        {
          href: href(`/run/${encodeURIComponent(id)}/${view.route}`),
          dataset: { route: view.route },
          "aria-current": view.route === current.route.name ? "page" : null,
          title: `${view.label} (${view.key})`,
        },
        view.label,
      ),
    ),
  );
  const chosen = tabs.querySelector("[aria-current]");
  if (chosen && tabs.scrollWidth > tabs.clientWidth) tabs.scrollLeft = chosen.offsetLeft - 40;
}

// ---- the header of a run

function drawHead() {
  head.hidden = current?.route.id === null;
  if (head.hidden || !run) {
    replace(head);
    return;
  }
  redraw(
    head,
    h("div", { class: "run-title" }, h("h1", visible(run.id)), run.name && run.name !== run.id && h("span", { class: "run-recipe" }, visible(run.name)), stateBadge(run.state), runPhase(), h("span", { class: "grow" }), actions()),
    h("dl", { class: "facts" }, facts()),
    run.end && runEnd(run.end),
    problems(run.problems),
  );
}

function runPhase() {
  if (run.state !== "running") return null;
  const isRecovering = run.recovery && run.recovery !== "normal";
  const text = isRecovering ? `recovering: ${run.recovery}` : run.phase;
  return text ? h("span", { class: ["phase", isRecovering && "warn"] }, text) : null;
}

function fact(label, value, detail = null, extra = null, name = null) {
  return h("div", { class: name }, h("dt", label), h("dd", value, detail && h("small", detail), extra));
}

function facts() {
  const incident = run.last_incident;
  return [
    fact("Step", count(run.step), run.steps ? ` of ${count(run.steps)}` : null, run.steps > 0 && h("progress", { max: run.steps, value: Math.min(run.step, run.steps), "aria-label": "Steps done" })),
    fact("Reward", number(run.reward, 3)),
    fact("Accuracy", percent(run.accuracy), run.accuracy === null ? null : ` ${interval(run.accuracy_low, run.accuracy_high)}`),
    fact("Tokens/s", compact(run.tokens_per_s)),
    fact(run.ended ? "Ran for" : "Age", duration(run.ended ? run.ended - run.started : run.age_s), run.ended ? ` until ${moment(run.ended)}` : null),
    fact("Algorithm", run.algorithm || "–"),
    fact("Model", visible(run.model || "–")),
    incident && fact("Last incident", h("a", { href: href(`/run/${encodeURIComponent(run.id)}/incidents`, { incident: incident.id }), title: incident.title }, visible(incident.title)), null, null, "wide"),
    run.learning.length > 0 && fact("Learning", h("a", { class: "warn", href: href(`/run/${encodeURIComponent(run.id)}/learning`), title: run.learning.join("\n") }, visible(run.learning[0].split(":")[0])), null, null, "wide"),
  ];
}

function runEnd(end) {
  if (!end.cause && !end.resume) return null;
  return h(
    "div",
    { class: ["notice", end.outcome === "failed" && "bad"] },
    end.cause && h("p", visible(end.cause)),
    end.resume && h("p", "Continue it with ", h("code", visible(end.resume)), copyButton(end.resume)),
  );
}

function copyButton(text) {
  return h("button", { class: "quiet square", type: "button", "aria-label": "Copy the command", title: "Copy", onclick: copy }, icon("copy"));

  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      toast(h("span", "Copied."));
    } catch {
      toast(h("span", "The browser did not allow copying."));
    }
  }
}

// ---- actions, each asks once

const ACTIONS = {
  stop: {
    label: "Stop",
    fits: () => run.state === "running",
    ask: "Stop this run after its step? It can be resumed later.",
  },
  scale: {
    label: "Scale",
    fits: () => run.state === "running" && run.servers > 0,
    ask: "Change the number of generation servers? Results are unaffected.",
  },
  resume: {
    label: "Resume",
    fits: () => run.state !== "running" && run.state !== "unreadable" && Boolean(run.end?.resume),
    ask: "Resume this run from its last checkpoint?",
  },
};

function actions() {
  return session.may
    .filter((name) => ACTIONS[name]?.fits())
    .map((name) => h("button", { type: "button", dataset: { action: name }, onclick: () => confirmAction(name) }, ACTIONS[name].label));
}

function confirmAction(name) {
  const { label, ask } = ACTIONS[name];
  const id = run.id;
  const servers = h("input", { type: "number", min: "1", max: "999", step: "1", value: String(run.servers), required: true });
  const problem = h("p", { class: "form-error", role: "alert" });
  const send = h("button", { class: name === "stop" ? "danger" : "primary", type: "submit" }, label);
  const form = h(
    "form",
    { onsubmit: submit },
    h("h2", `${label} ${run.id}`),
    h("p", ask),
    name === "scale" && h("label", "Generation servers ", servers),
    problem,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), send),
  );
  const dialog = modal(form);

  async function submit(event) {
    event.preventDefault();
    send.disabled = true;
    try {
      const order = { csrf: session.csrf, ...(name === "scale" ? { servers: Number(servers.value) } : {}) };
      const done = await api.action(id, name, order);
      dialog.close();
      toast(h("span", visible(done.text)));
      await readRun(id);
    } catch (error) {
      problem.textContent = error.message;
      send.disabled = false;
    }
  }
}

function modal(...children) {
  const dialog = h("dialog", { onclose: () => dialog.remove() }, children);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// ---- words to the reader

function say(text) {
  banner.textContent = text;
  banner.hidden = !text;
}

function toast(...children) {
  const close = h("button", { class: "quiet square", type: "button", "aria-label": "Dismiss", onclick: () => box.remove() }, icon("close"));
  const box = h("div", { class: "toast" }, children, close);
  toasts.append(box);
  while (toasts.childElementCount > 4) toasts.firstElementChild.remove();
  setTimeout(() => box.remove(), 20_000);
}

function tokenForm(error) {
  const field = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": "Token" });
  return h(
    "form",
    { class: "state", onsubmit: submit },
    h("h2", "This page needs a token"),
    h("p", visible(error.message)),
    h("div", { class: "row" }, field, h("button", { class: "primary", type: "submit" }, "Open")),
  );

  /** The server moves the token from the address into a cookie that no script can read. */
  function submit(event) {
    event.preventDefault();
    location.assign(`/?token=${encodeURIComponent(field.value.trim())}${location.hash}`);
  }
}

// ---- keyboard

const SHORTCUTS = [
  ["1 … 7", "views of the run"],
  ["g", "all runs"],
  ["/", "search in the view"],
  ["[ and ]", "step cursor back and forward"],
  ["\\", "clear the step cursor"],
  ["← →", "in a chart: move the cursor; with Shift ten times as far"],
  ["+ − 0", "in a chart: zoom in, out, reset"],
  ["n p", "in a chart: next and previous incident or evaluation"],
  ["x", "in the list of runs: choose for a comparison"],
  ["↑ ↓", "in a table: previous and next row; Enter opens it"],
  ["t", "theme: system, light, dark"],
  ["?", "this list"],
];

function showHelp() {
  if (document.querySelector("dialog[open]")) return;
  const dialog = modal(
    h("h2", "Keyboard"),
    h("dl", { class: "shortcuts" }, SHORTCUTS.map(([keys, text]) => [h("dt", h("kbd", keys)), h("dd", text)])),
    h("div", { class: "buttons" }, h("small", `Kintsugi ${session.version}`), h("span", { class: "grow" }), h("button", { type: "button", onclick: () => dialog.close() }, "Close")),
  );
}

function onKey(event) {
  const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const view = VIEWS.find((each) => each.key === event.key);
  const acts = {
    "?": showHelp,
    t: nextTheme,
    g: () => navigate("/"),
    "[": () => run && moveStep(-1),
    "]": () => run && moveStep(1),
    "\\": () => cursor.set(null),
    "/": () => main.querySelector('input[type="search"]')?.focus(),
  };
  if (view && current?.route.id !== null) navigate(`/run/${encodeURIComponent(current.route.id)}/${view.route}`);
  else if (acts[event.key]) acts[event.key]();
  else return;
  event.preventDefault();
}

// ---- start

async function start() {
  app.append(bar, banner, head, tabs, main, toasts);
  addEventListener("hashchange", open);
  addEventListener("keydown", onKey);
  const reading = api.session().then(
    (answer) => {
      session = answer;
      drawBar();
      drawHead();
    },
    () => {
      // The view's own request shows what is wrong; without a session the page only reads.
    },
  );
  await Promise.all([reading, open()]);
}

start();

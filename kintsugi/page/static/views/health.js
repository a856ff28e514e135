/** Health: hosts and their processes with state, load, weights and restarts, and the waits between them as arrows. */

import { arrowKeys, empty, failure, h, hostile, loadStyle, loading, problems, redraw, replace, stateBadge, svg, visible } from "../dom.js";
import { bytes, clock, compact, duration, moment, number, percent, plural } from "../format.js";

const LEAST_WAIT_S = 0.4;
const LONG_WAIT_S = 5;
const SILENT_S = 3;
const REFRESH_MS = 700;
const LANE = 13;

export async function render(root, context) {
  const { api, signal } = context;
  const id = context.run.id;
  const head = h("section", { class: "card health-head" });
  const arrows = h("div", { class: "health-arrows", "aria-hidden": "true" });
  const table = h("div", { class: "table-wrap health-wrap" });
  const observer = new ResizeObserver(() => drawArrows());
  let data = null;
  let timer = null;
  let lit = null;
  observer.observe(table);
  arrowKeys(table, "tr[tabindex]");
  await loadStyle("views/health.css");
  replace(root, loading("Reading the state of the processes"));
  await read();
  return {
    update(what) {
      if ((what.includes("health") || what.includes("state")) && timer === null) timer = setTimeout(readLater, REFRESH_MS);
    },
    close() {
      observer.disconnect();
      clearTimeout(timer);
    },
  };

  async function readLater() {
    timer = null;
    await read();
  }

  async function read() {
    try {
      data = await api.health(id, { signal });
    } catch (error) {
      if (error.name !== "AbortError" && data === null) replace(root, failure(error, () => read()));
      return;
    }
    draw();
  }

  function draw() {
    if (!data.hosts.length) {
      replace(root, problems(data.problems), empty("No processes", context.run.state === "running" ? "They appear when they have registered." : "This run recorded no processes."));
      return;
    }
    if (!root.contains(table)) replace(root, h("h2", { class: "visually-hidden" }, "Health"), head, table);
    redraw(head, problems(data.problems), summary(data));
    const scroll = table.scrollLeft;
    redraw(table, arrows, processTable());
    table.scrollLeft = scroll;
    drawArrows();
  }

  function processTable() {
    return h(
      "table",
      { class: ["health", !hasWaits() && "no-waits", !data.running && "over"], onpointerover: (event) => light(event.target.closest("tr")?.dataset.process ?? null), onpointerleave: () => light(null), onfocusin: (event) => light(event.target.closest("tr")?.dataset.process ?? null) },
      h("thead", h("tr", h("th", { class: "gutter" }, h("span", { class: "visually-hidden" }, "Waits")), h("th", "Process"), h("th", "State"), h("th", { class: "load-cell" }, "Load"), ["Memory", "Weights", "Restarts"].map((name) => h("th", { class: "number" }, name)), h("th", "Last line"))),
      data.hosts.map((host) => h("tbody", hostRow(host), host.processes.map((each) => processRow(each)))),
    );
  }

  /** Without arrows there is no need of room for them; the load of a process that ended says nothing. */
  function hasWaits() {
    return data.running && data.waits.length > 0;
  }

  function hostRow(host) {
    const memory = host.memory_total ? `memory ${bytes(host.memory_used)} of ${bytes(host.memory_total)}` : null;
    const text = [host.cpu !== null && `CPU ${percent(host.cpu, 0)}`, memory, plural(host.processes.length, "process", "processes")].filter(Boolean);
    return h("tr", { class: "host-row" }, h("td", { class: "gutter" }), h("th", { colspan: "7", scope: "rowgroup" }, h("b", visible(host.name || "unknown host")), h("span", { class: "muted" }, text.join(" · "))));
  }

  function processRow(each) {
    const logs = context.href(`/run/${encodeURIComponent(id)}/logs`, { process: each.process });
    const most = Math.max(...data.hosts.flatMap((host) => host.processes).filter((other) => other.role === each.role).map((other) => other.load));
    const waits = data.waits.filter((wait) => wait.from === each.process);
    return h(
      "tr",
      { dataset: { process: each.process }, tabindex: "0", class: [`is-${each.state}`, lit === each.process && "lit"], onkeydown: (event) => event.key === "Enter" && event.target.matches("tr") && context.navigate(`/run/${encodeURIComponent(id)}/logs`, { process: each.process }) },
      h("td", { class: "gutter" }),
      h("th", { scope: "row" }, h("a", { class: "mono", href: logs, title: "Its records" }, visible(each.process)), h("small", each.pid ? `pid ${each.pid}` : ""), waits.map(waitText)),
      h("td", { dataset: { label: "State" } }, stateBadge(each.state), each.silent_s > SILENT_S && data.running && h("small", { class: "warn" }, `silent ${duration(each.silent_s)}`)),
      h("td", { class: "load-cell", dataset: { label: "Load" } }, loadBar(each, most)),
      h("td", { class: "number", dataset: { label: "Memory" } }, bytes(each.memory || null)),
      h("td", { class: "number", dataset: { label: "Weights" } }, each.version === null || each.version < 0 ? "–" : String(each.version)),
      h("td", { class: ["number", each.restarts && "warn"], dataset: { label: "Restarts" } }, String(each.restarts)),
      h("td", { class: "last-words" }, each.last_words ? [hostile(each.last_words, { limit: 240 }), each.last_words_line && h("a", { href: lineHref(each) }, "in the log")] : h("span", { class: "muted" }, "–")),
    );
  }

  function lineHref(each) {
    return context.href(`/run/${encodeURIComponent(id)}/logs`, { process: each.process, line: each.last_words_line });
  }

  function light(process) {
    if (process === lit) return;
    lit = process;
    for (const row of table.querySelectorAll("tr[data-process]")) row.classList.toggle("lit", row.dataset.process === lit);
    for (const arrow of arrows.querySelectorAll("[data-ends]")) {
      const ends = arrow.dataset.ends.split(" ");
      arrow.classList.toggle("lit", lit !== null && ends.includes(lit));
      arrow.classList.toggle("dim", lit !== null && !ends.includes(lit) && hasArrow(lit));
    }
  }

  function hasArrow(process) {
    return data.waits.some((wait) => wait.from === process || wait.to === process);
  }

  /** Arcs in the gutter at the left, from the process that waits to the one it waits for; short ones lie inside. */
  function drawArrows() {
    const gutter = table.querySelector("td.gutter");
    if (!gutter) return;
    const top = table.getBoundingClientRect().top;
    const places = new Map([...table.querySelectorAll("tr[data-process]")].map((row) => [row.dataset.process, row.getBoundingClientRect()]).map(([name, box]) => [name, box.top - top + Math.min(18, box.height / 2)]));
    const width = gutter.getBoundingClientRect().width;
    const arcs = nested(data.waits.filter((wait) => places.has(wait.from) && places.has(wait.to)), places);
    const height = table.scrollHeight;
    replace(
      arrows,
      svg(
        "svg",
        { width, height, viewBox: `0 0 ${width} ${height}` },
        svg("defs", {}, ["usual", "long"].map((name) => svg("marker", { id: `wait-${name}`, class: `wait-head ${name}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerUnits: "userSpaceOnUse", markerWidth: 9, markerHeight: 9, orient: "auto" }, svg("path", { d: "M0 0.8 7.2 4 0 7.2Z" })))),
        arcs.map((arc) => drawArc(arc, width)),
      ),
    );
    light(lit);
  }
}

function drawArc({ wait, from, to, level, offset }, width) {
  const right = width - 4;
  const left = Math.max(6, right - 18 - level * LANE);
  const name = wait.since_s >= LONG_WAIT_S ? "long" : "usual";
  const way = Math.sign(to - from);
  const bend = Math.min(9, Math.abs(to - from) / 2);
  const start = from + 4;
  const end = to - 4 + offset;
  const d = `M${right} ${start}H${left + bend}Q${left} ${start} ${left} ${start + way * bend}V${end - way * bend}Q${left} ${end} ${left + bend} ${end}H${right}`;
  return svg(
    "g",
    { class: `wait-arc ${name}`, "data-ends": `${wait.from} ${wait.to}` },
    svg("title", {}, `${wait.from} waits ${duration(wait.since_s)} for ${wait.to}: ${wait.what}`),
    svg("circle", { cx: right, cy: start, r: 2.5 }),
    svg("path", { d, "marker-end": `url(#wait-${name})` }),
  );
}

/** Levels so that no two arcs share a line; the shortest are innermost. One arc for each pair. */
function nested(waits, places) {
  const longest = new Map();
  for (const wait of waits) {
    const key = `${wait.from} ${wait.to}`;
    if (wait.from !== wait.to && !(longest.get(key)?.since_s > wait.since_s)) longest.set(key, wait);
  }
  const arcs = [...longest.values()].map((wait) => ({ wait, from: places.get(wait.from), to: places.get(wait.to), level: 0, offset: 0 }));
  arcs.sort((one, two) => Math.abs(one.to - one.from) - Math.abs(two.to - two.from));
  const arrivals = new Map();
  for (const [index, arc] of arcs.entries()) {
    const meets = (other) => Math.min(arc.from, arc.to) < Math.max(other.from, other.to) + 6 && Math.max(arc.from, arc.to) > Math.min(other.from, other.to) - 6;
    const taken = new Set(arcs.slice(0, index).filter(meets).map((other) => other.level));
    while (taken.has(arc.level)) arc.level += 1;
    const count = arrivals.get(arc.wait.to) ?? 0;
    arc.offset = -Math.min(8, count * 4);
    arrivals.set(arc.wait.to, count + 1);
  }
  return arcs;
}

function waitText(wait) {
  return h("small", { class: wait.since_s >= LONG_WAIT_S ? "wait-text long" : "wait-text" }, `waits ${duration(wait.since_s)} for `, h("b", visible(wait.to)), ": ", visible(wait.what));
}

const LOADS = { server: "tokens", rollout: "groups" };

/** Load is counted differently by each role, so the bar compares within the role. */
function loadBar({ load, role }, most) {
  if (load === null || load === undefined || !(role in LOADS)) return h("span", { class: "muted" }, "–");
  return h("span", { class: "load", title: `${number(load, 4)} ${LOADS[role]} in flight; the bar compares with the busiest of its role` }, h("i", { style: { width: `${most > 0 ? (load / most) * 100 : 0}%` } }), h("span", `${compact(load)} ${LOADS[role]}`));
}

// ---- what matters, in a sentence

function summary(data) {
  const processes = data.hosts.flatMap((host) => host.processes);
  const states = new Map();
  for (const each of processes) states.set(each.state, (states.get(each.state) ?? 0) + 1);
  const restarts = processes.reduce((sum, each) => sum + each.restarts, 0);
  return [
    h("p", { class: "health-line" }, h("b", `${plural(processes.length, "process", "processes")} on ${plural(data.hosts.length, "host")}`), [...states].map(([state, amount]) => h("span", `${amount} ${state}`)), restarts > 0 && h("span", { class: "warn" }, plural(restarts, "restart")), data.phase && data.running && h("span", `phase ${data.phase}`), data.running && data.recovery && data.recovery !== "normal" && h("span", { class: "warn" }, `recovering: ${data.recovery}`), h("span", { class: "muted" }, data.running ? `as of ${clock(data.time)}` : `the run is over; last state, ${moment(data.time)}`)),
    data.running && waitSummary(data.waits),
  ];
}

/** The process at the end of the chains of waits is where to look. */
function waitSummary(waits) {
  const long = waits.filter((wait) => wait.since_s >= LEAST_WAIT_S);
  if (!long.length) return h("p", { class: "muted" }, waits.length ? `No process has waited longer than ${duration(LEAST_WAIT_S)} for another.` : "No process waits for another.");
  const waiting = new Set(long.map((wait) => wait.from));
  const ends = [...new Set(long.map((wait) => wait.to))].filter((name) => !waiting.has(name));
  const chains = ends.map((end) => chainTo(end, long)).toSorted((one, two) => two.seconds - one.seconds);
  if (!chains.length) return h("p", { class: "warn" }, "Processes wait for each other in a circle: ", [...waiting].join(", "));
  return h("ul", { class: "chains" }, chains.slice(0, 4).map(({ names, seconds, what, waiting: amount }) => h("li", h("span", { class: "chain" }, names.map((name, index) => [index > 0 && h("span", { class: "chain-arrow", "aria-label": "waits for" }, "→"), h("span", { class: index === names.length - 1 ? "mono chain-end" : "mono" }, visible(name))])), h("span", { class: "muted" }, visible(`${duration(seconds)}: ${what}`), amount > 1 && ` · ${plural(amount, "process waits", "processes wait")} for it`))));
}

/** The longest chain of waits that ends at a process. */
function chainTo(end, waits) {
  const names = [end];
  let { since_s: seconds, what } = longestTo(end, waits);
  for (let wait = longestTo(end, waits); wait && !names.includes(wait.from); wait = longestTo(wait.from, waits)) {
    names.unshift(wait.from);
    if (wait.since_s > seconds) ({ since_s: seconds, what } = wait);
  }
  return { names, seconds, what, waiting: allWaitingFor(end, waits).size };
}

/** Processes that wait for this one, directly or through others. */
function allWaitingFor(end, waits) {
  const found = new Set();
  const open = [end];
  while (open.length) {
    const name = open.pop();
    for (const { from } of waits.filter((wait) => wait.to === name && !found.has(wait.from))) {
      found.add(from);
      open.push(from);
    }
  }
  return found;
}

function longestTo(name, waits) {
  return waits.filter((wait) => wait.to === name).reduce((most, wait) => (most && most.since_s >= wait.since_s ? most : wait), null);
}

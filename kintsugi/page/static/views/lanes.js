/** Lanes of processes over time on one canvas: axis, lanes or a heat map, and measured load, all on the same time scale.
 *
 *     const lanes = laneCanvas({ onWindow, onSelect, onStep });
 *     lanes.show(timeline, { from, to, colourBy: "kind" | "version", hidden: Set, selected, heat: true, step });
 *
 * `onWindow(from, to)` is called while the reader drags or zooms; the drawing follows at once with what is known, the
 * caller reads what is missing. Colours come from the style sheet, so the canvas is drawn again when the theme changes.
 */

import { h, replace, visible } from "../dom.js";
import { bytes, clock, count, duration, number, percent } from "../format.js";
import { versionColour } from "./token_strips.js";

export const KINDS = {
  generate: { label: "generate", colour: "--s0" },
  reward: { label: "reward", colour: "--s3" },
  train: { label: "train", colour: "--s1" },
  weights: { label: "weights", colour: "--s2" },
  save: { label: "save", colour: "--s4" },
  evaluate: { label: "evaluate", colour: "--s5" },
  recover: { label: "recover", colour: "--bad" },
  start: { label: "start", colour: "--s7" },
  other: { label: "other", colour: "--s6" },
  wait: { label: "wait", colour: "--line-strong" },
};
const AXIS = 36;
const HOST = 20;
const PANEL = 46;
const HEAT_ROW = 11;
const MOST_ROWS = 4;
const NARROW = 560;
const LEAST_WINDOW_S = 0.02;
const MEASURES = [
  { name: "cpu", host: "CPU of all processors", process: "processors used", text: (value, isHost) => (isHost ? percent(value, 0) : number(value, 2)), top: (most, isHost) => (isHost ? 1 : Math.max(1, most)) },
  { name: "memory", host: "memory used", process: "memory", text: bytes, top: (most) => most * 1.1 },
  { name: "gpu", host: "GPU busy", process: "GPU busy", text: (value) => percent(value, 0), top: () => 1 },
  { name: "gpu_memory", host: "GPU memory used", process: "GPU memory", text: bytes, top: (most) => most * 1.1 },
];

export function laneCanvas({ onWindow, onSelect, onStep }) {
  const canvas = h("canvas", { class: "lanes-canvas", tabindex: "0", role: "img" });
  const tip = h("div", { class: "lanes-tip", role: "status", hidden: true });
  const element = h("div", { class: "lanes" }, canvas, tip);
  const colours = palette(element);
  const observer = new ResizeObserver(() => draw());
  const themes = new MutationObserver(() => draw());
  const system = matchMedia("(prefers-color-scheme: dark)");
  let data = null;
  let options = null;
  let plan = null;
  observer.observe(element);
  themes.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  system.addEventListener("change", draw);
  const pointers = pointerControl(canvas, { plan: () => plan, onWindow, onHover: hover, onClick: click });
  return {
    element,
    show(timeline, next) {
      data = timeline;
      options = next;
      draw();
    },
    close() {
      observer.disconnect();
      themes.disconnect();
      system.removeEventListener("change", draw);
      pointers.close();
    },
  };

  function draw() {
    const width = Math.floor(element.clientWidth);
    if (!data || !width) return;
    plan = layout(data, options, width);
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = plan.height * ratio;
    canvas.style.setProperty("width", `${width}px`);
    canvas.style.setProperty("height", `${plan.height}px`);
    canvas.setAttribute("aria-label", describe(data, options));
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.clearRect(0, 0, width, plan.height);
    paint(pen, plan, data, options, colours.read());
  }

  function hover(x, y) {
    const found = plan && y !== null ? plan.find(x, y) : null;
    tip.hidden = !found;
    canvas.classList.toggle("pointing", Boolean(found?.process || found?.step !== undefined));
    if (!found) return;
    replace(tip, found.lines.map((line, index) => h(index ? "div" : "b", visible(line))));
    const width = tip.offsetWidth;
    tip.style.setProperty("left", `${Math.max(0, Math.min(element.clientWidth - width, x + 14))}px`);
    tip.style.setProperty("top", `${y + 18}px`);
  }

  function click(x, y) {
    const found = plan?.find(x, y);
    if (found?.step !== undefined && found.isAxis) onStep(found.step);
    else if (found?.process) onSelect(found.process);
  }
}

/** Values of the style sheet's variables as the canvas takes them. */
function palette(element) {
  const probe = h("span", { hidden: true });
  element.append(probe);
  return { read };

  function read() {
    const known = new Map();
    return (variable) => {
      if (!known.has(variable)) {
        probe.style.setProperty("color", `var(${variable})`);
        known.set(variable, getComputedStyle(probe).color);
      }
      return known.get(variable);
    };
  }
}

function describe(data, options) {
  const names = data.lanes.map((lane) => lane.process).join(", ");
  return `Activity of ${count(data.lanes.length)} processes from ${clock(options.from)} to ${clock(options.to)}: ${names}. Arrow keys move, plus and minus zoom.`;
}

// ---- where everything is

function layout(data, options, width) {
  const narrow = width < NARROW;
  const longest = Math.max(8, ...data.lanes.map((lane) => lane.process.length), ...(data.heat?.processes ?? []).map((name) => name.length));
  const left = narrow ? 0 : 22 + 7.3 * longest;
  const right = width - 1;
  const { from, to } = options;
  const x = (time) => left + ((time - from) / (to - from)) * (right - left);
  const time = (at) => from + ((at - left) / (right - left)) * (to - from);
  const plan = { width, left, right, x, time, from, to, narrow, hosts: [], lanes: [], heat: null, panels: [], height: 0 };
  let y = AXIS;
  if (options.heat && data.heat) y = placeHeat(plan, data.heat, y);
  const shown = options.heat && data.heat ? data.lanes.filter((lane) => lane.process === options.selected) : data.lanes;
  y = placeLanes(plan, shown, options, y);
  plan.lanesEnd = y;
  y = placePanels(plan, data, options, y);
  plan.height = y + 4;
  plan.find = (atX, atY) => find(plan, data, options, atX, atY);
  return plan;
}

function placeHeat(plan, heat, y) {
  plan.heat = { y, rows: heat.processes.map((process, index) => ({ process, y: y + index * HEAT_ROW })) };
  return y + heat.processes.length * HEAT_ROW + 12;
}

function placeLanes(plan, lanes, options, start) {
  let y = start;
  let host = null;
  const several = new Set(lanes.map((lane) => lane.host)).size > 1;
  const ordered = several ? lanes.toSorted((one, two) => one.host.localeCompare(two.host, "en", { numeric: true })) : lanes;
  for (const lane of ordered) {
    if (several && lane.host !== host) {
      host = lane.host;
      if (host) {
        plan.hosts.push({ name: host, y });
        y += HOST;
      }
    }
    const spans = lane.spans.filter((span) => !options.hidden.has(span.kind) && span.to >= options.from && span.from <= options.to);
    const rows = packed(spans.filter((span) => span.kind !== "wait"));
    const size = rows.length <= 1 ? 14 : rows.length === 2 ? 9 : 7;
    const head = plan.narrow ? 15 : 0;
    const isQuiet = !spans.length;
    const height = isQuiet ? 17 : head + Math.max(1, rows.length) * (size + 1) + 11;
    plan.lanes.push({ lane, y, height, head, rows, size, isQuiet, waits: spans.filter((span) => span.kind === "wait") });
    y += height;
  }
  return y + 4;
}

/** Rows in which no two spans overlap; beyond the last row they share it. */
function packed(spans) {
  const rows = [];
  for (const span of spans.toSorted((one, two) => one.from - two.from)) {
    let row = rows.find((each) => each.end <= span.from + 1e-6);
    if (!row && rows.length < MOST_ROWS) rows.push((row = { end: -Infinity, spans: [] }));
    row ??= rows.reduce((least, each) => (each.end < least.end ? each : least));
    row.spans.push(span);
    row.end = Math.max(row.end, span.to);
  }
  return rows.map((row) => row.spans);
}

function placePanels(plan, data, options, start) {
  let y = start;
  const processes = new Set([...data.lanes.map((lane) => lane.process), ...(data.heat?.processes ?? [])]);
  const hosts = Object.keys(data.readings).filter((name) => !processes.has(name));
  const chosen = options.selected && data.readings[options.selected] ? [options.selected] : hosts.length ? hosts : Object.keys(data.readings);
  const isHost = !options.selected && hosts.length > 0;
  for (const measure of MEASURES) {
    const series = chosen
      .map((name) => ({ name, times: data.readings[name].times, values: data.readings[name][measure.name] ?? [] }))
      .filter((each) => each.values.some((value) => value !== null));
    if (!series.length) continue;
    const most = Math.max(...series.flatMap((each) => each.values.filter((value) => value !== null)));
    plan.panels.push({ measure, series, isHost, y, height: PANEL, top: measure.top(most || 1, isHost) });
    y += PANEL + 14;
  }
  return y;
}

// ---- painting

function paint(pen, plan, data, options, colour) {
  pen.font = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  pen.textBaseline = "middle";
  paintSteps(pen, plan, data, options, colour);
  paintAxis(pen, plan, colour);
  if (plan.heat) paintHeat(pen, plan, data.heat, options, colour);
  for (const host of plan.hosts) paintHost(pen, plan, host, colour);
  for (const lane of plan.lanes) paintLane(pen, plan, lane, options, colour);
  for (const panel of plan.panels) paintPanel(pen, plan, panel, colour);
  paintMarks(pen, plan, data, colour);
}

function inside(pen, plan, top, bottom) {
  pen.save();
  pen.beginPath();
  pen.rect(plan.left, top, plan.right - plan.left, bottom - top);
  pen.clip();
}

function paintSteps(pen, plan, data, options, colour) {
  inside(pen, plan, 0, plan.height);
  let free = -Infinity;
  for (const step of data.steps) {
    const [one, two] = [plan.x(step.from), plan.x(step.to)];
    if (two < plan.left || one > plan.right) continue;
    if (step.step === options.step) {
      pen.fillStyle = colour("--accent-soft");
      pen.fillRect(one, 16, Math.max(2, two - one), plan.height - 16);
    }
    if (two - one > 5) {
      pen.fillStyle = colour("--grid");
      pen.fillRect(Math.round(one), 16, 1, plan.height - 16);
    }
    const label = two - one > 56 ? `step ${step.step}` : String(step.step);
    const size = pen.measureText(label).width;
    const at = Math.max(one, plan.left) + 4;
    if (at > free && two - at > size * 0.6) {
      pen.fillStyle = colour(step.step === options.step ? "--accent" : "--muted");
      pen.fillText(label, at, 26);
      free = at + size + 6;
    }
  }
  pen.restore();
}

function paintAxis(pen, plan, colour) {
  const step = niceStep((plan.to - plan.from) / Math.max(2, (plan.right - plan.left) / 96));
  pen.fillStyle = colour("--muted");
  inside(pen, plan, 0, AXIS);
  for (let tick = Math.ceil(plan.from / step) * step; tick <= plan.to; tick += step) {
    const at = plan.x(tick);
    pen.fillRect(Math.round(at), 12, 1, 4);
    pen.fillText(axisText(tick, step), at + 4, 8);
  }
  pen.restore();
  pen.fillStyle = colour("--line");
  pen.fillRect(plan.left, 16, plan.right - plan.left, 1);
}

function niceStep(rough) {
  const sizes = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];
  return sizes.find((size) => size >= rough) ?? Math.ceil(rough / 86400) * 86400;
}

function axisText(time, step) {
  if (step >= 60) return clock(time).slice(0, 5);
  return step >= 1 ? clock(time) : clock(time, true).slice(0, step >= 0.1 ? -2 : undefined);
}

function paintHost(pen, plan, host, colour) {
  pen.fillStyle = colour("--muted");
  pen.fillText(host.name, plan.narrow ? 2 : 8, host.y + 11);
  pen.fillStyle = colour("--line");
  pen.fillRect(0, host.y, plan.width, 1);
}

function label(pen, plan, text, y, colour, { isSelected = false, isQuiet = false, size = 12 } = {}) {
  pen.save();
  pen.font = `${isSelected ? "600 " : ""}${size}px ui-monospace, "DejaVu Sans Mono", monospace`;
  pen.fillStyle = colour(isSelected ? "--accent" : isQuiet ? "--muted" : "--text");
  pen.textAlign = plan.narrow ? "left" : "right";
  pen.fillText(text, plan.narrow ? 2 : plan.left - 10, y);
  pen.restore();
}

function paintLane(pen, plan, place, options, colour) {
  const { lane, y, height, head, rows, size } = place;
  const isSelected = lane.process === options.selected;
  if (isSelected) {
    pen.fillStyle = colour("--accent-soft");
    pen.fillRect(0, y, plan.left, height);
  }
  label(pen, plan, lane.process, plan.narrow ? y + 8 : y + height / 2, colour, { isSelected, isQuiet: place.isQuiet });
  pen.fillStyle = colour("--grid");
  pen.fillRect(plan.left, y + height - 1, plan.right - plan.left, 1);
  inside(pen, plan, y, y + height);
  for (const [index, spans] of rows.entries()) {
    const top = y + head + 3 + index * (size + 1);
    for (const span of spans) paintSpan(pen, plan, span, top, size, options, colour);
  }
  pen.fillStyle = colour("--faint");
  for (const span of place.waits) {
    const from = plan.x(span.from);
    pen.fillRect(from, y + height - 6, Math.max(1, plan.x(span.to) - from), 3);
  }
  pen.restore();
}

function spanColour(span, options) {
  if (options.colourBy === "kind") return (KINDS[span.kind] ?? KINDS.other).colour;
  return span.version === null ? "--line" : versionColour(span.version);
}

function paintSpan(pen, plan, span, top, size, options, colour) {
  const from = Math.max(plan.left - 4, plan.x(span.from));
  const width = Math.max(1, Math.min(plan.right + 4, plan.x(span.to)) - from - (plan.x(span.to) - plan.x(span.from) > 4 ? 1 : 0));
  pen.fillStyle = colour(spanColour(span, options));
  if (width > 4) {
    pen.beginPath();
    pen.roundRect(from, top, width, size, 2);
    pen.fill();
  } else pen.fillRect(from, top, width, size);
  if (span.kind === "recover") hatch(pen, from, top, width, size, colour("--surface"));
  const text = options.colourBy === "version" && span.version !== null ? `v${span.version}` : span.name;
  if (size >= 12 && width > 30 && pen.measureText(text).width < width - 8) {
    pen.fillStyle = colour(options.colourBy === "version" && span.version === null ? "--muted" : "--surface");
    pen.fillText(text, from + 5, top + size / 2 + 0.5);
  }
}

/** Recovery differs from the rest without colour, too. */
function hatch(pen, x, y, width, height, ink) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, width, height);
  pen.clip();
  pen.strokeStyle = ink;
  pen.globalAlpha = 0.55;
  pen.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    pen.moveTo(at, y + height);
    pen.lineTo(at + height, y);
  }
  pen.stroke();
  pen.restore();
}

function paintHeat(pen, plan, heat, options, colour) {
  const step = heat.times.length > 1 ? heat.times[1] - heat.times[0] : plan.to - plan.from;
  for (const [index, row] of plan.heat.rows.entries()) {
    label(pen, plan, plan.narrow ? "" : row.process, row.y + HEAT_ROW / 2, colour, { isSelected: row.process === options.selected, size: 10 });
    inside(pen, plan, row.y, row.y + HEAT_ROW - 1);
    pen.fillStyle = colour("--sunken");
    pen.fillRect(plan.left, row.y, plan.right - plan.left, HEAT_ROW - 1);
    for (const [column, time] of heat.times.entries()) {
      const kind = heat.kinds[index][column];
      if (!kind || options.hidden.has(kind)) continue;
      const from = plan.x(time);
      pen.globalAlpha = Math.max(0.06, heat.busy[index][column]);
      pen.fillStyle = colour((KINDS[kind] ?? KINDS.other).colour);
      pen.fillRect(from, row.y, Math.max(1, plan.x(time + step) - from + 0.5), HEAT_ROW - 1);
    }
    pen.globalAlpha = 1;
    pen.restore();
  }
}

function paintPanel(pen, plan, panel, colour) {
  const { measure, series, isHost, y, height, top } = panel;
  const base = y + height;
  pen.fillStyle = colour("--line");
  pen.fillRect(plan.left, base, plan.right - plan.left, 1);
  pen.fillStyle = colour("--muted");
  const title = isHost ? measure.host : measure.process;
  pen.fillText(title, plan.left + 4, y + 3);
  paintNames(pen, series, { x: plan.left + 4 + pen.measureText(title).width + 14, y: y + 3, right: plan.right }, colour);
  pen.textAlign = "right";
  if (!plan.narrow) pen.fillText(measure.text(top, isHost), plan.left - 10, y + 14);
  pen.textAlign = "left";
  inside(pen, plan, y, base + 1);
  for (const [index, each] of series.entries()) {
    pen.strokeStyle = colour(seriesColour(index));
    pen.lineWidth = 1.5;
    pen.beginPath();
    let open = false;
    for (const [at, time] of each.times.entries()) {
      const value = each.values[at];
      if (value === null || value === undefined) {
        open = false;
        continue;
      }
      const place = [plan.x(time), base - Math.min(1, value / top) * (height - 12)];
      if (open) pen.lineTo(...place);
      else pen.moveTo(...place);
      open = true;
    }
    pen.stroke();
  }
  pen.restore();
}

function seriesColour(index) {
  return `--s${[0, 1, 2, 3, 4, 7][index % 6]}`;
}

/** Names of the lines, each behind a dash of its colour, as far as there is room. */
function paintNames(pen, series, { x, y, right }, colour) {
  let at = x;
  for (const [index, { name }] of series.entries()) {
    const width = pen.measureText(name).width;
    if (at + width + 16 > right) {
      pen.fillText(`and ${series.length - index} more`, at, y);
      return;
    }
    pen.fillStyle = colour(seriesColour(index));
    pen.fillRect(at, y - 4, 10, 2);
    pen.fillStyle = colour("--muted");
    pen.fillText(name, at + 14, y);
    at += width + 28;
  }
}

function paintMarks(pen, plan, data, colour) {
  inside(pen, plan, 0, plan.height);
  for (const mark of data.marks.filter((each) => each.kind === "incident" && each.time !== null)) {
    const at = Math.round(plan.x(mark.time)) + 0.5;
    pen.strokeStyle = colour("--bad");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(at, 16);
    pen.lineTo(at, plan.height);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = colour("--bad");
    pen.beginPath();
    pen.moveTo(at - 4, 12);
    pen.lineTo(at + 4, 12);
    pen.lineTo(at, 18);
    pen.fill();
  }
  pen.restore();
}

// ---- what is under the pointer

function find(plan, data, options, x, y) {
  const time = plan.time(x);
  if (y < AXIS) return findOnAxis(plan, data, x, time);
  const row = plan.heat?.rows.find((each) => y >= each.y && y < each.y + HEAT_ROW);
  if (row) return findInHeat(data.heat, row, time);
  const place = plan.lanes.find((each) => y >= each.y && y < each.y + each.height);
  if (place) return findInLane(plan, place, x, y, time);
  const panel = plan.panels.find((each) => y >= each.y && y <= each.y + each.height);
  return panel && x >= plan.left ? { lines: [clock(time, true), ...panel.series.map((each) => readingText(each, panel, time))] } : null;
}

function findOnAxis(plan, data, x, time) {
  const mark = data.marks.find((each) => each.time !== null && Math.abs(plan.x(each.time) - x) < 6);
  if (mark) return { lines: [mark.text, clock(mark.time, true)] };
  const step = data.steps.find((each) => each.from <= time && each.to > time);
  if (!step || x < plan.left) return null;
  return { step: step.step, isAxis: true, lines: [`Step ${step.step}`, `${duration(step.to - step.from)} from ${clock(step.from, true)}`, ...stageLines(step)] };
}

export function stageLines(step) {
  return Object.entries(step.stages)
    .toSorted((one, two) => two[1] - one[1])
    .map(([name, seconds]) => `${name} ${duration(seconds)}`);
}

function findInHeat(heat, row, time) {
  const index = heat.processes.indexOf(row.process);
  const column = heat.times.findLastIndex((each) => each <= time);
  if (column < 0) return { process: row.process, lines: [row.process] };
  return { process: row.process, lines: [row.process, `${percent(heat.busy[index][column], 0)} busy${heat.kinds[index][column] ? `, mostly ${heat.kinds[index][column]}` : ""}`, clock(time, true), "Click to see its lane"] };
}

function findInLane(plan, place, x, y, time) {
  const { lane, rows, size, head } = place;
  if (x < plan.left) return { process: lane.process, lines: [lane.process, `${lane.role}${lane.host ? ` on ${lane.host}` : ""}`, "Click to see its load"] };
  const slack = (plan.to - plan.from) / (plan.right - plan.left);
  const isAt = (span) => span.from - slack <= time && span.to + slack >= time;
  const row = rows[Math.floor((y - place.y - head - 3) / (size + 1))];
  const span = (y > place.y + place.height - 8 ? null : row?.findLast(isAt)) ?? (y > place.y + place.height - 8 ? place.waits.find(isAt) : null);
  if (!span) return { process: lane.process, lines: [lane.process, clock(time, true)] };
  const about = [span.step !== null && `step ${span.step}`, span.version !== null && `weights ${span.version}`, span.count > 1 && `${count(span.count)} spans drawn as one`].filter(Boolean);
  return { process: lane.process, lines: [`${span.name}${span.name === span.kind ? "" : ` (${span.kind})`}`, `${duration(span.to - span.from)} from ${clock(span.from, true)}`, lane.process, ...about] };
}

function readingText(series, panel, time) {
  const at = series.times.findLastIndex((each) => each <= time);
  const value = at < 0 ? null : series.values[at];
  return `${series.name}: ${value === null ? "–" : panel.measure.text(value, panel.isHost)}`;
}

// ---- moving in time

/** Drag moves, Ctrl and wheel or two fingers zoom, a horizontal wheel moves; keys do both. */
function pointerControl(canvas, { plan, onWindow, onHover, onClick }) {
  const down = new Map();
  let moved = 0;
  const listeners = { pointerdown, pointermove, pointerup, pointercancel: pointerup, pointerleave, wheel, keydown, dblclick };
  for (const [name, listener] of Object.entries(listeners)) canvas.addEventListener(name, listener, { passive: false });
  return { close: () => down.clear() };

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  function pointerdown(event) {
    down.set(event.pointerId, place(event));
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  }

  function pointermove(event) {
    const [x, y] = place(event);
    const before = down.get(event.pointerId);
    if (!before) {
      onHover(x, y);
      return;
    }
    const others = [...down].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    if (others.length) pinch(before[0], x, others[0][0]);
    else shift(before[0] - x);
    moved += Math.abs(before[0] - x);
    down.set(event.pointerId, [x, y]);
    onHover(0, null);
  }

  function pinch(before, after, fixed) {
    if (Math.abs(after - fixed) > 8) zoom(fixed, Math.abs(before - fixed) / Math.abs(after - fixed));
  }

  function pointerup(event) {
    const at = down.get(event.pointerId);
    down.delete(event.pointerId);
    if (at && event.type === "pointerup" && moved < 4) onClick(...at);
  }

  function pointerleave() {
    onHover(0, null);
  }

  function wheel(event) {
    const [x] = place(event);
    if (event.ctrlKey || event.metaKey) zoom(x, Math.exp(event.deltaY * 0.004));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) shift(event.deltaX || event.deltaY);
    else return;
    event.preventDefault();
  }

  function dblclick(event) {
    zoom(place(event)[0], 0.4);
  }

  function keydown(event) {
    const middle = (plan().left + plan().right) / 2;
    const by = (event.shiftKey ? 0.5 : 0.1) * (plan().right - plan().left);
    const acts = { ArrowLeft: () => shift(-by), ArrowRight: () => shift(by), "+": () => zoom(middle, 0.6), "=": () => zoom(middle, 0.6), "-": () => zoom(middle, 1 / 0.6), 0: () => onWindow(null, null) };
    if (!acts[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    acts[event.key]();
  }

  function shift(pixels) {
    const { from, to, left, right } = plan();
    const seconds = (pixels / (right - left)) * (to - from);
    onWindow(from + seconds, to + seconds);
  }

  function zoom(x, factor) {
    const { from, to, time } = plan();
    const fixed = Math.min(to, Math.max(from, time(x)));
    const scale = Math.max(LEAST_WINDOW_S / (to - from), factor);
    onWindow(fixed - (fixed - from) * scale, fixed + (to - fixed) * scale);
  }
}

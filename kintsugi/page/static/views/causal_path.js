/** The way of a fault, drawn over time × component: the cause first, each effect at the process where it showed.
 *
 *     const figure = causalPath({ path, onset, end, marks });
 *     container.append(figure.element);   // redraws itself when its width changes
 *     figure.close();
 *
 * `path` has { time, component, text }, the cause first. `marks` are other times of the incident: { time, text }.
 * Effects that follow so closely that they would overlap are moved apart, in their order; the list below the drawing has
 * the time of each.
 */

import { h, replace, svg, visible } from "../dom.js";
import { clock, duration } from "../format.js";

const ROW = 34;
const NARROW_ROW = 48;
const TOP = 30;
const BOTTOM = 30;
const RADIUS = 10;
const NARROW = 460;
const CLOSE_PX = 34;
const LEAST_SPAN_S = 0.2;
const LONGEST_TAIL = 6;
const ORDER = ["master", "watcher", "manager", "rollout", "server", "model", "agent", "launcher"];

export function causalPath({ path, onset, end = null, marks = [] }) {
  const drawing = h("div", { class: "causal-drawing" });
  const items = path.map((point, index) => keyItem(point, index, onset, light));
  const element = h("figure", { class: "causal" }, drawing, h("ol", { class: "causal-key" }, items));
  const observer = new ResizeObserver(() => draw());
  observer.observe(drawing);
  let width = 0;
  return { element, close: () => observer.disconnect() };

  function draw() {
    const now = Math.floor(drawing.clientWidth);
    if (!now || now === width) return;
    width = now;
    replace(drawing, picture({ path, onset, end, marks, width }));
  }

  function light(index, on) {
    for (const [place, item] of items.entries()) item.classList.toggle("lit", on && place === index);
    for (const mark of drawing.querySelectorAll("[data-point]")) mark.classList.toggle("lit", on && mark.dataset.point === String(index));
  }
}

function keyItem(point, index, onset, light) {
  return h(
    "li",
    { onpointerenter: () => light(index, true), onpointerleave: () => light(index, false) },
    h("span", { class: "causal-number", "aria-hidden": "true" }, String(index + 1)),
    h("span", { class: "causal-time", title: clock(point.time, true) }, after(point.time - onset)),
    h("span", { class: "causal-text" }, h("b", { class: "process" }, visible(point.component)), " ", visible(point.text)),
  );
}

/** A time after the beginning: +0.4 s. */
export function after(seconds) {
  if (Math.abs(seconds) < 0.0005) return "0 s";
  return `${seconds < 0 ? "−" : "+"}${duration(Math.abs(seconds))}`;
}

function picture({ path, onset, end, marks, width }) {
  const rows = componentsOf(path);
  const narrow = width < NARROW;
  const high = narrow ? NARROW_ROW : ROW;
  const left = narrow ? 8 : 20 + 7.4 * Math.max(...rows.map((row) => row.length));
  const { from, to, isCut } = extentOf(path, onset, end);
  const right = width - 18;
  const x = (time) => left + RADIUS + ((time - from) / (to - from)) * (right - left - 2 * RADIUS);
  const y = (component) => TOP + (rows.indexOf(component) + 0.5) * high + (narrow ? 9 : 0);
  const height = TOP + rows.length * high + BOTTOM;
  const places = placesOf(path, x, right - RADIUS);
  const label = path.map((point) => `${after(point.time - onset)} ${point.component}: ${point.text}`).join("; then ");
  return svg(
    "svg",
    { class: "causal-picture", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Way of the fault: ${label}` },
    svg("defs", {}, svg("marker", { id: "causal-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, svg("path", { class: "causal-head", d: "M0 0.8 7.2 4 0 7.2Z" }))),
    rows.map((row) => rowOf(row, { y: y(row), left, right, narrow, isCause: row === path[0].component })),
    axis({ from, to, onset, x, y: TOP + rows.length * high + 4, width: right - left }),
    faultBar({ x: x(onset), until: right, y: y(path[0].component), isCut: isCut || end === null }),
    markLines({ marks, from, to, x, bottom: TOP + rows.length * high }),
    pairs(places).map(([one, two]) => arrow(one, two, y)),
    places.map((place, index) => dot(place, y(place.component), index === 0)),
  );
}

function componentsOf(path) {
  const rank = (name) => {
    const found = ORDER.indexOf(name.replace(/-\d+$/, ""));
    return found < 0 ? ORDER.length : found;
  };
  const names = [...new Set(path.map((point) => point.component))];
  return names.sort((one, two) => rank(one) - rank(two) || one.localeCompare(two, "en", { numeric: true }));
}

/** The path, and what came after it as long as that does not crowd the path. */
function extentOf(path, onset, end) {
  const times = [onset, ...path.map((point) => point.time)];
  const from = Math.min(...times);
  const last = Math.max(...times);
  const span = Math.max(LEAST_SPAN_S, last - from);
  const whole = end !== null && end > last && end - from <= LONGEST_TAIL * span;
  return { from, to: whole ? end : from + span * 1.12, isCut: !whole };
}

/** Places of the points: none closer to its predecessor than `CLOSE_PX`, as long as there is room for all at the right. */
function placesOf(path, x, right) {
  const gap = Math.min(CLOSE_PX, (right - x(path[0].time)) / path.length);
  let last = -Infinity;
  return path.map((point, index) => {
    const room = right - (path.length - 1 - index) * gap;
    last = Math.min(room, Math.max(last + gap, x(point.time)));
    return { x: last, component: point.component, index };
  });
}

function pairs(places) {
  return places.slice(1).map((place, index) => [places[index], place]);
}

function rowOf(name, { y, left, right, narrow, isCause }) {
  return svg(
    "g",
    { class: isCause ? "causal-row cause" : "causal-row" },
    svg("line", { class: "causal-rule", x1: left, x2: right, y1: y, y2: y }),
    narrow
      ? svg("text", { class: "causal-name", x: left, y: y - 16 }, name)
      : svg("text", { class: "causal-name", x: left - 12, y: y + 4, "text-anchor": "end" }, name),
  );
}

function axis({ from, to, onset, x, y, width }) {
  const span = to - from;
  const rough = span / Math.max(2, Math.floor(width / 90));
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil((from - onset) / step) * step; tick <= to - onset + step * 1e-6; tick += step) ticks.push(tick);
  return svg(
    "g",
    { class: "causal-axis" },
    ticks.map((tick) => [
      svg("line", { x1: x(onset + tick), x2: x(onset + tick), y1: TOP, y2: y }),
      svg("text", { x: x(onset + tick), y: y + 15, "text-anchor": x(onset + tick) < 30 ? "start" : "middle" }, Math.abs(tick) < step * 1e-6 ? clock(onset) : after(tick)),
    ]),
  );
}

function faultBar({ x, until, y, isCut }) {
  return svg("rect", { class: isCut ? "causal-fault open" : "causal-fault", x, y: y - 11, width: Math.max(6, until - x), height: 22, rx: 3 });
}

/** Other times of the incident as dashed lines; a label that would meet its neighbour is left to the line's title. */
function markLines({ marks, from, to, x, bottom }) {
  let free = -Infinity;
  return marks
    .filter((mark) => mark.time >= from && mark.time <= to)
    .map((mark) => {
      const at = x(mark.time);
      const isFree = at - 2.9 * mark.text.length > free;
      if (isFree) free = at + 2.9 * mark.text.length + 8;
      return svg(
        "g",
        { class: "causal-mark" },
        svg("title", {}, `${mark.text}, ${clock(mark.time, true)}`),
        svg("line", { x1: at, x2: at, y1: 20, y2: bottom }),
        isFree && svg("text", { x: at, y: 13, "text-anchor": "middle" }, mark.text),
      );
    });
}

function arrow(one, two, y) {
  const [y1, y2] = [y(one.component), y(two.component)];
  const gap = RADIUS + 2;
  const forward = two.x - one.x > 3 * RADIUS;
  const d = forward
    ? `M${one.x + gap} ${y1}C${(one.x + two.x) / 2} ${y1} ${(one.x + two.x) / 2} ${y2} ${two.x - gap} ${y2}`
    : `M${one.x} ${y1 + Math.sign(y2 - y1) * gap}L${two.x} ${y2 - Math.sign(y2 - y1) * gap}`;
  return svg("path", { class: "causal-arrow", d, "marker-end": "url(#causal-head)" });
}

function dot(place, y, isCause) {
  return svg(
    "g",
    { class: isCause ? "causal-dot cause" : "causal-dot", "data-point": place.index },
    svg("circle", { cx: place.x, cy: y, r: RADIUS }),
    svg("text", { x: place.x, y: y + 4, "text-anchor": "middle" }, String(place.index + 1)),
  );
}

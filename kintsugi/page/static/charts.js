/** Line charts in SVG, written by hand.
 *
 * Plotly (7.1.0, PyPI) was tried first and failed on both counts that decide: under this page's policy
 * (style-src 'self') its style rules are refused, so that its charts are drawn without layout, and on two shared cores
 * sixteen charts needed 4 s until they were drawn, of which 3.4 s load and compile its 4.8 MB. This file needs neither
 * inline styles nor a library, and takes its colours from style.css, so that a change of theme redraws nothing.
 *
 *     const group = chartGroup({ cursor });
 *     const chart = lineChart({ title: "Reward", group, series: [{ name: "mean", color: 0, x, y, low, high }], marks });
 *     root.append(chart.element);
 *     chart.update({ series, smoothing: 0.6, log: true });
 *     chart.close();
 *
 * A series may have `low` and `high` (drawn as a band; `interval: false` keeps them out of the legend), `points` (dots,
 * with whiskers where there is a band), `rough` (never smoothed), `dashed`. `range: [0, 0]` keeps 0 in view.
 *
 * All charts of a group share the zoomed range, the pointer's position and the step cursor. Drag zooms, a click sets the
 * cursor, a double click shows everything again; as a slider for the keyboard: arrows, Home, End, + − 0, n and p.
 */

import { h, replace, svg } from "./dom.js";
import { count, number, percent } from "./format.js";

const MARGIN = { top: 14, right: 10, bottom: 20, left: 46 };
const HEIGHT = 168;
const MARK_REACH_PX = 7;
const DRAG_PX = 5;

let numCharts = 0;

/** How values are written: `format(value)` in the legend, `format(value, step)` on an axis whose ticks lie `step` apart. */
export const figure = (value, step) => (step === undefined ? number(value) : number(value, significant(value, step)));
export const share = (value, step) => percent(value, step === undefined ? 1 : Math.max(0, -lastDigit(step * 100)));

/** Significant digits that tell ticks apart. */
function significant(value, step) {
  return value === 0 ? 1 : Math.min(6, Math.max(1, Math.floor(Math.log10(Math.abs(value)) + 1e-9) - lastDigit(step) + 1));
}

/** Power of ten of the last digit of a step between ticks: 0 for 2, −1 for 0.5 and 2.5. */
function lastDigit(step) {
  const power = Math.floor(Math.log10(step) + 1e-9);
  return Math.abs(step / 10 ** power - 2.5) < 1e-6 ? power - 1 : power;
}

/** State that charts share. `onZoom(range | null)` is told of every change of the zoomed range. */
export function chartGroup({ cursor = null, onZoom = () => {} } = {}) {
  const charts = new Set();
  const group = {
    charts,
    cursor,
    range: null,
    hover: null,
    first: -Infinity,
    extent() {
      let [low, high] = [Infinity, -Infinity];
      for (const chart of charts) {
        const [from, to] = chart.extent();
        [low, high] = [Math.min(low, from), Math.max(high, to)];
      }
      return low <= high ? [Math.min(high, Math.max(low, group.first - 1)), high] : [0, 1];
    },
    /** Leave out the steps before this one, unless they are zoomed to. What has `points`, as evaluations do, is shown from
     * one step earlier: it was measured with the weights that the first step began with. */
    setFirst(step) {
      if (step === group.first) return;
      group.first = step;
      for (const chart of charts) chart.redraw();
    },
    setRange(range) {
      group.range = range;
      for (const chart of charts) chart.redraw();
      onZoom(range);
    },
    setHover(x) {
      if (x === group.hover) return;
      group.hover = x;
      for (const chart of charts) chart.point();
    },
    close() {
      unsubscribe?.();
      for (const chart of [...charts]) chart.close();
    },
  };
  const unsubscribe = cursor?.subscribe(() => {
    for (const chart of charts) chart.point();
  });
  return group;
}

/** Round numbers from `low` to `high`, about `wanted` of them. */
export function ticks(low, high, wanted = 5, sizes = [1, 2, 5, 10]) {
  const span = high - low;
  if (!(span > 0)) return [low];
  const rough = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = sizes.map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) found.push(index * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

function logTicks(low, high) {
  const found = [];
  const decades = Math.log10(high / low);
  const within = decades > 3 ? [1] : decades > 1 ? [1, 3] : [1, 2, 3, 5, 7];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const each of within) {
      const value = each * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  const stride = Math.ceil(found.length / 6);
  return found.length < 2 ? [low, high] : found.filter((_, index) => index % stride === 0);
}

/** Exponential moving average without the bias of its start; what was not measured stays so. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let [mean, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined || !Number.isFinite(value)) return null;
    mean = mean * weight + (1 - weight) * value;
    mass = mass * weight + (1 - weight);
    return mean / mass;
  });
}

/** Index of the value nearest to x in ascending values; -1 where there is none. */
function nearest(values, x) {
  let [low, high] = [0, values.length - 1];
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - values[low - 1] <= values[low] - x ? low - 1 : low;
}

const measured = (value) => value !== null && value !== undefined && Number.isFinite(value);

export function lineChart(given) {
  let options = { marks: [], smoothing: 0, log: false, height: HEIGHT, range: null, ...given };
  options.format ??= figure;
  options.marks = inOrder(options.marks);
  const { group } = options;
  const plot = svg("svg", { class: "plot", "aria-hidden": "true" });
  const clip = svg("rect", { x: MARGIN.left - 4, y: 0 });
  const clipId = `clip-${(numCharts += 1)}`;
  const layers = {
    axes: svg("g", { class: "axes" }),
    curves: svg("g", { class: "curves", "clip-path": `url(#${clipId})` }),
    marks: svg("g", { class: "marks" }),
    pointer: svg("g", { class: "pointer" }),
  };
  plot.append(svg("clipPath", { id: clipId }, clip), layers.axes, layers.curves, layers.marks, layers.pointer);
  const tip = h("div", { class: "chart-tip", hidden: true });
  const slider = { role: "slider", "aria-label": options.title, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0" };
  const area = h("div", { class: "chart-area", tabindex: "0", ...slider }, plot, tip);
  const legend = h("div", { class: "legend" });
  const position = h("span", { class: "chart-position" });
  const note = h("p", { class: "chart-note" });
  const element = h(
    "section",
    { class: "chart card", "aria-label": options.title },
    h("header", h("h3", options.hint ? { title: options.hint } : {}, options.title), position),
    legend,
    area,
    note,
  );

  let width = 0;
  let height = options.height;
  let seen = false;
  let dirty = true;
  let scale = null;
  let drawn = [];
  let drag = null;

  const sizes = new ResizeObserver(([entry]) => {
    const next = [Math.round(entry.contentRect.width), Math.max(options.height, Math.floor(entry.contentRect.height))];
    if (next[0] === width && next[1] === height) return;
    [width, height] = next;
    redraw();
  });
  const sight = new IntersectionObserver(([entry]) => {
    seen = entry.isIntersecting;
    if (seen && dirty) draw();
  }, { rootMargin: "200px" });
  sizes.observe(area);
  sight.observe(element);

  area.addEventListener("pointerdown", press);
  area.addEventListener("pointermove", move);
  area.addEventListener("pointerup", release);
  area.addEventListener("pointercancel", leave);
  area.addEventListener("pointerleave", leave);
  area.addEventListener("dblclick", () => group.setRange(null));
  area.addEventListener("keydown", onKey);

  const chart = { element, update, redraw, point, extent, close };
  group.charts.add(chart);
  return chart;

  function update(changes) {
    options = { ...options, ...changes };
    options.marks = inOrder(options.marks);
    redraw();
  }

  function close() {
    sizes.disconnect();
    sight.disconnect();
    group.charts.delete(chart);
    element.remove();
  }

  function redraw() {
    dirty = true;
    if (seen) draw();
    else if (!scale) whenIdle(() => dirty && draw());
  }

  function extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const { x } of options.series) {
      if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x.at(-1))];
    }
    return [low, high];
  }

  // ---- drawing

  function draw() {
    if (width < 40) return;
    dirty = false;
    plot.setAttribute("width", width);
    plot.setAttribute("height", height);
    clip.setAttribute("height", height - MARGIN.bottom + 4);
    clip.setAttribute("width", Math.max(0, width - MARGIN.left - MARGIN.right + 8));
    drawn = options.series.map((each) => ({ ...each, smooth: smoothed(each.y, each.rough ? 0 : options.smoothing) }));
    scale = scales();
    drawAxes();
    replace(layers.curves, drawn.map(curve));
    drawMarks();
    const hiddenValues = options.log ? countNotPositive() : 0;
    note.textContent = hiddenValues ? `${count(hiddenValues)} values of 0 or less are not shown on the log scale.` : "";
    point();
  }

  function countNotPositive() {
    return drawn.reduce((sum, { y }) => sum + y.filter((value) => measured(value) && value <= 0).length, 0);
  }

  function scales() {
    const [from, to] = group.range ?? group.extent();
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const span = to - from || 1;
    const [low, high] = valueRange(from, to);
    const shape = options.log ? Math.log10 : (value) => value;
    const [shapedLow, shapedHigh] = [shape(low), shape(high)];
    return {
      from,
      to,
      low,
      high,
      right,
      bottom,
      x: (value) => MARGIN.left + ((value - from) / span) * (right - MARGIN.left),
      y: (value) => bottom - ((shape(value) - shapedLow) / (shapedHigh - shapedLow)) * (bottom - MARGIN.top),
      step: (pixel) => from + ((pixel - MARGIN.left) / (right - MARGIN.left)) * span,
    };
  }

  function beginOf({ points }) {
    return group.range === null && !points ? group.first : -Infinity;
  }

  function valueRange(from, to) {
    let [low, high] = [Infinity, -Infinity];
    for (const series of drawn) {
      const { x, y, low: lows, high: highs } = series;
      const begin = Math.max(from, beginOf(series));
      for (let index = 0; index < x.length; index += 1) {
        if (x[index] < begin || x[index] > to) continue;
        for (const value of [y[index], lows?.[index], highs?.[index]]) {
          if (!measured(value) || (options.log && value <= 0)) continue;
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
    }
    if (low > high) return options.log ? [0.1, 1] : [0, 1];
    if (options.log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
    if (options.range) [low, high] = [Math.min(low, options.range[0]), Math.max(high, options.range[1])];
    // A variation that no axis label could show, such as rounding around 1, is drawn as the constant that it is.
    const constant = high - low <= 1e-4 * Math.max(Math.abs(low), Math.abs(high));
    const pad = constant ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.06;
    return [low >= 0 && low < pad * 4 ? 0 : low - pad, high + pad];
  }

  function drawAxes() {
    const { x, y, low, high, from, to, right, bottom } = scale;
    const rows = options.log ? logTicks(low, high) : ticks(low, high, 4, [1, 2, 2.5, 5, 10]);
    const step = (value) => (options.log ? value : (rows[1] ?? rows[0] + 1) - rows[0]);
    const columns = ticks(from, to, Math.max(3, Math.floor(width / 80))).filter(Number.isInteger);
    const last = columns.at(-1);
    replace(
      layers.axes,
      rows.map((value) => [
        svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: pixel(y(value)), y2: pixel(y(value)) }),
        svg("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, options.format(value, step(value))),
      ]),
      svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: pixel(bottom), y2: pixel(bottom) }),
      columns.map((value) => {
        const anchor = value === last && right - x(value) < 14 ? "end" : "middle";
        return svg("text", { x: anchor === "end" ? right : x(value), y: bottom + 15, "text-anchor": anchor }, count(value));
      }),
    );
  }

  function curve(series) {
    const { color = 0 } = series;
    const name = `series c${color % 8}`;
    const usesSmooth = options.smoothing > 0 && !series.rough;
    // Between values that are far apart a line would claim what was not measured.
    const lonely = !series.points && density(series.y) < 1 / 3;
    return svg(
      "g",
      { class: name },
      series.low && svg("path", { class: "band", d: band(series) }),
      usesSmooth && svg("path", { class: "raw", d: path(series, series.y) }),
      !lonely && svg("path", { class: series.dashed ? "line dashed" : "line", d: path(series, series.smooth) }),
      (series.points || lonely || countMeasured(series.y) < 2) && dots(series),
    );
  }

  function shown(value) {
    return measured(value) && (!options.log || value > 0);
  }

  /** Points of the line in view; where there are many per pixel, the lowest and highest of each stay. Values that were
   * not measured are passed over: an evaluation has a step of its own, which must not tear the other curves. */
  function path(series, y) {
    const { x } = series;
    const begin = beginOf(series);
    const first = Math.max(0, nearest(x, Math.max(begin, scale.from)) - 1);
    const last = Math.min(x.length - 1, nearest(x, scale.to) + 1);
    const bucket = Math.max(1, Math.floor((last - first) / (2 * width)));
    let text = "";
    let pen = "M";
    for (let start = first; start <= last; start += bucket) {
      for (const index of bucket === 1 ? [start] : extremes(y, start, Math.min(last + 1, start + bucket))) {
        if (!shown(y[index]) || x[index] < begin) continue;
        text += `${pen}${scale.x(x[index]).toFixed(1)} ${scale.y(y[index]).toFixed(1)}`;
        pen = "L";
      }
    }
    return text;
  }

  function extremes(y, start, end) {
    let [least, most] = [-1, -1];
    for (let index = start; index < end; index += 1) {
      if (!shown(y[index])) continue;
      if (least < 0 || y[index] < y[least]) least = index;
      if (most < 0 || y[index] > y[most]) most = index;
    }
    return least < 0 ? [] : least === most ? [least] : [Math.min(least, most), Math.max(least, most)];
  }

  function band(series) {
    const { x, y, low, high } = series;
    const begin = beginOf(series);
    const there = x.map((_, index) => index).filter((index) => x[index] >= begin && shown(low[index]) && shown(high[index]) && measured(y[index]));
    if (!there.length) return "";
    const up = there.map((index) => `${scale.x(x[index]).toFixed(1)} ${scale.y(high[index]).toFixed(1)}`);
    const down = there.reverse().map((index) => `${scale.x(x[index]).toFixed(1)} ${scale.y(low[index]).toFixed(1)}`);
    return `M${[...up, ...down].join("L")}Z`;
  }

  function dots({ x, y, low, high, points }) {
    const marks = [];
    x.forEach((at, index) => {
      if (!shown(y[index]) || at < scale.from || at > scale.to) return;
      const [column, row] = [scale.x(at).toFixed(1), scale.y(y[index]).toFixed(1)];
      if (points && low && shown(low[index]) && shown(high[index])) {
        marks.push(svg("line", { class: "whisker", x1: column, x2: column, y1: scale.y(low[index]).toFixed(1), y2: scale.y(high[index]).toFixed(1) }));
      }
      marks.push(svg("circle", { cx: column, cy: row, r: 3 }));
    });
    return marks;
  }

  function drawMarks() {
    const { bottom } = scale;
    replace(
      layers.marks,
      marksInView().map(({ mark, column }) => {
        if (mark.kind === "incident") {
          return svg(
            "g",
            { class: "mark incident" },
            svg("line", { x1: column, x2: column, y1: 10, y2: bottom }),
            svg("path", { d: `M${column - 5} 2h10l-5 9Z` }),
          );
        }
        const small = mark.kind === "evaluation" ? 3.5 : 2;
        return svg("path", { class: `mark ${mark.kind}`, d: `M${column} ${bottom - small}l${small} ${small}l-${small} ${small}l-${small} -${small}Z` });
      }),
    );
  }

  function marksInView() {
    return options.marks
      .filter(({ step }) => step >= scale.from && step <= scale.to)
      .map((mark) => ({ mark, column: pixel(scale.x(mark.step)) }));
  }

  // ---- pointer, cursor and what is read there

  /** Draw the pointer and the cursor, and write the values there into the legend. */
  function point() {
    const asked = group.cursor?.step ?? null;
    if (asked !== null && asked < group.first && group.range === null) group.setFirst(-Infinity);
    if (!scale || (!seen && legend.childElementCount)) {
      dirty = true;
      return;
    }
    const fixed = group.cursor?.step ?? null;
    const at = group.hover ?? fixed;
    const inside = (value) => value !== null && value >= scale.from && value <= scale.to;
    replace(
      layers.pointer,
      inside(fixed) && svg("line", { class: "cursor", x1: pixel(scale.x(fixed)), x2: pixel(scale.x(fixed)), y1: MARGIN.top, y2: scale.bottom }),
      inside(group.hover) && svg("line", { class: "hover", x1: pixel(scale.x(group.hover)), x2: pixel(scale.x(group.hover)), y1: MARGIN.top, y2: scale.bottom }),
      at !== null && drawn.map((series) => spot(series, at)),
      drag && drag.moved && svg("rect", { class: "selection", x: Math.min(drag.from, drag.to), width: Math.abs(drag.to - drag.from), y: MARGIN.top, height: scale.bottom - MARGIN.top }),
    );
    writeLegend(at);
  }

  /** Index of the measured value nearest to a step; -1 before the first one. */
  function indexAt({ x, y }, at) {
    if (at < x[y.findIndex(measured)]) return -1;
    let index = nearest(x, at);
    for (let reach = 0; reach < x.length && index >= 0; reach += 1) {
      if (measured(y[index - reach])) return index - reach;
      if (measured(y[index + reach])) return index + reach;
    }
    return index;
  }

  function spot(series, at) {
    const index = indexAt(series, at);
    const value = series.smooth[index];
    if (index < 0 || !shown(value) || series.x[index] < scale.from || series.x[index] > scale.to) return null;
    return svg("circle", { class: `series c${(series.color ?? 0) % 8} spot`, cx: scale.x(series.x[index]), cy: scale.y(value), r: 3.5 });
  }

  function writeLegend(at) {
    position.textContent = at === null ? "" : `step ${count(at)}`;
    const entries = drawn.map((series) => {
      const index = at === null ? lastMeasured(series.y) : indexAt(series, at);
      const value = options.smoothing && !series.rough ? series.smooth[index] : series.y[index];
      const between = measured(series.low?.[index]) && measured(series.high?.[index]) && series.interval !== false && drawn.length === 1;
      return { series, value, text: options.format(value), between: between && `${options.format(series.low[index])} … ${options.format(series.high[index])}` };
    });
    replace(
      legend,
      entries.map(({ series, text, between }) =>
        h("span", { class: ["key", `c${(series.color ?? 0) % 8}`] }, h("i", { class: series.dashed ? "dashed" : "", "aria-hidden": "true" }), h("span", series.name), h("b", text), between && h("small", between)),
      ),
    );
    describe(at, entries);
  }

  function describe(at, entries) {
    const [from, to] = [Math.ceil(scale.from), Math.floor(scale.to)];
    const now = Math.round(at ?? to);
    area.setAttribute("aria-label", `${options.title}: step cursor`);
    area.setAttribute("aria-valuemin", from);
    area.setAttribute("aria-valuemax", Math.max(from, to));
    area.setAttribute("aria-valuenow", Math.min(Math.max(from, to), Math.max(from, now)));
    area.setAttribute("aria-valuetext", `step ${now}: ${entries.map(({ series, text }) => `${series.name} ${text}`).join(", ")}`);
  }

  function stepAt(event) {
    const column = event.clientX - area.getBoundingClientRect().left;
    const step = Math.round(scale.step(Math.min(scale.right, Math.max(MARGIN.left, column))));
    return { column, step };
  }

  function markAt(column) {
    let found = null;
    for (const each of marksInView()) {
      const distance = Math.abs(each.column - column);
      const better = !found || distance < found.distance || (distance === found.distance && each.mark.kind === "incident");
      if (distance <= MARK_REACH_PX && better) found = { ...each, distance };
    }
    return found;
  }

  function press(event) {
    if (!scale || event.button !== 0) return;
    const { column } = stepAt(event);
    drag = { from: column, to: column, moved: false };
  }

  function move(event) {
    if (!scale) return;
    const { column, step } = stepAt(event);
    if (drag) {
      drag.to = Math.min(scale.right, Math.max(MARGIN.left, column));
      if (!drag.moved && Math.abs(drag.to - drag.from) > DRAG_PX) {
        drag.moved = true;
        area.setPointerCapture(event.pointerId);
      }
    }
    group.setHover(step);
    if (drag?.moved) point();
    showTip(markAt(column), column);
  }

  function release(event) {
    if (!drag || !scale) return;
    const done = drag;
    drag = null;
    if (done.moved) {
      const ends = [scale.step(done.from), scale.step(done.to)].sort((one, two) => one - two);
      const [from, to] = [Math.max(scale.from, Math.floor(ends[0])), Math.min(scale.to, Math.ceil(ends[1]))];
      if (to - from >= 1) group.setRange([from, to]);
      else point();
      return;
    }
    const { column, step } = stepAt(event);
    const mark = markAt(column);
    if (mark?.mark.kind === "incident" && event.offsetY < MARGIN.top + 4 && options.onMark) options.onMark(mark.mark);
    else group.cursor?.set(mark ? mark.mark.step : step);
  }

  function leave() {
    drag = null;
    tip.hidden = true;
    group.setHover(null);
  }

  function showTip(found, column) {
    tip.hidden = !found;
    if (!found) return;
    const same = options.marks.filter(({ step, kind }) => step === found.mark.step && kind !== "checkpoint");
    replace(tip, (same.length ? same : [found.mark]).map((mark) => h("div", h("b", `${title(mark.kind)}, step ${count(mark.step)}`), h("div", mark.text))));
    const left = column > width / 2;
    tip.style.setProperty("left", left ? "auto" : `${column + 10}px`);
    tip.style.setProperty("right", left ? `${width - column + 10}px` : "auto");
  }

  function onKey(event) {
    if (!scale || event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 10 : 1;
    const now = group.cursor?.step ?? Math.floor(scale.to);
    const acts = {
      ArrowLeft: () => set(now - far),
      ArrowDown: () => set(now - far),
      ArrowRight: () => set(now + far),
      ArrowUp: () => set(now + far),
      PageDown: () => set(now - 10),
      PageUp: () => set(now + 10),
      Home: () => set(Math.ceil(scale.from)),
      End: () => set(Math.floor(scale.to)),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      0: () => group.setRange(null),
      n: () => jump(options.marks.find(({ step }) => step > now)),
      p: () => jump(options.marks.findLast(({ step }) => step < now)),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    tip.hidden = true;
    group.hover = null;
    acts[event.key]();
  }

  function set(step) {
    const [from, to] = group.extent();
    group.cursor?.set(Math.min(to, Math.max(from, step)));
  }

  function jump(mark) {
    if (mark) set(mark.step);
  }

  function zoom(factor) {
    const [first, last] = group.extent();
    const centre = group.cursor?.step ?? (scale.from + scale.to) / 2;
    const half = ((scale.to - scale.from) * factor) / 2;
    if (half < 1) return;
    const [from, to] = [Math.max(first, Math.floor(centre - half)), Math.min(last, Math.ceil(centre + half))];
    group.setRange(from <= first && to >= last ? null : [from, to]);
  }
}

/** The first drawing of what is out of sight waits until the page is at rest; later ones until it comes into sight. */
const whenIdle = globalThis.requestIdleCallback ?? ((callback) => setTimeout(callback, 100));
const pixel = (value) => Math.round(value) + 0.5;
const title = (word) => word.charAt(0).toUpperCase() + word.slice(1);
const inOrder = (marks) => marks.toSorted((one, two) => one.step - two.step);
const countMeasured = (values) => values.reduce((sum, value) => sum + (measured(value) ? 1 : 0), 0);

/** Share of the places from the first to the last measured value that were measured. */
function density(values) {
  const amount = countMeasured(values);
  return amount ? amount / (lastMeasured(values) - values.findIndex(measured) + 1) : 0;
}

function lastMeasured(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (measured(values[index])) return index;
  return -1;
}

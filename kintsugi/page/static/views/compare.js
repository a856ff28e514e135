/** Two or more runs beside each other: curves over each other, differences in configuration, paired held-out answers. */

import { chartGroup, lineChart, share } from "../charts.js";
import { empty, failure, h, loading, problems, replace, stateBadge, svg, visible } from "../dom.js";
import { compact, count, number, percent } from "../format.js";
import { firstMainStep } from "./learning.js";

const CHARTS = [
  { title: "Reward", key: "reward/mean" },
  { title: "Held-out accuracy", format: share, range: [0, 0] },
  { title: "Loss", key: "loss" },
  { title: "Entropy", key: "entropy" },
  { title: "KL", key: "kl" },
  { title: "Length of completions", key: "completions/mean_length" },
  { title: "Clipped share", key: "clip_ratio", format: share },
  { title: "Gradient norm", key: "grad_norm" },
  { title: "Sampler − trainer", key: "logprob_abs_diff_mean" },
  { title: "Tokens per second", key: "tokens_per_s", format: (value) => compact(value) },
];

export async function render(root, { api, params, setParams, signal, cursor, href }) {
  const ids = (params.get("runs") ?? "").split(",").filter(Boolean);
  if (ids.length < 2) {
    replace(root, empty("Choose two runs or more", "Mark them in the list of runs, then press Compare.", h("a", { class: "button", href: "#/" }, "All runs")));
    return {};
  }
  const group = chartGroup({ cursor, onZoom: showZoom });
  const charts = [];
  const settings = { smoothing: 0, log: false };
  const reset = h("button", { type: "button", hidden: true, onclick: () => group.setRange(null) });
  replace(root, loading("Comparing the runs"));
  await read();
  return {
    close() {
      group.close();
    },
  };

  async function read() {
    try {
      const keys = CHARTS.map(({ key }) => key).filter(Boolean);
      const [comparison, ...curves] = await Promise.all([api.compare(ids, { signal }), ...ids.map((id) => api.metrics(id, { keys, points: 800 }, { signal }))]);
      draw(comparison, curves);
    } catch (error) {
      if (error.name !== "AbortError") replace(root, failure(error, read));
    }
  }

  function draw(comparison, curves) {
    replace(
      root,
      h("h1", `Compare ${comparison.runs.map(({ label }) => label).join(", ")}`),
      problems(comparison.problems),
      legend(comparison),
      comparison.remarks.length > 0 && h("ul", { class: "remarks" }, comparison.remarks.map((each) => h("li", visible(each)))),
      paired(comparison),
      section("Differences in configuration", differences(comparison)),
      curvesSection(comparison, curves),
    );
  }

  function section(title, ...content) {
    return h("section", { class: "section" }, h("h2", title), content);
  }

  function legend({ runs }) {
    const heads = ["", "Run", "State", "Step", "Seed", "Accuracy"];
    return h(
      "div",
      { class: "table-wrap fit" },
      h(
        "table",
        { class: "compared" },
        h("thead", h("tr", heads.map((each, index) => h("th", { scope: "col", class: index > 2 ? "number" : "" }, each || h("span", { class: "visually-hidden" }, "Label"))))),
        h(
          "tbody",
          runs.map((run, index) =>
            h(
              "tr",
              h("td", letter(run.label, index)),
              h("th", { scope: "row" }, h("a", { href: href(`/run/${encodeURIComponent(run.id)}/learning`) }, visible(run.id))),
              h("td", stateBadge(run.state)),
              h("td", { class: "number" }, count(run.step), h("small", ` / ${count(run.steps)}`)),
              h("td", { class: "number" }, String(run.seed)),
              h("td", { class: "number" }, percent(run.accuracy)),
            ),
          ),
        ),
      ),
    );
  }

  function letter(label, index) {
    return h("span", { class: ["letter", `c${index % 8}`] }, label);
  }

  function paired({ paired: all, runs }) {
    if (!all.length) return section("Held-out answers", h("p", { class: "muted" }, "Fewer than two of these runs have been evaluated."));
    const place = (label) => runs.findIndex((run) => run.label === label);
    return section(
      "Held-out answers",
      h(
        "div",
        { class: "table-wrap fit" },
        h(
          "table",
          h("thead", h("tr", ["Runs", "Difference", "95 % interval", "", "Problems", "Right in only one of the two", "p-value"].map((each, index) => h("th", { scope: "col", class: index > 3 || index === 1 ? "number" : "" }, each || h("span", { class: "visually-hidden" }, "Drawing"))))),
          h(
            "tbody",
            all.map((pair) =>
              h(
                "tr",
                h("th", { scope: "row" }, h("span", { class: "row" }, letter(pair.second, place(pair.second)), "−", letter(pair.first, place(pair.first)))),
                h("td", { class: "number" }, points(pair.difference)),
                h("td", `${points(pair.low)} … ${points(pair.high)}`),
                h("td", differenceBar(pair)),
                h("td", { class: "number" }, pair.paired ? count(pair.problems[0]) : `${pair.problems.map(count).join(" and ")}, not the same`),
                h("td", { class: "number" }, pair.paired ? h("span", { class: "only" }, letter(pair.first, place(pair.first)), count(pair.only_first), letter(pair.second, place(pair.second)), count(pair.only_second)) : "–"),
                h("td", { class: "number" }, number(pair.p_value, 2)),
              ),
            ),
          ),
        ),
      ),
    );
  }

  function differences({ differences: all, runs }) {
    if (!all.length) return h("p", { class: "muted" }, "The configurations are the same.");
    return h(
      "div",
      { class: "table-wrap fit" },
      h(
        "table",
        { class: "differences" },
        h("thead", h("tr", h("th", { scope: "col" }, "Field"), runs.map(({ label }, index) => h("th", { scope: "col" }, letter(label, index))))),
        h("tbody", all.map(({ key, values, origins }) => h("tr", h("th", { scope: "row", class: "mono" }, key), values.map((value, index) => h("td", { class: "mono" }, visible(value), origins[index] && h("small", visible(origins[index]))))))),
      ),
    );
  }

  // ---- curves

  function curvesSection({ runs }, curves) {
    const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: "0", "aria-label": "Smoothing" });
    const value = h("output", { class: "number" }, "0.00");
    const log = h("button", { type: "button", "aria-pressed": "false" }, "Log scale");
    slider.addEventListener("input", () => {
      settings.smoothing = Number(slider.value);
      value.textContent = settings.smoothing.toFixed(2);
      apply();
    });
    log.addEventListener("click", () => {
      settings.log = !settings.log;
      log.setAttribute("aria-pressed", String(settings.log));
      apply();
    });
    for (const { title, key, format, range } of CHARTS) {
      const series = runs.map(({ label }, index) => (key ? curve(curves[index], key, label, index) : accuracy(curves[index], label, index))).filter(Boolean);
      if (series.length) charts.push(lineChart({ title, group, series, format, range }));
    }
    const firsts = curves.map(firstMainStep);
    if (!firsts.includes(null)) group.setFirst(Math.min(...firsts));
    zoomFromAddress();
    return section(
      "Curves",
      h("div", { class: "toolbar" }, h("label", "Smoothing", slider, value), log, h("span", { class: "grow" }), reset),
      charts.length ? h("div", { class: "chart-grid" }, charts.map(({ element }) => element)) : h("p", { class: "muted" }, "None of these runs has recorded a step."),
    );
  }

  function apply() {
    for (const chart of charts) chart.update(settings);
  }

  function showZoom(range) {
    reset.hidden = range === null;
    reset.textContent = range ? `Steps ${count(range[0])}–${count(range[1])}: show all` : "";
    setParams({ zoom: range ? range.join("-") : null });
  }

  function zoomFromAddress() {
    const match = /^(\d+)-(\d+)$/.exec(params.get("zoom") ?? "");
    if (match && Number(match[1]) < Number(match[2])) group.setRange([Number(match[1]), Number(match[2])]);
  }
}

function curve(data, key, name, color) {
  const y = data.series[key];
  return y?.some((value) => value !== null) ? { name, color, x: data.steps, y, dashed: color >= 8 } : null;
}

function accuracy({ evaluations }, name, color) {
  const column = (field) => evaluations.map((each) => each[field]);
  if (!evaluations.length) return null;
  return { name, color, x: column("step"), y: column("accuracy"), low: column("low"), high: column("high"), points: true, rough: true };
}

/** A difference of shares in percentage points, with its sign. */
function points(difference) {
  return `${difference > 0 ? "+" : difference < 0 ? "−" : ""}${Math.abs(difference * 100).toFixed(1)} pp`;
}

function differenceBar({ low, high, difference }) {
  const reach = Math.max(0.1, Math.abs(low), Math.abs(high));
  const at = (value) => 60 + (value / reach) * 56;
  return svg(
    "svg",
    { class: "interval", width: 120, height: 14, role: "img", "aria-label": `from ${points(low)} to ${points(high)}` },
    svg("line", { class: "zero", x1: 60.5, x2: 60.5, y1: 0, y2: 14 }),
    svg("line", { class: "span", x1: at(low), x2: at(high), y1: 7, y2: 7 }),
    svg("circle", { cx: at(difference), cy: 7, r: 3.5 }),
  );
}

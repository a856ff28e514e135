/** Service levels: what the run delivered, what faults took from it, and which targets it met. */

import { empty, failure, h, icon, loading, problems, replace, svg, visible } from "../dom.js";
import { compact, count, duration, number, percent, plural } from "../format.js";

const REFRESH_MS = 1000;

export async function render(root, { api, run, signal, href }) {
  let timer = null;
  let shown = false;
  replace(root, loading("Adding up the run"));
  await read();

  return {
    update(what) {
      if (timer !== null || !what.some((each) => ["metrics", "incidents", "state"].includes(each))) return;
      timer = setTimeout(() => {
        timer = null;
        read();
      }, REFRESH_MS);
    },
    close() {
      clearTimeout(timer);
    },
  };

  async function read() {
    try {
      draw(await api.serviceLevels(run.id, { signal }));
      shown = true;
    } catch (error) {
      if (error.name !== "AbortError" && !shown) replace(root, failure(error, read));
    }
  }

  function draw(levels) {
    const address = (id) => href(`/run/${encodeURIComponent(run.id)}/incidents`, { incident: id });
    replace(root, h("h2", { class: "visually-hidden" }, "Service levels"), problems(levels.problems), tiles(levels), time(levels), h("div", { class: "levels-pair" }, targets(levels), losses(levels, address)));
  }
}

function tile(label, value, detail, tone = "") {
  return h("div", { class: ["tile", "card", tone] }, h("dt", label), h("dd", h("b", value), detail && h("small", detail)));
}

function tiles(levels) {
  const cost = levels.gpu_hours !== null
    ? tile("GPU-hours", number(levels.gpu_hours, 3), levels.processor_hours === null ? null : `and ${number(levels.processor_hours, 3)} processor-hours`)
    : tile("Processor-hours", number(levels.processor_hours, 3), "no accelerator was used");
  return h(
    "dl",
    { class: "tiles" },
    tile("Effective training time", percent(levels.effective_ratio), "wall time not lost to faults"),
    tile("Lost to faults", duration(levels.lost_s), levels.wall_s === null ? null : `of ${duration(levels.wall_s)}`),
    tile("Throughput", compact(levels.throughput), levels.samples_per_s === null ? "trained tokens/s" : `trained tokens/s · ${number(levels.samples_per_s, 3)} samples/s`),
    tile("Success rate", percent(levels.success_rate), "of samples neither lost nor quarantined"),
    cost,
    incidentTile(levels),
  );
}

function incidentTile({ incidents, recovered, mean_recovery_s: mean, steps_undone: undone }) {
  if (incidents === null) return tile("Incidents recovered", "–", "being read");
  if (!incidents) return tile("Incidents recovered", "none", "nothing broke");
  return tile("Incidents recovered", `${count(recovered)} of ${count(incidents)}`, `${duration(mean)} each on average · ${plural(undone, "step")} undone`);
}

/** Where the wall time went: training, lost to faults, and all else (start, evaluation, saving, idle). */
function time(levels) {
  if (!levels.wall_s || levels.lost_s === null) return null;
  const lost = Math.min(levels.wall_s, levels.lost_s);
  const training = Math.max(0, Math.min(levels.wall_s - lost, levels.training_s ?? 0));
  const parts = [
    { name: "Training", seconds: training, tone: "training" },
    { name: "Lost to faults", seconds: lost, tone: "lost" },
    { name: "Start, end and other", seconds: Math.max(0, levels.wall_s - training - lost), tone: "other" },
  ];
  let from = 0;
  const bars = parts.map(({ seconds, tone }) => {
    const width = (seconds / levels.wall_s) * 100;
    const bar = svg("rect", { class: tone, x: `${from}%`, width: `${width}%`, height: "100%" });
    from += width;
    return bar;
  });
  return h(
    "section",
    { class: "card" },
    h("h2", "Where the time went"),
    h("div", { class: "time-bar" }, svg("svg", { width: "100%", height: "20", role: "img", "aria-label": parts.map(({ name, seconds }) => `${name} ${duration(seconds)}`).join(", ") }, bars)),
    h("ul", { class: "time-keys" }, parts.map(({ name, seconds, tone }) => h("li", h("i", { class: tone, "aria-hidden": "true" }), name, h("b", duration(seconds)), h("small", percent(seconds / levels.wall_s))))),
  );
}

const UNITS = {
  share: (value) => percent(value),
  s: (value) => duration(value),
  seconds: (value) => duration(value),
};

function targets({ targets: all }) {
  if (!all.length) return h("section", { class: "card" }, h("h2", "Targets"), empty("No targets are set", "Service levels of the configuration appear here with their attainment."));
  return h(
    "section",
    { class: "card targets-card" },
    h("h2", "Targets"),
    h(
      "div",
      { class: "table-scroll" },
      h(
        "table",
        { class: "targets" },
        h("thead", h("tr", h("th", { scope: "col" }, "Target"), h("th", { scope: "col", class: "number" }, "Wanted"), h("th", { scope: "col", class: "number" }, "Actual"), h("th", { scope: "col" }, "Attained"))),
        h("tbody", all.map(targetRow)),
      ),
    ),
  );
}

function targetRow({ label, target, actual, met, unit, at_least: atLeast }) {
  const write = UNITS[unit] ?? ((value) => (value === null ? "–" : `${number(value, 3)}${unit ? ` ${unit}` : ""}`));
  const verdict = met === null ? h("span", { class: "verdict muted" }, "not known yet") : met ? h("span", { class: "verdict good" }, icon("check"), "met") : h("span", { class: "verdict missed" }, icon("close"), "missed");
  return h("tr", h("th", { scope: "row" }, visible(label)), h("td", { class: "number" }, `${atLeast ? "≥" : "≤"} ${write(target)}`), h("td", { class: "number" }, write(actual)), h("td", verdict));
}

/** What each incident cost, the most expensive first. */
function losses({ losses: all, incidents }, address) {
  if (!all.length) return incidents === 0 ? h("section", { class: "card" }, h("h2", "Time lost by incident"), empty("No incident", "No fault has taken time from this run.")) : null;
  const most = all[0].seconds || 1;
  return h(
    "section",
    { class: "card" },
    h("h2", "Time lost by incident"),
    h(
      "ol",
      { class: "losses" },
      all.map(({ incident, title, seconds }) =>
        h(
          "li",
          h("a", { href: address(incident) }, h("span", { class: "muted" }, `#${incident}`), " ", visible(title)),
          h("b", { class: "number" }, duration(seconds)),
          svg("svg", { width: "100%", height: "6", "aria-hidden": "true" }, svg("rect", { width: `${Math.max(0.5, (seconds / most) * 100)}%`, height: "100%", rx: "2" })),
        ),
      ),
    ),
    incidents > all.length && h("p", { class: "muted" }, `and ${count(incidents - all.length)} that cost less, or are not over`),
  );
}

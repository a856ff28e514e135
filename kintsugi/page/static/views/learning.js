/** Learning: what keeps a run from learning, and its curves, with incidents and evaluations as marks on each of them. */

import { chartGroup, lineChart, share } from "../charts.js";
import { empty, failure, h, icon, loading, problems, redraw, replace, visible } from "../dom.js";
import { compact, count, duration, percent, plural } from "../format.js";

const seconds = (value) => duration(value);

/** Charts in reading order. `keys` are names of metrics or a test of them; `labels` their short names. */
const SECTIONS = [
  {
    title: "Reward and accuracy",
    charts: [
      { title: "Reward", hint: "Mean over the batch; the band is one mean deviation of a group to both sides", build: rewardSeries },
      { title: "Held-out accuracy", hint: "Greedy answers, with Wilson's interval at 95 %", build: accuracySeries, format: share, range: [0, 0] },
      { title: "Reward by component", keys: (key) => /^reward\/(?!mean$)/.test(key), short: /^reward\// },
      { title: "Reward by source", hint: "Mean over the samples of each source of a mixture", keys: (key) => /^source\/.*\/reward$/.test(key), short: /^source\/|\/reward$/g },
      { title: "Spread of rewards", hint: "Mean deviation within a group, and the share of groups without any", keys: ["reward_std", "frac_reward_zero_std"], labels: ["deviation in a group", "groups all equal"] },
      { title: "Held-out, sampled", keys: (key) => /^eval\/(mean|pass)@\d+$/.test(key), short: /^eval\//, format: share, interval: true },
    ],
  },
  {
    title: "Policy",
    charts: [
      { title: "Loss", hint: "Of the policy, and of the critic where there is one", keys: ["loss", "value_loss"], labels: ["policy", "critic"] },
      { title: "Entropy", hint: "Of the policy's next token, mean over loss tokens, in nats", keys: ["entropy"] },
      { title: "KL", hint: "Divergence of the policy from the reference (without one: from the sampler), and of the sampler from the policy before the first update; nats per token", keys: ["kl", "behaviour_kl"], labels: ["to the reference", "sampler to trainer"] },
      { title: "Clipped share", hint: "Tokens whose probability ratio was outside the clip range", keys: ["clip_ratio", "value_clip_ratio"], labels: ["policy", "critic"], format: share },
      { title: "Sampler − trainer", hint: "Absolute difference of their log-probabilities before the first update; rises when something is wrong", keys: ["logprob_abs_diff_mean", "logprob_abs_diff_max"], labels: ["mean", "max"] },
      { title: "Importance weights", hint: "Probability of a token for the trainer over that for the sampler; 1 where they agree", keys: ["importance_weight_mean", "importance_weight_max", "ratio_mean"], labels: ["mean", "max", "ratio"] },
      { title: "Pairs ranked right", keys: ["dpo_accuracy", "rm_accuracy"], format: share },
      { title: "Margin", keys: ["dpo_margin", "rm_margin"] },
    ],
  },
  {
    title: "Completions",
    charts: [
      { title: "Length", hint: "Tokens per completion; the band is the shortest and the longest", build: lengthSeries },
      { title: "Truncated", keys: ["completions/clipped_ratio", "truncated_share"], labels: ["completions", "tokens"], format: share },
      { title: "Staleness", hint: "Steps between the weights of a sample and those of its step", keys: ["staleness_mean", "staleness_max", "token_staleness_mean"], labels: ["mean", "max", "by token"] },
      { title: "Repetition", hint: "Share of repeated 4-grams", keys: ["repetition"], format: share },
    ],
  },
  {
    title: "Optimisation and speed",
    charts: [
      { title: "Gradient norm", keys: ["grad_norm", "critic_grad_norm"], labels: ["policy", "critic"] },
      { title: "Learning rate", keys: ["learning_rate", "critic_learning_rate"], labels: ["policy", "critic"], rough: true },
      { title: "Tokens per second", keys: ["tokens_per_s"], format: (value) => compact(value) },
      { title: "Seconds by phase", keys: (key) => /^timing\/(?!step$)/.test(key), short: /^timing\//, format: seconds, most: 8 },
    ],
  },
];
const REFRESH_MS = 700;
const SETTINGS = "kintsugi.curves";

export async function render(root, context) {
  const { api, run, signal, cursor, params, setParams, navigate } = context;
  const settings = { smoothing: 0, log: false, warmup: false, incidents: true, evaluations: true, ...stored() };
  const charts = new Map();
  const body = h("div", { class: "sections" }, loading("Reading the curves"));
  const reset = h("button", { type: "button", hidden: true, onclick: () => group.setRange(null) });
  const search = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", value: params.get("find") ?? "" });
  const group = chartGroup({ cursor, onZoom: showZoom });
  const notes = h("div");
  const health = h("div", { class: "findings" });
  const warmup = toggle("warmup", "Warm-up");
  let data = null;
  let placed = "";
  let timer = null;
  let closed = false;

  search.addEventListener("input", () => {
    setParams({ find: search.value.trim() });
    layout();
  });
  replace(root, health, toolbar(), notes, body);
  zoomFromAddress();
  await Promise.all([readHealth(), read()]);

  return {
    update(what) {
      if (what.some((each) => ["metrics", "incidents"].includes(each))) readSoon();
      if (what.includes("learning")) readHealth();
    },
    close() {
      closed = true;
      clearTimeout(timer);
      group.close();
    },
  };

  // ---- reading

  async function read() {
    try {
      data = await api.metrics(run.id, { points: 1200 }, { signal });
      layout();
    } catch (error) {
      if (error.name === "AbortError" || closed) return;
      if (data === null) replace(body, failure(error, read));
    }
  }

  /** The findings; a healthy run has none, and nothing is drawn. */
  async function readHealth() {
    try {
      const { findings } = await api.learning(run.id, { signal });
      redraw(health, findings.map((each) => finding(each, cursor)));
    } catch (error) {
      if (error.name !== "AbortError" && !closed) replace(health, failure(error, readHealth));
    }
  }

  function readSoon() {
    if (timer !== null) return;
    timer = setTimeout(async () => {
      timer = null;
      await read();
    }, REFRESH_MS);
  }

  // ---- controls

  function toolbar() {
    const value = h("output", { class: "number" }, settings.smoothing.toFixed(2));
    const slider = h("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(settings.smoothing), "aria-label": "Smoothing" });
    slider.addEventListener("input", () => {
      settings.smoothing = Number(slider.value);
      value.textContent = settings.smoothing.toFixed(2);
      apply();
    });
    return h(
      "div",
      { class: "toolbar curves-toolbar" },
      h("span", { class: "searchbox" }, icon("search"), search),
      h("label", { title: "Exponential moving average; the values themselves stay visible behind it" }, "Smoothing", slider, value),
      toggle("log", "Log scale"),
      warmup,
      h("span", { class: "grow" }),
      reset,
      markToggle("incidents", "Incidents", "incident"),
      markToggle("evaluations", "Evaluations", "evaluation"),
    );
  }

  function toggle(name, label, ...content) {
    const button = h("button", { type: "button", "aria-pressed": String(settings[name]), onclick: flip }, content, label);
    return button;

    function flip() {
      settings[name] = !settings[name];
      button.setAttribute("aria-pressed", String(settings[name]));
      apply();
    }
  }

  function markToggle(name, label, kind) {
    return toggle(name, label, h("i", { class: `mark-key ${kind}`, "aria-hidden": "true" }));
  }

  function apply() {
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(settings));
    } catch {
      // Storage may be forbidden; the choice then ends with the page.
    }
    hideWarmup();
    for (const chart of charts.values()) chart.update(look());
  }

  /** Steps before the first reward are supervised warm-up; they would press the rest into a corner. */
  function hideWarmup() {
    const first = firstMainStep(data);
    warmup.hidden = first === null;
    warmup.title = first === null ? "" : `Steps before ${count(first)}: supervised, without rewards`;
    group.setFirst(first === null || settings.warmup ? -Infinity : first);
  }

  function look() {
    return { smoothing: settings.smoothing, log: settings.log, marks: marks() };
  }

  function marks() {
    if (!data) return [];
    return data.marks.filter(({ kind }) => (kind === "incident" && settings.incidents) || (kind === "evaluation" && settings.evaluations));
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

  // ---- charts

  /** Build, update and remove charts so that they are those of the data and of the search. */
  function layout() {
    if (!data.steps.length) {
      placed = "";
      replace(body, empty("No step has been recorded yet", run.state === "running" ? "The curves appear with the first step." : "This run ended before its first step."));
      return;
    }
    replace(notes, problems(data.problems), data.thinned > 1 && h("p", { class: "muted" }, `A place on a curve is the mean of ${plural(data.thinned, "step")}.`));
    const wanted = search.value.trim().toLowerCase();
    const sections = wanted ? [found(wanted)] : [...SECTIONS.map(known), ...others()];
    hideWarmup();
    const full = sections.filter(({ charts: specs }) => specs.length);
    const signature = JSON.stringify(full.map(({ title, charts: specs }) => [title, specs.map((spec) => spec.title)]));
    for (const spec of full.flatMap(({ charts: specs }) => specs)) drawChart(spec);
    // Where the charts are the same ones, they stay where they are: an update moves neither focus nor pointer.
    if (signature !== placed) place(full);
    placed = signature;
  }

  function place(sections) {
    const wanted = new Set(sections.flatMap(({ charts: specs }) => specs.map(({ title }) => title)));
    for (const [title, chart] of charts) {
      if (wanted.has(title)) continue;
      chart.close();
      charts.delete(title);
    }
    const parts = sections.map(({ title, charts: specs, folded }) => {
      const grid = h("div", { class: "chart-grid" }, specs.map((spec) => charts.get(spec.title).element));
      return folded ? foldedSection(title, specs, grid) : h("section", { class: "section" }, h("h2", title), grid);
    });
    replace(body, parts.length ? parts : empty("No metric has this in its name", search.value));
  }

  function known({ title, charts: specs }) {
    return { title, charts: specs.map((spec) => ({ ...spec, series: seriesOf(spec) })).filter(({ series }) => series.length) };
  }

  function others() {
    const used = new Set(SECTIONS.flatMap(({ charts: specs }) => specs.flatMap(keysOf)));
    const rest = data.keys.filter((key) => !used.has(key) && !/^eval\/(accuracy|problems)|_(low|high)$|^timing\/step$/.test(key));
    return rest.length ? [{ title: "All other metrics", charts: rest.map(single), folded: true }] : [];
  }

  function found(wanted) {
    const titled = SECTIONS.flatMap(({ charts: specs }) => specs).filter(({ title }) => title.toLowerCase().includes(wanted));
    const inTitled = new Set(titled.flatMap(keysOf));
    const named = data.keys.filter((key) => key.toLowerCase().includes(wanted) && !inTitled.has(key));
    const specs = [...known({ title: "", charts: titled }).charts, ...named.slice(0, 60).map(single)];
    return { title: `${plural(specs.length, "chart")} with “${search.value.trim()}”`, charts: specs };
  }

  function foldedSection(title, specs, grid) {
    const details = h("details", { class: "section" }, h("summary", h("h2", title), h("span", { class: "muted" }, count(specs.length))), grid);
    details.open = body.querySelector("details.section")?.open ?? false;
    return details;
  }

  function single(key) {
    return { title: key, mono: true, series: [{ name: "", color: 0, x: data.steps, y: data.series[key] ?? [] }] };
  }

  function keysOf({ keys }) {
    if (!keys) return ["reward/mean", "completions/mean_length", "completions/min_length", "completions/max_length"];
    return Array.isArray(keys) ? keys : data.keys.filter(keys);
  }

  function seriesOf(spec) {
    if (spec.build) return spec.build(data);
    const present = keysOf(spec).filter((key) => data.series[key]?.some((value) => value !== null));
    return present.slice(0, spec.most ?? 8).map((key, color) => ({
      name: nameOf(spec, key, present.length),
      color,
      x: data.steps,
      y: data.series[key],
      low: spec.interval ? data.series[`${key}_low`] : undefined,
      high: spec.interval ? data.series[`${key}_high`] : undefined,
      rough: spec.rough || spec.interval,
      points: spec.interval,
    }));
  }

  function drawChart(spec) {
    const changes = { series: spec.series, ...look() };
    const existing = charts.get(spec.title);
    if (existing) existing.update(changes);
    else charts.set(spec.title, lineChart({ title: spec.title, hint: spec.hint, group, format: spec.format, range: spec.range, onMark, ...changes }));
  }

  function onMark(mark) {
    if (mark.incident !== null) navigate(`/run/${encodeURIComponent(run.id)}/incidents`, { incident: mark.incident });
  }
}

/** Text with what is between backticks as code. */
function withCode(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", visible(part)) : visible(part)));
}

/** One finding: what, since when, what to do; the figures that show it are folded. */
function finding(found, cursor) {
  const step = (at, label) => h("button", { class: "link", type: "button", title: "Set the step of the whole page", onclick: () => cursor.set(at) }, label);
  return h(
    "article",
    { class: "notice finding", dataset: { kind: found.kind } },
    h("h2", icon("alert"), h("span", found.kind.replaceAll("_", " ")), h("small", "since ", step(found.since_step, `step ${count(found.since_step)}`), `, ${percent(found.confidence, 0)} sure`)),
    h("p", visible(found.summary)),
    h("p", { class: "muted" }, h("b", "What to do: "), withCode(found.advice)),
    h(
      "details",
      h("summary", `Evidence: ${plural(found.evidence.length, "figure")}`),
      h("ul", found.evidence.map((each) => h("li", step(each.step, `step ${count(each.step)}`), " ", h("span", { class: "mono" }, visible(each.quote)), h("small", ` ${each.source}`)))),
      found.leads_to.length > 0 && h("p", { class: "muted" }, `It leads to ${found.leads_to.map((kind) => kind.replaceAll("_", " ")).join(", ")}.`),
    ),
  );
}

/** The first step with a reward where steps without one come before it; null otherwise. */
export function firstMainStep(data) {
  const at = data?.series["reward/mean"]?.findIndex((value) => value !== null) ?? -1;
  return at > 0 ? data.steps[at] : null;
}

function nameOf({ keys, labels, short }, key, total) {
  if (short) return key.replace(short, "");
  if (labels) return total === 1 && labels.length === 1 ? "" : labels[keys.indexOf(key)];
  return total === 1 ? "" : key;
}

function rewardSeries(data) {
  const y = data.series["reward/mean"];
  if (!y?.some((value) => value !== null)) return [];
  const spread = data.series.reward_std ?? [];
  const at = (sign) => y.map((value, index) => (value === null || spread[index] == null ? null : value + sign * spread[index]));
  return [{ name: "mean", color: 0, x: data.steps, y, low: at(-1), high: at(1), interval: false }];
}

function accuracySeries({ evaluations }) {
  if (!evaluations.length) return [];
  const column = (name) => evaluations.map((each) => each[name]);
  return [{ name: "greedy", color: 2, x: column("step"), y: column("accuracy"), low: column("low"), high: column("high"), points: true, rough: true }];
}

function lengthSeries(data) {
  const [y, low, high] = ["mean", "min", "max"].map((name) => data.series[`completions/${name}_length`]);
  if (!y?.some((value) => value !== null)) return [];
  return [{ name: "mean", color: 0, x: data.steps, y, low, high }];
}

function stored() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
  } catch {
    return {};
  }
}

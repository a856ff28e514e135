/** All runs of the folder: searched, sorted, chosen for a comparison. */

import { arrowKeys, empty, failure, h, icon, loading, problems, redraw, replace, stateBadge, svg, visible } from "../dom.js";
import { ago, compact, count, duration, interval, number, percent, plural } from "../format.js";

const text = (value) => String(value ?? "").toLowerCase();

/** Columns of the table; `value` is what is sorted by, `down` whether the first click sorts the largest first. */
const COLUMNS = [
  { name: "name", label: "Run", value: (run) => text(run.id), cell: nameCell },
  { name: "state", label: "State", value: (run) => ["running", "failed", "interrupted", "unreadable", "stopped", "finished"].indexOf(run.state), cell: (run) => stateBadge(run.state) },
  { name: "step", label: "Step", number: true, down: true, value: (run) => run.step, cell: stepCell },
  { name: "reward", label: "Reward", number: true, down: true, value: (run) => run.reward, cell: rewardCell },
  { name: "accuracy", label: "Accuracy", number: true, down: true, value: (run) => run.accuracy, cell: accuracyCell },
  { name: "tokens", label: "Tokens/s", number: true, down: true, value: (run) => run.tokens_per_s, cell: (run) => compact(run.tokens_per_s) },
  { name: "age", label: "Age", number: true, value: (run) => (run.started ? run.age_s : null), cell: (run) => (run.started ? duration(run.age_s) : "–") },
  { name: "algorithm", label: "Algorithm", value: (run) => text(run.algorithm), cell: (run) => run.algorithm || "–" },
  { name: "model", label: "Model", value: (run) => text(run.model), cell: (run) => visible(run.model || "–") },
  { name: "incident", label: "Last incident", down: true, value: (run) => run.last_incident?.from ?? run.last_incident?.step ?? null, cell: incidentCell },
];
const REFRESH_MS = 500;

export async function render(root, { api, signal, params, setParams, navigate, href }) {
  const chosen = new Set();
  const body = h("div", loading("Reading the runs"));
  const notes = h("div");
  const states = h("div", { class: "segments", role: "group", "aria-label": "State" });
  const compare = h("button", { class: "primary", type: "button", onclick: openComparison });
  const search = h("input", { type: "search", placeholder: "Search name, model, algorithm, incident", "aria-label": "Search runs", value: params.get("find") ?? "" });
  const order = h("select", { "aria-label": "Sort by", onchange: () => sortBy(order.value) }, COLUMNS.map(({ name, label }) => h("option", { value: name }, label)));
  let list = null;
  let timer = null;

  search.addEventListener("input", () => {
    setParams({ find: search.value.trim() });
    draw();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") body.querySelector("tbody a.run-link")?.focus();
  });
  arrowKeys(body, "tbody a.run-link");
  body.addEventListener("keydown", chooseByKey);
  replace(
    root,
    h("div", { class: "overview-title" }, h("h1", "Runs"), h("span", { class: "muted folder" })),
    h("div", { class: "toolbar" }, h("span", { class: "searchbox wide" }, icon("search"), search), states, h("label", { class: "phone-only" }, "Sort by", order), h("span", { class: "grow" }), compare),
    notes,
    body,
  );
  await read();

  return {
    update(what) {
      if (what.some((each) => ["runs", "state", "metrics", "incidents", "learning"].includes(each)) && timer === null) {
        timer = setTimeout(() => {
          timer = null;
          read();
        }, REFRESH_MS);
      }
    },
    close() {
      clearTimeout(timer);
    },
  };

  async function read() {
    try {
      list = await api.runs({ signal });
      draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 401 || error.status === 403) throw error;
      if (list === null) replace(body, failure(error, read));
    }
  }

  function draw() {
    if (list === null) return;
    root.querySelector(".folder").textContent = list.folder;
    replace(notes, problems(list.problems));
    drawStates();
    drawCompare();
    const shown = sorted(list.runs.filter(matches));
    if (!list.runs.length) replace(body, noRuns());
    else if (!shown.length) replace(body, empty("No run matches", "Try fewer words, or another state.", h("button", { type: "button", onclick: clear }, "Show all runs")));
    else redraw(body, table(shown));
  }

  function clear() {
    search.value = "";
    setParams({ find: null, state: null });
    draw();
  }

  function matches(run) {
    const state = params.get("state");
    if (state && run.state !== state) return false;
    const haystack = text([run.name, run.id, run.state, run.algorithm, run.model, run.last_incident?.title].join(" "));
    return text(search.value).split(/\s+/).every((word) => haystack.includes(word));
  }

  function drawStates() {
    const counts = new Map();
    for (const { state } of list.runs) counts.set(state, (counts.get(state) ?? 0) + 1);
    const now = params.get("state");
    const button = (state, label, amount) =>
      h("button", { type: "button", "aria-pressed": String((now ?? null) === state), onclick: () => pick(state) }, label, h("small", count(amount)));
    redraw(states, button(null, "All", list.runs.length), [...counts].map(([state, amount]) => button(state, state, amount)));

    function pick(state) {
      setParams({ state });
      draw();
    }
  }

  // ---- sorting

  function ordering() {
    const column = COLUMNS.find(({ name }) => name === params.get("sort")) ?? COLUMNS.find(({ name }) => name === "age");
    return { column, down: params.has("down") ? params.get("down") === "1" : Boolean(column.down) };
  }

  function sorted(runs) {
    const { column, down } = ordering();
    const known = (value) => value !== null && value !== undefined && value !== "";
    return runs.toSorted((one, two) => {
      const [a, b] = [column.value(one), column.value(two)];
      if (!known(a) || !known(b)) return known(b) - known(a);
      return (a < b ? -1 : a > b ? 1 : 0) * (down ? -1 : 1);
    });
  }

  function sortBy(name) {
    const { column, down } = ordering();
    const next = COLUMNS.find((each) => each.name === name);
    const turn = column === next ? !down : Boolean(next.down);
    setParams({ sort: name, down: turn ? "1" : "0" });
    draw();
  }

  // ---- the table

  function table(runs) {
    const { column, down } = ordering();
    order.value = column.name;
    const heads = COLUMNS.map((each) =>
      h(
        "th",
        { class: each.number ? "number" : "", scope: "col", "aria-sort": each === column ? (down ? "descending" : "ascending") : null },
        h("button", { class: "sort", type: "button", onclick: () => sortBy(each.name) }, each.label, icon(down ? "down" : "up")),
      ),
    );
    return h(
      "div",
      { class: "table-wrap" },
      h("table", { class: "runs" }, h("thead", h("tr", h("th", { scope: "col" }, h("span", { class: "visually-hidden" }, "Choose")), heads)), h("tbody", runs.map(row))),
    );
  }

  function row(run) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.id), disabled: run.state === "unreadable", "aria-label": `Choose ${run.id} for a comparison`, onchange: () => choose(run, box.checked) });
    return h(
      "tr",
      { class: chosen.has(run.id) ? "chosen" : "", dataset: { run: run.id } },
      h("td", { class: "choose" }, box),
      COLUMNS.map((column) => h("td", { class: [column.number && "number", `col-${column.name}`], dataset: { label: column.label } }, column.cell(run, href))),
    );
  }

  function choose(run, on) {
    if (on) chosen.add(run.id);
    else chosen.delete(run.id);
    draw();
  }

  function chooseByKey(event) {
    const id = event.target.closest?.("tr")?.dataset.run;
    const run = list?.runs.find((each) => each.id === id);
    if (event.key !== "x" || !run || run.state === "unreadable") return;
    event.preventDefault();
    choose(run, !chosen.has(id));
  }

  function drawCompare() {
    compare.disabled = chosen.size < 2;
    replace(compare, icon("compare"), chosen.size < 2 ? "Compare" : `Compare ${plural(chosen.size, "run")}`);
    compare.title = chosen.size < 2 ? "Choose two runs or more (x)" : "";
  }

  function openComparison() {
    const ids = list.runs.map(({ id }) => id).filter((id) => chosen.has(id));
    navigate("/compare", { runs: ids.join(",") });
  }

  function noRuns() {
    return empty("No runs yet", h("span", "Runs that are started in ", h("code", list.folder), " appear here by themselves. For example: ", h("code", "kintsugi train grpo_arithmetic")));
  }
}

function nameCell(run, href) {
  const link = h("a", { class: "run-link", href: href(`/run/${encodeURIComponent(run.id)}/learning`) }, visible(run.id));
  const detail = run.name && run.name !== run.id && h("small", visible(run.name));
  const trouble = run.problems?.length > 0 && h("small", { class: "warn", title: run.problems.join("\n") }, run.state === "unreadable" ? visible(run.problems[0]) : plural(run.problems.length, "problem"));
  const learning = run.learning?.length > 0 && h("small", { class: "warn learning-note", title: run.learning.join("\n") }, `learning: ${run.learning[0].split(":")[0]}`);
  return h("div", { class: "run-name" }, link, detail, learning, trouble);
}

function stepCell(run) {
  if (!run.steps) return run.state === "unreadable" ? "–" : count(run.step);
  return [h("span", count(run.step), h("small", ` / ${count(run.steps)}`)), h("progress", { max: run.steps, value: Math.min(run.step, run.steps), "aria-label": "Steps done" })];
}

const CURVE = { width: 72, height: 20 };

/** The last value, behind the curve that led to it. */
function rewardCell(run) {
  const known = (run.curve ?? []).map((value, index) => [index, value]).filter(([, value]) => value !== null);
  if (known.length < 2) return number(run.reward, 3);
  const values = known.map(([, value]) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (index) => 2 + (index / (run.curve.length - 1)) * (CURVE.width - 4);
  const y = (value) => (high > low ? CURVE.height - 2 - ((value - low) / (high - low)) * (CURVE.height - 4) : CURVE.height / 2);
  const points = known.map(([index, value]) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
  const [lastX, lastY] = points.at(-1).split(",");
  return h(
    "span",
    { class: "reward", title: `Mean reward from ${number(values[0], 3)} to ${number(values.at(-1), 3)}; lowest ${number(low, 3)}, highest ${number(high, 3)}` },
    svg("svg", { class: "spark", width: CURVE.width, height: CURVE.height, "aria-hidden": "true" }, svg("polyline", { points: points.join(" ") }), svg("circle", { cx: lastX, cy: lastY, r: 2 })),
    number(run.reward, 3),
  );
}

/** The share, and where its interval lies between 0 and 100 %. */
function accuracyCell(run) {
  if (run.accuracy === null || run.accuracy === undefined) return "–";
  const at = (share) => 1 + share * 62;
  const [low, high] = [run.accuracy_low ?? run.accuracy, run.accuracy_high ?? run.accuracy];
  return h(
    "span",
    { class: "accuracy", title: `95 % interval: ${interval(low, high)}` },
    svg("svg", { class: "interval", width: 64, height: 8, "aria-hidden": "true" }, svg("line", { x1: 1, x2: 63, y1: 4, y2: 4 }), svg("line", { class: "span", x1: at(low), x2: at(high), y1: 4, y2: 4 }), svg("circle", { cx: at(run.accuracy), cy: 4, r: 3 })),
    percent(run.accuracy),
    h("small", interval(low, high)),
  );
}

function incidentCell(run, href) {
  const incident = run.last_incident;
  if (!incident) return h("span", { class: "muted" }, run.state === "unreadable" ? "–" : "none");
  return h("span", { class: "incident-cell" }, h("a", { href: href(`/run/${encodeURIComponent(run.id)}/incidents`, { incident: incident.id }) }, visible(incident.title)), h("small", incident.from ? ago(incident.from) : `after step ${count(incident.step)}`, incident.state === "recovered" ? "" : `, ${incident.state}`));
}

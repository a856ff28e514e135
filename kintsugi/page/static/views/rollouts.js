/** Rollouts: a step, its groups, and the samples of a group side by side; or any samples by words, reward and ending. */

import { arrowKeys, empty, failure, h, hostile, icon, loadStyle, loading, problems, replace, visible } from "../dom.js";
import { count, number, percent, plural } from "../format.js";
import { MEASURES, measuresOf, strips, tokenText } from "./token_strips.js";

const SORTS = { order: "In order", worst: "Worst first", longest: "Longest first", surprising: "Most surprising first" };
const ENDINGS = { eos: "ended itself", stop: "stop text", length: "cut at the limit" };
const PAGE = 48;
const EXCERPT = 700;
const AT_ONCE = 3;
const TYPING_MS = 250;

export async function render(root, context) {
  const { api, cursor, params, setParams, signal } = context;
  const id = context.run.id;
  const state = {
    all: params.get("scope") === "all",
    group: params.get("group"),
    sort: params.get("sort") in SORTS ? params.get("sort") : "order",
    text: params.get("text") ?? "",
    min: numberOf(params.get("min")),
    max: numberOf(params.get("max")),
    outcome: params.get("outcome") ?? "",
  };
  const parts = frame();
  let page = null;
  let wanted = 0;
  let strip = stripLoader();
  let dialog = null;
  await loadStyle("views/rollouts.css");
  replace(root, parts.toolbar, parts.notes, parts.split, parts.filtered);
  const forget = cursor.subscribe(() => {
    state.group = null;
    setParams({ group: null });
    load();
  });
  await load();
  if (params.get("sample")) openSample(Number(params.get("sample")));
  return {
    update(what) {
      if (what.includes("samples") && !dialog && (cursor.step === null || !page?.items.length || page.indexed < 1)) load({ quiet: true });
    },
    close() {
      forget();
      dialog?.close();
      strip.close();
    },
  };

  // ---- frame

  function frame() {
    const search = h("input", { type: "search", placeholder: "Words in the samples", value: state.text, "aria-label": "Search samples", oninput: later(() => change({ text: search.value.trim() })) });
    const sort = h("select", { "aria-label": "Order", onchange: () => change({ sort: sort.value }) }, Object.entries(SORTS).map(([value, label]) => h("option", { value, selected: value === state.sort }, label)));
    const outcome = h("select", { "aria-label": "How it ended", onchange: () => change({ outcome: outcome.value }) });
    const step = h("div", { class: "row step-picker" });
    const histogram = h("div", { class: "histogram-box" });
    const rail = h("nav", { class: "groups", "aria-label": "Groups of the step" });
    const samples = h("section", { class: "samples", "aria-label": "Samples" });
    arrowKeys(rail, "button");
    return {
      outcome,
      step,
      histogram,
      rail,
      samples,
      notes: h("div"),
      filtered: h("div"),
      toolbar: h("div", { class: "rollout-bar" }, h("div", { class: "toolbar" }, step, h("span", { class: "searchbox" }, icon("search"), search), sort, outcome), histogram),
      split: h("div", { class: "rollout-split" }, rail, samples),
    };
  }

  function change(changes) {
    Object.assign(state, changes);
    if ("text" in changes || "sort" in changes || "outcome" in changes || "min" in changes || "all" in changes) state.group = null;
    setParams({ scope: state.all ? "all" : null, group: state.group, sort: state.sort === "order" ? null : state.sort, text: state.text, min: state.min, max: state.max, outcome: state.outcome });
    load();
  }

  function isPlain() {
    return !state.all && state.sort === "order" && !state.text && state.min === null && state.max === null && !state.outcome;
  }

  // ---- reading

  async function load({ quiet = false } = {}) {
    const mine = ++wanted;
    if (!quiet) parts.samples.setAttribute("aria-busy", "true");
    if (!page) replace(parts.samples, loading("Reading samples"));
    try {
      const answer = await read();
      if (mine !== wanted) return;
      page = answer;
      draw();
    } catch (error) {
      if (mine === wanted && error.name !== "AbortError") replace(parts.samples, failure(error, () => load()));
    } finally {
      if (mine === wanted) parts.samples.removeAttribute("aria-busy");
    }
  }

  /** Without a step cursor the newest step that has samples is shown. In the plain view, the first group whose rewards
   * differ is open: the others have nothing to compare. */
  async function read() {
    let step = state.all ? null : cursor.step;
    if (!state.all && step === null) {
      const known = await api.samples(id, { limit: 1 }, { signal });
      if (!known.steps.length) return { ...known, items: [], step: null };
      step = known.steps[1];
    }
    const filter = { step, sort: state.sort, text: state.text, min: state.min, max: state.max, outcome: state.outcome, limit: PAGE };
    const answer = await api.samples(id, { ...filter, group: state.group }, { signal });
    if (isPlain() && state.group === null && answer.groups.length) {
      const { group } = answer.groups.find(({ low, high }) => high > low) ?? answer.groups[0];
      return { ...answer, ...itemsOf(await api.samples(id, { ...filter, group }, { signal })), step, filter: { ...filter, group }, group };
    }
    const group = state.group || null;
    return { ...answer, step, filter: { ...filter, group }, group };
  }

  async function more(button) {
    button.disabled = true;
    const at = page;
    const answer = await api.samples(id, { ...page.filter, cursor: page.next }, { signal });
    if (at !== page) return;
    page = { ...page, items: [...page.items, ...answer.items], next: answer.next, searched: answer.searched };
    drawSamples();
  }

  // ---- drawing

  function draw() {
    drawStep();
    drawOutcomes();
    replace(parts.histogram, histogram(page.histogram, state, change));
    replace(parts.notes, problems(page.problems), notes(page, state));
    parts.split.classList.toggle("no-groups", state.all || !page.groups.length);
    drawGroups();
    drawSamples();
    replace(parts.filtered, filteredOf(page.filtered));
  }

  function drawStep() {
    const [first, last] = page.steps.length ? page.steps : [null, null];
    const had = parts.step.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const go = (step) => (step === page.step ? null : cursor.set(step));
    const input = h("input", { type: "number", min: String(first ?? 0), max: String(last ?? 0), value: page.step === null ? "" : String(page.step), "aria-label": "Step", onchange: () => input.value && go(Number(input.value)) });
    replace(
      parts.step,
      h("span", { class: "segments", role: "group", "aria-label": "Which samples" }, pressed("One step", !state.all, () => change({ all: false })), pressed("All steps", state.all, () => change({ all: true }))),
      !state.all && [
        h("button", { type: "button", class: "square", "aria-label": "Step before", disabled: page.step === null || page.step <= first, onclick: () => go(page.step - 1) }, icon("left")),
        input,
        h("button", { type: "button", class: "square", "aria-label": "Step after", disabled: page.step === null || page.step >= last, onclick: () => go(page.step + 1) }, icon("chevron")),
        h("span", { class: "muted" }, last === null ? "" : cursor.step === null ? "the newest" : `of ${count(last)}`),
      ],
    );
    if (had) parts.step.querySelector(`[aria-label="${had}"]`)?.focus();
  }

  function drawOutcomes() {
    const known = Object.entries(page.outcomes);
    replace(parts.outcome, h("option", { value: "" }, "Any ending"), known.map(([name, amount]) => h("option", { value: name, selected: name === state.outcome }, `${ENDINGS[name] ?? name} (${count(amount)})`)));
    parts.outcome.value = state.outcome;
  }

  function drawGroups() {
    const had = parts.rail.contains(document.activeElement) ? document.activeElement.dataset.group : null;
    const low = Math.min(...page.groups.map((group) => group.low));
    const high = Math.max(...page.groups.map((group) => group.high));
    const scale = (value) => (high > low ? (value - low) / (high - low) : 0.5);
    replace(
      parts.rail,
      h("p", { class: "groups-head" }, `${plural(page.groups.length, "group")} of step ${page.step}`, h("span", "reward")),
      h("ul", [null, ...page.groups].map((group) => h("li", group ? groupRow(group, scale) : allRow()))),
    );
    if (had !== null) parts.rail.querySelector(`[data-group="${CSS.escape(had)}"]`)?.focus({ preventScroll: true });
  }

  function allRow() {
    return h("button", { type: "button", class: "group-row", dataset: { group: "" }, "aria-current": page.group === null ? "true" : null, onclick: () => pick("") }, h("span", { class: "group-prompt" }, "All groups"));
  }

  function groupRow(group, scale) {
    const spread = group.high > group.low;
    const isHit = group.group === page.group;
    return h(
      "button",
      { type: "button", class: "group-row", dataset: { group: group.group }, "aria-current": isHit ? "true" : null, title: `${group.group}: rewards ${number(group.low, 3)} to ${number(group.high, 3)}`, onclick: () => pick(group.group) },
      h("span", { class: "group-prompt" }, h("bdi", visible(tail(group.prompt, 90)))),
      h("span", { class: spread ? "group-range" : "group-range flat", "aria-hidden": "true" }, h("i", { style: { left: `${scale(group.low) * 100}%`, right: `${(1 - scale(group.high)) * 100}%` } }), h("b", { style: { left: `${scale(group.mean) * 100}%` } })),
      h("span", { class: "group-mean" }, number(group.mean, 2)),
    );
  }

  /** "" stands for all groups; in the plain view that is a choice of its own, not the first group. */
  function pick(group) {
    if (group === "" && isPlain()) {
      state.group = "";
      load();
      return;
    }
    state.group = group === "" ? null : group;
    setParams({ group: state.group });
    load();
  }

  function drawSamples() {
    strip.close();
    strip = stripLoader();
    if (!page.items.length) {
      replace(parts.samples, nothing(context.run, page, state));
      return;
    }
    const together = page.items.every((item) => item.group === page.items[0].group && item.step === page.items[0].step);
    const cards = h("div", { class: "sample-grid" }, page.items.map((item) => card(item, together)));
    arrowsInGrid(cards);
    replace(
      parts.samples,
      together && promptOf(page.items[0], context, id),
      h("p", { class: "samples-head" }, headline(page, state)),
      cards,
      page.next && h("button", { type: "button", class: "more", onclick: (event) => more(event.currentTarget) }, page.searched < 1 ? "Search further" : "Show more"),
    );
  }

  function card(item, together) {
    const place = h("div", { class: "card-strips" });
    const element = h(
      "article",
      { class: "sample", tabindex: "0", "aria-label": `Sample ${item.sample} of step ${item.step}, reward ${number(item.reward, 3)}`, onclick: openIt, onkeydown: openByKey },
      h("header", score(item), h("span", { class: "grow" }), !together && h("span", { class: "muted" }, `step ${item.step}`), h("span", { class: "muted" }, `#${item.sample}`)),
      rewardParts(item),
      !together && h("div", { class: "sample-prompt" }, hostile(tail(item.prompt, 160), { limit: 200 })),
      h("div", { class: "sample-text" }, item.completion === "" ? h("span", { class: "muted" }, "empty") : episode(item.completion), item.length > item.completion.length && h("small", "cut here; a click shows all")),
      place,
      h("footer", ending(item), h("span", `weights ${item.version}`), h("span", plural(item.length, "character"))),
    );
    strip.watch(element, item.n, place);
    return element;

    function openIt(event) {
      if (event.target.closest("button, a") || String(getSelection())) return;
      openSample(item.n);
    }

    function openByKey(event) {
      if (event.key !== "Enter" || event.target !== element) return;
      event.preventDefault();
      openSample(item.n);
    }
  }

  /** Reads the tokens of the samples that come into sight, a few at a time; stops where the run recorded none. */
  function stripLoader() {
    const waiting = [];
    const places = new Map();
    let running = 0;
    let isOver = false;
    const observer = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((each) => each.isIntersecting)) {
        observer.unobserve(entry.target);
        waiting.push(places.get(entry.target));
      }
      next();
    });
    return {
      watch(element, n, place) {
        places.set(element, { n, place });
        observer.observe(element);
      },
      close() {
        isOver = true;
        observer.disconnect();
      },
    };

    async function next() {
      while (!isOver && running < AT_ONCE && waiting.length) {
        const { n, place } = waiting.shift();
        running += 1;
        try {
          const detail = await api.sample(id, n, { signal });
          if (detail.tokens === null) isOver = true;
          else if (!isOver && detail.tokens.length) replace(place, strips(detail.tokens));
        } catch {
          isOver = true;
        }
        running -= 1;
      }
    }
  }

  // ---- one sample

  async function openSample(n) {
    const body = h("div", { class: "sample-page" }, loading("Reading the sample"));
    if (!dialog) {
      dialog = h("dialog", { class: "drawer", "aria-label": "Sample", onclose: closed, onclick: outside, onkeydown: turn });
      document.body.append(dialog);
      dialog.showModal();
    }
    replace(dialog, body);
    setParams({ sample: n });
    try {
      const detail = await api.sample(id, n, { signal });
      if (body.isConnected) {
        dialog.dataset.previous = detail.previous ?? "";
        dialog.dataset.next = detail.next ?? "";
        replace(body, samplePage(detail, { context, id, open: openSample, close: () => dialog.close() }));
        body.querySelector("button:not(:disabled)")?.focus();
      }
    } catch (error) {
      if (error.name !== "AbortError") replace(body, failure(error), h("button", { type: "button", onclick: () => dialog?.close() }, "Close"));
    }
  }

  function closed() {
    dialog?.remove();
    dialog = null;
    setParams({ sample: null });
  }

  function outside(event) {
    if (event.target === dialog) dialog.close();
  }

  function turn(event) {
    const way = { ArrowLeft: "previous", ArrowRight: "next" }[event.key];
    if (way && dialog.dataset[way] && !event.target.closest(".tokens, input, select")) openSample(Number(dialog.dataset[way]));
  }
}

// ---- pieces

function numberOf(text) {
  return text === null || text === "" || !Number.isFinite(Number(text)) ? null : Number(text);
}

function itemsOf({ items, next, total }) {
  return { items, next, total };
}

function later(action) {
  let timer = null;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(action, TYPING_MS);
  };
}

function pressed(label, isOn, onclick) {
  return h("button", { type: "button", "aria-pressed": String(isOn), onclick }, label);
}

/** The end of a prompt says more than its beginning, which is often the same instruction for all. */
function tail(text, length) {
  return text.length > length ? `…${text.slice(-length)}` : text;
}

const PARTS = /⟨(?<output>[^]*?)⟩|(?<call><tool(?:_call)?>[^]*?<\/tool(?:_call)?>)/g;

/** A completion in few lines, with tool calls and their output told apart. */
function episode(text) {
  const parts = [];
  let from = 0;
  for (const { index, 0: whole, groups } of text.matchAll(PARTS)) {
    parts.push([text.slice(from, index), ""], groups.call === undefined ? [groups.output, "tool-output"] : [whole, "tool-call"]);
    from = index + whole.length;
  }
  parts.push([text.slice(from), ""]);
  return h("div", { class: "hostile", dir: "auto" }, parts.filter(([part]) => part.trim()).map(([part, kind]) => h("bdi", { class: ["hostile-text", kind], title: kind.replace("-", " ") || null }, visible(part.slice(0, EXCERPT)))));
}

function notes(page, state) {
  const sentences = [];
  if (page.indexed < 1) sentences.push(`The index of the samples is being built: ${percent(page.indexed, 0)} so far.`);
  if (state.text && page.searched < 1) sentences.push(`${percent(page.searched, 0)} of the samples were searched.`);
  return sentences.length ? h("p", { class: "muted", role: "status" }, sentences.join(" ")) : null;
}

function nothing(run, page, state) {
  if (page.indexed < 1) return empty("Nothing here yet", "The samples are still being indexed.");
  if (state.text || state.outcome || state.min !== null) return empty("No sample fits", "Try other words, another reward or another step.");
  if (page.steps.length) return empty(`Step ${page.step} has no samples`, `Samples are recorded for steps ${page.steps[0]} to ${page.steps[1]}.`);
  return empty("No samples", run.state === "running" ? "They appear with the first trained step." : "This run recorded none.");
}

function headline(page, state) {
  const shown = count(page.items.length);
  if (state.text) return `${shown} shown with “${state.text}”`;
  return page.total > page.items.length ? `${shown} of ${plural(page.total, "sample")}` : plural(page.items.length, "sample");
}

function filteredOf(filtered) {
  if (!filtered?.length) return null;
  return h("section", { class: "card filtered" }, h("h2", "Not trained in this run"), h("ul", filtered.map((each) => h("li", h("b", count(each.count)), " ", visible(each.reason)))));
}

/** The rewards as a histogram that filters: a click takes one bar, a drag or Shift a range, the same again all. */
function histogram({ edges, counts }, state, change) {
  if (!counts.length) return null;
  const most = Math.max(...counts, 1);
  const isActive = state.min !== null || state.max !== null;
  let from = null;
  const bars = counts.map((amount, index) =>
    h(
      "button",
      {
        type: "button",
        class: ["histogram-bar", isInside(index) && "inside"],
        dataset: { index },
        "aria-pressed": String(isActive && isInside(index)),
        "aria-label": `Reward ${number(edges[index], 3)} to ${number(edges[index + 1], 3)}: ${plural(amount, "sample")}`,
        title: `${number(edges[index], 3)} to ${number(edges[index + 1], 3)}: ${plural(amount, "sample")}`,
        onpointerdown: () => (from = index),
        onpointerup: (event) => take(from ?? index, event.shiftKey ? index : Number(document.elementFromPoint(event.clientX, event.clientY)?.closest?.(".histogram-bar")?.dataset.index ?? index)),
        onkeydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), take(index, index)),
      },
      h("i", { style: { height: `${amount ? Math.max(6, (amount / most) * 100) : 0}%` } }),
    ),
  );
  return [
    h("div", { class: "histogram-title" }, "Reward ", isActive ? h("button", { type: "button", class: "link", onclick: () => change({ min: null, max: null }) }, `${number(state.min, 3)} to ${number(state.max, 3)}, show all`) : h("span", { class: "muted" }, "click a bar to filter")),
    h("div", { class: isActive ? "histogram active" : "histogram", role: "group", "aria-label": "Histogram of rewards" }, bars),
    h("div", { class: "histogram-axis" }, h("span", number(edges[0], 3)), h("span", number(edges.at(-1), 3))),
  ];

  function isInside(index) {
    return edges[index] >= (state.min ?? -Infinity) - 1e-9 && edges[index] <= (state.max ?? Infinity);
  }

  /** Bars do not contain their upper edge, except the last one. */
  function upper(index) {
    const isLast = index === counts.length - 1;
    return isLast ? edges[index + 1] : edges[index + 1] - Math.abs(edges.at(-1) - edges[0]) * 1e-7;
  }

  function take(one, two) {
    const [low, high] = [Math.min(one, two), Math.max(one, two)];
    const next = { min: edges[low], max: upper(high) };
    change(next.min === state.min && next.max === state.max ? { min: null, max: null } : next);
  }
}

function score(item) {
  return h(
    "span",
    { class: "score" },
    h("b", { class: item.reward > 0 ? "score-value some" : "score-value" }, number(item.reward, 3)),
    item.advantage !== null && h("span", { class: item.advantage < 0 ? "advantage below" : "advantage above", title: `Advantage ${number(item.advantage, 4)}: reward against its group` }, h("span", { class: "advantage-bar", "aria-hidden": "true" }, h("i", { style: { width: `${Math.min(50, Math.abs(item.advantage) * 20)}%` } })), `advantage ${signed(item.advantage)}`),
  );
}

function signed(value) {
  if (value === 0) return "0";
  return `${value < 0 ? "−" : "+"}${number(Math.abs(value), 2)}`;
}

function rewardParts(item) {
  const names = Object.entries(item.rewards);
  if (names.length < 2) return null;
  return h("ul", { class: "reward-parts" }, names.map(([name, value]) => h("li", h("span", visible(name)), h("b", number(value, 3)))));
}

function ending(item) {
  return h("span", { class: item.outcome === "length" ? "ending cut" : "ending" }, ENDINGS[item.outcome] ?? item.outcome);
}

function promptOf(item, context, id) {
  const logs = context.href(`/run/${encodeURIComponent(id)}/logs`, { request: item.group });
  return h(
    "div",
    { class: "prompt" },
    h("p", { class: "prompt-head" }, h("span", "Prompt"), h("a", { href: logs, title: "Everything that was recorded about this group" }, visible(item.group))),
    hostile(item.prompt, { limit: EXCERPT }),
  );
}

function arrowsInGrid(grid) {
  grid.addEventListener("keydown", (event) => {
    const cards = [...grid.children];
    const at = cards.indexOf(document.activeElement);
    if (at < 0) return;
    const columns = cards.filter((each) => each.offsetTop === cards[0].offsetTop).length;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    cards[Math.min(cards.length - 1, Math.max(0, at + by))].focus();
  });
}

function samplePage(detail, { context, id, open, close }) {
  const path = `/run/${encodeURIComponent(id)}`;
  const turnTo = (label, n, symbol) => h("button", { type: "button", class: "square", "aria-label": label, title: label, disabled: n === null, onclick: () => open(n) }, icon(symbol));
  return [
    h(
      "header",
      { class: "drawer-head" },
      h("div", h("h2", `Step ${detail.step}, sample ${detail.sample}`), h("p", { class: "muted mono" }, visible(detail.group))),
      h("span", { class: "grow" }),
      turnTo("Sample before (←)", detail.previous, "left"),
      turnTo("Sample after (→)", detail.next, "chevron"),
      h("button", { type: "button", class: "quiet square", "aria-label": "Close", onclick: close }, icon("close")),
    ),
    h("dl", { class: "sample-facts" }, sampleFacts(detail)),
    detail.expected && expected(detail.expected),
    h("section", h("h3", "Episode"), h("ol", { class: "turns" }, detail.turns.map(turnOf))),
    tokensOf(detail),
    h("p", { class: "row drawer-links" }, h("a", { href: context.href(`${path}/logs`, { request: detail.group }) }, "Records of this group"), h("a", { href: context.href(`${path}/time`, { step: detail.step }) }, "Step in time")),
  ];
}

function sampleFacts(detail) {
  const fact = (label, value, note = null) => h("div", h("dt", label), h("dd", value, note && h("small", ` ${note}`)));
  const parts = Object.entries(detail.rewards);
  return [
    fact("Reward", number(detail.reward, 4), detail.group_mean === null ? null : `group ${number(detail.group_mean, 3)}`),
    parts.map(([name, value]) => fact(visible(name), number(value, 4))),
    fact("Advantage", detail.advantage === null ? "–" : number(detail.advantage, 4)),
    fact("Ended", ENDINGS[detail.outcome] ?? detail.outcome),
    fact("Weights", String(detail.version), detail.version >= 0 && detail.step - 1 > detail.version ? plural(detail.step - 1 - detail.version, "step") + " old" : null),
    fact("Length", plural(detail.length, "character")),
  ];
}

function expected(columns) {
  return h("section", h("h3", "Row of the data"), h("dl", { class: "columns" }, Object.entries(columns).map(([name, value]) => [h("dt", visible(name)), h("dd", hostile(value, { limit: 400 }))])));
}

const ROLES = { prompt: "Prompt", completion: "Completion", system: "System", user: "User", assistant: "Model", tool: "Tool" };

function turnOf(turn) {
  const label = turn.kind === "tool_call" ? "Tool call" : turn.kind === "tool_output" ? "Tool output" : (ROLES[turn.role] ?? turn.role);
  return h("li", { class: `turn is-${turn.kind} by-${turn.role}` }, h("span", { class: "turn-role" }, label), turn.text === "" ? h("span", { class: "muted" }, "empty") : hostile(turn.text, { limit: 4000 }));
}

function tokensOf(detail) {
  if (detail.tokens === null) return h("section", h("h3", "Tokens"), h("p", { class: "muted" }, "This run did not record tokens with their samples."));
  const names = measuresOf(detail.tokens);
  const place = h("div");
  const chosen = h("span", { class: "segments", role: "group", "aria-label": "Colour of the tokens" });
  show(names[0] ?? "mask");
  return h("section", { class: "token-section" }, h("h3", "Tokens"), strips(detail.tokens), chosen, place);

  function show(name) {
    replace(chosen, names.map((each) => pressed(MEASURES[each].label, each === name, () => pick(each))));
    replace(place, tokenText(detail.tokens, name));
  }

  function pick(name) {
    show(name);
    chosen.querySelector('[aria-pressed="true"]').focus({ preventScroll: true });
  }
}

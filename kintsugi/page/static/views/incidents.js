/** Incidents of a run: the list, and for each the story in sentences, the diagnosis, the way of the fault, the evidence. */

import { arrowKeys, empty, failure, h, hostile, icon, loadStyle, loading, problems, replace, visible } from "../dom.js";
import { clock, duration, moment, percent, plural } from "../format.js";
import { after, causalPath } from "./causal_path.js";

const MARKS = { noticed: "noticed", decided: "decided", replaced: "replaced", resumed: "going on" };
const WORDS = {
  broke: "broke",
  noticed: "noticed",
  decided: "decided",
  replaced: "replaced",
  diagnosed: "diagnosed",
  resumed: "went on",
  cost: "cost",
  log: "log",
};
const PHASES = {
  detect: "noticing",
  start: "start of a replacement",
  lock: "stopping the ranks",
  rebuild: "new process group",
  repair: "state from a peer",
  replay: "repeated work",
  rest: "not measured by phase",
};
const STRATEGIES = {
  continue: "the ranks went on without interruption",
  retry: "the interrupted work was repeated",
  recover: "what was lost was replaced",
  elastic: "went on with fewer ranks",
  dump: "saved the state and ended the run",
  exit: "ended the run",
};
const STATES = { recovered: "recovered", recovering: "recovering", unresolved: "ended the run" };
const AROUND_S = 5;
const LEAST_REST = 0.05;

export async function render(root, context) {
  const { api, params, setParams, signal } = context;
  const id = context.run.id;
  const list = h("ul", { class: "incident-list", "aria-label": "Incidents" });
  const others = h("div");
  const story = h("article", { class: "incident", "aria-live": "off" });
  let answer = null;
  let chosen = null;
  let figure = null;
  let drawn = "";
  arrowKeys(list, "a");
  await Promise.all([loadStyle("views/incidents.css"), read()]);
  return {
    update(what) {
      if (what.includes("incidents") || what.includes("state")) read().catch(ignore);
    },
    close: () => figure?.close(),
  };

  async function read() {
    answer = await api.incidents(id, { signal });
    if (!answer.incidents.length) {
      replace(root, problems(answer.problems), nothing(context.run, answer.others));
      return;
    }
    const wanted = Number(params.get("incident")) || null;
    chosen = answer.incidents.find((each) => each.id === wanted)?.id ?? (chosen !== null ? chosen : answer.incidents.at(-1).id);
    if (!root.contains(list)) {
      replace(root, h("h2", { class: "visually-hidden" }, "Incidents"), problems(answer.problems), h("div", { class: "incident-split" }, h("aside", { class: "incident-side" }, list, others), story));
    }
    drawList();
    replace(others, otherLosses(answer.others));
    await open(chosen, { quiet: drawn !== "" });
  }

  function drawList() {
    const focused = document.activeElement?.closest?.(".incident-list a")?.dataset.incident;
    replace(list, answer.incidents.toReversed().map((each) => h("li", row(each, each.id === chosen))));
    if (focused) list.querySelector(`[data-incident="${focused}"]`)?.focus({ preventScroll: true });
  }

  function row(each, isChosen) {
    const path = `/run/${encodeURIComponent(id)}/incidents`;
    return h(
      "a",
      { href: context.href(path, { incident: each.id }), dataset: { incident: each.id }, "aria-current": isChosen ? "true" : null, class: `incident-row is-${each.state}`, onclick: choose },
      h("span", { class: "incident-line" }, h("span", { class: "incident-number" }, `#${each.id}`), stateWord(each.state), h("span", { class: "grow" }), h("span", { class: "incident-cost" }, each.cost_s === null ? "not over" : duration(each.cost_s))),
      h("span", { class: "incident-title" }, visible(each.title)),
      h("span", { class: "incident-meta" }, `${clock(each.from)} · after step ${each.step}`),
    );

    function choose(event) {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      chosen = each.id;
      setParams({ incident: each.id });
      drawList();
      open(each.id).catch(ignore);
      if (story.getBoundingClientRect().top > innerHeight * 0.6) story.scrollIntoView();
    }
  }

  async function open(incident, { quiet = false } = {}) {
    if (!quiet) replace(story, loading("Reading the incident"));
    let detail;
    try {
      detail = await api.incident(id, incident, { signal });
    } catch (error) {
      if (error.name !== "AbortError") replace(story, failure(error, () => open(incident)));
      return;
    }
    const content = JSON.stringify(detail);
    if (incident !== chosen || (quiet && content === drawn)) return;
    drawn = content;
    figure?.close();
    figure = detail.diagnosis?.path.length ? figureOf(detail) : null;
    replace(story, page(detail, figure, linkTo));
  }

  /** Address of the place in the logs where something is written. */
  function linkTo(process, line, time) {
    return context.href(`/run/${encodeURIComponent(id)}/logs`, { process, line, at: time === null ? null : time.toFixed(3) });
  }
}

function ignore(error) {
  if (error.name !== "AbortError") console.warn(error.message);
}

function nothing(run, others) {
  const text = run.state === "running" ? "Incidents appear here as they happen, without reloading." : "Nothing broke in this run.";
  return [empty("No incidents", text), h("div", { class: "incident-others-alone" }, otherLosses(others))];
}

function otherLosses(others) {
  if (!others?.length) return null;
  return h(
    "details",
    { class: "incident-others" },
    h("summary", `${plural(others.length, "process was", "processes were")} replaced without an incident`),
    h("ul", others.map((each) => h("li", visible(each.text)))),
  );
}

function stateWord(state) {
  return h("span", { class: `incident-state is-${state}` }, h("i", { "aria-hidden": "true" }), STATES[state] ?? state);
}

function figureOf(detail) {
  const { diagnosis, story } = detail;
  const marks = story.filter((line) => line.time !== null && MARKS[line.kind]).map((line) => ({ time: line.time, text: MARKS[line.kind] }));
  return causalPath({ path: diagnosis.path, onset: diagnosis.onset, end: detail.to, marks });
}

function page(detail, figure, linkTo) {
  const { diagnosis } = detail;
  return [
    h(
      "header",
      { class: "incident-head" },
      h("p", { class: "incident-line" }, h("span", { class: "incident-number" }, `Incident ${detail.id}`), stateWord(detail.state), h("span", { class: "incident-when" }, moment(detail.from))),
      h("h2", visible(detail.title)),
      h("p", { class: "incident-lead" }, visible(detail.summary)),
      facts(detail),
    ),
    problems(detail.problems),
    h(
      "div",
      { class: "incident-columns" },
      section("What happened", h("ol", { class: "story" }, sentences(detail, linkTo)), timingBar(detail)),
      h("div", { class: "incident-why" }, diagnosis ? explanation(diagnosis, figure, linkTo) : unexplained(detail)),
    ),
  ];
}

function explanation(diagnosis, figure, linkTo) {
  return [
    section("Why", cause(diagnosis), figure?.element),
    advice(diagnosis),
    evidence(diagnosis, linkTo),
    causes("Also broke in this incident", diagnosis.alternatives.filter(({ also }) => also)),
    causes("Less likely causes", diagnosis.alternatives.filter(({ also }) => !also)),
    ruledOut(diagnosis),
  ];
}

function unexplained(detail) {
  return section("Why", h("p", { class: "muted" }, visible(detail.no_diagnosis || "No cause was diagnosed.")));
}

function section(title, ...children) {
  return h("section", { class: "incident-part" }, h("h3", title), children);
}

function facts(detail) {
  const fact = (label, value, detail = null) => h("div", h("dt", label), h("dd", value, detail && h("small", ` ${detail}`)));
  return h(
    "dl",
    { class: "incident-facts" },
    fact("Lasted", detail.cost_s === null ? "not over" : duration(detail.cost_s)),
    fact("Strategy", detail.strategy || "–", STRATEGIES[detail.strategy]),
    fact("Steps undone", String(detail.steps_undone)),
    fact("Groups sampled again", String(detail.groups_again)),
  );
}

function sentences(detail, linkTo) {
  const times = detail.story.map((line) => line.time).filter((time) => time !== null);
  const start = times.length ? Math.min(...times) : detail.from;
  return detail.story.map((line) => sentence(line, start, linkTo));
}

function sentence(line, start, linkTo) {
  const isTimed = line.time !== null && start !== null && line.kind !== "rejected";
  return h(
    "li",
    { class: `story-line is-${line.kind}` },
    h("span", { class: "story-time", title: line.time === null ? "the time was not recorded" : moment(line.time) }, isTimed ? after(line.time - start) : ""),
    h("span", { class: "story-mark", "aria-hidden": "true" }),
    h(
      "div",
      { class: "story-text" },
      h("p", hostile(line.text, { limit: 600, tag: "span" })),
      line.kind !== "rejected" &&
        h(
          "p",
          { class: "story-meta" },
          h("span", { class: "story-kind" }, WORDS[line.kind] ?? line.kind),
          line.process && h("span", { class: "process" }, visible(line.process)),
          line.time !== null && h("span", clock(line.time, true)),
          line.link && h("a", { href: linkTo(line.link.process, line.link.line, line.time) }, "in the log"),
        ),
    ),
  );
}

/** Where the time went, as one bar. */
function timingBar(detail) {
  const parts = Object.entries(detail.timing).filter(([name, seconds]) => name !== "total" && name !== "outage" && seconds > 0);
  const measured = parts.reduce((total, [, seconds]) => total + seconds, 0);
  if (!measured) return null;
  const rest = (detail.cost_s ?? 0) - measured;
  if (rest > LEAST_REST * measured) parts.push(["rest", rest]);
  const sum = parts.reduce((total, [, seconds]) => total + seconds, 0);
  return h(
    "div",
    { class: "timing" },
    h("h4", "Where the time went"),
    h("div", { class: "timing-bar", role: "img", "aria-label": parts.map(([name, seconds]) => `${PHASES[name] ?? name} ${duration(seconds)}`).join(", ") }, parts.map(([name, seconds], index) => h("span", { class: timingClass(name, index), style: { "flex-grow": seconds / sum } }))),
    h("ul", { class: "timing-key" }, parts.map(([name, seconds], index) => h("li", h("i", { class: timingClass(name, index), "aria-hidden": "true" }), PHASES[name] ?? name, " ", h("b", duration(seconds))))),
  );
}

function timingClass(name, index) {
  return name === "rest" ? "timing-rest" : `timing-${index % 6}`;
}

function cause(diagnosis) {
  return h(
    "div",
    { class: "cause" },
    h("p", { class: "cause-text" }, visible(diagnosis.cause)),
    h(
      "p",
      { class: "cause-meta" },
      h("span", { class: "tag" }, visible(diagnosis.kind.replaceAll("_", " "))),
      h("span", { class: "process" }, visible(diagnosis.process)),
      diagnosis.host && h("span", `on ${diagnosis.host}`),
      h("span", `since ${clock(diagnosis.onset, true)}`),
      h("span", { class: "cause-certainty" }, h("meter", { min: "0", max: "1", value: String(diagnosis.certainty), "aria-label": "Certainty" }), `${percent(diagnosis.certainty, 0)} sure`),
    ),
  );
}

function evidence(diagnosis, linkTo) {
  return section(
    "Evidence",
    diagnosis.evidence.length === 0 && h("p", { class: "muted" }, "No record is quoted."),
    diagnosis.evidence.map((each) =>
      h(
        "figure",
        { class: "evidence" },
        h("blockquote", hostile(each.text, { limit: 800 })),
        h(
          "figcaption",
          h("span", { class: "process" }, visible(each.process)),
          h("span", clock(each.time, true)),
          h("a", { href: linkTo(each.process, each.line, each.time), title: `${AROUND_S} s around this record` }, visible(each.line), icon("arrow")),
        ),
      ),
    ),
  );
}

function causes(title, all) {
  if (!all.length) return null;
  return section(
    title,
    h(
      "ul",
      { class: "alternatives" },
      all.map((each) => h("li", h("span", { class: "alternative-share" }, h("meter", { min: "0", max: "1", value: String(each.certainty), "aria-hidden": "true" }), percent(each.certainty, 0)), visible(each.cause))),
    ),
  );
}

function ruledOut(diagnosis) {
  if (!diagnosis.ruled_out.length) return null;
  return section("Ruled out", h("ul", { class: "ruled-out" }, diagnosis.ruled_out.map(ruledOutLine)));
}

/** "an error of its own: it recorded none" → what was excluded, struck through, and the reason. */
function ruledOutLine(text) {
  const at = text.indexOf(": ");
  if (at < 0) return h("li", visible(text));
  return h("li", h("s", visible(text.slice(0, at))), " ", visible(text.slice(at + 2)));
}

function advice(diagnosis) {
  return diagnosis.advice ? section("What to do", h("p", visible(diagnosis.advice))) : null;
}

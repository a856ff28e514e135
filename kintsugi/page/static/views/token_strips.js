/** Tokens of a sample as colours: strips of the whole sample, to compare samples side by side, and the text itself.
 *
 *     strips(tokens)                  one row of colours per measure that was recorded
 *     tokenText(tokens, "logprob")    the text, each token on the colour of this measure
 *     measuresOf(tokens)              names of the recorded measures
 *
 * Colours are mixed from variables of the style sheet, so they follow the theme. A strip of many tokens shows the
 * strongest one of each place.
 */

import { h, replace, visible } from "../dom.js";
import { count, number, percent } from "../format.js";

const PLACES = 240;
const FIRST_TOKENS = 1500;

export const MEASURES = {
  logprob: {
    label: "log-probability",
    hint: "colour: how unlikely the sampled token was to the sampler",
    strength: (token) => (token.logprob === null ? null : clamp(-token.logprob / 4)),
    colour: () => "--s1",
    text: (token) => `log-probability ${number(token.logprob, 3)} (${percent(Math.exp(token.logprob), 1)})`,
  },
  trainer_minus_sampler: {
    label: "trainer − sampler",
    hint: "colour: log-probability of the trainer above (orange) or below (blue) that of the sampler",
    strength: (token) => (token.trainer_minus_sampler === null ? null : clamp(Math.sqrt(Math.abs(token.trainer_minus_sampler)))),
    colour: (token) => (token.trainer_minus_sampler < 0 ? "--s0" : "--s1"),
    text: (token) => `trainer − sampler ${number(token.trainer_minus_sampler, 3)}`,
  },
  entropy: {
    label: "entropy",
    hint: "colour: how undecided the sampler was",
    strength: (token) => (token.entropy === null ? null : clamp(token.entropy / 3)),
    colour: () => "--s7",
    text: (token) => `entropy ${number(token.entropy, 3)}`,
  },
  mask: {
    label: "loss mask",
    hint: "colour: tokens that count in the loss",
    strength: (token) => (token.mask ? 0.7 : 0),
    colour: () => "--s2",
    text: (token) => (token.mask ? "in the loss" : "not in the loss"),
  },
  version: {
    label: "weight version",
    hint: "colour: version of the weights that sampled the token",
    strength: (token) => (token.version === null || token.version === undefined || token.version < 0 ? null : 0.75),
    colour: (token) => versionColour(token.version),
    text: (token) => (token.version === null || token.version < 0 ? "not sampled" : `weights ${token.version}`),
  },
};

const VERSION_COLOURS = ["--s0", "--s1", "--s2", "--s3", "--s4", "--s7"];

/** Colour of a version of the weights; neighbours differ. */
export function versionColour(version) {
  return VERSION_COLOURS[((version % VERSION_COLOURS.length) + VERSION_COLOURS.length) % VERSION_COLOURS.length];
}

function clamp(value) {
  return Math.min(1, Math.max(0, value));
}

export function measuresOf(tokens) {
  const versions = new Set(tokens.filter((token) => token.mask).map((token) => token.version));
  return Object.keys(MEASURES).filter((name) => {
    if (name === "version") return versions.size > 1;
    return tokens.some((token) => token[name] !== null && token[name] !== undefined);
  });
}

export function strips(tokens) {
  return h(
    "div",
    { class: "strips", role: "img", "aria-label": `${count(tokens.length)} tokens, ${count(tokens.filter((token) => token.mask).length)} in the loss` },
    measuresOf(tokens).map((name) => h("div", { class: "strip", title: MEASURES[name].hint }, h("span", MEASURES[name].label), h("i", { style: { background: gradient(tokens, MEASURES[name]) } }))),
  );
}

/** Hard stops of a gradient: one place per token, or per group of tokens. */
function gradient(tokens, measure) {
  const places = Math.min(PLACES, tokens.length);
  const stops = [];
  for (let place = 0; place < places; place += 1) {
    const first = Math.floor((place * tokens.length) / places);
    const last = Math.max(first + 1, Math.floor(((place + 1) * tokens.length) / places));
    let strongest = null;
    for (let index = first; index < last; index += 1) {
      const strength = measure.strength(tokens[index]);
      if (strength !== null && (strongest === null || strength > strongest.strength)) strongest = { strength, token: tokens[index] };
    }
    const from = `${((place / places) * 100).toFixed(2)}%`;
    const to = `${(((place + 1) / places) * 100).toFixed(2)}%`;
    stops.push(`${strongest === null ? "transparent" : mix(measure.colour(strongest.token), strongest.strength)} ${from} ${to}`);
  }
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

function mix(variable, strength) {
  return `color-mix(in srgb, var(${variable}) ${Math.round(strength * 85 + 4)}%, var(--sunken))`;
}

/** The text of the tokens; the measures of the one under the pointer, or of the focused one, are written below. */
export function tokenText(tokens, name) {
  const measure = MEASURES[name];
  const readout = h("p", { class: "token-readout", role: "status" }, measure.hint);
  const text = h("div", { class: "tokens", dir: "ltr", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys move", onpointerover: point, onpointerleave: leave, onkeydown: move });
  const more = h("button", { type: "button", class: "link", onclick: () => show(tokens.length) });
  let at = -1;
  show(Math.min(FIRST_TOKENS, tokens.length));
  return h("div", { class: "token-box" }, text, more, readout);

  function show(amount) {
    replace(text, tokens.slice(0, amount).map((token, index) => tokenOf(token, index, measure)));
    more.textContent = `Show all ${count(tokens.length)} tokens`;
    more.hidden = amount >= tokens.length;
  }

  function point(event) {
    const index = event.target.closest?.("[data-index]")?.dataset.index;
    if (index !== undefined) say(Number(index));
  }

  function leave() {
    say(-1);
  }

  function move(event) {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    say(Math.min(text.childElementCount - 1, Math.max(0, at + by)));
  }

  function say(index) {
    text.children[at]?.classList.remove("lit");
    at = index;
    text.children[at]?.classList.add("lit");
    const token = tokens[index];
    replace(readout, token ? [h("b", visible(JSON.stringify(token.text))), ` token ${count(index + 1)} · `, described(token)] : measure.hint);
  }
}

function described(token) {
  return Object.entries(MEASURES)
    .filter(([name]) => token[name] !== null && token[name] !== undefined)
    .map(([, measure]) => measure.text(token))
    .join(" · ");
}

function tokenOf(token, index, measure) {
  const strength = measure.strength(token);
  const props = { class: token.mask ? "token" : "token given", dataset: { index } };
  if (strength !== null && strength > 0.02) {
    props.style = { background: `color-mix(in srgb, var(${measure.colour(token)}) ${Math.round(strength * 55 + 3)}%, transparent)` };
  }
  const text = token.text === "" ? "␀" : token.text;
  return h("bdi", props, visible(text.replaceAll("\n", "⏎\n")));
}

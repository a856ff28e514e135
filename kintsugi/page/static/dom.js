/** Builds elements from text only: nothing here or in a view parses markup, so text written by a model stays text.
 *
 *     h("button", { class: "quiet", onclick: save, "aria-label": "Save" }, "Save")
 *     h("p", "Two ", h("b", "words"))
 *
 * Properties: `class`, `dataset`, `style` (an object; set through the CSSOM, which the policy allows), `on…` listeners,
 * IDL properties such as `value`, `checked`, `disabled`, `hidden`, `open`, `indeterminate`; all else is an attribute.
 * Children: nodes, strings, numbers, arrays; null, undefined and false are left out.
 */

import { count, plural } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const IDL = new Set(["value", "checked", "disabled", "hidden", "open", "indeterminate", "selected", "htmlFor"]);

export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

/** Like h(), for SVG elements. */
export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(element, props, children) {
  if (isProps(props)) setProps(element, props);
  else if (props !== undefined) children.unshift(props);
  add(element, children);
  return element;
}

function isProps(value) {
  return value !== null && typeof value === "object" && !(value instanceof Node) && !Array.isArray(value);
}

function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) {
      if (IDL.has(name)) element[name] = false;
    } else if (name === "class") element.setAttribute("class", Array.isArray(value) ? value.filter(Boolean).join(" ") : value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "style") {
      for (const [key, setting] of Object.entries(value)) element.style.setProperty(key, String(setting));
    } else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (IDL.has(name) && name in element) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
}

function add(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) add(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

/** Replace the children of an element. */
export function replace(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

/** Replace the children of an element that is drawn again often: focus and opened details stay where they were. */
export function redraw(element, ...children) {
  const focusable = () => [...element.querySelectorAll("a, button, input, select, summary, [tabindex]")];
  const at = focusable().indexOf(document.activeElement);
  const opened = [...element.querySelectorAll("details")].map((each) => each.open);
  replace(element, ...children);
  element.querySelectorAll("details").forEach((each, index) => (each.open = opened[index] ?? false));
  if (at >= 0) focusable().at(Math.min(at, focusable().length - 1))?.focus({ preventScroll: true });
  return element;
}

/** Load a style sheet of a view, once; resolves when it applies. `path` is relative to the static folder. */
export function loadStyle(path) {
  const href = `/static/${path}`;
  const known = document.head.querySelector(`link[href="${href}"]`);
  if (known) return known.loaded ?? Promise.resolve();
  const link = h("link", { rel: "stylesheet", href });
  link.loaded = new Promise((done) => {
    link.addEventListener("load", done);
    link.addEventListener("error", done);
  });
  document.head.append(link);
  return link.loaded;
}

/** Symbols as inline SVG, so that no font is needed: icon("chevron"). */
const PATHS = {
  alert: "M8 2.2 14.4 13.4H1.6ZM8 6.4v3.2M8 11.4v.4",
  arrow: "M3 8h10M9 4l4 4-4 4",
  check: "M3 8.5 6.5 12 13 4.5",
  chevron: "M6 3.5 10.5 8 6 12.5",
  close: "M4 4l8 8M12 4l-8 8",
  compare: "M5.5 2.5v11M10.5 2.5v11M2.5 5.5h3M10.5 10.5h3",
  copy: "M5.5 5.5h7v8h-7zM3.5 10.5v-8h7",
  down: "M3.5 6 8 10.5 12.5 6",
  download: "M8 2.5v8M4.5 7 8 10.5 11.5 7M3 13.5h10",
  help: "M5.8 6a2.2 2.2 0 1 1 3.4 1.9c-.8.5-1.2.9-1.2 1.8M8 12.2v.2",
  left: "M10 3.5 5.5 8 10 12.5",
  moon: "M13 9.6A5.6 5.6 0 0 1 6.4 3 5.6 5.6 0 1 0 13 9.6Z",
  search: "M7 11.5a4.5 4.5 0 1 1 0-9 4.5 4.5 0 0 1 0 9ZM10.3 10.3 14 14",
  sun: "M8 5.2a2.8 2.8 0 1 1 0 5.6 2.8 2.8 0 0 1 0-5.6ZM8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3 3l1.2 1.2M11.8 11.8 13 13M13 3l-1.2 1.2M4.2 11.8 3 13",
  system: "M2.5 3.5h11v7.5h-11zM6 13.5h4",
  up: "M3.5 10 8 5.5 12.5 10",
};

export function icon(name) {
  return svg(
    "svg",
    { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("path", { d: PATHS[name] }),
  );
}

/** Characters that change how text is shown without being seen: controls, bidirectional and invisible ones, tags. */
const HIDDEN =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;

/** Text of a model or a tool as nodes: hidden characters appear as escapes, direction cannot leak out of the element. */
export function visible(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) nodes.push(text.slice(from, match.index));
    nodes.push(h("span", { class: "escape" }, escapeOf(match[0])));
    from = match.index + match[0].length;
  }
  if (from < text.length) nodes.push(text.slice(from));
  return nodes;
}

function escapeOf(character) {
  const code = character.codePointAt(0);
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\u{${code.toString(16)}}`;
}

const PIECE = 50_000;

/** Text of a model as a block: isolated, escaped, and clipped to `limit` characters with a button that shows more.
 *
 *     hostile(sample.completion, { limit: 2000 })
 */
export function hostile(text, { limit = 2000, class: name = "", tag = "div" } = {}) {
  const string = String(text ?? "");
  const body = h("bdi", { class: "hostile-text" }, visible(string.slice(0, limit)));
  const block = h(tag, { class: `hostile ${name}`, dir: "auto" }, body);
  let shown = Math.min(limit, string.length);
  if (shown === string.length) return block;
  const more = h("button", { class: "link", type: "button", dir: "ltr", onclick: grow });
  label();
  block.append(more);
  return block;

  function label() {
    const left = string.length - shown;
    const all = left <= PIECE;
    more.textContent = all
      ? `Show all ${string.length.toLocaleString("en")} characters`
      : `Show more (${shown.toLocaleString("en")} of ${string.length.toLocaleString("en")} characters)`;
  }

  function grow() {
    const next = Math.min(string.length, shown + PIECE);
    body.append(...visible(string.slice(shown, next)));
    shown = next;
    if (shown === string.length) more.remove();
    else label();
  }
}

/** The three states that every view has besides its content. */
export function loading(what = "Loading") {
  return h("div", { class: "state", role: "status" }, h("span", { class: "spinner", "aria-hidden": "true" }), `${what}…`);
}

export function empty(title, detail = null, ...actions) {
  return h("div", { class: "state" }, h("h2", title), detail && h("p", detail), actions);
}

export function failure(error, retry = null) {
  return h(
    "div",
    { class: "state failed", role: "alert" },
    icon("alert"),
    h("h2", error.status === 404 ? "Not found" : "This could not be read"),
    h("p", visible(error.message)),
    retry && h("button", { type: "button", onclick: retry }, "Try again"),
  );
}

/** State of a run as a coloured dot with its word. */
export function stateBadge(state) {
  return h("span", { class: `badge state-${state}` }, h("i", { "aria-hidden": "true" }), state);
}

/** Sentences about what could not be read, folded into one line. */
export function problems(sentences) {
  if (!sentences?.length) return null;
  return h(
    "details",
    { class: "problems" },
    h("summary", icon("alert"), `${plural(sentences.length, "problem")} while reading this run`),
    h("ul", sentences.slice(0, 100).map((each) => h("li", visible(each)))),
    sentences.length > 100 && h("p", `and ${count(sentences.length - 100)} more`),
  );
}

/** Move focus among the rows of a table with the arrow keys, Home and End; Enter opens what the row links to. */
export function arrowKeys(container, selector) {
  container.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 }[event.key];
    const ends = { Home: 0, End: -1 }[event.key];
    const rows = [...container.querySelectorAll(selector)];
    const at = rows.findIndex((row) => row === document.activeElement);
    if (at < 0 || (move === undefined && ends === undefined)) return;
    event.preventDefault();
    const next = ends === undefined ? Math.min(rows.length - 1, Math.max(0, at + move)) : ends;
    rows.at(next).focus();
  });
}

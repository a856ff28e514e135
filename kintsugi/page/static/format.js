/** How values are written. A value that was not measured is a dash, never a zero. */

export const NONE = "–";

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

/** A figure with `digits` significant digits: 0.4213, 12.3, 1,240, 3.2e-6. */
export function number(value, digits = 4) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  const sign = value < 0 ? "−" : "";
  if (size >= 1e7 || size < 1e-4) return sign + size.toExponential(Math.min(2, digits - 1)).replace("e+", "e");
  if (size >= 1000) return sign + Math.round(size).toLocaleString("en");
  return sign + String(Number(size.toPrecision(digits)));
}

/** A count: 1,240. */
export function count(value) {
  return missing(value) ? NONE : Math.round(value).toLocaleString("en");
}

/** A large count in few characters: 1.2 k, 3.4 M. */
export function compact(value) {
  if (missing(value)) return NONE;
  const size = Math.abs(value);
  for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= factor) return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

/** A share as a percentage: 83.2 %. */
export function percent(share, digits = 1) {
  return missing(share) ? NONE : `${(share * 100).toFixed(digits)} %`;
}

/** An interval of shares: 78–87 %. */
export function interval(low, high) {
  if (missing(low) || missing(high)) return NONE;
  return `${(low * 100).toFixed(0)}–${(high * 100).toFixed(0)} %`;
}

/** A duration: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min, 3 d 4 h. */
export function duration(seconds) {
  if (missing(seconds)) return NONE;
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (size < 10) return `${Number(seconds.toFixed(1))} s`;
  if (size < 59.5) return `${Math.round(seconds)} s`;
  const parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  let rest = Math.round(size);
  const first = parts.findIndex(([, length]) => rest >= length);
  const words = parts.slice(first, first + 2).map(([unit, length]) => {
    const amount = Math.floor(rest / length);
    rest -= amount * length;
    return amount ? `${amount} ${unit}` : "";
  });
  return (seconds < 0 ? "−" : "") + words.filter(Boolean).join(" ");
}

/** How long ago a time was: "12 s ago". */
export function ago(time, now = Date.now() / 1000) {
  return missing(time) ? NONE : `${duration(Math.max(0, now - time))} ago`;
}

/** A time of day, with milliseconds where asked: 14:03:07. */
export function clock(time, milliseconds = false) {
  if (missing(time)) return NONE;
  const date = new Date(time * 1000);
  const text = date.toLocaleTimeString("en-GB");
  return milliseconds ? `${text}.${String(date.getMilliseconds()).padStart(3, "0")}` : text;
}

/** A date and time: 2026-11-18 14:03:07. */
export function moment(time) {
  if (missing(time)) return NONE;
  const date = new Date(time * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(time)}`;
}

/** Bytes: 4.1 MB. */
export function bytes(value) {
  if (missing(value)) return NONE;
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= factor) return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

/** "1 incident", "3 incidents". */
export function plural(amount, noun, many = `${noun}s`) {
  return `${count(amount)} ${amount === 1 ? noun : many}`;
}

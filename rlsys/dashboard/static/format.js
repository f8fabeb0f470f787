/** Numbers, times and words as people read them. What is not known is `–`. */

export const NONE = "–";

/** `0.5231` -> `0.523`, `1234567` -> `1.23M`, `0.00001234` -> `1.23e-5`, `12` -> `12`. */
export function number(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1e6) return scaled(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  if (Number.isInteger(value)) return String(value);
  if (size >= 100) return value.toFixed(1);
  if (size >= 10) return value.toFixed(2);
  if (size >= 0.001) return value.toFixed(3);
  return value.toExponential(2);
}

function scaled(value) {
  const [by, letter] =
    Math.abs(value) >= 1e12 ? [1e12, "T"] : Math.abs(value) >= 1e9 ? [1e9, "G"] : [1e6, "M"];
  return `${(value / by).toPrecision(3)}${letter}`;
}

/** A number with all its digits, for tables that are compared with files. */
export function exact(value) {
  return isNumber(value) ? String(value) : NONE;
}

/** `0.123` -> `12 %`. */
export function percent(share) {
  if (!isNumber(share)) return NONE;
  const percents = share * 100;
  return `${percents !== 0 && Math.abs(percents) < 1 ? percents.toFixed(1) : Math.round(percents)} %`;
}

/** A value with its unit: `12 %` of a share, `3.2 s`, `0.52 nats`, `1 agent`, `0.52`. */
export function quantity(value, unit) {
  if (!isNumber(value)) return NONE;
  if (unit === "share") return percent(value);
  if (unit === "s") return duration(value);
  const named = value === 1 ? unit.replace(/^([a-z]{3,})s$/, "$1") : unit;
  return unit ? `${number(value)} ${named}` : number(value);
}

/** `0.012` -> `12 ms`, `3.2` -> `3.2 s`, `75` -> `1 min 15 s`, `7500` -> `2 h 5 min`, `200000` -> `2 d 8 h`. */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return pair(Math.floor(whole / 60), "min", whole % 60, "s");
  const minutes = Math.round(seconds / 60);
  if (minutes < 24 * 60) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(seconds / 3600);
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

function pair(first, unit, second, smaller) {
  return second ? `${first} ${unit} ${second} ${smaller}` : `${first} ${unit}`;
}

/** `3 s ago`, `2 h ago`. */
export function ago(timeS) {
  if (!isNumber(timeS)) return NONE;
  const since = Date.now() / 1000 - timeS;
  return since < 1
    ? "now"
    : `${since < 10 ? `${Math.round(since)} s` : duration(since).replace(/^(\d+ \w+) .*/, "$1")} ago`;
}

/** The time of day in this place, `14:03:07`. */
export function clock(timeS) {
  return isNumber(timeS) ? new Date(timeS * 1000).toTimeString().slice(0, 8) : NONE;
}

/** `2026-02-11 14:03:07`, in this place. */
export function date(timeS) {
  if (!isNumber(timeS)) return NONE;
  const moment = new Date(timeS * 1000);
  const two = (part) => String(part).padStart(2, "0");
  return `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())} ${clock(timeS)}`;
}

/** `1 group`, `3 groups`. */
export function count(num, noun) {
  return `${number(num)} ${noun}${num === 1 ? "" : "s"}`;
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

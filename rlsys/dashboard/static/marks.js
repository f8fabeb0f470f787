/** Small marks beside numbers: where a value lies among others. Each stands beside its number, never instead of it. */

import { svg } from "./dom.js";

const WIDTH = 100;
const HEIGHT = 12;

/** From the lowest to the highest of `values`, and 0: the scale of marks that are compared. Null if there are none. */
export function scaleOf(values) {
  const known = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (!known.length) return null;
  const low = Math.min(0, ...known);
  const high = Math.max(0, ...known);
  return { low, high: high === low ? low + 1 : high };
}

/** A bar from 0 to `value`. */
export function barMark(value, scale) {
  if (!scale || value === null) return null;
  const [zero, end] = [place(0, scale), place(value, scale)];
  const bar = { x: Math.min(zero, end), y: 2, width: Math.max(Math.abs(end - zero), 0.75), height: HEIGHT - 4 };
  return mark(track(), svg("rect", { ...bar, class: value < 0 ? "below" : "above" }), axis(zero));
}

/** A line from `low` to `high`, and a dot for the mean. */
export function rangeMark({ low, mean, high }, scale) {
  if (!scale || mean === null) return null;
  const [from, to, dot] = [low, high, mean].map((value) => place(value, scale));
  return mark(
    track(),
    axis(place(0, scale)),
    svg("rect", { class: "range", x: from, y: HEIGHT / 2 - 1.5, width: Math.max(to - from, 0.75), height: 3 }),
    svg("rect", { class: "above", x: dot - 1.5, y: 1, width: 3, height: HEIGHT - 2 }),
  );
}

function place(value, scale) {
  return 2 + ((value - scale.low) / (scale.high - scale.low)) * (WIDTH - 4);
}

/** All that there could be. */
function track() {
  return svg("rect", { class: "track", x: 0, y: 2, width: WIDTH, height: HEIGHT - 4 });
}

function axis(x) {
  return svg("rect", { class: "zero", x: x - 0.35, y: 0, width: 0.7, height: HEIGHT });
}

function mark(...shapes) {
  const box = `0 0 ${WIDTH} ${HEIGHT}`;
  return svg("svg", { class: "mark-bar", viewBox: box, preserveAspectRatio: "none", "aria-hidden": "true" }, shapes);
}

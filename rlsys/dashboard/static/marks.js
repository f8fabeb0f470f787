/** Small marks beside numbers: where a value lies among others. Each stands beside its number, never instead of it. */

import { number, percent } from "./format.js";
import { html } from "./html.js";

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
  const width = Math.max(Math.abs(end - zero), 0.75);
  return mark(
    html`<rect x=${Math.min(zero, end)} y="2" width=${width} height=${HEIGHT - 4} class=${value < 0 ? "below" : "above"} />${axis(zero)}`,
  );
}

/** A line from `low` to `high`, and a dot for the mean. */
export function rangeMark({ low, mean, high }, scale) {
  if (!scale || mean === null) return null;
  const [from, to, dot] = [low, high, mean].map((value) => place(value, scale));
  return mark(html`${axis(place(0, scale))}
    <rect class="range" x=${from} y=${HEIGHT / 2 - 1.5} width=${Math.max(to - from, 0.75)} height="3" />
    <rect class="above" x=${dot - 1.5} y="1" width="3" height=${HEIGHT - 2} />`);
}

/** The rewards of a group beside their mark. */
export function spread({ reward_min: low, reward_mean: mean, reward_max: high }, scale) {
  if (low === null) return null;
  return html`<span class="spread">${rangeMark({ low, mean, high }, scale)}<span class="muted">${number(low)} to ${number(high)}</span></span>`;
}

/** The score of an evaluation, never without the share of samples that it leaves out. */
export function scored({ mean, failed_frac }) {
  return html`<span><b class="num">${number(mean)}</b>${failed_frac > 0 && html` <span class="bad-text">${percent(failed_frac)} failed</span>`}</span>`;
}

/** A curve of `values` without axes, which fills its box; null if there are fewer than two. */
export function sparkline(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const y = (value) => HEIGHT - 1 - ((value - low) / (high - low || 1)) * (HEIGHT - 2);
  const points = known
    .map(
      (value, index) =>
        `${((index / (known.length - 1)) * WIDTH).toFixed(1)},${y(value).toFixed(1)}`,
    )
    .join(" ");
  return html`<svg class="spark" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true"><polyline points=${points} /></svg>`;
}

function place(value, scale) {
  return 2 + ((value - scale.low) / (scale.high - scale.low)) * (WIDTH - 4);
}

function axis(x) {
  return html`<rect class="zero" x=${x - 0.35} y="0" width="0.7" height=${HEIGHT} />`;
}

/** Shapes on a track, which is all that there could be. */
function mark(shapes) {
  return html`<svg class="mark-bar" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
    <rect class="track" x="0" y="2" width=${WIDTH} height=${HEIGHT - 4} />${shapes}</svg>`;
}

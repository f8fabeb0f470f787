/**
 * The numbers behind a chart: lines of `{ kind, xs, ys, isThinned }` as columns and rows, and what its axes show. `isThinned`: there are more points
 * than these, see `Series.num_points`. Pure logic, no page.
 */

import uPlot from "./vendor/uPlot.esm.js";

const TOLD = 3;
const DRAWN = 20;

/**
 * The columns that uPlot draws: one of x, which takes in all of `span`, then one per line; stacked ones are sums, and gaps where what they add up to,
 * a line of kind `whole`, has no value. A logarithmic axis has no place for 0 and below.
 */
export function columnsOf(lines, span = [], isLog = false) {
  if (!lines.length) return [span];
  const joined = uPlot.join([
    ...(span.length ? [[span]] : []),
    ...lines.map(({ xs, ys }) => [xs, ys]),
  ]);
  const xs = joined[0];
  const isStacked = whereStacked(lines, xs);
  let below = xs.map(() => 0);
  lines.forEach((line, index) => {
    if (line.kind !== "stack") return;
    below = filled(line, xs).map((value, at) => below[at] + value);
    joined[index + 1] = below.map((sum, at) => (isStacked[at] ? sum : null));
  });
  if (!isLog) return joined;
  return [xs, ...joined.slice(1).map((ys) => ys.map((y) => (y > 0 ? y : null)))];
}

/** The lines without bands that never move: one from 0 to 1 throughout says nothing. */
export function tellingOf(lines) {
  const isFlat = ({ ys }) => new Set(ys.filter((y) => y !== null)).size < 2;
  const bands = lines.filter(({ kind }) => kind === "band");
  return bands.length && bands.every(isFlat) ? lines.filter(({ kind }) => kind !== "band") : lines;
}

/** The lines to draw, smoothed by `weight` (0 to 1), with the raw one, of kind `raw`, behind each. */
export function drawnOf(lines, weight) {
  if (!weight) return lines;
  return lines.flatMap((line) =>
    line.kind === "line"
      ? [
          { ...line, kind: "raw" },
          { ...line, ys: smoothed(line.ys, weight) },
        ]
      : [line],
  );
}

/** Exponential moving average, without the bias of its beginning; gaps stay gaps. */
export function smoothed(ys, weight) {
  let [mean, mass] = [0, 0];
  return ys.map((y) => {
    if (y === null) return null;
    mean = weight * mean + (1 - weight) * y;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** The step behind an x: of a line that has a value there, or nearest before. Null if there is none. */
export function stepAt(lines, x) {
  let found = null;
  for (const { xs, steps = xs } of lines) {
    const index = xs.findLastIndex((one) => one <= x);
    if (x !== null && index >= 0 && (found === null || steps[index] > found)) found = steps[index];
  }
  return found;
}

/** The line nearest to a height at an x, by `top(y)`; null if none has a value there or before. */
export function nearest(lines, x, height, top) {
  const known = lines.map((line) => [line, valueAt(line, x)]).filter(([, y]) => y !== null);
  return (
    known
      .map(([line, y]) => [line, Math.abs(top(y) - height)])
      .sort(([, a], [, b]) => a - b)[0]?.[0] ?? null
  );
}

/** Rows of `rowsOf` as comma-separated values, under `x` and the names of the lines. */
export function csvOf(x, names, rows) {
  const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const head = [x, ...names].map(quoted);
  return [head, ...rows.map(([at, values]) => [at, ...values.map((value) => value ?? "")])]
    .map((row) => row.join(","))
    .join("\n");
}

/** For every one of `xs`: is there anything to stack? */
function whereStacked(lines, xs) {
  const wholes = lines.filter(({ kind }) => kind === "whole");
  const parts = wholes.length ? wholes : lines.filter(({ kind }) => kind === "stack");
  const known = new Set(
    parts.flatMap((line) => line.xs.filter((_, index) => line.ys[index] !== null)),
  );
  const [first, last] = [Math.min(...known), Math.max(...known)];
  const isThinned = parts.some((line) => line.isThinned);
  return xs.map((x) => known.has(x) || (isThinned && x >= first && x <= last));
}

/**
 * A line's values at every one of `xs`. Where it has none it was 0, as a checkpoint that was not saved took no time; of one that was thinned out it
 * lies between its neighbours.
 */
function filled({ xs, ys, isThinned }, at) {
  const known = xs.map((x, index) => [x, ys[index]]).filter(([, y]) => y !== null);
  if (!isThinned) {
    const values = new Map(known);
    return at.map((x) => values.get(x) ?? 0);
  }
  let next = 0;
  return at.map((x) => {
    while (next < known.length && known[next][0] < x) next += 1;
    const after = known[next];
    const before = known[next - 1];
    if (!after || !before || after[0] === x) return (after ?? before)?.[1] ?? 0;
    return before[1] + ((after[1] - before[1]) * (x - before[0])) / (after[0] - before[0]);
  });
}

/** A line's value at `x`; unless it must be `exact`, the last before where it has none. Null if there is none. */
export function valueAt({ xs, ys }, x, exact = false) {
  for (let place = xs.length - 1; place >= 0; place -= 1) {
    if (xs[place] > x || ys[place] === null) continue;
    return exact && xs[place] !== x ? null : ys[place];
  }
  return null;
}

/** What a legend says of a line at `x`: of a part of a sum only what it was just there. */
export function toldAt(line, x) {
  return valueAt(line, x, line.kind === "stack" && !line.isThinned);
}

/** The last x of any line. */
export function lastOf(lines) {
  return Math.max(...lines.map(({ xs }) => xs.at(-1) ?? -Infinity));
}

/** Marks with the newest first: `drawn` of them become lines, `told` in words, and `numMore` are not told. */
export function newestOf(marks) {
  const sorted = [...marks].sort((a, b) => b.x - a.x);
  const told = sorted.slice(0, TOLD);
  return { drawn: sorted.slice(0, DRAWN), told, numMore: sorted.length - told.length };
}

/** What the table under a chart shows: `[x, [value of each line]]`, by x. */
export function rowsOf(lines) {
  const rows = new Map();
  lines.forEach(({ xs, ys }, index) => {
    xs.forEach((x, at) => {
      if (!rows.has(x)) rows.set(x, new Array(lines.length).fill(null));
      rows.get(x)[index] = ys[at];
    });
  });
  return [...rows].sort(([a], [b]) => a - b);
}

/**
 * From 0 where that hides nothing, and with room above; areas that are stacked, always. Never less high than `least`, so that noise about a value is
 * not drawn as if it moved.
 */
export function rangeOf(low, high, isStacked = false, least = 0) {
  if (low === null || high === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size < least) return [low < 0 ? -least : 0, least];
  if (high - low <= size * 1e-9)
    return low === 0 ? [0, 1] : [Math.min(0, low * 1.5), Math.max(0, low * 1.5)];
  const room = Math.max((high - low) * 0.08, (least - (high - low)) / 2);
  if (isStacked) return [Math.min(low, 0), high + room];
  return [low >= 0 && (low < high * 0.6 || low < room) ? 0 : low - room, high + room];
}

/** A value beside its axis; `by` is the distance of ticks. */
export function tick(value, by) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 10_000)
    return new Intl.NumberFormat("en", { notation: "compact" }).format(value);
  if (by < 1e-4) return value.toExponential(1);
  return value.toFixed(decimalsOf(by));
}

/** As many digits as the distance of ticks has: 0.25 has two. */
function decimalsOf(by) {
  let decimals = 0;
  while (decimals < 6 && Math.abs(by * 10 ** decimals - Math.round(by * 10 ** decimals)) > 1e-6)
    decimals += 1;
  return decimals;
}

/**
 * Values sorted into at most `most` bins of round width: `[{ from, to, count }]`; the last holds its upper end as well.
 *
 * Fewer different values than bins, as rewards of 0 and 1, have a bin each, with `from` equal to `to`.
 */
export function histogramOf(values, most = 12) {
  const known = values
    .filter((value) => typeof value === "number" && Number.isFinite(value))
    .sort((a, b) => a - b);
  if (!known.length) return [];
  const different = [...new Set(known)];
  if (different.length <= most)
    return different.map((value) => ({
      from: value,
      to: value,
      count: known.filter((other) => other === value).length,
    }));
  const width = roundUp((known.at(-1) - known[0]) / most);
  const first = Math.floor(known[0] / width + 1e-9);
  const last = Math.max(Math.ceil(known.at(-1) / width - 1e-9), first + 1);
  const bins = Array.from({ length: last - first }, (_, i) => ({
    from: Number(((first + i) * width).toPrecision(12)),
    to: Number(((first + i + 1) * width).toPrecision(12)),
    count: 0,
  }));
  for (const value of known)
    bins[Math.min(Math.floor(value / width - first + 1e-9), bins.length - 1)].count += 1;
  return bins;
}

/** The next larger of 1, 2, 5 times a power of ten. */
function roundUp(width) {
  const power = 10 ** Math.floor(Math.log10(width));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= width * (1 - 1e-9));
}

/** How the line of this index looks: no two of 44 are alike. */
export function lookOf(index) {
  const dashes = [[], [7, 3], [2, 2], [9, 3, 2, 3]];
  return {
    colour: `--c${(index % 11) + 1}`,
    dash: dashes[((index % 11) + Math.floor(index / 11)) % 4],
  };
}

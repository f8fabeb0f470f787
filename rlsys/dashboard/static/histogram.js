/** How many values lie where: pure logic, no page. */

/**
 * Values sorted into at most `most` bins of round width: `[{ from, to, count }]`; the last holds its upper end as well.
 *
 * Fewer different values than bins, as rewards of 0 and 1, have a bin each, with `from` equal to `to`.
 */
export function histogramOf(values, most = 12) {
  const known = values.filter((value) => typeof value === "number" && Number.isFinite(value)).sort((a, b) => a - b);
  if (!known.length) return [];
  const different = [...new Set(known)];
  if (different.length <= most) {
    return different.map((value) => ({ from: value, to: value, count: known.filter((other) => other === value).length }));
  }
  const width = roundUp((known.at(-1) - known[0]) / most);
  const first = Math.floor(known[0] / width + 1e-9);
  const last = Math.max(Math.ceil(known.at(-1) / width - 1e-9), first + 1);
  const bins = Array.from({ length: last - first }, (_, i) => ({
    from: Number(((first + i) * width).toPrecision(12)),
    to: Number(((first + i + 1) * width).toPrecision(12)),
    count: 0,
  }));
  for (const value of known) bins[Math.min(Math.floor(value / width - first + 1e-9), bins.length - 1)].count += 1;
  return bins;
}

/** The next larger of 1, 2, 5 times a power of ten. */
function roundUp(width) {
  const power = 10 ** Math.floor(Math.log10(width));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= width * (1 - 1e-9));
}

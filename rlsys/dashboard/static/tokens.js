/**
 * Tokens coloured by what is known of each: pure logic, no page. `colouring.js` draws them.
 *
 * A reading is one number (or word) per token. Its scale sorts tokens into a few bins, so that a legend can name every colour with numbers, and
 * neighbours of one bin are one element: 10,000 tokens need a few thousand, not 10,000.
 */

/** Characters that would not be seen, or would turn the text around them: controls, and marks of direction. */
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** What tokens can be coloured by: the column of a turn, its unit, its meaning, and how values are sorted into bins. */
export const READINGS = [
  { key: "none", label: "nothing", column: null, unit: "", help: "The text alone." },
  {
    key: "logprob",
    label: "logprob",
    column: "logprobs",
    unit: "nats",
    help: "Log-probability under the sampler: the darker, the more surprising.",
    scale: { kind: "rising", edges: [-5, -2.3, -1, -0.5, -0.1, -0.01], isReversed: true },
  },
  {
    key: "ratio",
    label: "ratio",
    column: "ratios",
    unit: "",
    help: "Probability under the trainer over that under the sampler, a factor: 1 where they agree.",
    scale: { kind: "around", edges: [0.5, 0.8, 0.95, 1.05, 1.25, 2] },
  },
  {
    key: "advantage",
    label: "advantage",
    column: "advantages",
    unit: "",
    help: "What training pushes for (positive) or against (negative).",
    scale: { kind: "around", shares: [-2 / 3, -1 / 3, -0.02, 0.02, 1 / 3, 2 / 3] },
  },
  {
    key: "entropy",
    label: "entropy",
    column: "entropies",
    unit: "nats",
    help: "Of the next-token distribution before the step: the darker, the less sure.",
    scale: { kind: "rising", edges: [0.01, 0.1, 0.5, 1, 1.5, 2.5] },
  },
  {
    key: "mask",
    label: "mask",
    column: "masks",
    unit: "",
    help: "Did the token train?",
    scale: {
      kind: "named",
      names: {
        trained: "trained",
        left_out: "left out: no advantage, clipped, or masked by a correction",
        context: "context: not of the policy",
      },
    },
  },
  {
    key: "version",
    label: "version",
    column: "versions",
    unit: "",
    help: "Weights that sampled the token, in steps behind them.",
    scale: { kind: "each" },
  },
];

/** The reading of a key; colouring by nothing where there is none of that key. */
export function readingOf(key) {
  return READINGS.find((reading) => reading.key === key) ?? READINGS[0];
}

/** Is a reading known for any token of these turns? */
export function isRecorded(reading, turns) {
  return (
    !reading.column || turns.some((turn) => turn[reading.column].some((value) => value !== null))
  );
}

/**
 * The bins of a reading for an episode: `bins`, each with its CSS class, its label and the number of its tokens, and `binOf(value)`, an index of
 * them, or -1 where nothing was recorded.
 */
export function scaleOf(reading, turns) {
  const values = turns.flatMap((turn) => (reading.column ? turn[reading.column] : []));
  const scale = scaleOfValues(reading, values);
  const counts = new Array(scale.bins.length).fill(0);
  let numUnknown = 0;
  for (const value of values) {
    const bin = scale.binOf(value);
    if (bin < 0) numUnknown += 1;
    else counts[bin] += 1;
  }
  const bins = scale.bins.map((bin, i) => ({ ...bin, numTokens: counts[i] }));
  return { ...scale, bins, numUnknown };
}

function scaleOfValues(reading, values) {
  const scale = reading.scale;
  if (!scale) return { bins: [], binOf: () => -1 };
  if (scale.kind === "named") return namedScale(scale.names);
  if (scale.kind === "each") return eachScale(values);
  const edges = scale.edges ?? edgesFor(scale.shares, values);
  const numBins = edges.length + 1;
  const bins = Array.from({ length: numBins }, (_, bin) => ({
    className: `tok-${scale.kind}-${scale.isReversed ? numBins - 1 - bin : bin}`,
    label: labelOf(edges, bin),
  }));
  return {
    bins,
    binOf: (value) => (isNumber(value) ? edges.filter((edge) => value >= edge).length : -1),
  };
}

/** Edges at shares of the largest size among the values, rounded to two digits, so that the legend can be read. */
function edgesFor(shares, values) {
  const largest =
    values.reduce((most, value) => (isNumber(value) ? Math.max(most, Math.abs(value)) : most), 0) ||
    1;
  return shares.map((share) => Number((share * largest).toPrecision(2)));
}

function labelOf(edges, bin) {
  if (bin === 0) return `under ${edges[0]}`;
  if (bin === edges.length) return `${edges.at(-1)} and up`;
  return `${edges[bin - 1]} to ${edges[bin]}`;
}

function namedScale(names) {
  const keys = Object.keys(names);
  const bins = keys.map((key) => ({
    className: `tok-mask-${key.replace("_", "-")}`,
    label: names[key],
  }));
  return { bins, binOf: (value) => keys.indexOf(value) };
}

/** A bin for each value there is; colours repeat after eight, neighbours always differ. */
function eachScale(values) {
  const all = [...new Set(values.filter(isNumber))].sort((a, b) => a - b);
  const indices = new Map(all.map((value, index) => [value, index]));
  const bins = all.map((value, index) => ({
    className: `tok-each-${index % 8}`,
    label: `version ${value}`,
  }));
  return { bins, binOf: (value) => indices.get(value) ?? -1 };
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

/** Neighbouring tokens of one bin joined: `[{ bin, start, end, text }]`, tokens `start` up to `end`. Columns may be empty; then all is one run of bin -1. */
export function runsOf(shown, values, binOf) {
  const runs = [];
  shown.forEach((text, index) => {
    const bin = binOf(values[index] ?? null);
    const last = runs.at(-1);
    if (last && last.bin === bin) {
      last.end = index + 1;
      last.parts.push(text);
    } else {
      runs.push({ bin, start: index, end: index + 1, parts: [text] });
    }
  });
  return runs.map(({ bin, start, end, parts }) => ({ bin, start, end, text: parts.join("") }));
}

/** Where each token begins in the text shown, in UTF-16 units as the page counts them; one entry more, the end. */
export function offsetsOf(shown) {
  const offsets = new Uint32Array(shown.length + 1);
  shown.forEach((text, index) => {
    offsets[index + 1] = offsets[index] + text.length;
  });
  return offsets;
}

/** The token that holds a place in the text: the last that begins at or before it, and is not empty. */
export function tokenAt(offsets, place) {
  let low = 0;
  let high = offsets.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (offsets[middle] <= place) low = middle;
    else high = middle;
  }
  return low;
}

/** A text in which nothing is hidden: a control character as its picture, a mark of direction by its number. */
export function visible(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code === 0x7f) return "\u2421";
    return code < 0x20
      ? String.fromCodePoint(0x2400 + code)
      : `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** Characters of one token that are shown: no real one has as many, but what a model wrote may claim so. */
const TOKEN_SHOWN = 1000;

/** A token as it is shown where tokens matter: line ends are seen as well. */
export function visibleToken(piece) {
  const rest = piece.length - TOKEN_SHOWN;
  const shown = visible(piece.slice(0, TOKEN_SHOWN)).replaceAll("\n", "↵\n");
  return rest > 0 ? `${shown}… (${rest} more characters)` : shown;
}

/**
 * Swim-lanes: the window of time they show, its ticks, and the shapes of their spans. Pure logic, no page.
 *
 * Times are Unix seconds. A window is `{ from, to }`, and lies within `{ from, to }` of the whole run.
 */

/** The shortest time that can be looked at, seconds. */
export const LEAST_S = 0.2;

/** Seconds between two ticks of an axis of time. */
export const STEPS_S = [
  0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  14400, 43200, 86400,
];

/** A window moved and cut so that it lies within the run. */
export function clamped(window, run) {
  const whole = Math.max(run.to - run.from, LEAST_S);
  const length = Math.min(Math.max(window.to - window.from, LEAST_S), whole);
  const from = Math.min(Math.max(window.from, run.from), run.from + whole - length);
  return { from, to: from + length };
}

/** Look closer (`factor` above 1) or from further off, about the moment `at`, or about the middle. */
export function zoomed(window, factor, run, at = (window.from + window.to) / 2) {
  const length = (window.to - window.from) / factor;
  const share = (at - window.from) / (window.to - window.from);
  return clamped({ from: at - share * length, to: at + (1 - share) * length }, run);
}

/** Look at what came later (`share` above 0) or before, by a share of what is shown. */
export function panned(window, share, run) {
  const move = (window.to - window.from) * share;
  return clamped({ from: window.from + move, to: window.to + move }, run);
}

/** What was dragged over, as a window; null if it was a click. Places are shares of the width. */
export function dragged(window, begin, end, run) {
  const [low, high] = begin < end ? [begin, end] : [end, begin];
  if (high - low < 0.01) return null;
  const length = window.to - window.from;
  return clamped({ from: window.from + low * length, to: window.from + high * length }, run);
}

/** Round moments of a window, at most `most`: `[{ share, label }]`, counted from the beginning of the run. */
export function ticksOf(window, origin, most) {
  const length = window.to - window.from;
  const step =
    STEPS_S.find((candidate) => length / candidate <= most) ??
    STEPS_S.at(-1) * Math.ceil(length / most / STEPS_S.at(-1));
  const first = Math.ceil((window.from - origin) / step);
  const last = Math.floor((window.to - origin) / step + 1e-9);
  return Array.from({ length: Math.max(last - first + 1, 0) }, (_, i) => {
    const at = (first + i) * step;
    return { share: (origin + at - window.from) / length, label: sinceBegin(at, step) };
  });
}

/** Seconds since a run began as `h:mm:ss` or `m:ss`, with as many decimals as steps of `step_s` need. */
export function sinceBegin(seconds, step_s = 1) {
  const decimals = step_s >= 1 ? 0 : step_s >= 0.1 ? 1 : 2;
  const rounded = Number(Math.abs(seconds).toFixed(decimals));
  const hours = Math.floor(rounded / 3600);
  const minutes = Math.floor((rounded % 3600) / 60);
  const rest = (rounded % 60).toFixed(decimals).padStart(decimals ? decimals + 3 : 2, "0");
  const clock = hours
    ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}`
    : `${minutes}:${rest}`;
  return seconds < 0 && rounded ? `-${clock}` : clock;
}

/**
 * What a worker can do, in the order it is drawn: a colour, and a height with a place, so that none is told apart by colour alone, and no two share
 * one. `top` and `height` are shares of the lane.
 */
export const ACTIVITIES = {
  generating: { colour: "--c1", top: 0, height: 1, help: "a replica played a group" },
  evaluating: {
    colour: "--c4",
    top: 0,
    height: 1,
    help: "a replica of the evaluation lane played a group",
  },
  scoring: { colour: "--c3", top: 0, height: 1, help: "a reward worker scored a group" },
  annotating: { colour: "--c6", top: 0, height: 1, help: "an annotator added a column to groups" },
  training: { colour: "--c2", top: 0, height: 1, help: "the actor or the critic took its step" },
  fetching: {
    colour: "--c7",
    top: 0.5,
    height: 0.5,
    help: "the trainer's ranks fetched the data of a step",
  },
  preparing: {
    colour: "--c8",
    top: 0,
    height: 0.5,
    help: "columns were made that need the whole step",
  },
  saving: { colour: "--c9", top: 0, height: 0.5, help: "a checkpoint was written" },
  recording: {
    colour: "--c10",
    top: 0,
    height: 0.5,
    help: "the actor wrote the rollouts of a step for people",
  },
  publishing: { colour: "--c5", top: 0.5, height: 0.5, help: "the actor handed its weights over" },
  pulling: { colour: "--c11", top: 0.5, height: 0.5, help: "a replica took in new weights" },
};

/** How an activity looks; one that this page does not know is grey. */
export function shapeOf(activity) {
  return ACTIVITIES[activity] ?? { colour: "--c7", top: 0.25, height: 0.5, help: "" };
}

/**
 * The spans of a lane as one SVG path for each activity, `width` by `height` pixels: `[{ activity, path }]`.
 *
 * A lane of a thousand spans is then as many elements as it has activities. Nothing is thinner than a pixel.
 */
export function pathsOf(spans, window, width, height) {
  const perSecond = width / (window.to - window.from);
  const paths = new Map(Object.keys(ACTIVITIES).map((activity) => [activity, ""]));
  for (const span of spans) {
    const left = Math.max((span.start_s - window.from) * perSecond, 0);
    const right = Math.min((span.end_s - window.from) * perSecond, width);
    if (right < left) continue;
    const shape = shapeOf(span.activity);
    const wide = Math.max(right - left, 1).toFixed(1);
    const path = `M${left.toFixed(1)} ${shape.top * height}h${wide}v${shape.height * height}h-${wide}z`;
    paths.set(span.activity, (paths.get(span.activity) ?? "") + path);
  }
  return [...paths].filter(([, path]) => path).map(([activity, path]) => ({ activity, path }));
}

/** The span at a moment, the shortest if several overlap, within `slack_s` of it; null if the worker was idle. */
export function spanAt(spans, moment, slack_s = 0) {
  let best = null;
  for (const span of spans) {
    if (span.start_s - slack_s > moment || span.end_s + slack_s < moment) continue;
    if (!best || span.end_s - span.start_s < best.end_s - best.start_s) best = span;
  }
  return best;
}

/**
 * Which metrics belong together on a chart. Names are those of `rlsys/monitoring/metric_catalog.py`, which also gives units and meanings; one that
 * ends in `*` stands for all that begin so and fit `only`. A chart of which a run has nothing is left out, and one that `isQuiet` also where it is 0
 * throughout, as is a part of a stack. `least`: a height of the axis, in units, below which all is noise.
 */

export const FAMILIES = [
  {
    heading: "Reward and evaluation",
    charts: [
      {
        id: "reward",
        title: "Reward",
        noun: "reward",
        note: "Of the episodes trained in each step.",
        lines: [
          { name: "reward/min", label: "lowest", kind: "band", colour: "--c1" },
          { name: "reward/max", label: "highest", kind: "band", colour: "--c1" },
          { name: "reward/mean", label: "mean", colour: "--c1", dash: [] },
        ],
      },
      {
        id: "evaluation",
        title: "Evaluation",
        noun: "score",
        lines: [{ name: "eval/*", only: /^eval\/(.+\/(mean|pass@\d+))$/, kind: "points" }],
      },
      {
        id: "reward-by",
        title: "Reward by function",
        noun: "reward",
        lines: [{ name: "reward/by/*", only: /^reward\/by\/(.+)$/ }],
      },
    ],
  },
  {
    heading: "Policy",
    charts: [
      {
        id: "entropy",
        least: 0.01,
        title: "Entropy",
        note: "Near 0 the policy has stopped exploring.",
        lines: [{ name: "policy/entropy", label: "policy" }],
      },
      {
        id: "kl",
        least: 0.001,
        title: "KL to the reference",
        lines: [{ name: "policy/kl_ref", label: "policy" }],
      },
      {
        id: "mismatch",
        least: 0.001,
        title: "Trainer against engine",
        note: "KL between what sampled and what trains; 0 if they agree.",
        lines: [{ name: "sampler/mismatch_kl", label: "KL" }],
      },
      {
        id: "ratio",
        least: 0.01,
        title: "Ratio tails",
        noun: "ratio",
        note: "Probability of tokens, trainer over engine; 1 if they agree.",
        lines: [
          { name: "sampler/ratio_p99", label: "99th percentile" },
          { name: "sampler/ratio_p50", label: "median" },
          { name: "sampler/ratio_p01", label: "1st percentile" },
        ],
      },
      {
        id: "clip",
        least: 0.001,
        title: "Clipped tokens",
        lines: [
          { name: "policy/clip_frac_low", label: "low" },
          { name: "policy/clip_frac_high", label: "high" },
          { name: "policy/clip_frac_dual", label: "dual" },
        ],
      },
      {
        id: "loss",
        least: 0.0001,
        title: "Loss",
        noun: "loss",
        lines: [{ name: "loss", label: "policy" }],
      },
    ],
  },
  {
    heading: "Groups and episodes",
    charts: [
      {
        id: "lengths",
        title: "Length of trajectories",
        lines: [
          { name: "completions/length_mean", label: "mean" },
          { name: "completions/length_p90", label: "90th percentile" },
          { name: "completions/length_max", label: "longest" },
          { name: "completions/offered_length_mean", label: "mean rolled out" },
        ],
      },
      {
        id: "truncation",
        least: 0.01,
        title: "Cut at the token limit",
        lines: [{ name: "completions/truncated_frac", label: "trajectories" }],
      },
      {
        id: "zero-std",
        least: 0.01,
        title: "Groups with equal rewards",
        note: "They teach nothing to an algorithm that compares.",
        lines: [
          { name: "group/frac_zero_std", label: "groups" },
          { name: "reward/failed_frac", label: "failed episodes" },
        ],
      },
      {
        id: "agents",
        title: "Tool calls",
        isQuiet: true,
        lines: [{ name: "agents/tool_calls", label: "in an episode" }],
      },
    ],
  },
  {
    heading: "Optimiser",
    charts: [
      {
        id: "grad-norm",
        title: "Gradient norm",
        noun: "norm",
        lines: [{ name: "optim/grad_norm", label: "before clipping" }],
      },
      {
        id: "cosine",
        least: 0.01,
        title: "Gradient alignment",
        noun: "cosine",
        note: "With the gradient before; far from 0, updates repeat or undo each other.",
        lines: [
          { name: "gac/cosine", label: "as it came" },
          { name: "gac/cosine_after", label: "as it went on" },
        ],
      },
      {
        id: "critic-loss",
        title: "Critic's loss",
        isQuiet: true,
        noun: "loss",
        lines: [{ name: "critic/loss", label: "critic" }],
      },
      {
        id: "explained",
        title: "Critic's explained variance",
        isQuiet: true,
        lines: [{ name: "critic/explained_variance", label: "of returns" }],
      },
      {
        id: "lr",
        title: "Learning rate",
        noun: "rate",
        lines: [
          { name: "optim/lr", label: "policy" },
          { name: "critic/lr", label: "critic" },
        ],
      },
    ],
  },
  {
    heading: "Freshness",
    charts: [
      {
        id: "staleness",
        title: "Staleness",
        note: "Of the tokens trained; never above the bound.",
        lines: [
          { name: "async/staleness_max", label: "largest" },
          { name: "async/staleness_mean", label: "mean" },
        ],
      },
      {
        id: "dropped",
        title: "Dropped groups",
        note: "Since the run began.",
        lines: [
          { name: "async/dropped", label: "all" },
          { name: "async/dropped_stale", label: "too stale" },
        ],
      },
      {
        id: "queue",
        title: "Waiting to be trained",
        isQuiet: true,
        lines: [{ name: "async/queue_depth", label: "groups" }],
      },
    ],
  },
  {
    heading: "Time",
    id: "time",
    charts: [
      {
        id: "trainer-time",
        title: "Where the trainer's time goes",
        note: "Stacked; the blank rest up to a step's time is overhead.",
        lines: [
          { name: "time/wait_batch", label: "waits for groups", kind: "stack", colour: "--c7" },
          { name: "time/fetch", label: "fetches", kind: "stack", colour: "--c6" },
          { name: "time/columns", label: "prepares", kind: "stack", colour: "--c5" },
          { name: "time/train", label: "trains", kind: "stack", colour: "--c1" },
          { name: "time/publish", label: "publishes", kind: "stack", colour: "--c3" },
          { name: "time/record", label: "writes rollouts", kind: "stack", colour: "--c2" },
          { name: "time/checkpoint", label: "saves", kind: "stack", colour: "--c4" },
          { name: "time/eval_wait", label: "waits for evaluation", kind: "stack", colour: "--c8" },
          { name: "time/step", label: "whole step", kind: "whole", colour: "--text", dash: [2, 2] },
        ],
      },
      {
        id: "others-time",
        title: "What goes on beside the trainer",
        note: "The busiest worker of each kind.",
        lines: [
          { name: "time/rollout", label: "rolls out" },
          { name: "time/reward", label: "judges" },
          { name: "time/annotate", label: "annotates" },
          { name: "time/weights_wait", label: "waits for weights" },
          { name: "time/wait_permit", label: "rollouts wait for the trainer" },
        ],
      },
      { id: "tokens", title: "Speed", lines: [{ name: "perf/tokens_per_s", label: "trained" }] },
    ],
  },
];

/** Every name that the families ask for. */
export const NAMES = [
  ...new Set(
    FAMILIES.flatMap(({ charts }) => charts.flatMap(({ lines }) => lines.map(({ name }) => name))),
  ),
];

/** A chart's lines for `Chart.show`, of what a run has: `series` of a SeriesAnswer. */
export function linesOf(chart, series) {
  const lines = chart.lines.flatMap((line) =>
    series
      .filter(({ name }) => fits(line, name))
      .map((found) => ({
        ...line,
        label: line.label ?? found.name.match(line.only)[1],
        title: found.help,
        name: found.name,
        unit: found.unit,
        help: found.help,
        xs: found.xs ?? found.steps,
        ys: found.values,
        steps: found.steps,
        isThinned: found.num_points > found.steps.length,
      })),
  );
  const isZero = ({ ys }) => ys.every((y) => !y);
  if (chart.isQuiet && lines.every(isZero)) return [];
  return lines.filter((line) => line.kind !== "stack" || !isZero(line));
}

function fits({ name, only }, found) {
  return only ? only.test(found) : name === found;
}

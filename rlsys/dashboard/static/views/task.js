/** One task over time: is it being learned? */

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { badge, empty } from "../components.js";
import { tableView } from "../datatable.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { go, link } from "../router.js";
import { groupCells } from "./groups.js";

export const title = "Task";

const REWARD = "Mean, lowest and highest reward of the groups of it that a step trained";
const MOST = 1000; // groups that fit into a question
const KIND = { trained: null, dropped: "warn", lost: "warn" };

export async function render(root, place, context) {
  const task = place.query.get("task") ?? "";
  let answer = null;
  return tableView(root, place, context, {
    ...groupCells(() => answer.points, {
      state: (state, { reason }) => html`${badge(state.replace("_", " "), KIND[state])} ${reason}`,
    }),
    fixed: () =>
      `group_id in (${answer.points
        .slice(-MOST)
        .map(({ group_id }) => group_id)
        .join(", ")})`,
    usual: { show: "group_id, step, state, reason, reward, reward_min, episodes, length" },
    load: async () => {
      answer = await get("task", { run: place.run, task }, context.signal);
    },
    head: () => html`${head(place.run, answer)}${charts(place.run, answer)}`,
    none: () => empty("This task was not rolled out yet.", "It appears here with its first group."),
  });
}

function charts(run, { points }) {
  const trained = byStep(points);
  const line = (label, field, kind) => ({
    label,
    kind,
    xs: trained.map(({ step }) => step),
    ys: trained.map((point) => point[field]),
    colour: "--c1",
    dash: [],
  });
  const rewards = [
    line("lowest", "reward_min", "band"),
    line("highest", "reward_max", "band"),
    line("mean", "reward_mean", "line"),
  ];
  const pick = (step) => go(link("groups", run, { step }));
  return (
    trained.length > 0 &&
    html`<h2 key="h-charts" class="visually-hidden">Over the steps</h2><div key="charts" class="charts">
    <${Chart} id="task-reward" title="Reward" noun="reward" help=${REWARD} lines=${rewards} pick=${pick} />
    <${Chart} id="task-length" title="Length" unit="tokens" help="Tokens sampled in an episode, mean" lines=${[line("mean", "length_mean", "line")]} pick=${pick} /></div>`
  );
}

/**
 * What a chart shows of the points of a TaskAnswer: one for every step that trained the task, in their order. Of several groups in one step the mean,
 * the lowest and the highest of all their episodes.
 */
export function byStep(points) {
  const steps = new Map();
  for (const point of points) {
    if (point.step === null || point.reward_mean === null) continue;
    steps.set(point.step, [...(steps.get(point.step) ?? []), point]);
  }
  const sorted = [...steps].sort(([a], [b]) => a - b);
  return sorted.map(([step, groups]) => ({
    step,
    reward_min: Math.min(...groups.map((group) => group.reward_min)),
    reward_max: Math.max(...groups.map((group) => group.reward_max)),
    reward_mean: meanOf(groups, "reward_mean"),
    length_mean: meanOf(groups, "length_mean"),
  }));
}

/** Of groups, by their episodes; null if none tells it. */
function meanOf(groups, field) {
  const told = groups.filter((group) => group[field] !== null);
  const num = told.reduce((sum, group) => sum + group.num_episodes, 0);
  return num ? told.reduce((sum, group) => sum + group[field] * group.num_episodes, 0) / num : null;
}

function head(run, answer) {
  const num = { trained: 0, pending: 0, dropped: 0 };
  for (const { fate } of answer.points) num[fate] += 1;
  return html`<div key="head" class="head"><h1 data-testid="title">Task ${answer.task_id}</h1>
    <span class="muted">rolled out ${count(answer.points.length, "time")}: ${num.trained} trained, ${num.pending} pending, ${num.dropped} dropped</span>
    <span class="space"></span><a class="button" href=${link("tasks", run)} data-testid="to-tasks">All tasks</a></div>`;
}

/** One task over time: is it being learned? */

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { Table, badge, empty, rollout } from "../components.js";
import { count, number } from "../format.js";
import { html, update } from "../html.js";
import { scaleOf, spread } from "../marks.js";
import { go, link } from "../router.js";

export const title = "Task";

const REWARD = "Mean, lowest and highest reward of the groups of it that a step trained";

export async function render(root, place, { signal }) {
  const task = place.query.get("task") ?? "";
  const pick = (step) => go(link("groups", place.run, { step }));

  async function load() {
    const answer = await get("task", { run: place.run, task }, signal);
    const trained = byStep(answer.points);
    const xs = trained.map((point) => point.step);
    const line = (label, field, kind) => ({ label, kind, xs, ys: trained.map((point) => point[field]), colour: "--c1", dash: [] });
    const rewards = [line("lowest", "reward_min", "band"), line("highest", "reward_max", "band"), line("mean", "reward_mean", "line")];
    update(
      root,
      html`${head(place.run, answer)}
      ${trained.length > 0 && html`<h2 class="visually-hidden">Over the steps</h2><div key="charts" class="charts">
        <${Chart} id="task-reward" title="Reward" noun="reward" help=${REWARD} lines=${rewards} pick=${pick} />
        <${Chart} id="task-length" title="Length" unit="tokens" help="Tokens sampled in an episode, mean" lines=${[line("mean", "length_mean", "line")]} pick=${pick} /></div>`}
      ${answer.points.length ? history(place.run, answer) : empty("This task was not rolled out yet.", "It appears here with its first group.")}`,
    );
  }
  await load();
  return load;
}

/**
 * What a chart shows of the points of a TaskAnswer: one for every step that trained the task, in their order. Of several
 * groups in one step the mean, the lowest and the highest of all their episodes.
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

function history(run, answer) {
  const scale = scaleOf(answer.points.flatMap((point) => [point.reward_min, point.reward_max]));
  const columns = [
    { label: "Group", isHead: true, cell: (point) => group(run, point) },
    { label: "Trained by step", isNumber: true, cell: (point) => number(point.step) },
    { label: "", cell: fate },
    { label: "Mean reward", isNumber: true, cell: (point) => number(point.reward_mean) },
    { label: "Lowest to highest", cell: (point) => spread(point, scale) },
    { label: "Episodes", isNumber: true, cell: (point) => number(point.num_episodes) },
    { label: "Length (tokens)", isNumber: true, cell: (point) => number(point.length_mean) },
  ];
  return html`<section key="history"><h2>Every time, newest first</h2>
    <${Table} columns=${columns} rows=${[...answer.points].reverse()} id="points" keyOf=${(point) => point.group_id} /></section>`;
}

function group(run, { group_id, step, has_rollouts }) {
  const name = `group ${group_id}`;
  if (!has_rollouts) return html`<span title="Its texts were not written, or it was not trained">${name}</span>`;
  return html`<a href=${rollout(run, { step, group_id })} data-row data-testid="group-link">${name}</a>`;
}

function fate(point) {
  if (point.fate === "trained") return "trained";
  return point.fate === "pending" ? badge("pending") : html`${badge("dropped", "warn")}${point.reason && ` ${point.reason}`}`;
}

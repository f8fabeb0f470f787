/** One task over time: is it being learned? */

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { h, update } from "../dom.js";
import { count, number } from "../format.js";
import { rangeMark, scaleOf } from "../marks.js";
import { rollout } from "../paging.js";
import { badge, empty, table } from "../parts.js";
import { link } from "../router.js";

export const title = "Task";

export async function render(root, place, { signal }) {
  const task = place.query.get("task") ?? "";
  const reward = new Chart({
    id: "task-reward", title: "Reward", noun: "reward", help: "Mean, lowest and highest reward of the groups of it that a step trained", signal,
  });
  const length = new Chart({ id: "task-length", title: "Length", unit: "tokens", help: "Tokens sampled in an episode, mean", signal });
  const charts = h("div", { key: "charts", class: "charts" }, reward.element, length.element);

  async function load() {
    const answer = await get("task", { run: place.run, task }, signal);
    const trained = byStep(answer.points);
    update(root, head(place.run, answer), trained.length ? charts : null,
      answer.points.length ? history(place.run, answer) : empty("This task was not rolled out yet.", "It appears here with its first group."));
    const xs = trained.map((point) => point.step);
    const line = (label, field, kind) => ({ label, kind, xs, ys: trained.map((point) => point[field]) });
    reward.show([
      { ...line("lowest", "reward_min", "band"), colour: "--c1" },
      { ...line("highest", "reward_max", "band"), colour: "--c1" },
      { ...line("mean", "reward_mean", "line"), colour: "--c1", dash: [] },
    ]);
    length.show([line("mean", "length_mean", "line")]);
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
  answer.points.forEach((point) => (num[point.fate] += 1));
  return h("div", { key: "head", class: "head" },
    h("h1", { "data-testid": "title" }, "Task ", answer.task_id),
    h("span", { class: "muted" }, `rolled out ${count(answer.points.length, "time")}: ${num.trained} trained, ${num.pending} pending, ${num.dropped} dropped`),
    h("span", { class: "space" }),
    h("a", { class: "button", href: link("tasks", run), "data-testid": "to-tasks" }, "All tasks"));
}

function history(run, answer) {
  const scale = scaleOf(answer.points.flatMap((point) => [point.reward_min, point.reward_max]));
  const columns = [
    { label: "Group", isHead: true, cell: (point) => group(run, point) },
    { label: "Trained by step", isNumber: true, cell: (point) => number(point.step) },
    { label: "", cell: fate },
    { label: "Mean reward", isNumber: true, cell: (point) => number(point.reward_mean) },
    { label: "Lowest to highest", cell: (point) => (point.reward_min === null ? null : h("span", { class: "spread" },
      rangeMark({ low: point.reward_min, mean: point.reward_mean, high: point.reward_max }, scale),
      h("span", { class: "muted" }, `${number(point.reward_min)} to ${number(point.reward_max)}`))) },
    { label: "Episodes", isNumber: true, cell: (point) => number(point.num_episodes) },
    { label: "Length (tokens)", isNumber: true, cell: (point) => number(point.length_mean) },
  ];
  return h("section", { key: "history" }, h("h2", null, "Every time, newest first"),
    table(columns, [...answer.points].reverse(), { id: "points", key: (point) => point.group_id }));
}

function group(run, point) {
  const name = `group ${point.group_id}`;
  if (!point.has_rollouts) return h("span", { title: "Its texts were not written, or it was not trained" }, name);
  return h("a", { href: rollout(run, { step: point.step, group_id: point.group_id }), "data-row": true, "data-testid": "group-link" }, name);
}

function fate(point) {
  if (point.fate === "trained") return "trained";
  return point.fate === "pending" ? badge("pending") : [badge("dropped", "warn"), point.reason && ` ${point.reason}`];
}

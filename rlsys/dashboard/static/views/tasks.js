/** The tasks of a run, hardest first, and how the reward of each has moved. */

import { empty, untold } from "../components.js";
import { tableView } from "../datatable.js";
import { NONE, number } from "../format.js";

export const title = "Tasks";

const unlessNone = (num) => (num === 0 ? "" : null);
const OPTIONS = {
  table: "tasks",
  noun: "task",
  usual: { order: "reward" },
  labels: { reward_before: "reward before", reward_after: "reward after" },
  cells: {
    failed: unlessNone,
    truncated: unlessNone,
    change: (by) =>
      by === null ? NONE : by > 0 ? `▲ +${number(by)}` : by < 0 ? `▼ ${number(by)}` : "0",
  },
  none: (run) =>
    untold(run) ??
    empty(
      "No task has been trained yet.",
      "Tasks appear with the first step that trains a group of them.",
    ),
};

export const render = (root, place, context) => tableView(root, place, context, OPTIONS);

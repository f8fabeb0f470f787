/** All tasks of a run, and how the reward of each has moved. */

import { get } from "../api.js";
import { h, update } from "../dom.js";
import { NONE, number } from "../format.js";
import { pages, searchField } from "../paging.js";
import { empty, table, untold } from "../parts.js";
import { go, link } from "../router.js";

export const title = "Tasks";

const PAGE_SIZE = 50;

export async function render(root, place, { signal, run }) {
  const asked = { q: place.query.get("q"), page: place.query.get("page") };
  const to = (changes) => link("tasks", place.run, { ...asked, page: null, ...changes });

  async function load(now) {
    const answer = await get("tasks", { run: place.run, ...asked }, signal);
    const noun = answer.num_tasks === 1 ? "task" : "tasks";
    update(root,
      h("div", { key: "head", class: "head" }, h("h1", { "data-testid": "title" }, `${number(answer.num_tasks)} ${noun}`),
        h("span", { class: "space" }), searchField("Find a task by its id", asked.q ?? "", (q) => to({ q }), go)),
      answer.tasks.length ? taskTable(place.run, answer) : (untold(now) ?? nothing(asked, to)),
      pages({ page: answer.page, size: PAGE_SIZE, num: answer.num_tasks, noun: "tasks" }, (page) => to({ page })));
  }
  await load(run);
  return load;
}

function taskTable(run, answer) {
  const columns = [
    { label: "Task", isHead: true, cell: (task) => h("a", { href: link("task", run, { task: task.task_id }), "data-row": true, "data-testid": "task-link" }, task.task_id) },
    { label: "Times rolled out", isNumber: true, cell: (task) => number(task.num_groups) },
    { label: "First mean reward", isNumber: true, cell: (task) => number(task.first_reward) },
    { label: "Last mean reward", isNumber: true, cell: (task) => number(task.last_reward) },
    { label: "Change", isNumber: true, title: "Last less first mean reward", cell: change },
    { label: "Last trained by step", isNumber: true, cell: (task) => number(task.last_step) },
  ];
  return table(columns, answer.tasks, { id: "tasks", key: (task) => task.task_id });
}

function change(task) {
  if (task.first_reward === null || task.last_reward === null) return NONE;
  const by = task.last_reward - task.first_reward;
  return by > 0 ? `▲ +${number(by)}` : by < 0 ? `▼ ${number(by)}` : "0";
}

function nothing(asked, to) {
  if (!asked.q) return empty("No task has been rolled out yet.", "Tasks appear with the first group that is issued.");
  return empty(`No task has an id that contains “${asked.q}”.`, h("a", { href: to({ q: null }) }, "Show all tasks"));
}

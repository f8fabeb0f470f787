/** All tasks of a run, and how the reward of each has moved. */

import { get } from "../api.js";
import { Table, empty, pages, searchField, sorted, untold } from "../components.js";
import { NONE, count, number } from "../format.js";
import { html, update } from "../html.js";
import { link, note } from "../router.js";

export const title = "Tasks";

const PAGE_SIZE = 50;

export async function render(root, place, { signal, run }) {
  const asked = { q: place.query.get("q"), page: place.query.get("page") };
  const to = (changes) => link("tasks", place.run, { ...asked, sort, page: null, ...changes });
  const columns = columnsOf(place.run);
  let sort = place.query.get("sort");
  let answer = null;

  async function load(now) {
    run = now;
    answer = await get("tasks", { run: place.run, ...asked }, signal);
    draw();
  }
  function draw() {
    const rows = sorted(answer.tasks, columns, sort);
    update(
      root,
      html`<div key="head" class="head"><h1 data-testid="title">${count(answer.num_tasks, "task")}</h1>
        <span class="space"></span>${searchField("Find a task by its id", asked.q ?? "", (q) => to({ q }))}</div>
      ${rows.length ? html`<${Table} columns=${columns} rows=${rows} id="tasks" keyOf=${({ task_id }) => task_id} sort=${sort} onSort=${sortBy} />` : (untold(run) ?? nothing(asked, to))}
      ${pages({ page: answer.page, size: PAGE_SIZE, num: answer.num_tasks, noun: "tasks" }, (page) => to({ page }))}`,
    );
  }
  function sortBy(by) {
    sort = by;
    note(to({ page: asked.page }));
    draw();
  }
  await load(run);
  return load;
}

function columnsOf(run) {
  const field = (name) => ({ value: (task) => task[name], cell: (task) => number(task[name]), isNumber: true });
  const moved = ({ first_reward, last_reward }) => (first_reward === null || last_reward === null ? null : last_reward - first_reward);
  return [
    { label: "Task", isHead: true, value: ({ task_id }) => task_id, cell: ({ task_id }) => html`<a href=${link("task", run, { task: task_id })} data-row data-testid="task-link">${task_id}</a>` },
    { label: "Times rolled out", ...field("num_groups") },
    { label: "First mean reward", ...field("first_reward") },
    { label: "Last mean reward", ...field("last_reward") },
    { label: "Change", isNumber: true, title: "Last less first mean reward", value: moved, cell: (task) => change(moved(task)) },
    { label: "Last trained by step", ...field("last_step") },
  ];
}

function change(by) {
  if (by === null) return NONE;
  return by > 0 ? `▲ +${number(by)}` : by < 0 ? `▼ ${number(by)}` : "0";
}

function nothing(asked, to) {
  if (!asked.q) return empty("No task has been rolled out yet.", "Tasks appear with the first group that is issued.");
  return empty(`No task has an id that contains “${asked.q}”.`, html`<a href=${to({ q: null })}>Show all tasks</a>`);
}

/** Every evaluation of a run, with what failed; the samples of one open like training episodes. */

import { get } from "../api.js";
import { Table, badge, empty, pages, rollout, sorted } from "../components.js";
import { count, duration, number, percent } from "../format.js";
import { html, update } from "../html.js";
import { link, note } from "../router.js";

export const title = "Evaluations";

const PAGE_SIZE = 50;

export async function render(root, place, { signal }) {
  const { run, query } = place;
  const [dataset, step] = [query.get("dataset"), query.get("step")];
  let sort = query.get("sort");

  async function load() {
    if (dataset !== null && step !== null) return one(await get("evaluation", { run, dataset, step, page: query.get("page") }, signal));
    const { evaluations } = await get("evaluations", { run }, signal);
    const columns = columnsOf(run, [...new Set(evaluations.flatMap(({ scores }) => Object.keys(scores)))]);
    const sortBy = (by) => {
      sort = by;
      note(link("evaluations", run, { sort }));
      load();
    };
    update(
      root,
      html`<h1 data-testid="title">${count(evaluations.length, "evaluation")}</h1>
      ${evaluations.length
        ? html`<${Table} columns=${columns} rows=${sorted(evaluations, columns, sort)} id="evaluations" keyOf=${(row) => `${row.dataset} ${row.step}`} sort=${sort} onSort=${sortBy} />`
        : empty("No evaluation is done yet.", "Set eval.data and eval.every in the configuration.")}`,
    );
  }

  function one(answer) {
    const to = (page) => link("evaluations", run, { dataset, step, sort, page });
    const columns = tasksOf(run, answer);
    const sortBy = (by) => {
      sort = by;
      note(to(query.get("page")));
      one(answer);
    };
    update(
      root,
      html`<div class="head"><h1 data-testid="title">${answer.dataset}, step ${answer.step}</h1><span class="space"></span>
        <a class="button" href=${link("evaluations", run)}>All evaluations</a></div>
      <${Table} columns=${columns} rows=${sorted(answer.groups, columns, sort)} id="evaluated" keyOf=${({ group_id }) => group_id} sort=${sort} onSort=${sortBy} />
      ${pages({ page: answer.page, size: PAGE_SIZE, num: answer.num_groups, noun: "tasks" }, to)}`,
    );
  }

  await load();
  return load;
}

function columnsOf(run, measures) {
  const share = /_frac$|^pass@/;
  return [
    { label: "Evaluation", isHead: true, value: ({ step }) => step, cell: (row) => named(run, row) },
    ...measures.map((name) => ({ label: name, isNumber: true, value: ({ scores }) => scores[name], cell: ({ scores }) => (share.test(name) ? percent(scores[name]) : number(scores[name])) })),
    { label: "Took", isNumber: true, value: ({ seconds }) => seconds, cell: ({ seconds }) => duration(seconds) },
    { label: "Why samples failed", isText: true, cell: ({ failures }) => reasons(failures) },
  ];
}

function named(run, { dataset, step, has_samples }) {
  const name = `${dataset}, step ${step}`;
  return has_samples ? html`<a href=${link("evaluations", run, { dataset, step })} data-row data-testid="evaluation-link">${name}</a>` : html`<span title="Its samples were not written">${name}</span>`;
}

function reasons(failures) {
  const all = Object.entries(failures).sort(([, a], [, b]) => b - a);
  return all.length ? html`<ul class="reasons">${all.map(([reason, num]) => html`<li>${badge(number(num), "bad")} ${reason}</li>`)}</ul>` : null;
}

function tasksOf(run, { dataset, step }) {
  const field = (name) => ({ value: (group) => group[name], cell: (group) => number(group[name]), isNumber: true });
  const href = (group_id) => rollout(run, { step, group_id, dataset });
  return [
    { label: "Task", isHead: true, value: ({ task_id }) => task_id, cell: ({ task_id, group_id }) => html`<a href=${href(group_id)} data-row data-testid="group-link">${task_id}</a>` },
    { label: "Mean reward", ...field("reward_mean") },
    { label: "Lowest", ...field("reward_min") },
    { label: "Highest", ...field("reward_max") },
    { label: "Samples", ...field("num_episodes") },
    { label: "Failed", ...field("num_failed"), cell: ({ num_failed }) => (num_failed ? badge(`${num_failed} failed`, "bad") : "0") },
    { label: "Length (tokens)", ...field("length_mean") },
  ];
}

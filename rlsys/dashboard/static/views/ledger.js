/** What is pending, where, and for how long: a task that never finishes stands on top. */

import { get } from "../api.js";
import { Table, badge, figure, untold } from "../components.js";
import { tableView } from "../datatable.js";
import { count, duration, number, percent } from "../format.js";
import { html } from "../html.js";
import { link } from "../router.js";

export const title = "Ledger";

const MEANINGS = {
  stale: "its weights were too old when its turn came; should read 0",
  failed: "its rollout or its reward failed",
  zero_advantage: "the algorithm found nothing to learn in it",
  too_long: "it does not fit into a batch",
};

export async function render(root, place, context) {
  let answer = null;
  return tableView(root, place, context, {
    table: "pending",
    noun: "group",
    usual: {
      order: "is_overdue desc, age_s desc",
      show: "task_id, is_overdue, state, worker, age_s, state_s, num_attempts, last_reason, group_id",
    },
    labels: {
      task_id: "task",
      is_overdue: "overdue",
      age_s: "age",
      state_s: "in this state",
      num_attempts: "attempts",
      last_reason: "issued again because",
      group_id: "group",
    },
    cells: {
      task_id: (task) =>
        html`<a href=${link("task", place.run, { task })} data-row data-testid="task-link">${task}</a>`,
      is_overdue: (is) => (is ? badge("overdue", "bad", "Far longer than others take") : ""),
      group_id: String,
    },
    rowClass: ({ is_overdue }) => (is_overdue ? "overdue" : null),
    load: async () => {
      answer = await get("ledger", { run: place.run }, context.signal);
    },
    head: () => html`<div key="head" class="head"><h1 data-testid="title">Ledger</h1></div>
      ${sums(answer)}${verdict(answer)}<h2 key="pending">Pending groups</h2>`,
    foot: () =>
      html`<section key="dropped"><h2>Dropped groups</h2>${droppedTable(place.run, answer)}</section>`,
    none: (run) => untold(run) ?? nonePending(answer),
  });
}

function sums(answer) {
  const numDropped = Object.values(answer.dropped).reduce((sum, num) => sum + num, 0);
  return html`<dl key="sums" class="figures">
    ${figure("Issued", number(answer.num_issued), { id: "num-issued", title: "Groups whose rollout was asked for" })}
    ${figure("Trained", number(answer.num_trained), { id: "num-trained" })}${figure("Dropped", number(numDropped), { id: "num-dropped" })}
    ${figure("Pending", number(answer.pending.length), { id: "num-pending" })}
    ${figure("Issued again", number(answer.num_reissued), { title: "Attempts beyond the first of a group: what they had was lost" })}
    ${figure("From issue to judgement", duration(answer.typical_s), { note: "median", title: "Of groups that came through" })}</dl>`;
}

/** The one thing to know, in words. */
function verdict(answer) {
  const overdue = answer.pending.filter((row) => row.is_overdue);
  if (!overdue.length) return null;
  const typical = answer.typical_s === null ? "" : `; others take ${duration(answer.typical_s)}`;
  const oldest = [...overdue].sort((a, b) => b.age_s - a.age_s)[0];
  const where = oldest.worker ? ` at ${oldest.worker}` : "";
  return html`<p key="verdict" class="banner warn" role="status" data-testid="overdue">
    <strong>${`${count(overdue.length, "group")} ${overdue.length === 1 ? "takes" : "take"} far longer than others. `}</strong>
    ${`Task ${oldest.task_id} ${oldest.state}${where}, for ${duration(oldest.age_s)} since it was issued${typical}.`}</p>`;
}

function nonePending(answer) {
  const why = answer.num_issued
    ? "all that were issued are trained or dropped"
    : "groups appear here once the first is issued";
  return html`<p class="muted" data-testid="none-pending">No group is pending: ${why}.</p>`;
}

function droppedTable(run, answer) {
  const rows = Object.entries(answer.dropped).sort(([, a], [, b]) => b - a);
  if (!rows.length)
    return html`<p class="muted" data-testid="none-dropped">No group was dropped.</p>`;
  const which = (reason) =>
    link("tables", run, {
      table: "logs",
      filter: `kind = 'group_dropped' and text like '%): ${reason}%'`,
    });
  const columns = [
    {
      label: "Reason",
      isHead: true,
      cell: ([reason]) =>
        html`<a href=${which(reason)} data-row title="Which groups, and why">${reason}</a>`,
    },
    { label: "Groups", isNumber: true, cell: ([, num]) => number(num) },
    {
      label: "Share of issued",
      isNumber: true,
      cell: ([, num]) => percent(num / Math.max(answer.num_issued, 1)),
    },
    { label: "It means", cell: ([reason]) => MEANINGS[reason] ?? "" },
  ];
  return html`<${Table} columns=${columns} rows=${rows} id="dropped" keyOf=${([reason]) => reason} />`;
}

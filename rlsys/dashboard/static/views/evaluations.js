/** Every evaluation of a run, with what failed; the samples of one open like training episodes. */

import { get } from "../api.js";
import { badge, empty } from "../components.js";
import { condition, tableView } from "../datatable.js";
import { count, duration, number } from "../format.js";
import { html } from "../html.js";
import { scored } from "../marks.js";
import { link } from "../router.js";

export const title = "Evaluations";

export async function render(root, place, context) {
  const [dataset, step] = [place.query.get("dataset"), place.query.get("step")];
  return tableView(
    root,
    place,
    context,
    dataset !== null && step !== null
      ? samplesOf(place.run, dataset, step)
      : evaluationsOf(place.run, context.signal),
  );
}

function samplesOf(run, dataset, step) {
  return {
    table: "samples",
    noun: "sample",
    fixed: () => `${condition("dataset", dataset)} and step = ${step}`,
    usual: {
      order: "task, episode",
      show: "task, episode, reward, outcome, reason, length, turns, seconds, answer",
    },
    head: (
      _,
      answer,
    ) => html`<div key="head" class="head"><h1 data-testid="title">${dataset}, step ${step}</h1><span class="muted">${count(answer?.num_rows ?? 0, "sample")}</span>
      <span class="space"></span><a class="button" href=${link("evaluations", run)}>All evaluations</a></div>`,
  };
}

function evaluationsOf(run, signal) {
  let known = new Map();
  const of = ({ dataset, step }) => known.get(`${dataset} ${step}`);
  const samples = (name) => (value, row) =>
    of(row)?.has_samples
      ? html`<a href=${link("evaluations", run, { dataset: row.dataset, step: row.step })} data-row=${name === "step"} data-testid="evaluation-link">${value}</a>`
      : value;
  return {
    table: "evaluations",
    noun: "evaluation",
    cells: {
      step: samples("step"),
      dataset: samples("dataset"),
      mean: (mean, row) =>
        scored({ mean, failed_frac: row.failed_frac ?? of(row)?.scores.failed_frac }),
    },
    after: [
      { label: "took", isNumber: true, cell: (row) => duration(of(row)?.seconds) },
      {
        label: "why samples failed",
        isText: true,
        cell: (row) => reasons(run, row, of(row)?.failures ?? {}),
      },
    ],
    load: async () => {
      const { evaluations } = await get("evaluations", { run }, signal);
      known = new Map(evaluations.map((one) => [`${one.dataset} ${one.step}`, one]));
    },
    none: () =>
      empty("No evaluation is done yet.", "Set eval.data and eval.every in the configuration."),
  };
}

/** Each count leads to the samples that failed so. */
function reasons(run, { dataset, step }, failures) {
  const all = Object.entries(failures).sort(([, a], [, b]) => b - a);
  const samples = (reason) =>
    link("evaluations", run, { dataset, step, filter: condition("reason", reason) });
  return all.length
    ? html`<ul class="reasons">${all.map(([reason, num]) => html`<li><a href=${samples(reason)}>${badge(number(num), "bad")}</a> ${reason}</li>`)}</ul>`
    : null;
}

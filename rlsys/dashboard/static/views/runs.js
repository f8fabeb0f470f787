/** All runs of the folder, and the choice of some to compare. */

import { get } from "../api.js";
import { Table, badge, empty, nameOf, status } from "../components.js";
import { tableView } from "../datatable.js";
import { ago, date, duration, number } from "../format.js";
import { html } from "../html.js";
import { scored, sparkline } from "../marks.js";
import { go, link } from "../router.js";
import { visible } from "../tokens.js";

export const title = "Runs";

const MOST = 32; // that the server compares

export async function render(root, place, context) {
  const chosen = new Set();
  let [known, folder, redraw] = [new Map(), "", null];
  const toggle = (id, isChosen) => {
    chosen[isChosen ? "add" : "delete"](id);
    redraw();
  };
  const of = ({ id }) => known.get(id) ?? { rewards: [], evaluations: [] };
  return tableView(root, place, context, {
    table: "runs",
    noun: "run",
    usual: {
      show: "name, status, model, algorithm, step, reward, step_s, eta_s, updated_s, num_alerts",
    },
    labels: { step_s: "step time", eta_s: "left", updated_s: "written", num_alerts: "alerts" },
    cells: {
      name: (_, row) => named(of(row), row.id),
      status,
      step: (step, row) =>
        of(row).total_steps ? `${number(step)} / ${number(of(row).total_steps)}` : number(step),
      updated_s: (time) => html`<time title=${date(time)}>${ago(time)}</time>`,
      num_alerts: (num) => (num ? badge(`${num} open`, "bad") : "0"),
    },
    before: [
      {
        label: "",
        cell: ({
          id,
        }) => html`<label class="choose"><input type="checkbox" checked=${chosen.has(id)} data-testid=${`choose-${id}`}
      aria-label=${`Compare ${id}`} onchange=${({ target }) => toggle(id, target.checked)} /></label>`,
      },
    ],
    after: [
      { label: "curve", title: "Reward over the steps", cell: (row) => sparkline(of(row).rewards) },
      {
        label: "evaluations",
        title: "Last score on each data set",
        cell: (row) => evaluations(of(row)),
      },
    ],
    load: async () => {
      const answer = await get("runs", {}, context.signal);
      folder = answer.folder;
      known = new Map(answer.runs.map((run) => [run.id, run]));
    },
    head: (_, answer, draw) => {
      redraw = draw;
      const ids = (
        chosen.size
          ? [...known.keys()].filter((id) => chosen.has(id))
          : (answer?.rows.map(({ id }) => id).filter(Boolean) ?? [])
      ).slice(0, MOST);
      return html`<div class="head" key="head"><h1>Runs</h1><code class="muted" data-testid="folder">${folder}</code><span class="space"></span>
        <button type="button" data-testid="compare" disabled=${ids.length < 2} title="Tick some to compare only those" onclick=${() => go(link("compare", null, { run: ids }))}>
          ${ids.length < 2 ? "Compare: choose two or more" : chosen.size ? `Compare ${ids.length} runs` : `Compare the ${ids.length} shown`}</button></div>`;
    },
    none: () =>
      empty(
        "No run was found in this folder.",
        "Start one with `rlsys train`, or give the folder that holds them: `rlsys dashboard FOLDER`.",
      ),
  });
}

function named({ name, last_error }, id) {
  return html`<a href=${link("overview", id)} data-row data-testid=${`run-${id}`}>${name || id}</a>
    ${name && name !== id && html`<div class="muted small path">${id}</div>`}
    ${last_error && html`<div class="last-error" data-testid=${`error-${id}`} title=${last_error}>${visible(last_error)}</div>`}`;
}

/** The last score on each data set, with its failed share. */
function evaluations({ evaluations: scores }) {
  return scores.length
    ? html`<ul class="reasons">${scores.map((one) => html`<li title=${`${one.dataset}, step ${one.step}`}><span class="of">${one.dataset}</span> ${scored(one)}</li>`)}</ul>`
    : null;
}

/** A few runs beside each other. */
export function runTable(runs, id) {
  return html`<${Table} columns=${COLUMNS} rows=${runs} id=${id} keyOf=${(run) => run.id} />`;
}

const COLUMNS = [
  {
    label: "Run",
    isHead: true,
    cell: ({ id, name }) =>
      html`<a href=${link("overview", id)} data-row data-testid=${`row-${nameOf(id)}`}>${name || nameOf(id)}</a>`,
  },
  { label: "Status", cell: (run) => status(run.status) },
  { label: "Algorithm", cell: ({ algorithm }) => algorithm || null },
  { label: "Model", cell: ({ model }) => model || null },
  { label: "Step", isNumber: true, cell: ({ step }) => number(step) },
  {
    label: "Reward",
    isNumber: true,
    title: "Mean of the last 20 steps",
    cell: ({ reward }) => number(reward),
  },
  { label: "Evaluations", title: "Last score on each data set", cell: evaluations },
  { label: "Step time", isNumber: true, cell: ({ step_s }) => duration(step_s) },
  { label: "Open alerts", isNumber: true, cell: ({ num_alerts }) => number(num_alerts) },
];

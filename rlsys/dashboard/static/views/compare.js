/** Runs side by side: their curves over each other, and where their configurations differ. */

import { get, numbered } from "../api.js";
import { Chart } from "../charts.js";
import { chartTools, choicesOf, paramsOf, toggled, windowOf } from "../choices.js";
import { Table, empty, fold } from "../components.js";
import { count } from "../format.js";
import { html, update } from "../html.js";
import { lookOf } from "../plotting.js";
import { go, link, note } from "../router.js";
import { runTable } from "./runs.js";

export const title = "Compare";

const POINTS = 400;
const USUAL = [
  "reward/mean",
  "policy/entropy",
  "policy/kl_ref",
  "completions/length_mean",
  "optim/grad_norm",
  "time/step",
];
const SHORT = 24; // characters of a value that is not broken over two lines

export async function render(root, { query }, { signal }) {
  const ids = query.getAll("run");
  if (ids.length < 2)
    return void update(
      root,
      empty(
        "Two runs are needed to compare.",
        html`<a href=${link("runs", null)}>Choose them in the list of runs</a>`,
      ),
    );
  const newest = numbered();
  const known = (await Promise.all(ids.map((run) => get("metrics", { run }, signal)))).flatMap(
    ({ metrics }) => metrics.map(({ name }) => name),
  );
  const names = [...new Set(known)].sort();
  const evals = names.filter((name) => /^eval\/.+\/mean$/.test(name));
  let chosen = query.getAll("metric");
  if (!chosen.length)
    chosen = [USUAL[0], ...evals, ...USUAL.slice(1)].filter((name) => names.includes(name));
  let choices = choicesOf(query);
  let told = null;

  async function refresh() {
    const isNewest = newest();
    const [{ runs, differences }, ...answers] = await Promise.all([
      get("compare", { run: ids }, signal),
      ...(chosen.length
        ? ids.map((run) =>
            get("series", { run, name: chosen, points: POINTS, ...windowOf(choices) }, signal),
          )
        : []),
    ]);
    if (!isNewest()) return;
    const labels = labelsOf(runs);
    told = {
      runs,
      differences,
      labels,
      charts: chosen.map((name) => chartOf(name, ids, labels, answers)).filter(Boolean),
    };
    draw();
  }

  function draw() {
    const { runs, differences, labels, charts } = told;
    const add = ({ target }) => {
      const name = target.value;
      target.value = "";
      if (names.includes(name)) chart(name);
    };
    update(
      root,
      html`<div class="head"><h1>Compare</h1></div>
      ${runTable(runs, "compared")}
      <div class="tools after" key="tools">
        <input type="search" list="metric-names" placeholder="Add a metric" aria-label="Add a metric" data-search data-testid="add-metric" onchange=${add} />
        <datalist id="metric-names">${names.map((name) => html`<option value=${name} />`)}</datalist>
        ${chosen.map((name) => html`<button key=${name} type="button" class="name" aria-label=${`Remove ${name}`} onclick=${() => chart(name)}>${name} ×</button>`)}</div>
      ${chartTools(choices, choose)}
      <h2 class="visually-hidden" key="h-curves">Curves</h2>
      <div class="charts after" key="curves" data-testid="curves">${charts.map((one) => html`<${Chart} key=${one.id} ...${one} choices=${choices} choose=${choose} pick=${pick} />`)}</div>
      <h2>Configuration</h2>${configuration(labels, differences)}`,
    );
  }

  const pick = (step, line) => line && go(link("groups", line.run, { step }));
  function noted() {
    note(link("compare", null, { run: ids, metric: chosen, ...paramsOf(choices) }));
  }
  function choose(changes) {
    choices = { ...choices, ...changes };
    noted();
    draw();
    if ("x" in changes || "zoom" in changes) return refresh();
  }
  function chart(name) {
    chosen = toggled(chosen, name);
    noted();
    return refresh();
  }

  await refresh();
  return refresh;
}

/** One metric of all runs, as props of a chart; null if none has it. */
function chartOf(name, ids, labels, answers) {
  const found = answers.map(({ series }) => series.find((one) => one.name === name));
  const one = found.find(Boolean);
  if (!one) return null;
  const kind = name.startsWith("eval/") ? "points" : "line";
  const lines = found.flatMap((series, index) =>
    series
      ? [
          {
            run: ids[index],
            label: labels[index],
            xs: series.xs ?? series.steps,
            steps: series.steps,
            ys: series.values,
            kind,
            ...lookOf(index),
          },
        ]
      : [],
  );
  return { id: name, title: name, help: one.help, unit: one.unit, noun: "no unit", lines };
}

/** What runs are called here: by name, unless two share one. */
export function labelsOf(runs) {
  const names = runs.map(({ id, name }) => name || id);
  return new Set(names).size === names.length ? names : runs.map(({ id }) => id);
}

/** Where the runs differ; keys that some of them lack, as those of other algorithms, are folded away. */
function configuration(labels, differences) {
  if (!differences.length) return empty("Their configurations are the same.");
  const differing = (rows, id) =>
    html`<${Table} columns=${differenceColumns(labels)} rows=${rows} id=${id} keyOf=${({ key }) => key} />`;
  const shared = differences.filter(({ values }) => !values.includes(null));
  const lacking = differences.filter(({ values }) => values.includes(null));
  return html`${shared.length ? differing(shared, "differences") : html`<p class="muted">In the keys that all of them have they are the same.</p>`}
    ${lacking.length > 0 && fold(`${count(lacking.length, "key")} that not all of them have`, differing(lacking, "lacking-keys"), { id: "lacking" })}`;
}

function differenceColumns(labels) {
  const shown = (value) =>
    value === null
      ? html`<span class="muted">not there</span>`
      : html`<code class=${value.length <= SHORT ? "whole" : null}>${value}</code>`;
  return [
    { label: "Key", isHead: true, cell: ({ key }) => html`<code>${key}</code>` },
    ...labels.map((label, index) => ({ label, cell: ({ values }) => shown(values[index]) })),
  ];
}

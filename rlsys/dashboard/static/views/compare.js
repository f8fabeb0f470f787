/** Runs side by side: their curves over each other, and where their configurations differ. */

import { get, numbered } from "../api.js";
import { Chart } from "../charts.js";
import { h, update } from "../dom.js";
import { count, duration, number } from "../format.js";
import { empty, status, table } from "../parts.js";
import { link, note } from "../router.js";

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

export async function render(root, { query }, { signal }) {
  const ids = query.getAll("run");
  if (ids.length < 2)
    return void root.append(
      empty("Two runs are needed to compare.", h("a", { href: link("runs", null) }, "Choose them in the list of runs")),
    );
  const charts = new Map(); // metric -> Chart
  const newest = numbered();
  const top = h("div");
  const box = h("div", { class: "charts after", "data-testid": "curves" });
  const bottom = h("div");
  const known = (await Promise.all(ids.map((run) => get("metrics", { run }, signal)))).flatMap(({ metrics }) =>
    metrics.map(({ name }) => name),
  );
  const names = [...new Set(known)].sort();
  const evals = names.filter((name) => /^eval\/.+\/mean$/.test(name));
  let chosen = query.getAll("metric");
  if (!chosen.length)
    chosen = [...USUAL.slice(0, 1), ...evals, ...USUAL.slice(1)].filter((name) => names.includes(name));
  root.append(h("div", { class: "head" }, h("h1", null, "Compare")), top, box, bottom);

  function choose(name) {
    if (!names.includes(name)) return;
    chosen = chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name];
    if (!chosen.includes(name)) {
      charts.get(name)?.close();
      charts.delete(name);
    }
    note(link("compare", null, { run: ids, metric: chosen }));
    return refresh();
  }

  async function refresh() {
    const isNewest = newest();
    const [{ runs, differences }, ...answers] = await Promise.all([
      get("compare", { run: ids }, signal),
      ...(chosen.length ? ids.map((run) => get("series", { run, name: chosen, points: POINTS }, signal)) : []),
    ]);
    if (!isNewest()) return;
    const labels = labelsOf(runs);
    update(
      top,
      table(columns(), runs, { id: "compared", key: ({ id }) => id }),
      h(
        "div",
        { class: "tools after", key: "tools" },
        h("input", {
          type: "search",
          list: "metric-names",
          placeholder: "Add a metric",
          "aria-label": "Add a metric",
          "data-search": true,
          "data-testid": "add-metric",
          onchange: ({ target }) => {
            const name = target.value;
            target.value = "";
            choose(name);
          },
        }),
        h(
          "datalist",
          { id: "metric-names" },
          names.map((name) => h("option", { value: name })),
        ),
        chosen.map((name) =>
          h(
            "button",
            { key: name, type: "button", class: "name", "aria-label": `Remove ${name}`, onclick: () => choose(name) },
            name,
            " ×",
          ),
        ),
      ),
    );
    for (const name of chosen)
      drawChart(
        name,
        labels,
        answers.map(({ series }) => series.find((one) => one.name === name)),
      );
    update(
      bottom,
      h("h2", null, "Configuration"),
      configuration(labels, differences),
    );
  }

  function drawChart(name, labels, found) {
    const one = found.find(Boolean);
    if (!one) return;
    if (!charts.has(name)) {
      charts.set(name, new Chart({ id: name, title: name, help: one.help, unit: one.unit, noun: "no unit", signal }));
      box.append(charts.get(name).element);
    }
    const kind = name.startsWith("eval/") ? "points" : "line";
    charts
      .get(name)
      .show(
        found.flatMap((series, index) =>
          series
            ? [{ label: labels[index], xs: series.steps, ys: series.values, kind, ...LOOKS[index % LOOKS.length] }]
            : [],
        ),
      );
  }

  await refresh();
  return refresh;
}

/** What runs are called here: by name, unless two share one. */
export function labelsOf(runs) {
  const names = runs.map(({ id, name }) => name || id);
  return new Set(names).size === names.length ? names : runs.map(({ id }) => id);
}

/** Where the runs differ; keys that some of them lack, as those of other algorithms, are folded away. */
function configuration(labels, differences) {
  if (!differences.length) return empty("Their configurations are the same.");
  const options = (id) => ({ id, key: ({ key }) => key });
  const shared = differences.filter(({ values }) => !values.includes(null));
  const lacking = differences.filter(({ values }) => values.includes(null));
  return [
    shared.length
      ? table(differing(labels), shared, options("differences"))
      : h("p", { class: "muted" }, "In the keys that all of them have they are the same."),
    lacking.length > 0 &&
      h(
        "details",
        { key: "lacking", class: "data", "data-testid": "lacking" },
        h("summary", null, `${count(lacking.length, "key")} that not all of them have`),
        table(differing(labels), lacking, options("lacking-keys")),
      ),
  ];
}

/** Of the runs, the same on every chart. */
const LOOKS = [
  { colour: "--c1", dash: [] },
  { colour: "--c2", dash: [7, 3] },
  { colour: "--c3", dash: [2, 2] },
  { colour: "--c4", dash: [9, 3, 2, 3] },
  { colour: "--c5", dash: [] },
  { colour: "--c6", dash: [7, 3] },
  { colour: "--c8", dash: [2, 2] },
  { colour: "--c7", dash: [9, 3, 2, 3] },
];

function columns() {
  return [
    {
      label: "Run",
      isHead: true,
      cell: (run) => h("a", { href: link("overview", run.id), "data-row": true }, run.name || run.id),
    },
    { label: "Status", cell: (run) => status(run.status) },
    { label: "Model", cell: (run) => run.model || null },
    { label: "Algorithm", cell: (run) => run.algorithm || null },
    { label: "Step", isNumber: true, cell: (run) => number(run.step) },
    { label: "Reward", isNumber: true, cell: (run) => number(run.reward) },
    { label: "Step time", isNumber: true, cell: (run) => duration(run.step_s) },
  ];
}

function differing(labels) {
  return [
    { label: "Key", isHead: true, cell: ({ key }) => h("code", null, key) },
    ...labels.map((label, index) => ({
      label,
      cell: ({ values }) =>
        values[index] === null ? h("span", { class: "muted" }, "not there") : h("code", null, values[index]),
    })),
  ];
}

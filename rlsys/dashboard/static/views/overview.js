/** The run at a glance: who waits for whom, open alerts, and every family of metrics over steps. */

import { get, numbered } from "../api.js";
import { Chart } from "../charts.js";
import { h, update } from "../dom.js";
import { FAMILIES, NAMES, linesOf } from "../families.js";
import { ago, duration, number, percent } from "../format.js";
import { empty, figure, nameOf, status, table } from "../parts.js";
import { link, note } from "../router.js";
import { metricList } from "../metriclist.js";

export const title = "Overview";

const POINTS = 600;

export async function render(root, { run: id, query }, { signal, run }) {
  const summary = h("div", { class: "summary" });
  const families = h("div");
  const more = h("section", { "data-testid": "all-metrics" });
  const charts = new Map(); // id -> Chart
  const chosen = new Set(query.getAll("metric"));
  let sought = "";
  const newest = numbered();
  let isWhole = false;
  root.append(h("h1", { class: "visually-hidden" }, "Overview"), summary, families, more);

  async function refresh(now) {
    const isNewest = newest();
    const ask = (name, params) => get(name, { run: id, ...params }, signal);
    const [{ series }, { alerts }, { bottleneck }, { metrics }] = await Promise.all([
      ask("series", { name: [...NAMES, ...chosen], points: POINTS }),
      ask("alerts"),
      ask("cluster", { width: 1 }),
      ask("metrics"),
    ]);
    if (!isNewest()) return;
    const open = alerts.filter((alert) => alert.until_step === null);
    update(
      summary,
      figures(now.summary, series),
      policyOf(now.summary),
      now.policies.length > 0 && policyTable(now.policies),
      series.length || now.policies.length ? null : nothing(now),
      h("div", { class: "sides", key: "sides" }, waiting(bottleneck, id), openAlerts(open, id)),
    );
    for (const family of FAMILIES) drawFamily(family, series, alerts);
    drawMore(metrics, series, alerts);
  }

  function drawFamily(family, series, alerts) {
    const here = family.charts.map((chart) => [chart, linesOf(chart, series)]).filter(([, lines]) => lines.length);
    if (!here.length) return;
    const slug = family.heading.toLowerCase().replaceAll(" ", "-");
    let box = families.querySelector(`[data-family="${slug}"] .charts`);
    if (!box) {
      box = h("div", { class: "charts" });
      families.append(
        h("section", { "data-family": slug, "data-testid": `family-${slug}` }, h("h2", null, family.heading), box),
      );
    }
    for (const [chart, lines] of here) drawChart(box, chart, lines, alerts, series);
  }

  function drawChart(box, chart, lines, alerts, series) {
    if (!charts.has(chart.id)) {
      const help = [...new Set(lines.map((line) => line.help).filter(Boolean))].join("; ");
      charts.set(chart.id, new Chart({ ...chart, help, unit: lines[0].unit, signal }));
      box.append(charts.get(chart.id).element);
    }
    charts.get(chart.id).show(lines, marksOf(lines, alerts), spanOf(series));
  }

  function drawMore(metrics, series, alerts) {
    if (!metrics.length) return;
    const box = more.querySelector(".charts") ?? h("div", { class: "charts" });
    const choose = async (name) => {
      if (!chosen.delete(name)) chosen.add(name);
      note(link("overview", id, { metric: [...chosen] }));
      charts.get(`metric-${name}`)?.close();
      charts.delete(`metric-${name}`);
      await refresh(run);
    };
    if (!more.firstChild) more.append(h("h2", { id: "all-metrics" }, "All metrics"), box, h("div"));
    for (const name of chosen) {
      const found = series.find((one) => one.name === name);
      if (found)
        drawChart(box, { id: `metric-${name}`, title: name, noun: "no unit" }, [lineOf(found)], alerts, series);
    }
    const seek = (text) => {
      sought = text;
      list();
    };
    const unfold = () => {
      isWhole = true;
      list();
    };
    const list = () => update(more.lastChild, metricList(metrics, { chosen, sought, isWhole, choose, seek, unfold }));
    list();
  }

  await refresh(run);
  charts.get(`metric-${query.get("metric")}`)?.element.setAttribute("data-arrive", "");
  return (now) => {
    run = now;
    return refresh(now);
  };
}

function lineOf({ name, unit, help, steps, values }) {
  return { name, label: name.split("/").at(-1), unit, help, xs: steps, ys: values };
}

/** The first and last step of any of them. */
function spanOf(series) {
  const first = Math.min(...series.map(({ steps }) => steps[0]));
  const last = Math.max(...series.map(({ steps }) => steps.at(-1)));
  return first < last ? [first, last] : [];
}

/** Where a line's alerts began. */
function marksOf(lines, alerts) {
  return alerts
    .filter(({ metric }) => lines.some(({ name }) => name === metric))
    .map(({ alert, step }) => ({ x: step, text: alert.replaceAll("_", " ") }));
}

function figures(summary, series) {
  const last = (name) => series.find((one) => one.name === name)?.values.findLast((value) => value !== null) ?? null;
  const evaluation = series.find(({ name }) => /^eval\/.+\/mean$/.test(name));
  return h(
    "dl",
    { class: "figures", key: "figures", "data-testid": "figures" },
    summary.model && figure("Model", summary.model),
    summary.algorithm && figure("Algorithm", summary.algorithm),
    summary.reward !== null &&
      figure("Reward", number(summary.reward), { id: "figure-reward", title: "Mean of the last step" }),
    evaluation &&
      figure("Evaluation", number(evaluation.values.at(-1)), {
        id: "figure-evaluation",
        note: `${evaluation.name.split("/")[1]}, step ${evaluation.steps.at(-1)}`,
      }),
    summary.step_s !== null && figure("Step time", duration(summary.step_s), { title: "Median of the last 20 steps" }),
    last("perf/tokens_per_s") !== null && figure("Speed", number(last("perf/tokens_per_s")), { note: "tokens/s" }),
    summary.eta_s !== null && figure("Left", duration(summary.eta_s)),
    figure("Last written", ago(summary.updated_s)),
  );
}

/** The runs of the policies of a run of several. */
function policyTable(policies) {
  return h(
    "section",
    { key: "policies" },
    h("h2", null, "Policies"),
    h("p", { class: "muted small" }, "Each is a run of its own, with its steps, groups and alerts."),
    table(POLICIES, policies, { id: "policies", key: ({ id }) => id }),
  );
}

const POLICIES = [
  {
    label: "Policy",
    isHead: true,
    cell: ({ id }) =>
      h("a", { href: link("overview", id), "data-row": true, "data-testid": `policy-${nameOf(id)}` }, nameOf(id)),
  },
  { label: "Status", cell: (policy) => status(policy.status) },
  { label: "Algorithm", cell: ({ algorithm }) => algorithm || null },
  { label: "Step", isNumber: true, cell: ({ step }) => number(step) },
  { label: "Reward", isNumber: true, title: "Mean of the last step", cell: ({ reward }) => number(reward) },
  { label: "Open alerts", isNumber: true, cell: ({ num_alerts }) => number(num_alerts) },
];

/** The way from the run of one policy to the run it is part of. */
function policyOf({ id }) {
  const [, whole, name] = id.match(/^(?:(.*)\/)?policies\/([^/]+)$/) ?? [];
  if (!name) return null;
  return h(
    "p",
    { key: "whole", class: "muted small" },
    `Policy ${name} of `,
    h("a", { href: link("overview", whole ?? "."), "data-testid": "to-whole" }, whole ?? "the run of several policies"),
    ".",
  );
}

function nothing(run) {
  const done = Object.keys(run.phases).length;
  return h(
    "div",
    { key: "nothing" },
    empty(
      "No step is done yet.",
      done
        ? `Start-up has come to ${Object.keys(run.phases).at(-1).replaceAll("_", " ")}; the log shows more.`
        : "The log shows what the run has done so far.",
    ),
  );
}

/** Who waits for whom. */
function waiting(bottleneck, id) {
  if (!bottleneck) return null;
  return h(
    "section",
    { class: "waiting", key: "waiting", "data-testid": "bottleneck", "data-who": bottleneck.who },
    h("h2", null, "Who waits for whom"),
    h(
      "p",
      { "data-testid": "bottleneck-sentence" },
      bottleneck.sentence,
      " ",
      h("a", { href: link("cluster", id) }, "See the cluster"),
    ),
    h(
      "dl",
      { class: "shares" },
      Object.entries(bottleneck.shares).map(([who, share]) =>
        h(
          "div",
          { key: who },
          h("dt", null, who),
          h(
            "dd",
            null,
            h(
              "span",
              { class: "meter", "aria-hidden": "true" },
              h("span", { style: { width: `${Math.min(share ?? 0, 1) * 100}%` } }),
            ),
            percent(share),
          ),
        ),
      ),
    ),
  );
}

function openAlerts(open, id) {
  if (!open.length) return null;
  return h(
    "section",
    { class: "open-alerts", key: "alerts", "data-testid": "open-alerts" },
    h("h2", null, "Open alerts"),
    h(
      "ul",
      null,
      open.map((alert) =>
        h(
          "li",
          { key: `${alert.alert} ${alert.step}` },
          h("a", { href: link("alerts", id) }, alert.alert.replaceAll("_", " ")),
          ` since step ${alert.step}. `,
          alert.sentence,
        ),
      ),
    ),
  );
}

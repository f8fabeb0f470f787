/** The run at a glance: is it learning, then open alerts, who waits for whom, and every family of metrics. */

import { get, numbered } from "../api.js";
import { Chart } from "../charts.js";
import { chartTools, choicesOf, paramsOf, windowOf } from "../choices.js";
import { Table, empty, figure } from "../components.js";
import { condition } from "../datatable.js";
import { FAMILIES, NAMES, linesOf } from "../families.js";
import { ago, date, duration, number, percent } from "../format.js";
import { html, update } from "../html.js";
import { barMark } from "../marks.js";
import { metricList } from "../metriclist.js";
import { go, link, note } from "../router.js";
import { visible } from "../tokens.js";
import { runTable } from "./runs.js";

export const title = "Overview";

const POINTS = 600;
const HERO_PX = 220;

export async function render(root, { run: id, query }, { signal, run }) {
  const chosen = new Set(query.getAll("metric"));
  const newest = numbered();
  let choices = choicesOf(query);
  let [sought, isWhole, isExplained, told] = ["", false, false, null];

  async function refresh() {
    const isNewest = newest();
    const ask = (name, params) => get(name, { run: id, ...params }, signal);
    const [{ series, x }, { alerts }, { bottleneck }, { metrics }, failures] = await Promise.all([
      ask("series", { name: [...NAMES, ...chosen], points: POINTS, ...windowOf(choices) }),
      ask("alerts"),
      ask("cluster", { width: 1 }),
      ask("metrics"),
      isExplained && ask("failures"),
    ]);
    if (!isNewest()) return;
    told = {
      x,
      alerts,
      bottleneck,
      metrics,
      failures,
      series,
      ...chartsOf(series, alerts, chosen),
    };
    draw();
  }

  function draw() {
    const { alerts, bottleneck, metrics, families, more, span } = told;
    const isThere = families.length > 0 || run.policies.length > 0;
    const open = alerts.filter(({ until_step }) => until_step === null);
    const [learning, ...rest] =
      families[0]?.family === FAMILIES[0] ? families : [{ charts: [] }, ...families];
    const one = (chart) =>
      html`<${Chart} key=${chart.id} ...${chart} span=${span} choices=${choices} choose=${choose} pick=${pick} />`;
    update(
      root,
      html`<h1 class="visually-hidden">Overview</h1>
      ${policyOf(run.summary)}
      ${
        learning.charts.length > 0 &&
        html`<section class="learning" key="learning" data-family="reward-and-evaluation" data-testid="family-reward-and-evaluation">
        <h2 class="visually-hidden">Reward and evaluation</h2>
        <div class="beside"><dl class="hero" data-testid="figures">${heroes(id, run.summary, told, explain)}</dl>${facts(run.summary, told)}</div>
        <div class="charts">${learning.charts.map((chart) => one({ ...chart, height: HERO_PX }))}</div></section>`
      }
      ${!isThere && nothing(run)}
      <div key="sides" class="sides">${openAlerts(open, id)}${told.failures && failureList(id, told.failures)}${waiting(bottleneck, id)}</div>
      ${run.policies.length > 0 && policyTable(run.policies)}
      ${!learning.charts.length && facts(run.summary, told)}
      ${isThere && chartTools(choices, choose)}
      ${choices.zoom && choices.x === "step" && html`<p key="tasks" class="small"><a href=${tasksIn(id, choices.zoom)}>Tasks that lost most between these steps</a></p>`}
      ${told.x !== choices.x && html`<p class="muted small" key="no-x">This run does not record what x should count: charts are over steps.</p>`}
      <div key="families" class="families">${rest.map(
        ({
          family,
          slug,
          charts,
        }) => html`<section key=${slug} data-family=${slug} data-testid=${`family-${slug}`}
        style=${{ "--num": charts.length }}><h2>${family.heading}</h2><div class="charts">${charts.map(one)}</div></section>`,
      )}</div>
      ${
        metrics.length > 0 &&
        html`<section key="all" data-testid="all-metrics"><h2 id="all-metrics">All metrics</h2>
        <div class="charts">${more.map(one)}</div>
        ${metricList(metrics, { chosen, sought, isWhole, choose: chart, seek, unfold })}</section>`
      }`,
    );
  }

  function noted() {
    note(link("overview", id, { metric: [...chosen], ...paramsOf(choices) }));
  }
  function choose(changes) {
    choices = { ...choices, ...changes };
    noted();
    draw();
    if ("x" in changes || "zoom" in changes) return refresh();
  }
  function chart(names) {
    for (const name of names) if (!chosen.delete(name)) chosen.add(name);
    noted();
    return refresh();
  }
  function explain() {
    isExplained = !isExplained;
    return refresh();
  }
  function pick(step) {
    go(link("groups", id, { step }));
  }
  function seek(text) {
    sought = text;
    draw();
  }
  function unfold() {
    isWhole = true;
    draw();
  }

  await refresh();
  root
    .querySelector(`#${CSS.escape(`chart-metric-${query.get("metric")}`)}`)
    ?.setAttribute("data-arrive", "");
  return (now) => {
    run = now;
    return refresh();
  };
}

/** All charts of an answer, as props: once for each answer, because a chart looks anew at lines that are others. */
function chartsOf(series, alerts, chosen) {
  const chartOf = (chart, lines) => {
    const help = [...new Set(lines.map((line) => line.help).filter(Boolean))].join("; ");
    return { ...chart, help, unit: lines[0].unit, lines, marks: marksOf(lines, alerts) };
  };
  const families = FAMILIES.map((family) => ({
    family,
    slug: family.heading.toLowerCase().replaceAll(" ", "-"),
    charts: family.charts
      .map((chart) => [chart, linesOf(chart, series)])
      .filter(([, lines]) => lines.length)
      .map(([chart, lines]) => chartOf(chart, lines)),
  })).filter(({ charts }) => charts.length);
  const found = [...chosen].map((name) => series.find((one) => one.name === name)).filter(Boolean);
  const more = found.map((one) =>
    chartOf({ id: `metric-${one.name}`, title: one.name, noun: "no unit" }, [lineOf(one)]),
  );
  return { families, more, span: spanOf(series) };
}

function lineOf({ name, unit, help, steps, xs, values }) {
  return { name, label: name.split("/").at(-1), unit, help, steps, xs: xs ?? steps, ys: values };
}

/** The tasks by what they lost in the stretch that is looked at. */
function tasksIn(id, [from, to]) {
  return link("tables", id, {
    table: "tasks",
    from: Math.max(Math.floor(from), 0),
    to: Math.ceil(to),
    order: "change",
  });
}

/** The first and last x of any of them. */
function spanOf(series) {
  const told = series.map(({ xs, steps }) => xs ?? steps).filter(({ length }) => length);
  const first = Math.min(...told.map((xs) => xs[0]));
  const last = Math.max(...told.map((xs) => xs.at(-1)));
  return first < last ? [first, last] : [];
}

/** Where a line's alerts began. */
function marksOf(lines, alerts) {
  return alerts.flatMap(({ alert, step, metric }) => {
    const line = lines.find(({ name }) => name === metric);
    const index = line ? line.steps.findLastIndex((one) => one <= step) : -1;
    return index < 0
      ? []
      : [{ x: line.steps === line.xs ? step : line.xs[index], text: alert.replaceAll("_", " ") }];
  });
}

/** Reward and evaluations, in the largest type. */
function heroes(id, summary, { series, failures }, explain) {
  const find = (name) => series.find((one) => one.name === name);
  const last = (name) => find(name)?.values.findLast((value) => value !== null) ?? null;
  const first = find("reward/mean")?.values.find((value) => value !== null);
  const failed = (share) =>
    share > 0 && html`<span class="bad-text">${percent(share)} failed</span>`;
  const lost = failed(last("reward/failed_frac"));
  const reward =
    summary.reward !== null &&
    html`<div class="figure" key="reward" data-testid="figure-reward" title="Mean of the last 20 steps">
    <dt>Reward</dt><dd>${number(summary.reward)}<small>${first !== undefined && html`began at ${number(first)}<br />${bestOf(find("reward/mean"))}`}${
      lost &&
      html`<button type="button"
      class="why" aria-expanded=${Boolean(failures)} title="Why episodes failed" data-testid="why-failed" onclick=${explain}>${lost}</button>`
    }</small></dd></div>`;
  const evaluations = series.filter(({ name }) => /^eval\/.+\/mean$/.test(name));
  return [
    reward,
    ...evaluations.map(({ name, values, steps }, index) => {
      const data = name.slice("eval/".length, -"/mean".length);
      return html`<div class="figure" key=${name} data-testid=${index ? null : "figure-evaluation"} title=${`Evaluation of ${data}`}>
        <dt><a href=${link("evaluations", id)}>${data}</a>, step ${steps.at(-1)}</dt><dd>${number(values.at(-1))}<small>${bestOf({ values, steps })}${failed(last(`eval/${data}/failed_frac`))}</small></dd></div>`;
    }),
  ];
}

/** The highest value, and when it was; nothing of a single one. */
function bestOf({ values, steps }) {
  const known = values.filter((value) => value !== null);
  const best = Math.max(...known);
  return known.length > 1 && `best ${number(best)} at step ${steps[values.indexOf(best)]} `;
}

/** What else is worth knowing, small. */
function facts(summary, { series }) {
  const speed =
    series
      .find(({ name }) => name === "perf/tokens_per_s")
      ?.values.findLast((value) => value !== null) ?? null;
  return html`<dl class="figures small-figures" key="facts">
    ${summary.step_s !== null && figure("Step time", duration(summary.step_s), { title: "Median of the last 20 steps" })}
    ${speed !== null && figure("Speed", number(speed), { note: "tokens/s" })}
    ${summary.eta_s !== null && figure("Left", duration(summary.eta_s))}
    ${figure("Last written", ago(summary.updated_s))}
    ${summary.algorithm && figure("Algorithm", summary.algorithm)}
    ${summary.model && figure("Model", summary.model)}</dl>`;
}

/** The runs of the policies of a run of several. */
function policyTable(policies) {
  return html`<section key="policies"><h2>Policies</h2>
    <p class="muted small">Each is a run of its own, with its steps, groups and alerts.</p>
    ${runTable(policies, "policies")}</section>`;
}

/** The way from the run of one policy to the run it is part of. */
function policyOf({ id }) {
  const [, whole, name] = id.match(/^(?:(.*)\/)?policies\/([^/]+)$/) ?? [];
  if (!name) return null;
  const way = html`<a href=${link("overview", whole ?? ".")} data-testid="to-whole">${whole ?? "the run of several policies"}</a>`;
  return html`<p key="whole" class="muted small">Policy ${name} of ${way}.</p>`;
}

function nothing(run) {
  const phase = Object.keys(run.phases).at(-1);
  const come = phase
    ? `Start-up has come to ${phase.replaceAll("_", " ")}; the log shows more.`
    : "The log shows what the run has done so far.";
  return html`<div key="nothing">${empty("No step is done yet.", come)}</div>`;
}

/** Who waits for whom. */
function waiting(bottleneck, id) {
  if (!bottleneck) return null;
  return html`<section class="waiting" key="waiting" data-testid="bottleneck" data-who=${bottleneck.who}><h2>Who waits for whom</h2>
    <p data-testid="bottleneck-sentence">${bottleneck.sentence} <a href=${link("cluster", id)}>See the cluster</a></p>
    <dl class="shares">${Object.entries(bottleneck.shares).map(([who, share]) => html`<div key=${who}><dt>${who}</dt><dd>${barMark(share, { low: 0, high: 1 })}${percent(share)}</dd></div>`)}</dl></section>`;
}

/** Why episodes of training failed, each count with the way to its episodes. */
function failureList(id, { failures, num_failed, num_episodes }) {
  const episodes = ({ reason, num_episodes: num }) =>
    html`<a href=${link("tables", id, { table: "episodes", filter: condition("reason", reason) })} data-row>${number(num)}</a>`;
  const columns = [
    { label: "Episodes", isNumber: true, cell: episodes },
    {
      label: "Why",
      isText: true,
      cell: ({ reason }) => html`<span class="said">${visible(reason)}</span>`,
    },
    {
      label: "Last",
      cell: ({ last_s, last_task_id }) =>
        html`<a href=${link("task", id, { task: last_task_id })} title=${date(last_s)}>${last_task_id}</a>`,
    },
  ];
  const untold = html`<p class="muted">The events do not tell why; <a href=${link("tables", id, { table: "episodes", filter: "failed" })}>the failed episodes</a> do.</p>`;
  return html`<section key="failures" data-testid="failures"><h2>Why ${num_failed ? `${number(num_failed)} of ${number(num_episodes)} ` : ""}episodes failed</h2>
    ${failures.length ? html`<${Table} columns=${columns} rows=${failures} id="failure-reasons" keyOf=${({ reason }) => reason} />` : untold}</section>`;
}

function openAlerts(open, id) {
  if (!open.length) return null;
  return html`<section class="open-alerts" key="alerts" data-testid="open-alerts"><h2>Open alerts</h2>
    <ul>${open.map((alert) => html`<li key=${`${alert.alert} ${alert.step}`}><a href=${link("alerts", id)}>${alert.alert.replaceAll("_", " ")}</a>${` since step ${alert.step}. ${alert.sentence}`}</li>`)}</ul></section>`;
}

/** What looked wrong, since when, and what to do; and the rules it is scored by. */

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { Table, badge, empty, fold } from "../components.js";
import { tableView } from "../datatable.js";
import { date, quantity } from "../format.js";
import { html } from "../html.js";
import { link } from "../router.js";

export const title = "Alerts";

const POINTS = 400;

export async function render(root, place, context) {
  const id = place.run;
  let [open, rules, series] = [[], [], []];
  return tableView(root, place, context, {
    table: "alerts",
    noun: "alert",
    fixed: () => "until_step is not null",
    usual: { show: "alert, step, until_step, value, threshold, sentence" },
    labels: { step: "from step", until_step: "to step" },
    cells: {
      alert: words,
      value: (value, { unit }) => unit && quantity(value, unit),
      threshold: (value, { unit }) => unit && quantity(value, unit),
    },
    load: async () => {
      const answer = await get("alerts", { run: id }, context.signal);
      rules = answer.rules;
      open = answer.alerts.filter(({ until_step }) => until_step === null);
      const names = [...new Set(open.map(({ metric }) => metric).filter(Boolean))];
      series = names.length
        ? (await get("series", { run: id, name: names, points: POINTS }, context.signal)).series
        : [];
    },
    head: () => html`<h1 key="title" class="visually-hidden">Alerts</h1>
      <section key="open" data-testid="open"><h2>Open (${open.length})</h2>
        ${
          open.length
            ? open.map((alert) =>
                card(
                  alert,
                  id,
                  series.find(({ name }) => name === alert.metric),
                ),
              )
            : empty("Nothing looks wrong now.", "Alerts that are over, and the rules, are below.")
        }</section>
      ${fold("Rules", html`<${Table} columns=${RULES} rows=${rules} id="rules" keyOf=${({ alert }) => alert} />`, { id: "all-rules" })}<h2 key="over">Over</h2>`,
    none: () => html`<p class="muted">No alert is over.</p>`,
  });
}

function words(alert) {
  return alert.replaceAll("_", " ");
}

function card(alert, id, found) {
  const metric =
    alert.metric &&
    html`<a href=${link("overview", id, { metric: alert.metric })}>${alert.metric}</a>`;
  const numbers = `${quantity(alert.value, alert.unit)} at step ${alert.step}; the threshold is ${quantity(alert.threshold, alert.unit)}. `;
  return html`<article class="alert" key=${`${alert.alert} ${alert.step}`} data-testid=${`alert-${alert.alert}`} tabindex="-1" data-row>
    <div class="alert-text"><h3>${words(alert.alert)} ${badge(`since step ${alert.step}`, "bad", date(alert.time_s))}</h3>
      <p data-testid="sentence">${alert.sentence}</p><p class="muted small">${numbers}${metric}</p></div>
    <div class="alert-chart">${found?.steps.length > 0 && html`<${Chart} ...${chartOf(alert, found)} />`}</div></article>`;
}

function chartOf(alert, { name, help, unit, steps, values }) {
  const limit = {
    label: "threshold",
    xs: [steps[0], steps.at(-1)],
    ys: [alert.threshold, alert.threshold],
    colour: "--c7",
  };
  const isComparable = alert.unit === unit; // others are thresholds of a share or a trend of it
  const lines = [{ label: "value", xs: steps, ys: values }, ...(isComparable ? [limit] : [])];
  return {
    id: `alert-${alert.alert}`,
    title: name,
    help,
    unit,
    noun: "no unit",
    lines,
    marks: [{ x: alert.step, text: "raised" }],
  };
}

const RULES = [
  { label: "Alert", isHead: true, cell: ({ alert }) => words(alert) },
  {
    label: "Threshold",
    isNumber: true,
    cell: ({ threshold, unit }) => (threshold === null ? badge("off") : quantity(threshold, unit)),
  },
  { label: "Meaning", isText: true, cell: ({ meaning }) => meaning },
];

/** What looked wrong, since when, and what to do; and the rules it is scored by. */

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { Table, badge, empty } from "../components.js";
import { date, number, quantity } from "../format.js";
import { html, update } from "../html.js";
import { link } from "../router.js";

export const title = "Alerts";

const POINTS = 400;

export async function render(root, { run: id }, { signal }) {
  async function refresh() {
    const { alerts, rules } = await get("alerts", { run: id }, signal);
    const open = alerts.filter(({ until_step }) => until_step === null);
    const past = alerts.filter(({ until_step }) => until_step !== null);
    const names = [...new Set(open.map(({ metric }) => metric).filter(Boolean))];
    const { series } = names.length ? await get("series", { run: id, name: names, points: POINTS }, signal) : { series: [] };
    const cards = open.map((alert) => card(alert, id, series.find(({ name }) => name === alert.metric)));
    update(
      root,
      html`<h1 class="visually-hidden">Alerts</h1>
      <section key="open" data-testid="open"><h2>Open (${open.length})</h2>
        ${open.length ? cards : empty("Nothing looks wrong now.", "Alerts that are over, and the rules, are below.")}</section>
      ${past.length > 0 && html`<section key="past" data-testid="past"><h2>Over (${number(past.length)})</h2>
        <${Table} columns=${PAST} rows=${byRule(past)} id="past-alerts" keyOf=${({ last }) => last.alert} /></section>`}
      <section key="rules" data-testid="rules"><h2>Rules</h2><${Table} columns=${RULES} rows=${rules} id="rules" keyOf=${({ alert }) => alert} /></section>`,
    );
  }
  await refresh();
  return refresh;
}

function words(alert) {
  return alert.replaceAll("_", " ");
}

function card(alert, id, found) {
  const metric = alert.metric && html`<a href=${link("overview", id, { metric: alert.metric })}>${alert.metric}</a>`;
  const numbers = `${quantity(alert.value, alert.unit)} at step ${alert.step}; the threshold is ${quantity(alert.threshold, alert.unit)}. `;
  return html`<article class="alert" key=${`${alert.alert} ${alert.step}`} data-testid=${`alert-${alert.alert}`} tabindex="-1" data-row>
    <div class="alert-text"><h3>${words(alert.alert)} ${badge(`since step ${alert.step}`, "bad", date(alert.time_s))}</h3>
      <p data-testid="sentence">${alert.sentence}</p><p class="muted small">${numbers}${metric}</p></div>
    <div class="alert-chart">${found?.steps.length > 0 && html`<${Chart} ...${chartOf(alert, found)} />`}</div></article>`;
}

function chartOf(alert, { name, help, unit, steps, values }) {
  const limit = { label: "threshold", xs: [steps[0], steps.at(-1)], ys: [alert.threshold, alert.threshold], colour: "--c7" };
  const isComparable = alert.unit === unit; // others are thresholds of a share or a trend of it
  const lines = [{ label: "value", xs: steps, ys: values }, ...(isComparable ? [limit] : [])];
  return { id: `alert-${alert.alert}`, title: name, help, unit, noun: "no unit", lines, marks: [{ x: alert.step, text: "raised" }] };
}

/** One row for all that a rule raised: `{ num, first, last }`. `past`: newest first, as they are answered. */
export function byRule(past) {
  const rows = new Map();
  for (const alert of past) {
    const row = rows.get(alert.alert) ?? { num: 0, last: alert };
    rows.set(alert.alert, { ...row, num: row.num + 1, first: alert });
  }
  return [...rows.values()];
}

const PAST = [
  { label: "Alert", isHead: true, cell: ({ last }) => words(last.alert) },
  { label: "Times", isNumber: true, cell: ({ num }) => number(num) },
  { label: "First at step", isNumber: true, cell: ({ first }) => number(first.step) },
  { label: "Last at steps", isNumber: true, cell: ({ last }) => `${number(last.step)} to ${number(last.until_step)}` },
  { label: "Last value", isNumber: true, cell: ({ last }) => quantity(last.value, last.unit) },
  { label: "Threshold", isNumber: true, cell: ({ last }) => quantity(last.threshold, last.unit) },
  { label: "What it said last", isText: true, cell: ({ last }) => last.sentence },
];

const RULES = [
  { label: "Alert", isHead: true, cell: ({ alert }) => words(alert) },
  { label: "Threshold", isNumber: true, cell: ({ threshold, unit }) => (threshold === null ? badge("off") : quantity(threshold, unit)) },
  { label: "Meaning", isText: true, cell: ({ meaning }) => meaning },
];

/** What looked wrong, since when, and what to do; and the rules it is scored by. */

import { get } from "../api.js";
import { Chart } from "../charts.js";
import { h, update } from "../dom.js";
import { date, number, quantity } from "../format.js";
import { badge, empty, table } from "../parts.js";
import { link } from "../router.js";

export const title = "Alerts";

const POINTS = 400;

export async function render(root, { run: id }, { signal }) {
  const list = h("div");
  const charts = new Map(); // metric -> Chart
  root.append(h("h1", { class: "visually-hidden" }, "Alerts"), list);

  async function refresh() {
    const { alerts, rules } = await get("alerts", { run: id }, signal);
    const open = alerts.filter(({ until_step }) => until_step === null);
    const past = alerts.filter(({ until_step }) => until_step !== null);
    const names = [...new Set(open.map(({ metric }) => metric).filter(Boolean))];
    const { series } = names.length
      ? await get("series", { run: id, name: names, points: POINTS }, signal)
      : { series: [] };
    update(
      list,
      h(
        "section",
        { key: "open", "data-testid": "open" },
        h("h2", null, `Open (${open.length})`),
        open.length
          ? open.map((alert) => card(alert, id))
          : empty("Nothing looks wrong now.", "Alerts that are over, and the rules, are below."),
      ),
      past.length > 0 &&
        h(
          "section",
          { key: "past", "data-testid": "past" },
          h("h2", null, `Over (${number(past.length)})`),
          table(PAST, byRule(past), { id: "past-alerts", key: ({ last }) => last.alert }),
        ),
      h(
        "section",
        { key: "rules", "data-testid": "rules" },
        h("h2", null, "Rules"),
        table(RULES, rules, { id: "rules", key: ({ alert }) => alert }),
      ),
    );
    drawCharts(open, series);
  }

  function drawCharts(open, series) {
    const isOpen = new Set(open.map(keyOf));
    for (const [key, chart] of charts) {
      if (isOpen.has(key)) continue;
      chart.close();
      charts.delete(key);
    }
    for (const alert of open) {
      const found = series.find(({ name }) => name === alert.metric);
      const place = list.querySelector(`[data-chart="${CSS.escape(keyOf(alert))}"]`);
      if (!found || !place) continue;
      const chart =
        charts.get(keyOf(alert)) ??
        new Chart({
          id: `alert-${alert.alert}`,
          title: found.name,
          help: found.help,
          unit: found.unit,
          noun: "no unit",
          signal,
        });
      charts.set(keyOf(alert), chart);
      if (chart.element.parentNode !== place) place.append(chart.element);
      const limit = {
        label: "threshold",
        xs: [found.steps[0], found.steps.at(-1)],
        ys: [alert.threshold, alert.threshold],
        colour: "--c7",
      };
      const isComparable = alert.unit === found.unit; // others are thresholds of a share or a trend of it
      chart.show(
        [{ label: "value", xs: found.steps, ys: found.values }, ...(isComparable ? [limit] : [])],
        [{ x: alert.step, text: "raised" }],
      );
    }
  }

  await refresh();
  return refresh;
}

function keyOf({ alert, step }) {
  return `${alert} ${step}`;
}

function words(alert) {
  return alert.replaceAll("_", " ");
}

function card(alert, id) {
  return h(
    "article",
    { class: "alert", key: keyOf(alert), "data-testid": `alert-${alert.alert}`, tabindex: "-1", "data-row": true },
    h(
      "div",
      { class: "alert-text" },
      h("h3", null, words(alert.alert), " ", badge(`since step ${alert.step}`, "bad", date(alert.time_s))),
      h("p", { "data-testid": "sentence" }, alert.sentence),
      h(
        "p",
        { class: "muted small" },
        `${quantity(alert.value, alert.unit)} at step ${alert.step}; `,
        `the threshold is ${quantity(alert.threshold, alert.unit)}. `,
        alert.metric && h("a", { href: link("overview", id, { metric: alert.metric }) }, alert.metric),
      ),
    ),
    h("div", { class: "alert-chart", "data-chart": keyOf(alert), keep: true }),
  );
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
  {
    label: "Threshold",
    isNumber: true,
    cell: ({ threshold, unit }) => (threshold === null ? badge("off") : quantity(threshold, unit)),
  },
  { label: "Meaning", isText: true, cell: ({ meaning }) => meaning },
];

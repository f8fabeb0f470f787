/** Every metric that a run has reported, with what it means; some are chosen to be charted. */

import { Table, empty, filterField } from "./components.js";
import { quantity } from "./format.js";
import { html } from "./html.js";

const FEW = 12;

/** Metrics whose name or meaning has each word of `sought`, a regular expression, or a plain word if it is none. */
export function found(metrics, sought) {
  const patterns = sought.split(/\s+/).filter(Boolean).map(patternOf);
  return metrics.filter(({ name, help }) =>
    patterns.every((pattern) => pattern.test(`${name} ${help}`)),
  );
}

function patternOf(word) {
  try {
    return new RegExp(word, "i");
  } catch {
    return new RegExp(word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i"); // not finished yet, or meant as it stands
  }
}

/**
 * `metrics` of a MetricsAnswer; `choose(names)` turns their charts on or off, `seek(text)` narrows the list, which begins with a few until `isWhole`,
 * for which `unfold()` is asked.
 */
export function metricList(metrics, { chosen, sought, isWhole, choose, seek, unfold }) {
  const all = found(metrics, sought);
  const shown = isWhole || sought ? all : all.slice(0, FEW);
  const missing = all.map(({ name }) => name).filter((name) => !chosen.has(name));
  const columns = [
    { label: "Metric", isHead: true, cell: ({ name }) => html`<code>${name}</code>` },
    { label: "Last", isNumber: true, cell: ({ last, unit }) => quantity(last, unit) },
    { label: "Meaning", isText: true, cell: ({ help }) => help || null },
    {
      label: "Chart",
      cell: ({
        name,
      }) => html`<button type="button" data-row data-testid=${`show-${name}`} aria-pressed=${chosen.has(name)}
      onclick=${() => choose([name])}>${chosen.has(name) ? "Hide" : "Show"}</button>`,
    },
  ];
  return html`<div class="tools" key="tools">
      ${filterField({ label: "Search metrics, as kl|entropy", title: "Search metrics", value: sought, seek, id: "search-metrics" })}
      <span class="muted small" role="status">${all.length} of ${metrics.length}</span>
      ${sought && missing.length > 0 && missing.length <= FEW && html`<button type="button" data-testid="chart-found" onclick=${() => choose(missing)}>Chart all ${missing.length}</button>`}
    </div>
    ${
      shown.length
        ? html`<${Table} columns=${columns} rows=${shown} id="metrics" keyOf=${({ name }) => name} />`
        : empty("No metric matches.", "Try a part of its name, as kl, or of its meaning.")
    }
    ${shown.length < all.length && html`<p key="unfold" class="after"><button type="button" data-testid="unfold-metrics" onclick=${unfold}>Show all ${all.length}</button></p>`}`;
}

/** Every metric that a run has reported, with what it means; some are chosen to be charted. */

import { h } from "./dom.js";
import { quantity } from "./format.js";
import { empty, table } from "./parts.js";

const FEW = 12;

/**
 * `metrics` of a MetricsAnswer; `choose(name)` turns a chart on or off, `seek(text)` narrows the list, which begins with
 * a few until `isWhole`, for which `unfold()` is asked.
 */
export function metricList(metrics, { chosen, sought, isWhole, choose, seek, unfold }) {
  const words = sought.toLowerCase().split(/\s+/);
  const found = metrics.filter(({ name, help }) =>
    words.every((word) => `${name} ${help}`.toLowerCase().includes(word)),
  );
  const shown = isWhole || sought ? found : found.slice(0, FEW);
  return [
    h(
      "div",
      { class: "tools", key: "tools" },
      h("input", {
        type: "search",
        placeholder: "Search metrics and their meaning",
        "aria-label": "Search metrics",
        "data-search": true,
        "data-testid": "search-metrics",
        oninput: ({ target }) => seek(target.value),
      }),
      h("span", { class: "muted small", role: "status" }, `${found.length} of ${metrics.length}`),
    ),
    shown.length
      ? table(columns(chosen, choose), shown, { id: "metrics", key: ({ name }) => name })
      : empty("No metric matches.", "Try a part of its name, as `kl`, or of its meaning."),
    shown.length < found.length &&
      h(
        "p",
        { key: "unfold", class: "after" },
        h("button", { type: "button", "data-testid": "unfold-metrics", onclick: unfold }, `Show all ${found.length}`),
      ),
  ];
}

function columns(chosen, choose) {
  return [
    { label: "Metric", isHead: true, cell: ({ name }) => h("code", null, name) },
    { label: "Last", isNumber: true, cell: ({ last, unit }) => quantity(last, unit) },
    { label: "Meaning", isText: true, cell: ({ help }) => help || null },
    {
      label: "Chart",
      cell: ({ name }) =>
        h(
          "button",
          {
            type: "button",
            "data-row": true,
            "data-testid": `show-${name}`,
            "aria-pressed": String(chosen.has(name)),
            onclick: () => choose(name),
          },
          chosen.has(name) ? "Hide" : "Show",
        ),
    },
  ];
}

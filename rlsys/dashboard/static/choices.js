/**
 * What a person chose of the charts of a page: what x counts, smoothing, the stretch that is looked at, axes, hidden lines, and the chart that fills
 * the window. Charts take and change it as `choices` and `choose(changes)`.
 */

import { html } from "./html.js";

/** What steps can be counted by: see `/api/series`. */
export const AXES = {
  step: "step",
  time: "wall time",
  tokens: "tokens trained",
  samples: "episodes trained",
};

export const NOTHING_CHOSEN = { x: "step", smooth: 0, zoom: null, log: [], hide: [], full: null };

/** The choices in an address, a URLSearchParams. */
export function choicesOf(query) {
  const [from, to] = [Number(query.get("from") ?? NaN), Number(query.get("to") ?? NaN)];
  return {
    x: query.get("x") in AXES ? query.get("x") : "step",
    smooth: Math.min(Math.max(Number(query.get("smooth")) || 0, 0), 0.99),
    zoom: from < to ? [from, to] : null,
    log: query.getAll("log"),
    hide: query.getAll("hide"),
    full: query.get("full"),
  };
}

/** The same as parameters of an address, without what is usual. */
export function paramsOf({ x, smooth, zoom, log, hide, full }) {
  const [from, to] = zoom ?? [null, null];
  return { x: x === "step" ? null : x, smooth: smooth || null, from, to, log, hide, full };
}

/** What to ask `/api/series` for, so that it answers just what is looked at. */
export function windowOf({ x, zoom }) {
  return { x, from: zoom?.[0], to: zoom?.[1] };
}

/** `list` with `item` if it was without it, and without it otherwise. */
export function toggled(list, item) {
  return list.includes(item) ? list.filter((one) => one !== item) : [...list, item];
}

/** What is chosen for all charts of a page. */
export function chartTools(choices, choose) {
  return html`<div class="tools chart-tools" key="chart-tools" data-testid="chart-tools">
    <label>x <select data-testid="x-axis" value=${choices.x} onchange=${({ target }) => choose({ x: target.value, zoom: null })}>
      ${Object.entries(AXES).map(([name, label]) => html`<option value=${name} selected=${name === choices.x}>${label}</option>`)}</select></label>
    <label>Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${choices.smooth} data-testid="smooth"
      oninput=${({ target }) => choose({ smooth: Number(target.value) })} /><span class="num small">${choices.smooth.toFixed(2)}</span></label>
    ${choices.zoom && html`<button type="button" data-testid="show-whole" onclick=${() => choose({ zoom: null })}>Show all of the run</button>`}
    ${choices.hide.length > 0 && html`<button type="button" data-testid="show-lines" onclick=${() => choose({ hide: [] })}>Show hidden lines</button>`}
  </div>`;
}

/** When each turn, tool and step of an environment of an episode ran, drawn to scale: who waited for whom. */

import { Table, fold } from "./components.js";
import { duration } from "./format.js";
import { html } from "./html.js";
import { sinceBegin } from "./lanes.js";

const KIND = { turn: "--c1", tool: "--c3", environment: "--c2" };
const ROW = 14; // pixels
const WIDTH = 1000;

/** The timeline of an EpisodeAnswer; nothing if none was recorded. */
export function timeline({ timeline: spans, trajectories, seconds }) {
  if (!spans.length) return null;
  const whole =
    Math.max(seconds ?? 0, ...spans.map(({ start_s, seconds: took }) => start_s + took)) || 1;
  const rows = [...new Set(spans.map(({ trajectory }) => trajectory))].sort((a, b) => a - b);
  const nameOf = ({ kind, name }) => name || kind;
  const kinds = [...new Set(spans.map(({ kind }) => kind))];
  const bar = (span) => {
    const { kind, trajectory, start_s, seconds: took } = span;
    return html`<rect x=${(start_s / whole) * WIDTH} y=${rows.indexOf(trajectory) * ROW + 2} width=${Math.max((took / whole) * WIDTH, 1)} height=${ROW - 4}
      style=${{ fill: `var(${KIND[kind] ?? "--c7"})` }}><title>${nameOf(span)}: ${duration(took)} from ${sinceBegin(start_s, 0.1)}</title></rect>`;
  };
  const columns = [
    {
      label: "Agent",
      isHead: true,
      cell: ({ trajectory }) => trajectories[trajectory]?.agent ?? String(trajectory),
    },
    { label: "What", cell: nameOf },
    { label: "From", isNumber: true, cell: ({ start_s }) => sinceBegin(start_s, 0.1) },
    { label: "Took", isNumber: true, cell: ({ seconds: took }) => duration(took) },
  ];
  return html`<section key="timeline" data-testid="timeline" class="timeline"><h2>Timeline <small class="muted">${duration(seconds ?? whole)}</small></h2>
    <div class="legend">${kinds.map((kind) => html`<span><svg viewBox="0 0 20 8" aria-hidden="true"><rect width="20" height="8" style=${{ fill: `var(${KIND[kind] ?? "--c7"})` }} /></svg>${kind}</span>`)}</div>
    <div class="spans">${rows.length > 1 && html`<div class="names">${rows.map((row) => html`<span>${trajectories[row]?.agent}</span>`)}</div>`}
      <svg viewBox=${`0 0 ${WIDTH} ${rows.length * ROW}`} preserveAspectRatio="none" style=${{ height: `${rows.length * ROW}px` }} role="img"
        aria-label=${`${spans.length} parts in ${duration(whole)}; the table below has each`}>${spans.map(bar)}</svg></div>
    ${fold("Data", html`<${Table} columns=${columns} rows=${spans} id="spans" />`, { id: "data-timeline" })}</section>`;
}

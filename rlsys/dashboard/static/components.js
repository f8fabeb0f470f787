/**
 * The components that views are made of; `#/components` shows each of them. Charts are in `charts.js`, texts that somebody wrote in `prompts.js`,
 * small marks beside numbers in `marks.js`.
 */

import { NONE, number } from "./format.js";
import { html, useState } from "./html.js";
import { link } from "./router.js";

/**
 * Table; on a narrow page its rows become cards. `columns`: `{ label, cell(row), isNumber, isText, title, isHead, order }`: `cell` gives children of
 * a cell, `isText` marks one of sentences, `isHead` the one that names its row. One with `order`, its name for the server, can be sorted by, if
 * `onOrder` is there: it is called with the new `order`, a name, followed by ` desc` where the largest stands on top. `id` is also its data-testid.
 */
export function Table({ columns, rows, id, caption, keyOf, rowClass, order, onOrder }) {
  const kind = (column) => (column.isNumber ? "num" : column.isText ? "text" : null);
  const cell = (column, row) => {
    const shown = column.cell(row) ?? NONE;
    const names = [kind(column), shown === NONE && "none"].filter(Boolean).join(" ") || null;
    return column.isHead
      ? html`<th scope="row" class=${names} data-label=${column.label}>${shown}</th>`
      : html`<td class=${names} data-label=${column.label}>${shown}</td>`;
  };
  return html`<div class="table-box"><table class="cards" data-testid=${id}>
    ${caption && html`<caption>${caption}</caption>`}
    <thead><tr>${columns.map((column) => html`<${Heading} ...${{ column, kind: kind(column), order, onOrder }} />`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${keyOf?.(row)} class=${rowClass?.(row)}>${columns.map((column) => cell(column, row))}</tr>`)}</tbody>
  </table></div>`;
}

function Heading({ column: { label, title, order: own, isNumber }, kind, order, onOrder }) {
  if (!label) return html`<td></td>`;
  if (!onOrder || !own) return html`<th class=${kind} scope="col" title=${title}>${label}</th>`;
  const by = order === own ? "ascending" : order === `${own} desc` ? "descending" : null;
  const isDown = by ? by === "ascending" : isNumber;
  return html`<th class=${kind} scope="col" aria-sort=${by}><button type="button" class="sort" title=${title ?? `Sort by ${label}`} data-testid=${`sort-${own}`}
    onclick=${() => onOrder(isDown ? `${own} desc` : own)}>${label}${by && (by === "ascending" ? " ▲" : " ▼")}</button></th>`;
}

const MARKS = {
  starting: "◌",
  running: "▶",
  silent: "…",
  finished: "✓",
  interrupted: "❚❚",
  failed: "✕",
};

/** The state of a run, by sign, word and colour. */
export function status(name) {
  return html`<span class=${`status status-${name}`} data-testid="status"><span class="mark" aria-hidden="true">${MARKS[name] ?? "?"}</span>${name}</span>`;
}

/** A word set apart. `kind`: `bad`, `warn`, `good` or nothing. */
export function badge(text, kind, title) {
  return html`<span class=${kind ? `badge ${kind}` : "badge"} title=${title}>${text}</span>`;
}

/** How an episode ended, by word and colour; nothing if it ended well. */
export function outcomeBadge(outcome, reason) {
  return outcome !== "ok" && badge(outcome, outcome === "failed" ? "bad" : "warn", reason || null);
}

/** Nothing to show: why, and what to do about it. */
export function empty(why, remedy) {
  return html`<div class="empty" data-testid="empty"><p>${why}</p>${remedy && html`<p class="muted">${remedy}</p>`}</div>`;
}

/** `page`, by its title, could not be shown: `error` of any kind, and a way to try again. */
export function failure(page, error, retry) {
  return html`<div class="failure" role="alert" data-testid="error">
    <p><strong>${page ? `“${page}” could not be shown. ` : "This could not be shown. "}</strong>${error.message}</p>
    ${
      error.address &&
      html`<details><summary>What was asked</summary>
      <p class="muted"><code>${`/${error.address}`}</code>${error.status ? ` answered ${error.status}` : ""}</p></details>`
    }
    ${retry && html`<button type="button" onclick=${retry}>Try again</button>`}
  </div>`;
}

/** A sentence that a person must not miss. `kind`: `bad`, `warn` or nothing. */
export function banner(kind, children, { id, role = "status" } = {}) {
  return html`<div class=${kind ? `banner ${kind}` : "banner"} role=${role} data-testid=${id}>${children}</div>`;
}

/** What the pages of groups and tasks say of a run whose events tell of none, though it has trained; else null. */
export function untold(run) {
  if (run.has_groups || run.summary.step === 0) return null;
  if (run.policies.length) return ofPolicies(run, "The groups");
  return empty(
    "The events of this run do not tell of groups: it was written by an older version.",
    "Its steps are in the overview; rollouts that it wrote are under Groups.",
  );
}

/** Nothing to show of a run of several policies, because each of them has its own; `what` that is. */
export function ofPolicies(run, what) {
  const links = run.policies.map(
    ({ id }, index) => html`${index > 0 && ", "}<a href=${link("overview", id)}>${nameOf(id)}</a>`,
  );
  return empty(`${what} of a run of several policies are told by each of them.`, links);
}

/** What a policy is called, by the id of its run: its folder. */
export function nameOf(id) {
  return id.split("/").at(-1);
}

/** A named figure: `Reward` over `0.523`. */
export function figure(label, value, { title, note, id } = {}) {
  return html`<div class="figure" key=${label} title=${title} data-testid=${id}>
    <dt>${label}</dt><dd>${value}${note && html`<small>${note}</small>`}</dd></div>`;
}

/** What can be unfolded: `Data` under a chart. */
export function fold(summary, children, { id, ontoggle, isOpen } = {}) {
  return html`<details class="data" data-testid=${id} ontoggle=${ontoggle} open=${isOpen}><summary>${summary}</summary>${children}</details>`;
}

/** A button that copies a text, and says so. `text` is a string, or a function that gives it. */
export function CopyButton({ label, text, id }) {
  const [said, say] = useState(null);
  const onclick = async () => {
    say((await copy(typeof text === "function" ? text() : text)) ? "Copied" : "Could not copy");
    setTimeout(() => say(null), 1200);
  };
  return html`<button type="button" class="copy" data-testid=${id} onclick=${onclick}>${said ?? label}</button>`;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only there on a secure page: loopback or HTTPS
    return true;
  } catch {
    const field = Object.assign(document.createElement("textarea"), {
      value: text,
      readOnly: true,
    });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}

/** A field that narrows what is shown as one types; `seek(text)` is called. */
export function filterField({ label, title, value, seek, id = "filter" }) {
  return html`<input type="search" placeholder=${label} aria-label=${title ?? label} data-search data-testid=${id} value=${value}
    oninput=${({ target }) => seek(target.value)} />`;
}

/** A link to the previous or next thing (`nav`), or the same greyed out where `href` is null; keys: see `keys.js`. */
export function neighbour(nav, label, href) {
  const text = nav === "next" ? `${label} ›` : `‹ ${label}`;
  const id = `to-${nav}`;
  if (href === null)
    return html`<button key=${id} type="button" disabled data-testid=${id}>${text}</button>`;
  return html`<a key=${id} class="button" href=${href} data-nav=${nav} data-testid=${id} title=${nav === "next" ? "]" : "["}>${text}</a>`;
}

/** Where one is in a list of pages, and the ways on; nothing if all of it is shown. `size`: rows of a page. */
export function pages({ page, size, num, noun }, hrefOf) {
  if (num <= size) return null;
  const from = page * size + 1;
  const to = Math.min((page + 1) * size, num);
  return html`<nav key="pages" class="tools pages" aria-label="Pages">
    ${page > 0 && html`<a class="button" href=${hrefOf(page - 1)} data-testid="page-before">‹ Page before</a>`}
    <span class="muted" data-testid="page">${`${number(from)} to ${number(to)} of ${number(num)} ${noun}`}</span>
    ${to < num && html`<a class="button" href=${hrefOf(page + 1)} data-testid="page-after">Page after ›</a>`}</nav>`;
}

/** The name of a task, which leads to the task over time if the run's events tell of it. `run`: a RunAnswer. */
export function taskName(run, task) {
  if (!run.has_groups) return html`<span data-testid="task-name">${task}</span>`;
  return html`<a href=${link("task", run.summary.id, { task })} data-testid="task-link" title="This task over time">${task}</a>`;
}

/** The place of a group, and of one of its episodes if `episode` is given; of an evaluation on `dataset` if there is one. */
export function rollout(run, { step, group_id, episode, dataset }) {
  return link(episode === undefined ? "group" : "episode", run, {
    step,
    group_id,
    episode,
    dataset,
  });
}

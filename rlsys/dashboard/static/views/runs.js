/** All runs of the folder, and the choice of some to compare. */

import { get } from "../api.js";
import { Table, badge, empty, filterField, sorted, status } from "../components.js";
import { ago, date, duration, number } from "../format.js";
import { html, update } from "../html.js";
import { go, link, note } from "../router.js";
import { visible } from "../tokens.js";

export const title = "Runs";

export async function render(root, { query }, { signal }) {
  const chosen = new Set();
  let sought = query.get("q") ?? "";
  let sort = query.get("sort");
  let answer = null;

  function draw() {
    const all = [{ label: "", cell: (run) => choice(run, chosen, toggle) }, ...COLUMNS];
    const runs = sorted(answer.runs.filter((run) => matches(run, sought)), all, sort);
    const none = answer.runs.length
      ? empty("No run matches the filter.", "Clear the filter to see all.")
      : empty("No run was found in this folder.", "Start one with `rlsys train`, or give the folder that holds them: `rlsys dashboard FOLDER`.");
    update(
      root,
      html`<div class="head" key="head"><h1>Runs</h1><code class="muted" data-testid="folder">${answer.folder}</code><span class="space"></span>
        ${filterField({ label: "Filter by name, model, status", title: "Filter runs", value: sought, seek })}
        <button type="button" data-testid="compare" disabled=${chosen.size < 2} onclick=${compare}>${chosen.size < 2 ? "Compare: choose two or more" : `Compare ${chosen.size} runs`}</button></div>
      ${runs.length ? html`<${Table} columns=${all} rows=${runs} id="runs" keyOf=${(run) => run.id} sort=${sort} onSort=${sortBy} />` : none}`,
    );
  }
  function noted() {
    note(link("runs", null, { q: sought, sort }));
    draw();
  }
  function toggle(id, isChosen) {
    if (isChosen) chosen.add(id);
    else chosen.delete(id);
    draw();
  }
  function seek(text) {
    sought = text;
    noted();
  }
  function sortBy(by) {
    sort = by;
    noted();
  }
  function compare() {
    go(link("compare", null, { run: answer.runs.filter(({ id }) => chosen.has(id)).map(({ id }) => id) }));
  }
  async function refresh() {
    answer = await get("runs", {}, signal);
    draw();
  }
  await refresh();
  return refresh;
}

function matches(run, sought) {
  const text = [run.id, run.name, run.model, run.algorithm, run.status].join(" ").toLowerCase();
  return sought.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function choice({ id, name }, chosen, toggle) {
  return html`<label class="choose"><input type="checkbox" checked=${chosen.has(id)} data-testid=${`choose-${id}`} aria-label=${`Compare ${name || id}`}
    onchange=${({ target }) => toggle(id, target.checked)} /></label>`;
}

const COLUMNS = [
  { label: "Run", isHead: true, value: ({ name, id }) => name || id, cell: named },
  { label: "Status", value: (run) => run.status, cell: (run) => status(run.status) },
  { label: "Model", value: (run) => run.model, cell: (run) => run.model || null },
  { label: "Algorithm", value: (run) => run.algorithm, cell: (run) => run.algorithm || null },
  { label: "Step", isNumber: true, value: (run) => run.step, cell: (run) => (run.total_steps ? `${number(run.step)} / ${number(run.total_steps)}` : number(run.step)) },
  { label: "Reward", isNumber: true, title: "Mean of the last 20 steps", value: (run) => run.reward, cell: (run) => number(run.reward) },
  { label: "Step time", isNumber: true, title: "Median of the last 20 steps", value: (run) => run.step_s, cell: (run) => duration(run.step_s) },
  { label: "Left", isNumber: true, title: "Until its last step, if it goes on like this", value: (run) => run.eta_s, cell: (run) => duration(run.eta_s) },
  { label: "Written", isNumber: true, title: "When it last wrote anything", value: (run) => run.updated_s, cell: (run) => html`<time title=${date(run.updated_s)}>${ago(run.updated_s)}</time>` },
  { label: "Alerts", isNumber: true, value: (run) => run.num_alerts, cell: (run) => (run.num_alerts ? badge(`${run.num_alerts} open`, "bad") : "0") },
];

function named({ id, name, last_error }) {
  return html`<a href=${link("overview", id)} data-row data-testid=${`run-${id}`}>${name || id}</a>
    ${name && name !== id && html`<div class="muted small path">${id}</div>`}
    ${last_error && html`<div class="last-error" data-testid=${`error-${id}`} title=${last_error}>${visible(last_error)}</div>`}`;
}

/** Output of all workers as one log, filtered by the server: part of the view of the log. */

import { Table, empty, pages, searchField } from "./components.js";
import { date, number } from "./format.js";
import { html } from "./html.js";
import { go, link } from "./router.js";
import { visible } from "./tokens.js";

export const PAGE = 200;
const LEVELS = ["debug", "info", "warning", "error"];

/** What to ask `/api/logs` for, from the query of an address. */
export function asking(query) {
  return { worker: query.getAll("worker"), level: query.get("level") ?? "debug", q: query.get("q"), page: query.get("page"), limit: PAGE };
}

/** The lines of `answer`, a WorkerLogsAnswer, with the filters `asked`. */
export function workerLogs(run, answer, asked) {
  const to = (changes) => link("log", run, { of: "workers", ...asked, limit: null, page: null, ...changes });
  const option = (value, label, isChosen) => html`<option value=${value} selected=${isChosen}>${label}</option>`;
  return html`<div class="tools" key="filters">
      <label class="small muted">Worker <select data-testid="worker" onchange=${({ target }) => go(to({ worker: target.value || null }))}>
        ${option("", "all", !asked.worker.length)}${answer.workers.map((name) => option(name, name, asked.worker.includes(name)))}</select></label>
      <label class="small muted">At least <select data-testid="level" onchange=${({ target }) => go(to({ level: target.value }))}>
        ${LEVELS.map((level) => option(level, level, level === asked.level))}</select></label>
      ${searchField("Regular expression", asked.q ?? "", (q) => to({ q }))}
      <span class="muted small" role="status">${number(answer.num_lines)} lines, newest first</span></div>
    ${answer.lines.length
      ? html`<${Table} columns=${COLUMNS} rows=${answer.lines} id="worker-log" rowClass=${({ level }) => (level === "error" ? "bad" : level === "warning" ? "warn" : null)} />`
      : empty(answer.workers.length ? "No line matches." : "No worker has written a log into the folder of this run.", "The log of events is beside this one.")}
    ${pages({ page: answer.page, size: PAGE, num: answer.num_lines, noun: "lines" }, (page) => to({ page }))}`;
}

const COLUMNS = [
  { label: "Time", cell: ({ time_s }) => html`<time class="num">${date(time_s)}</time>` },
  { label: "Worker", cell: ({ worker }) => html`<span class="muted">${worker}</span>` },
  { label: "Level", cell: ({ level }) => level },
  { label: "What", isText: true, cell: ({ text }) => html`<span class="said">${visible(text)}</span>` },
];

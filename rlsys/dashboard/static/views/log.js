/** What happened, in words, newest first: the events of the run, or the output of its workers. */

import { get } from "../api.js";
import { Table, empty, filterField } from "../components.js";
import { date } from "../format.js";
import { html, update } from "../html.js";
import { continued, gap, indexed, joined } from "../loglines.js";
import { link } from "../router.js";
import { visible } from "../tokens.js";
import { asking, workerLogs } from "../workerlogs.js";

export const title = "Log";

const PAGE = 200;
const MOST = 1000; // that the server gives at once
const BAD = new Set(["worker_failed", "alert_raised", "signal_missing"]);

export async function render(root, { run: id, query }, { signal }) {
  if (query.get("of") === "workers") {
    const asked = asking(query);
    const load = async () => {
      const answer = await get("logs", { run: id, ...asked }, signal);
      update(root, html`<h1 class="visually-hidden">Output of workers</h1>${which(id, true)}${workerLogs(id, answer, asked)}`);
    };
    await load();
    return load;
  }
  let held = []; // newest first, see loglines.js
  let isLoading = false;
  let sought = "";

  function draw() {
    const lines = held.filter(({ kind, text }) => `${kind} ${text}`.toLowerCase().includes(sought.toLowerCase()));
    const hasOlder = held.length > 0 && held.at(-1).index > 0;
    const none = held.length
      ? empty("No line matches.", "Load older ones, or clear the filter.")
      : empty("Nothing has happened yet.", "The first lines come with the start of the workers.");
    const rowClass = ({ kind }) => (BAD.has(kind) ? "bad" : null);
    update(
      root,
      html`${which(id, false)}<div class="head" key="head"><h1 class="visually-hidden">Log</h1>
        ${filterField({ label: "Filter what is loaded", title: "Filter the log", value: sought, seek })}
        <span class="muted small" role="status">${`${lines.length} of ${held.length} lines${hasOlder ? ", there are older ones" : ""}`}</span></div>
      ${lines.length ? html`<${Table} columns=${COLUMNS} rows=${lines} id="log" keyOf=${({ index }) => index} rowClass=${rowClass} />` : none}
      ${hasOlder && html`<p key="older" class="after"><button type="button" data-testid="older" disabled=${isLoading} onclick=${loadOlder}>Older lines</button></p>`}`,
    );
  }
  function seek(text) {
    sought = text;
    draw();
  }
  async function loadOlder() {
    isLoading = true;
    draw();
    try {
      held = continued(held, await ask(held.at(-1).index, PAGE));
    } finally {
      isLoading = false;
      draw();
    }
  }
  async function ask(before, limit) {
    return indexed(await get("log", { run: id, before, limit }, signal));
  }
  async function refresh() {
    const fresh = await ask(null, PAGE);
    const missed = Math.min(gap(held, fresh), MOST);
    const between = missed ? await ask(fresh.at(-1).index, missed) : [];
    held = joined(held, [...fresh, ...between]);
    draw();
  }
  await refresh();
  return refresh;
}

function which(run, isOfWorkers) {
  const way = (of, label, isHere) => html`<a class="button" href=${link("log", run, { of })} data-testid=${`log-${of ?? "events"}`} aria-current=${isHere ? "true" : null}>${label}</a>`;
  return html`<nav key="which" class="tools which" aria-label="Logs">${way(null, "Events of the run", !isOfWorkers)}${way("workers", "Output of workers", isOfWorkers)}</nav>`;
}

const COLUMNS = [
  { label: "Time", cell: ({ time_s }) => html`<time class="num">${date(time_s)}</time>` },
  { label: "Kind", cell: ({ kind }) => html`<span class="muted">${kind.replaceAll("_", " ")}</span>` },
  { label: "What", isText: true, cell: ({ text }) => html`<span class="said">${visible(text.trim())}</span>` },
];

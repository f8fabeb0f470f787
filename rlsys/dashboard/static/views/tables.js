/** Any table of a run: filtered, searched, sorted, grouped and paged by the server, and all of it in the address. */

import { get, numbered } from "../api.js";
import { Table, banner, empty, fold, pages, rollout } from "../components.js";
import { date, number, percent } from "../format.js";
import { html, update } from "../html.js";
import { go, link, note } from "../router.js";
import { visible } from "../tokens.js";

export const title = "Tables";

const ROWS = 50;
const AGAIN_MS = 500;
const ASKED = ["table", "filter", "search", "order", "show", "group", "from", "to", "offset"];
/** Questions that are asked often: what they are called, and the answer. */
const OFTEN = [
  ["Hardest tasks", { table: "tasks", order: "reward" }],
  ["Biggest losses", { table: "tasks", order: "change" }],
  ["Biggest gains", { table: "tasks", order: "change desc" }],
  ["Longest truncated", { table: "episodes", filter: "outcome = truncated", order: "length desc" }],
  ["Failed episodes", { table: "episodes", filter: "outcome = failed", order: "step desc" }],
  ["Lowest rewards", { table: "episodes", order: "reward" }],
  ["Stalest", { table: "episodes", order: "staleness desc" }],
];

export async function render(root, place, { signal }) {
  const run = place.run;
  const asked = Object.fromEntries(ASKED.map((name) => [name, place.query.get(name) ?? ""]));
  asked.table ||= run === null ? "runs" : "episodes";
  const newest = numbered();
  const { tables } = await get("tables", { run }, signal);
  const to = (changes) => link("tables", run, { ...asked, offset: null, ...changes });
  let answer = null;
  let problem = null;

  async function load() {
    const isNewest = newest();
    const params = Object.fromEntries(Object.entries(asked).filter(([, value]) => value !== ""));
    try {
      const fresh = await get("table", { run, ...params, limit: ROWS }, signal);
      if (!isNewest()) return;
      [answer, problem] = [fresh, null];
    } catch (error) {
      if (error.status !== 400 || !isNewest()) throw error;
      problem = error.message; // a filter that cannot be understood: the sentence says where and why
    }
    draw();
    if (answer?.indexed < 1 && !signal.aborted) setTimeout(() => !signal.aborted && load(), AGAIN_MS); // nothing tells of an index
  }

  function draw() {
    const table = tables.find(({ name }) => name === asked.table);
    const tab = ({ name, help }) => html`<a key=${name} class="button" href=${link("tables", run, { table: name })} title=${help} data-testid=${`table-${name}`}
      aria-current=${name === asked.table ? "true" : null}>${name}</a>`;
    const often = OFTEN.filter(([, query]) => tables.some(({ name }) => name === query.table));
    update(
      root,
      html`<h1 class="visually-hidden" data-testid="title">Tables</h1>
      <nav class="tools" aria-label="Tables">${tables.map(tab)}</nav>
      ${often.length > 0 && html`<nav class="tools often" aria-label="Often asked">${often.map(([label, query]) => html`<a class="small" href=${link("tables", run, query)}>${label}</a>`)}</nav>`}
      ${questions(asked, to)}
      ${problem && banner("bad", problem, { id: "refused", role: "alert" })}
      ${answer && answer.indexed < 1 && banner("", `${percent(answer.indexed)} of the run is indexed so far; the rest follows.`, { id: "indexing" })}
      ${answer && found(run, answer, asked, sortBy)}
      ${answer && pages({ page: answer.offset / ROWS, size: ROWS, num: answer.num_rows, noun: "rows" }, (page) => to({ offset: page * ROWS || null }))}
      ${table && fold("Columns, and how to filter", columnHelp(table, asked, to), { id: "columns" })}`,
    );
  }
  function sortBy(by) {
    asked.order = by.startsWith("-") ? `${by.slice(1)} desc` : by;
    asked.offset = "";
    note(to({}));
    return load();
  }
  await load();
  return load;
}

/** The fields above the table; Enter asks. */
function questions(asked, to) {
  const field = (name, label, size) => html`<label class="asked"><span class="muted small">${label}</span>
    <input name=${name} type="search" size=${size} defaultValue=${asked[name]} data-testid=${`ask-${name}`} autocomplete="off" data-search=${name === "search" ? true : null} /></label>`;
  const onsubmit = (event) => {
    event.preventDefault();
    go(to(Object.fromEntries(new FormData(event.target))));
  };
  return html`<form class="tools questions" role="search" onsubmit=${onsubmit}>
    ${field("search", "Text anywhere", 20)}${field("filter", "Where, as reward < 0.1 and step > 100", 40)}
    ${field("from", "From step", 6)}${field("to", "To step", 6)}${field("group", "Grouped by", 16)}<button type="submit" data-testid="ask">Show</button></form>`;
}

function found(run, { table, columns, rows, indexed }, asked, sortBy) {
  if (!rows.length && indexed < 1) return null;
  if (!rows.length) return empty("No row matches.", "Clear a field above to see more.");
  const shown = columns.map(({ name, kind, help }, index) => ({
    label: name,
    field: name,
    title: help,
    isHead: index === 0,
    isNumber: kind === "int" || kind === "float",
    isText: name === "answer" || name === "prompt" || name === "text",
    cell: (row) => cell(run, table, name, kind, row, index === 0),
  }));
  const [column, direction] = asked.order.split(" ");
  return html`<${Table} columns=${shown} rows=${rows} id="rows" sort=${direction === "desc" ? `-${column}` : column} onSort=${sortBy} />`;
}

function cell(run, table, name, kind, row, isFirst) {
  const value = row[name];
  const text = value === null || value === undefined ? null : written(value, kind);
  const href = isFirst || name === "task" || name === "episode" || name === "group_id" ? placeOf(run, table, name, row) : null;
  return href ? html`<a href=${href} data-row=${isFirst || null}>${text ?? "–"}</a>` : text;
}

function written(value, kind) {
  if (kind === "time") return html`<time>${date(value)}</time>`;
  if (kind === "bool") return value ? "yes" : "no";
  return typeof value === "number" ? number(value) : visible(String(value));
}

/** Where a cell leads; null if nowhere. */
function placeOf(run, table, name, row) {
  if (table === "runs") return row.id ? link("overview", row.id) : null;
  if (name === "task" && row.task) return link("task", run, { task: row.task });
  const { step, group_id, episode, dataset } = row;
  if (step === null || step === undefined) return null;
  if (table === "steps") return link("groups", run, { step });
  if (group_id === undefined || group_id === null) return null;
  return rollout(run, { step, group_id, episode: episode ?? undefined, dataset });
}

function columnHelp(table, asked, to) {
  const columns = [
    { label: "Column", isHead: true, cell: ({ name }) => html`<code>${name}</code>` },
    { label: "Kind", cell: ({ kind }) => kind },
    { label: "Meaning", isText: true, cell: ({ help }) => help },
    { label: "", cell: ({ name }) => html`<a class="small" href=${to({ show: [...(asked.show || table.shown.join(", ")).split(/,\s*/), name].filter((one, at, all) => all.indexOf(one) === at).join(", ") })}>show</a>` },
  ];
  return html`<p>Conditions: <code>${"= != < <= > >="}</code>, <code>between A and B</code>, <code>contains "text"</code>, <code>matches "regular expression"</code>, <code>is empty</code>,
    with <code>and</code>, <code>or</code>, <code>not</code> and parentheses; the same as <code>rlsys query</code>.</p>
    <${Table} columns=${columns} rows=${table.columns} id="column-help" keyOf=${({ name }) => name} />`;
}

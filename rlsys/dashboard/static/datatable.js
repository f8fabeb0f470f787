/**
 * The table of every list: rows of a table of `/api/tables`, filtered, searched, sorted, grouped and paged by the server, with all of that in the
 * address. Views name the table, and the cells that should not be shown as they are.
 */

import { get, numbered } from "./api.js";
import { Table, banner, empty, fold, outcomeBadge, pages, rollout } from "./components.js";
import { NONE, count, date, duration, number, percent } from "./format.js";
import { html, update } from "./html.js";
import { go, link, note } from "./router.js";
import { visible } from "./tokens.js";

const AGAIN_MS = 500;
const ASKED = ["filter", "search", "order", "show", "group", "from", "to", "offset"];
const LONG = 500; // letters of a text that a condition does not take whole
const CONTROL = /[\u0000-\u001f]/;
const STEPPED = new Set([
  "episodes",
  "samples",
  "groups",
  "tasks",
  "steps",
  "evaluations",
  "alerts",
]);
const DURATIONS = new Set(["step_s", "eta_s", "age_s", "state_s", "seconds"]);
const TEXTS = new Set(["answer", "prompt", "text", "reason", "sentence", "detail"]);

/** Questions that are asked often of a table. */
export const PRESETS = {
  tasks: [
    ["Hardest tasks", { order: "reward" }],
    ["Biggest losses", { order: "change" }],
    ["Biggest gains", { order: "change desc" }],
  ],
  episodes: [
    ["Longest truncated", { filter: "truncated", order: "length desc" }],
    ["Failed episodes", { filter: "failed", show: "step, task, outcome, reason, replica" }],
    ["Lowest rewards", { order: "reward" }],
    ["Most stale", { order: "staleness desc" }],
  ],
  groups: [
    ["Equal rewards", { filter: "equal" }],
    ["Failed", { filter: "failed > 0" }],
    ["Truncated", { filter: "truncated > 0" }],
  ],
  samples: [
    ["Failed", { filter: "failed" }],
    ["Truncated", { filter: "truncated" }],
    ["By task", { group: "task" }],
  ],
  logs: [
    ["Events", { filter: "kind <> 'line'" }],
    ["Output of workers", { filter: "kind = 'line'" }],
    ["Warnings and errors", { filter: "level in ('warning', 'error')" }],
  ],
};

/**
 * A view that is one such table: fills `root` and returns its refresh. Options:
 *
 * - `table`; `noun` of a row; `fixed()`, a condition that all rows meet; `usual`, what is asked unless the address says otherwise;
 * - `size` of a page; `presets`, as in `PRESETS`; `cells`: column -> `(value, row, to)` gives its children; `labels`;
 *   `before` and `after`: columns of `Table` beside those of the answer, unless rows are grouped; `rowClass(row)`;
 * - `load(run)`: what else is asked, each time before the rows; `head(to, answer, draw)`, instead of the count of rows; `foot()`, beneath all; `none(run)`: instead of an empty table.
 */
export async function tableView(root, place, { signal, run }, options) {
  const { table, noun = "row", fixed, usual = {}, size = 50, presets = PRESETS[table] } = options;
  const own = Object.fromEntries(ASKED.map((name) => [name, place.query.get(name) ?? ""]));
  const others = Object.fromEntries(
    [...place.query.keys()]
      .filter((name) => !ASKED.includes(name))
      .map((name) => [name, place.query.getAll(name)]),
  );
  const newest = numbered();
  const to = (changes) =>
    link(place.view, place.run, { ...others, ...own, offset: null, ...changes });
  const preset = (asked) => link(place.view, place.run, { ...others, ...asked });
  let [answer, problem, described] = [null, null, null];

  async function load(now) {
    if (now) run = now;
    const isNewest = newest();
    await options.load?.(run);
    const asked = { ...usual, ...(own.group && { show: "", order: "" }), ...filled(own) };
    const filter = [fixed?.(), asked.filter]
      .filter(Boolean)
      .map((one) => `(${one})`)
      .join(" and ");
    try {
      const fresh = await get(
        "table",
        { run: place.run, table, ...filled({ ...asked, filter }), limit: size },
        signal,
      );
      if (!isNewest()) return;
      [answer, problem] = [fresh, null];
    } catch (error) {
      if (error.status !== 400 || !isNewest()) throw error;
      problem = error.message; // a filter that cannot be understood: the sentence says where and why
    }
    draw();
    if (answer?.indexed < 1 && !signal.aborted)
      setTimeout(() => !signal.aborted && load(), AGAIN_MS); // no event tells of an index
  }
  function draw() {
    const page =
      answer &&
      pages({ page: answer.offset / size, size, num: answer.num_rows, noun: `${noun}s` }, (index) =>
        to({ offset: index * size || null }),
      );
    update(
      root,
      html`${options.head?.(to, answer, draw) ?? html`<h1 key="title" data-testid="title">${count(answer?.num_rows ?? 0, noun)}</h1>`}
      ${
        presets?.length > 0 &&
        html`<nav key="presets" class="tools often" aria-label="Often asked">${presets.map(
          ([label, asked]) =>
            html`<a class="button" href=${preset(asked)} aria-current=${isAsked(asked) ? "true" : null}>${label}</a>`,
        )}
        ${ASKED.some((name) => own[name]) && html`<a class="button" href=${preset({})} data-testid="show-all">All</a>`}</nav>`
      }
      ${questions()}
      ${problem && banner("bad", problem, { id: "refused", role: "alert" })}
      ${answer?.problem && banner("warn", answer.problem, { id: "stale-index" })}
      ${answer?.indexed < 1 && banner("", `${percent(answer.indexed)} of the run is indexed so far; the rest follows.`, { id: "indexing" })}
      ${answer && rows()}${page}
      ${fold("Columns, and how to filter", described && columnHelp(described), { id: "columns", ontoggle: ({ target }) => target.open && !described && describe() })}${options.foot?.()}`,
    );
  }
  function isAsked(asked) {
    return Object.entries({ ...others, ...asked }).every(
      ([name, value]) => String(own[name] ?? others[name] ?? "") === String(value),
    );
  }
  function questions() {
    const field = (
      name,
      label,
      wide,
    ) => html`<label class=${wide ? "asked wide" : "asked"}><span class="muted small">${label}</span>
      <input name=${name} type="search" defaultValue=${own[name]} data-testid=${`ask-${name}`} autocomplete="off" data-search=${name === "search" ? true : null} /></label>`;
    const onsubmit = (event) => {
      event.preventDefault();
      const asked = Object.fromEntries(new FormData(event.target));
      go(to({ ...asked, ...(asked.group !== own.group && { show: "", order: "" }) }));
    };
    const hasSteps = !fixed && STEPPED.has(table);
    return html`<details key="questions" class="asking" open=${ASKED.some((name) => own[name])}><summary>Filter and sort</summary>
      <form class="tools questions" role="search" onsubmit=${onsubmit}>${field("search", "Text anywhere", true)}
      ${field("filter", table === "runs" ? 'Where, as reward > 0.5 and "train.lr" = 1e-6' : table === "logs" ? "Where, as level = 'error' and text regexp 'CUDA|OOM'" : "Where, as reward < 0.1 and step > 100", true)}
      ${hasSteps && html`${field("from", "From step")}${field("to", "To step")}`}${field("group", table === "runs" ? "Grouped by, as train.lr" : "Grouped by")}
      <button type="submit" data-testid="ask">Show</button></form></details>`;
  }
  function rows() {
    if (!answer.rows.length) {
      if (answer.indexed < 1) return null;
      return html`<div key="none">${(!ASKED.some((name) => own[name]) && options.none?.(run)) || empty(`No ${noun} matches.`, html`<a href=${preset({})}>Show all</a>`)}</div>`;
    }
    const shown = answer.columns.map(({ name, kind, help }, index) => ({
      label: options.labels?.[name] ?? name,
      order: name,
      title: help,
      isHead: index === 0,
      isNumber: kind === "int" || kind === "float",
      isText: TEXTS.has(name),
      cell: (row) => cell(name, kind, row, index === 0),
    }));
    const columns = own.group
      ? shown
      : [...(options.before ?? []), ...shown, ...(options.after ?? [])];
    return html`<${Table} columns=${columns} rows=${answer.rows} id="rows" keyOf=${own.group ? null : keyOf} rowClass=${options.rowClass} order=${own.order || usual.order} onOrder=${sortBy} />`;
  }
  function cell(name, kind, row, isFirst) {
    const value = row[name];
    const text =
      value === null || value === undefined || value === "" ? null : written(name, value, kind);
    if (own.group)
      return own.group.split(/,\s*/).includes(name)
        ? html`<a href=${to({ group: null, order: null, filter: conjoined(own.filter, name, value) })} data-row=${isFirst || null}>${text ?? "none"}</a>`
        : text;
    if (options.cells?.[name]) return options.cells[name](value, row, to) ?? text;
    const href = isFirst || name === "task" ? placeOf(run, table, isFirst, row) : null;
    return href ? html`<a href=${href} data-row=${isFirst || null}>${text ?? NONE}</a>` : text;
  }
  function sortBy(order) {
    Object.assign(own, { order, offset: "" });
    note(to({}));
    return load();
  }
  async function describe() {
    const { tables } = await get("tables", { run: place.run }, signal);
    described = tables.find(({ name }) => name === table);
    draw();
  }
  function columnHelp({ columns, shown }) {
    const now = own.show
      ? own.show.split(/,\s*/)
      : own.group
        ? []
        : (usual.show?.split(/,\s*/) ?? shown);
    const toggle = ({
      name,
    }) => html`<a class="button" href=${to({ show: (now.includes(name) ? now.filter((one) => one !== name) : [...now, name]).join(", ") })}
      aria-current=${now.includes(name) ? "true" : null} aria-label=${`Column ${name}`}>${now.includes(name) ? "hide" : "show"}</a>`;
    const told = [
      { label: "Column", isHead: true, cell: ({ name }) => html`<code>${name}</code>` },
      { label: "Kind", cell: ({ kind }) => kind },
      { label: "Meaning", isText: true, cell: ({ help }) => help },
      { label: "", cell: toggle },
    ];
    return html`<p>A filter is what stands behind <code>where</code> in SQL, as in <code>rlsys query</code>: texts in single quotes, names with <code>.</code> or <code>/</code> in double
      ones, <code>answer like '%text%'</code>, <code>answer regexp 'pattern'</code>, <code>reward is null</code>.</p>
      <${Table} columns=${told} rows=${columns} id="column-help" keyOf=${({ name }) => name} />`;
  }
  await load();
  return load;
}

/** The condition that a column has a value, in SQL. */
export function condition(name, value) {
  const column =
    /^[a-z_]\w*$/i.test(name) && name !== "group" ? name : `"${name.replaceAll('"', '""')}"`;
  if (value === null || value === undefined || value === "") return `coalesce(${column}, '') = ''`;
  if (typeof value === "number") return `${column} = ${value}`;
  if (typeof value === "boolean") return value ? column : `not ${column}`;
  const text = String(value);
  if (text.length < LONG && !CONTROL.test(text))
    return `${column} = '${text.replaceAll("'", "''")}'`;
  const pieces = text
    .trim()
    .split("\n")
    .at(-1)
    .split(/[%_']/)
    .flatMap((piece) => piece.split(CONTROL)); // of a traceback, the exception
  return `${column} like '%${pieces.sort((a, b) => b.length - a.length)[0].slice(0, LONG)}%'`;
}

function conjoined(filter, name, value) {
  const own = condition(name, value);
  return filter ? `(${filter}) and ${own}` : own;
}

function filled(asked) {
  return Object.fromEntries(Object.entries(asked).filter(([, value]) => value !== ""));
}

function keyOf({ id, dataset, step, group_id, episode, task }) {
  return id ?? (group_id === undefined ? task : `${dataset} ${step} ${group_id} ${episode}`);
}

function written(name, value, kind) {
  if (kind === "time") return html`<time class="num">${date(value)}</time>`;
  if (kind === "bool") return value ? "yes" : "no";
  if (name === "outcome" && value !== "ok") return outcomeBadge(value);
  if (typeof value !== "number")
    return TEXTS.has(name)
      ? html`<div class="cut">${visible(value.trim())}</div>`
      : visible(String(value));
  return kind === "float" && /_frac$|^pass@/.test(name)
    ? percent(value)
    : DURATIONS.has(name)
      ? duration(value)
      : number(value);
}

/** Where a cell leads; null if nowhere. `now`: the RunAnswer, whose page of a task is made of events. */
function placeOf(
  now,
  table,
  isFirst,
  { id, task, step, group_id, episode, dataset, recorded = true },
) {
  if (table === "runs") return id ? link("overview", id) : null;
  const run = now.summary.id;
  if (table === "steps") return link("groups", run, { step });
  const isWritten =
    recorded && step !== null && step !== undefined && group_id !== null && group_id !== undefined;
  if (isFirst && isWritten) return rollout(run, { step, group_id, episode, dataset });
  if (!task) return null;
  return now.has_groups
    ? link("task", run, { task })
    : link("tables", run, { table: "groups", filter: condition("task", task) });
}

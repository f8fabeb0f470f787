/** What many views show: tables, states of a run, empty and error states. */

import { h } from "./dom.js";
import { NONE } from "./format.js";
import { link } from "./router.js";

/**
 * A table; on a narrow page its rows become cards.
 * `columns`: `{ label, cell(row), isNumber, isText, title, isHead }`; `cell` gives children of a cell, `isText` marks
 * one of sentences, `isHead` the one that names its row. `options`:
 * `{ id, caption, key(row), rowClass(row) }`; `id` is also its data-testid.
 */
export function table(columns, rows, { id, caption, key, rowClass } = {}) {
  const kind = (column) => (column.isNumber ? "num" : column.isText ? "text" : null);
  const cell = (column, row) => {
    const shown = column.cell(row) ?? NONE;
    return h(
      column.isHead ? "th" : "td",
      {
        class: [kind(column), shown === NONE && "none"].filter(Boolean).join(" ") || null,
        "data-label": column.label,
        scope: column.isHead ? "row" : null,
      },
      shown,
    );
  };
  return h(
    "div",
    { class: "table-box", key: id },
    h(
      "table",
      { class: "cards", "data-testid": id },
      caption && h("caption", null, caption),
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          columns.map((column) => h("th", { class: kind(column), scope: "col", title: column.title }, column.label)),
        ),
      ),
      h(
        "tbody",
        null,
        rows.map((row) =>
          h(
            "tr",
            { key: key?.(row), class: rowClass?.(row) },
            columns.map((column) => cell(column, row)),
          ),
        ),
      ),
    ),
  );
}

const MARKS = { starting: "◌", running: "▶", silent: "…", finished: "✓", interrupted: "❚❚", failed: "✕" };

/** The state of a run, by sign, word and colour. */
export function status(name) {
  return h(
    "span",
    { class: `status status-${name}`, "data-testid": "status" },
    h("span", { class: "mark", "aria-hidden": "true" }, MARKS[name] ?? "?"),
    name,
  );
}

/** A word set apart. `kind`: `bad`, `warn`, `good` or nothing. */
export function badge(text, kind, title) {
  return h("span", { class: kind ? `badge ${kind}` : "badge", title }, text);
}

/** Nothing to show: why, and what to do about it. */
export function empty(why, remedy) {
  return h(
    "div",
    { class: "empty", "data-testid": "empty" },
    h("p", null, why),
    remedy && h("p", { class: "muted" }, remedy),
  );
}

/** `page`, by its title, could not be shown: `error` of any kind, and a way to try again. */
export function failure(page, error, retry) {
  return h(
    "div",
    { class: "failure", role: "alert", "data-testid": "error" },
    h("p", null, h("strong", null, page ? `“${page}” could not be shown. ` : "This could not be shown. "), error.message),
    error.address &&
      h(
        "details",
        null,
        h("summary", null, "What was asked"),
        h("p", { class: "muted" }, h("code", null, `/${error.address}`), error.status ? ` answered ${error.status}` : ""),
      ),
    retry && h("button", { type: "button", onclick: retry }, "Try again"),
  );
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
  const links = run.policies.map(({ id }, index) => [index > 0 && ", ", h("a", { href: link("overview", id) }, nameOf(id))]);
  return empty(`${what} of a run of several policies are told by each of them.`, links);
}

/** What a policy is called, by the id of its run: its folder. */
export function nameOf(id) {
  return id.split("/").at(-1);
}

/** A named figure: `Reward` over `0.523`. */
export function figure(label, value, { title, note, id } = {}) {
  return h(
    "div",
    { class: "figure", key: label, title, "data-testid": id },
    h("dt", null, label),
    h("dd", null, value, note && h("small", null, note)),
  );
}

/** A button that copies a text, and says so. `text` is a string, or a function that gives it. */
export function copyButton(label, text, id) {
  const button = h("button", { type: "button", class: "copy", "data-testid": id }, label);
  button.onclick = async () => {
    const isCopied = await copy(typeof text === "function" ? text() : text);
    button.textContent = isCopied ? "Copied" : "Could not copy";
    setTimeout(() => {
      button.textContent = label;
    }, 1200);
  };
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only there on a secure page: loopback or HTTPS
    return true;
  } catch {
    const field = h("textarea", { value: text, readonly: true });
    document.body.append(field);
    field.select();
    const isCopied = document.execCommand("copy");
    field.remove();
    return isCopied;
  }
}

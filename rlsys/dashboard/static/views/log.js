/** What happened, in words, newest first: the events of the run, and the output of its workers. */

import { empty } from "../components.js";
import { condition, tableView } from "../datatable.js";
import { html } from "../html.js";
import { visible } from "../tokens.js";

export const title = "Log";

const narrowed = (name) => (value, _row, to) =>
  value && value !== "info"
    ? html`<a href=${to({ filter: condition(name, value) })}>${value}</a>`
    : "";

const OPTIONS = {
  table: "logs",
  noun: "line",
  size: 200,
  labels: { time_s: "time" },
  cells: {
    worker: narrowed("worker"),
    level: narrowed("level"),
    text: (text) => html`<span class="said">${visible(text.trim())}</span>`,
  },
  rowClass: ({ level }) => (level === "error" ? "bad" : level === "warning" ? "warn" : null),
  none: () =>
    empty("Nothing has happened yet.", "The first lines come with the start of the workers."),
};

export const render = (root, place, context) => tableView(root, place, context, OPTIONS);

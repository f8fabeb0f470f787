/** What happened, in words, newest first. */

import { get } from "../api.js";
import { h, update } from "../dom.js";
import { date } from "../format.js";
import { continued, gap, indexed, joined } from "../loglines.js";
import { empty, table } from "../parts.js";
import { visible } from "../tokens.js";

export const title = "Log";

const PAGE = 200;
const MOST = 1000; // that the server gives at once
const BAD = new Set(["worker_failed", "alert_raised", "signal_missing"]);

export async function render(root, { run: id }, { signal }) {
  let held = []; // newest first, see loglines.js
  let isLoading = false;
  let sought = "";

  function draw() {
    const lines = held.filter(({ kind, text }) => `${kind} ${text}`.toLowerCase().includes(sought.toLowerCase()));
    const hasOlder = held.length > 0 && held.at(-1).index > 0;
    update(
      root,
      h(
        "div",
        { class: "head", key: "head" },
        h("h1", { class: "visually-hidden" }, "Log"),
        h("input", {
          type: "search",
          placeholder: "Filter what is loaded",
          "aria-label": "Filter the log",
          "data-search": true,
          "data-testid": "filter",
          oninput: ({ target }) => {
            sought = target.value;
            draw();
          },
        }),
        h(
          "span",
          { class: "muted small", role: "status" },
          `${lines.length} of ${held.length} lines${hasOlder ? ", there are older ones" : ""}`,
        ),
      ),
      lines.length
        ? table(COLUMNS, lines, {
            id: "log",
            key: ({ index }) => index,
            rowClass: ({ kind }) => (BAD.has(kind) ? "bad" : null),
          })
        : empty(
            held.length ? "No line matches." : "Nothing has happened yet.",
            held.length
              ? "Load older ones, or clear the filter."
              : "The first lines come with the start of the workers.",
          ),
      hasOlder &&
        h(
          "p",
          { key: "older", class: "after" },
          h("button", { type: "button", "data-testid": "older", disabled: isLoading, onclick: loadOlder }, "Older lines"),
        ),
    );
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

const COLUMNS = [
  { label: "Time", cell: ({ time_s }) => h("time", { class: "num" }, date(time_s)) },
  { label: "Kind", cell: ({ kind }) => h("span", { class: "muted" }, kind.replaceAll("_", " ")) },
  { label: "What", isText: true, cell: ({ text }) => h("span", { class: "said" }, visible(text.trim())) },
];

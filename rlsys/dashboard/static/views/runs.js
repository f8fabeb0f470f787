/** All runs of the folder, and the choice of some to compare. */

import { get } from "../api.js";
import { h, update } from "../dom.js";
import { ago, date, duration, number } from "../format.js";
import { badge, empty, status, table } from "../parts.js";
import { go, link, note } from "../router.js";
import { visible } from "../tokens.js";

export const title = "Runs";

export async function render(root, { query }, { signal }) {
  const chosen = new Set();
  let sought = query.get("q") ?? "";
  let answer = null;

  function draw() {
    const runs = answer.runs.filter((run) => matches(run, sought));
    update(
      root,
      h(
        "div",
        { class: "head", key: "head" },
        h("h1", null, "Runs"),
        h("code", { class: "muted", "data-testid": "folder" }, answer.folder),
        h("span", { class: "space" }),
        h("input", {
          type: "search",
          placeholder: "Filter by name, model, status",
          "aria-label": "Filter runs",
          "data-search": true,
          "data-testid": "filter",
          value: sought,
          oninput: ({ target }) => filter(target.value),
        }),
        h(
          "button",
          { type: "button", "data-testid": "compare", disabled: chosen.size < 2, onclick: compare },
          chosen.size < 2 ? "Compare: choose two or more" : `Compare ${chosen.size} runs`,
        ),
      ),
      answer.runs.length === 0
        ? empty(
            "No run was found in this folder.",
            "Start one with `rlsys train`, or give the folder that holds them: `rlsys dashboard FOLDER`.",
          )
        : runs.length === 0
          ? empty("No run matches the filter.", "Clear the filter to see all.")
          : table(columns(chosen, toggle), runs, { id: "runs", key: (run) => run.id }),
    );
  }
  function toggle(id, isChosen) {
    if (isChosen) chosen.add(id);
    else chosen.delete(id);
    draw();
  }
  function filter(text) {
    sought = text;
    note(link("runs", null, { q: sought }));
    draw();
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
  return sought
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

function columns(chosen, toggle) {
  return [
    {
      label: "",
      cell: (run) =>
        h(
          "label",
          { class: "choose" },
          h("input", {
            type: "checkbox",
            checked: chosen.has(run.id),
            "data-testid": `choose-${run.id}`,
            "aria-label": `Compare ${run.name || run.id}`,
            onchange: ({ target }) => toggle(run.id, target.checked),
          }),
        ),
    },
    { label: "Run", isHead: true, cell: named },
    { label: "Status", cell: (run) => status(run.status) },
    { label: "Model", cell: (run) => run.model || null },
    { label: "Algorithm", cell: (run) => run.algorithm || null },
    {
      label: "Step",
      isNumber: true,
      cell: (run) => (run.total_steps ? `${number(run.step)} / ${number(run.total_steps)}` : number(run.step)),
    },
    { label: "Reward", isNumber: true, title: "Mean of the last step", cell: (run) => number(run.reward) },
    { label: "Step time", isNumber: true, title: "Median of the last 20 steps", cell: (run) => duration(run.step_s) },
    {
      label: "Left",
      isNumber: true,
      title: "Until its last step, if it goes on like this",
      cell: (run) => duration(run.eta_s),
    },
    {
      label: "Written",
      isNumber: true,
      title: "When it last wrote anything",
      cell: (run) => h("time", { title: date(run.updated_s) }, ago(run.updated_s)),
    },
    { label: "Alerts", isNumber: true, cell: (run) => (run.num_alerts ? badge(`${run.num_alerts} open`, "bad") : "0") },
  ];
}

function named(run) {
  return [
    h("a", { href: link("overview", run.id), "data-row": true, "data-testid": `run-${run.id}` }, run.name || run.id),
    run.name && run.name !== run.id && h("div", { class: "muted small path" }, run.id),
    run.last_error &&
      h(
        "div",
        { class: "last-error", "data-testid": `error-${run.id}`, title: run.last_error },
        visible(run.last_error),
      ),
  ];
}

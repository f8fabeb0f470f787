/** The frame around every view: where one is, the state of the run, the way to the other views, keys. */

import { h } from "./dom.js";
import { ago, clock, count, duration, number } from "./format.js";
import { badge, status } from "./parts.js";
import { link } from "./router.js";
import { themeButton } from "./theme.js";
import { visible } from "./tokens.js";

const TABS = [
  ["overview", "Overview"],
  ["groups", "Groups"],
  ["tasks", "Tasks"],
  ["cluster", "Cluster"],
  ["ledger", "Ledger"],
  ["alerts", "Alerts"],
  ["log", "Log"],
  ["config", "Configuration"],
];
const WITHIN = { group: "groups", episode: "groups", task: "tasks" };
const LOST = { lost: "Connection lost, trying again", gone: "This run is gone" };
const ENDED = new Set(["finished", "interrupted", "failed"]);

/** The bar on top: `now` as in `app.js`. */
export function header(now, { up, togglePause, showHelp }) {
  const { place, run } = now;
  return [
    h(
      "div",
      { class: "bar", key: "bar" },
      h("a", { class: "brand", href: link("runs", null), "data-testid": "to-runs" }, "rlsys"),
      run &&
        h(
          "a",
          { class: "run-name", href: link("overview", place.run), "data-testid": "run-name" },
          run.summary.name || run.summary.id,
        ),
      run && progress(run.summary),
      h("span", { class: "space" }),
      marker(now, togglePause),
      up &&
        h(
          "a",
          { class: "button", href: up, "data-nav": "up", "data-testid": "up", title: "Up (Esc)", "aria-label": "Up" },
          "↑",
          h("span", { class: "wide" }, "Up"),
        ),
      themeButton(),
      h(
        "button",
        { type: "button", onclick: showHelp, "data-testid": "help", title: "Keys (?)", "aria-label": "Keys" },
        "?",
      ),
    ),
    run &&
      h(
        "nav",
        { class: "tabs", key: "tabs", "aria-label": "Views of the run" },
        TABS.map(([view, label]) =>
          h(
            "a",
            {
              key: view,
              href: link(view, place.run),
              "data-testid": `tab-${view}`,
              "aria-current": (WITHIN[place.view] ?? place.view) === view ? "page" : null,
            },
            label,
            view === "alerts" && run.summary.num_alerts > 0 && badge(run.summary.num_alerts, "bad"),
          ),
        ),
      ),
  ];
}

function progress(summary) {
  const total = summary.total_steps;
  return h(
    "span",
    { class: "progress", role: "status", "aria-live": "polite" },
    status(summary.status),
    h(
      "span",
      { class: "num", "data-testid": "progress" },
      `step ${number(summary.step)}${total ? ` of ${number(total)}` : ""}`,
    ),
    summary.eta_s !== null &&
      h("span", { class: "muted num", "data-testid": "eta" }, `${duration(summary.eta_s)} left`),
  );
}

/** Does the page follow the run? */
function marker(now, togglePause) {
  const isEnded = ENDED.has(now.run?.summary.status);
  if (now.connection in LOST)
    return h(
      "span",
      { key: "live", class: "live lost", "data-testid": "live", role: "status" },
      LOST[now.connection],
    );
  if (isEnded) return h("span", { key: "live", class: "live", "data-testid": "live", role: "status" }, "Ended");
  const waiting = now.isPaused && now.numMissed ? `, ${count(now.numMissed, "change")} waiting` : "";
  return h(
    "button",
    {
      key: "live",
      type: "button",
      class: now.isPaused ? "live paused" : "live on",
      "data-testid": "live",
      onclick: togglePause,
      "aria-pressed": String(!now.isPaused),
      title: now.isPaused ? "Follow the run again" : "Stop following the run",
    },
    h("span", { class: "mark", "aria-hidden": "true" }, now.isPaused ? "❚❚" : "●"),
    now.isPaused ? `Paused${waiting}` : "Live",
  );
}

/** What everybody must know before anything else. */
export function banners(now) {
  const { run } = now;
  return h(
    "div",
    { key: "banners", class: "banners" },
    run && bad(run),
    now.problem &&
      h(
        "p",
        { key: "problem", class: "banner warn", role: "alert", "data-testid": "problem" },
        `“${now.title}” could not be brought up to date: ${now.problem.message}`,
      ),
    run?.num_corrupt > 0 &&
      h(
        "p",
        { key: "corrupt", class: "banner", "data-testid": "num-corrupt" },
        `${count(run.num_corrupt, "line")} of its files could not be read and ${were(run.num_corrupt)} skipped.`,
      ),
    run?.num_unknown > 0 &&
      h(
        "p",
        { key: "unknown", class: "banner", "data-testid": "num-unknown" },
        `${count(run.num_unknown, "event")} of a kind this version does not know ${were(run.num_unknown)} left out.`,
      ),
  );
}

function were(num) {
  return num === 1 ? "was" : "were";
}

function bad({ summary, has_groups }) {
  const since = h("time", { title: clock(summary.updated_s) }, ago(summary.updated_s));
  const said =
    summary.last_error && h("span", { class: "said", "data-testid": "last-error" }, visible(summary.last_error));
  if (summary.status === "failed") {
    return h(
      "div",
      { key: "bad", class: "banner bad", role: "alert", "data-testid": "banner" },
      h("strong", null, "The run failed "),
      since,
      ". ",
      said,
    );
  }
  if (summary.status === "silent") {
    return h(
      "div",
      { key: "bad", class: "banner warn", role: "alert", "data-testid": "banner" },
      h("strong", null, "Nothing was written since "),
      since,
      ": the process was killed, or it is stuck. ",
      has_groups && "The ledger shows what it was waiting for. ",
      said,
    );
  }
  return null;
}

const HELP = [
  ["g r", "runs"],
  ["g o", "overview"],
  ["g g", "groups"],
  ["g t", "tasks"],
  ["g c", "cluster"],
  ["g l", "ledger"],
  ["g a", "alerts"],
  ["g e", "log of events"],
  ["g f", "configuration"],
  ["j k", "next, previous row; or step, where there are no rows"],
  ["] [", "next, previous step, group or episode"],
  ["Enter", "open"],
  ["Esc", "up"],
  ["/", "search"],
  ["?", "this help"],
];

/** The list of keys. */
export function helpDialog() {
  const dialog = h(
    "dialog",
    { class: "help", "data-testid": "help-dialog", "aria-labelledby": "help-title" },
    h("h2", { id: "help-title" }, "Keys"),
    h(
      "dl",
      null,
      HELP.map(([pressed, what]) =>
        h(
          "div",
          null,
          h(
            "dt",
            null,
            pressed.split(" ").map((one) => [h("kbd", null, one), " "]),
          ),
          h("dd", null, what),
        ),
      ),
    ),
    h("button", { type: "button", "data-testid": "help-close", onclick: () => dialog.close() }, "Close"),
  );
  return dialog;
}

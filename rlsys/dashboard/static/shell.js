/** The frame around every view: where one is, the state of the run, the way to the other views, keys. */

import { badge, banner, status } from "./components.js";
import { ago, clock, count, duration, number } from "./format.js";
import { html } from "./html.js";
import { HELP, VIEWS } from "./keys.js";
import { link } from "./router.js";
import { themeButton } from "./theme.js";
import { visible } from "./tokens.js";

/** The tab that a view belongs to. */
const WITHIN = { group: "groups", episode: "groups", task: "tasks" };
const LOST = { lost: "Connection lost, trying again", gone: "This run is gone" };
const ENDED = new Set(["finished", "interrupted", "failed"]);

/** The bar on top: `now` as in `app.js`. */
export function header(now, { up, togglePause, showHelp, redraw }) {
  const { place, run } = now;
  const here = place.query.has("dataset") ? "evaluations" : (WITHIN[place.view] ?? place.view);
  return html`<div class="bar" key="bar">
      <a class="brand" href=${link("runs", null)} data-testid="to-runs">rlsys</a>
      ${run && html`<a class="run-name" href=${link("overview", place.run)} data-testid="run-name">${run.summary.name || run.summary.id}</a>`}
      ${run && progress(run.summary)}
      <span class="space"></span>
      ${marker(now, togglePause)}
      ${up && html`<a class="button" href=${up} data-nav="up" data-testid="up" title="Up (Esc)" aria-label="Up">↑<span class="wide">Up</span></a>`}
      ${themeButton(redraw)}
      <button type="button" onclick=${showHelp} data-testid="help" title="Keys (?)" aria-label="Keys">?</button>
    </div>
    ${
      run &&
      html`<nav class="tabs" key="tabs" aria-label="Views of the run">
      ${VIEWS.map(
        ([
          view,
          label,
        ]) => html`<a key=${view} href=${link(view, place.run)} data-testid=${`tab-${view}`} aria-current=${here === view ? "page" : null}>
        ${label}${view === "alerts" && run.summary.num_alerts > 0 && badge(run.summary.num_alerts, "bad")}</a>`,
      )}</nav>`
    }`;
}

function progress(summary) {
  const total = summary.total_steps;
  const done = `step ${number(summary.step)}${total ? ` of ${number(total)}` : ""}`;
  return html`<span class="progress" role="status" aria-live="polite">${status(summary.status)}
    <span class="num" data-testid="progress">${done}</span>
    ${summary.eta_s !== null && html`<span class="muted num" data-testid="eta">${duration(summary.eta_s)} left</span>`}</span>`;
}

/** Does the page follow the run? */
function marker(now, togglePause) {
  const lost = LOST[now.connection];
  if (lost)
    return html`<span key="live" class="live lost" data-testid="live" role="status">${lost}</span>`;
  if (ENDED.has(now.run?.summary.status))
    return html`<span key="live" class="live" data-testid="live" role="status">Ended</span>`;
  const waiting =
    now.isPaused && now.numMissed ? `, ${count(now.numMissed, "change")} waiting` : "";
  return html`<button key="live" type="button" class=${now.isPaused ? "live paused" : "live on"} data-testid="live" onclick=${togglePause}
    aria-pressed=${!now.isPaused} title=${now.isPaused ? "Follow the run again" : "Stop following the run"}>
    <span class="mark" aria-hidden="true">${now.isPaused ? "❚❚" : "●"}</span>${now.isPaused ? `Paused${waiting}` : "Live"}</button>`;
}

/** What everybody must know before anything else. */
export function banners(now) {
  const { run, problem, title } = now;
  const were = (num) => (num === 1 ? "was" : "were");
  return html`<div key="banners" class="banners">
    ${run && bad(run)}
    ${problem && banner("warn", `“${title}” could not be brought up to date: ${problem.message}`, { id: "problem", role: "alert" })}
    ${run?.num_corrupt > 0 && banner("", `${count(run.num_corrupt, "line")} of its files could not be read and ${were(run.num_corrupt)} skipped.`, { id: "num-corrupt" })}
    ${run?.num_unknown > 0 && banner("", `${count(run.num_unknown, "event")} of a kind this version does not know ${were(run.num_unknown)} left out.`, { id: "num-unknown" })}
  </div>`;
}

function bad({ summary, has_groups }) {
  const since = html`<time title=${clock(summary.updated_s)}>${ago(summary.updated_s)}</time>`;
  const said =
    summary.last_error &&
    html`<span class="said" data-testid="last-error">${visible(summary.last_error)}</span>`;
  const options = { id: "banner", role: "alert" };
  if (summary.status === "failed")
    return banner("bad", html`<strong>The run failed </strong>${since}. ${said}`, options);
  if (summary.status !== "silent") return null;
  const hint = has_groups && "The ledger shows what it was waiting for. ";
  const what = html`<strong>Nothing was written since </strong>${since}: the process was killed, or it is stuck. ${hint}${said}`;
  return banner("warn", what, options);
}

/** The list of keys. */
export function helpDialog() {
  const keysOf = (pressed) => pressed.split(" ").map((one) => html`<kbd>${one}</kbd> `);
  return html`<dialog class="help" data-testid="help-dialog" aria-labelledby="help-title"><h2 id="help-title">Keys</h2>
    <dl>${HELP.map(([pressed, what]) => html`<div><dt>${keysOf(pressed)}</dt><dd>${what}</dd></div>`)}</dl>
    <div class="tools"><button type="button" data-testid="help-close" onclick=${({ target }) => target.closest("dialog").close()}>Close</button>
      <a class="small" href=${link("components", null)} onclick=${({ target }) => target.closest("dialog").close()}>Components of these pages</a></div></dialog>`;
}

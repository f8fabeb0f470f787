/**
 * The shell: shows the view that the address names, and keeps it fresh while the run goes on.
 *
 * A view is a module `views/<name>.js` with
 *
 *     export const title = "Groups";
 *     export async function render(root, place, { signal, run }) { …; return refresh; }
 *
 * `render` fills the empty element `root` by `html.update`. `place` is `{ view, run, query }` of `router.parse`, `run` the RunAnswer, null outside of
 * a run. `signal` is aborted when the person leaves. What it returns, `async refresh(run)`, or nothing, is called when the run has written something,
 * never twice at once; it keeps scroll, selection and focus, as `update` does. Errors are shown with a way to try again. A view notes a change of its
 * own address by `router.note`; `router.go` and links render it anew. What somebody came for bears `data-arrive`, what tests look for `data-testid`.
 */

import { get, stream } from "./api.js";
import { failure } from "./components.js";
import { update } from "./html.js";
import * as keys from "./keys.js";
import { link, parse } from "./router.js";
import { banners, header, helpDialog } from "./shell.js";

/** View -> the one that Escape goes up to, if that is not the overview. */
const PARENTS = {
  compare: "runs",
  components: "runs",
  overview: "runs",
  group: "groups",
  episode: "group",
  task: "tasks",
};

const shell = document.getElementById("shell");
const main = document.getElementById("main");
const help = document.body.appendChild(document.createElement("div"));
update(help, helpDialog());

/** Now: `{ place, title, run, refresh, abort, stop, connection, isPaused, isBusy, numMissed, error, problem }`. */
let shown = null;

async function show() {
  const before = shown;
  before?.abort.abort();
  before?.stop?.();
  const place = parse(location.hash);
  const isSame = before?.place.view === place.view && before?.place.run === place.run;
  const now = {
    place,
    abort: new AbortController(),
    run: before?.place.run === place.run ? before?.run : null,
    isPaused: before?.isPaused ?? false,
    connection: "live",
    numMissed: 0,
  };
  shown = now;
  now.stop = stream(
    place.run,
    () => changed(now),
    (state) => drawShell(Object.assign(now, { connection: state })),
  );
  await render(now, before ? (isSame ? "same" : "new") : "first");
}

/** `arrival`: `first` view of the page, a `new` one, or the `same` in another state. */
async function render(now, arrival) {
  const {
    place,
    abort: { signal },
  } = now;
  let root = emptyRoot(place.view);
  Object.assign(now, { error: null, isBusy: true });
  main.setAttribute("aria-busy", "true");
  try {
    const asked = place.run === null ? null : get("run", { run: place.run }, signal);
    const [view, run] = await Promise.all([viewOf(now), asked]);
    now.run = run;
    drawShell(now);
    now.refresh = await view.render(root, place, { signal, run });
  } catch (error) {
    if (now !== shown) return;
    now.error = error;
    root = emptyRoot(place.view); // of what was drawn of it nothing is left
    update(
      root,
      failure(now.title, readable(error, place), () => render(now, "same")),
    );
  }
  if (now !== shown) return;
  drawShell(now);
  putIn(root, arrival);
  now.isBusy = false;
  await catchUp(now); // with what was written meanwhile
}

function emptyRoot(view) {
  const root = document.createElement("div");
  root.className = `view view-${view}`;
  root.dataset.testid = `view-${view}`;
  return root;
}

/** Its module; the title is noted as soon as it is known, for errors to name it. */
async function viewOf(now) {
  const { view: name } = now.place;
  if (!/^[a-z]+$/.test(name)) throw new Error(`there is no view ${name}`);
  const view = await import(`./views/${name}.js`);
  now.title = view.title;
  return view;
}

/** Put the view in, with the focus where a person would look for it. */
function putIn(root, arrival) {
  const focused =
    arrival === "same" && main.contains(document.activeElement)
      ? document.activeElement.dataset.testid
      : null;
  const before = main.firstElementChild;
  main.replaceChildren(root);
  if (before) update(before); // its charts end
  main.removeAttribute("aria-busy");
  main.dataset.rendered = String(Number(main.dataset.rendered ?? 0) + 1);
  showTab();
  if (arrival === "new") window.scrollTo(0, 0);
  if (arrival !== "same") root.querySelector("[data-arrive]")?.scrollIntoView({ block: "center" });
  if (arrival === "first") return; // the first Tab leads to the skip link
  const target =
    focused &&
    [...root.querySelectorAll("[data-testid]")].find((node) => node.dataset.testid === focused);
  (target ?? main).focus({ preventScroll: true });
}

/** On a narrow page tabs scroll: the one of this view must be seen. */
function showTab() {
  const tab = shell.querySelector(".tabs [aria-current]");
  if (!tab) return;
  const row = tab.parentElement;
  const [seen, all] = [tab.getBoundingClientRect(), row.getBoundingClientRect()];
  if (seen.left < all.left || seen.right > all.right)
    row.scrollLeft += seen.left - all.left - (all.width - seen.width) / 2;
}

function readable(error, place) {
  if (error instanceof TypeError && /module/.test(error.message)) {
    return new Error(`there is no view ${place.view}; the address is wrong, or the server is gone`);
  }
  return error;
}

/** The run has written something. */
async function changed(now) {
  if (now !== shown) return;
  now.numMissed += 1;
  if (now.isPaused || now.isBusy) drawShell(now);
  else await catchUp(now);
}

/** Bring the page up to date, once more if the run writes something meanwhile. */
async function catchUp(now) {
  now.isBusy = true;
  while (now.numMissed && now === shown && !now.isPaused) {
    now.numMissed = 0;
    await refresh(now);
  }
  now.isBusy = false;
}

/** What was asked for by a button was not to be had: say so. */
function onUnhandled(event) {
  event.preventDefault();
  if (event.reason?.name === "AbortError") return; // the person went elsewhere
  console.error(event.reason);
  shown.problem = event.reason;
  drawShell(shown);
}

async function refresh(now) {
  const {
    place,
    abort: { signal },
  } = now;
  if (now.error) return render(now, "same");
  try {
    if (place.run !== null) now.run = await get("run", { run: place.run }, signal);
    if (now !== shown) return;
    drawShell(now);
    await now.refresh?.(now.run);
    now.problem = null;
  } catch (error) {
    if (now === shown) now.problem = error; // what is shown stays, with a word above it
  }
  if (now === shown) drawShell(now);
}

function drawShell(now) {
  if (now !== shown) return;
  const { place, run } = now;
  const name = run ? run.summary.name || run.summary.id : null;
  document.title = [now.title, name, "rlsys"].filter(Boolean).join(" · ");
  const redraw = () => drawShell(shown);
  update(shell, header(now, { up: up(place), togglePause, showHelp, redraw }), banners(now));
}

function up({ view, run, query }) {
  const isEvaluated = view === "group" && query.has("dataset");
  if (view === "runs") return null;
  const parent = isEvaluated
    ? "evaluations"
    : run === null
      ? "runs"
      : (PARENTS[view] ?? "overview");
  const keep =
    { group: ["step", "group_id", "dataset"], groups: ["step"], evaluations: ["step", "dataset"] }[
      parent
    ] ?? [];
  return link(
    parent,
    parent === "runs" ? null : run,
    Object.fromEntries(keep.map((name) => [name, query.get(name)])),
  );
}

function togglePause() {
  shown.isPaused = !shown.isPaused;
  drawShell(shown);
  if (!shown.isPaused && !shown.isBusy) catchUp(shown);
}

function showHelp() {
  help.querySelector("dialog").showModal();
}

function goTo(view) {
  if (view === "runs") location.hash = link("runs", null);
  else if (shown?.place.run !== null) location.hash = link(view, shown.place.run);
}

document.querySelector(".skip").onclick = (event) => {
  event.preventDefault(); // what follows # is the place of a view
  main.focus();
};
keys.listen({ goTo, showHelp });
window.addEventListener("unhandledrejection", onUnhandled);
window.addEventListener("hashchange", show);
show();

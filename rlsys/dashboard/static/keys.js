/**
 * Keyboard. A view needs no code for it, only marks on its links and buttons:
 *
 *     data-row             j / k move the focus along these; Enter then opens, as of any link
 *     data-nav="next"      j (where there are no rows), ] and n press it; "previous": k, [ and p
 *     data-nav="up"        Escape presses it
 *     data-search          / puts the focus there; Escape leaves it
 */

/** The views of a run in the order of their tabs: `[view, label, key after g]`. */
export const VIEWS = [
  ["overview", "Overview", "o"],
  ["groups", "Groups", "g"],
  ["tasks", "Tasks", "t"],
  ["evaluations", "Evaluations", "v"],
  ["cluster", "Cluster", "c"],
  ["ledger", "Ledger", "l"],
  ["alerts", "Alerts", "a"],
  ["log", "Log", "e"],
  ["tables", "Tables", "x"],
  ["config", "Configuration", "f"],
];
/** What each key is for. */
export const HELP = [
  ["g r", "runs"],
  ...VIEWS.map(([, label, key]) => [`g ${key}`, label.toLowerCase()]),
  ["j k", "next, previous row; or step, where there are no rows"],
  ["] [", "next, previous step, group or episode"],
  ["Enter", "open"],
  ["← →", "along the points of a chart, the tokens of a turn, the time of lanes"],
  ["+ -", "look closer at a chart or lanes, and all of it again"],
  ["Esc", "up"],
  ["/", "search"],
  ["?", "this help"],
];

const PLACES = { r: "runs", ...Object.fromEntries(VIEWS.map(([view, , key]) => [key, view])) };
const CHORD_MS = 1500;
const MOVES = { "]": "next", n: "next", "[": "previous", p: "previous" };

/** Listen for keys. `goTo(view)` and `showHelp()` are what only the shell can do. */
export function listen({ goTo, showHelp }) {
  let chordUntil = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (document.querySelector("dialog[open]")) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const isChord = performance.now() < chordUntil;
    chordUntil = 0;
    if (isChord && event.key in PLACES) goTo(PLACES[event.key]);
    else if (event.key === "g") chordUntil = performance.now() + CHORD_MS;
    else if (!press(event.key, showHelp)) return;
    event.preventDefault();
  });
}

function press(key, showHelp) {
  if (key === "?") return showHelp() ?? true;
  if (key === "/") return focus(document.querySelector("[data-search]"));
  if (key === "j" || key === "k") return step(key === "j" ? 1 : -1);
  if (key === "Escape") return click("up");
  return key in MOVES && click(MOVES[key]);
}

/** Move along the rows; where there are none, to the next or previous thing. */
function step(by) {
  const rows = [...document.querySelectorAll("[data-row]")].filter(
    (row) => row.offsetParent !== null,
  );
  if (!rows.length) return click(by > 0 ? "next" : "previous");
  const here = rows.indexOf(document.activeElement);
  return focus(
    rows[
      here < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(here + by, 0), rows.length - 1)
    ],
  );
}

function click(nav) {
  const target = document.querySelector(`[data-nav="${nav}"]:not([disabled])`);
  target?.click();
  return target !== null;
}

function focus(target) {
  target?.focus();
  target?.scrollIntoView({ block: "nearest" });
  return Boolean(target);
}

function isTyping(target) {
  return (
    target.isContentEditable ||
    target.matches("textarea, select, input:not([type=checkbox], [type=radio], [type=button])")
  );
}

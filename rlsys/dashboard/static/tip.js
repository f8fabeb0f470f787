/** The small box that shows everything known of one token. */

import { NONE, number } from "./format.js";
import { html, update } from "./html.js";
import { READINGS, visible } from "./tokens.js";

/** What the style sheet calls the token that is looked at. */
const LOOKED_AT = "token";

/** One a page: `element` is where it is drawn, `show` puts it beside a range of text, the token of that number. */
export function tokenTip() {
  const element = document.createElement("div");
  Object.assign(element, { className: "tip", role: "status", hidden: true });
  element.dataset.testid = "tip";
  return {
    element,
    show(range, turn, token) {
      update(
        element,
        html`<code>${quoted(turn.pieces[token])}</code><dl>${known(turn, token)}</dl>`,
      );
      element.hidden = false;
      CSS.highlights?.set(LOOKED_AT, new Highlight(range));
      put(element, range.getClientRects()[0]);
    },
    hide() {
      element.hidden = true;
      CSS.highlights?.delete(LOOKED_AT);
    },
  };
}

function quoted(piece) {
  const cut = piece.length > 60 ? `${piece.slice(0, 60)}…` : piece;
  return JSON.stringify(visible(cut.replaceAll("\n", "↵")));
}

function known(turn, token) {
  const readings = READINGS.filter((reading) => reading.column && turn[reading.column].length);
  return readings.map(
    (reading) =>
      html`<div><dt>${reading.label}</dt><dd>${inWords(reading, turn[reading.column][token])}</dd></div>`,
  );
}

function inWords(reading, value) {
  if (value === null || value === undefined)
    return reading.key === "advantage" ? "none: not trained" : NONE;
  if (reading.key === "mask") return value.replace("_", " ");
  if (reading.key === "logprob")
    return `${number(value)} nats (${(Math.exp(value) * 100).toPrecision(3)} %)`;
  return reading.unit ? `${number(value)} ${reading.unit}` : number(value);
}

/** Below what it explains, or above where there is no room; never past the edge of the window. It scrolls with the page. */
function put(element, rect) {
  if (!rect) return;
  const { width, height } = element.getBoundingClientRect();
  const left = Math.max(Math.min(rect.left, document.documentElement.clientWidth - width - 8), 8);
  const isBelow = rect.bottom + height + 8 < innerHeight;
  element.style.left = `${left + scrollX}px`;
  element.style.top = `${(isBelow ? rect.bottom + 4 : Math.max(rect.top - height - 4, 4)) + scrollY}px`;
}

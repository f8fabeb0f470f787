/** Draws the tokens of a turn in colours; the pointer, a tap or the arrow keys choose one to be told about. */

import { number } from "./format.js";
import { html, useLayoutEffect, useRef, useState } from "./html.js";
import { LongText } from "./prompts.js";
import { READINGS, offsetsOf, runsOf, tokenAt, visible, visibleToken } from "./tokens.js";

/** Tokens drawn before somebody asks for all of them. */
const SHOWN = 20_000;

/** What a person chooses a reading by. `pick(key)` is called with its key. */
export function readingPicker(chosen, isRecorded, pick) {
  return html`<fieldset class="readings" data-testid="readings"><legend>Colour tokens by</legend>
    ${READINGS.map(
      (
        reading,
      ) => html`<label key=${reading.key} title=${isRecorded(reading) ? reading.help : "This was not recorded"}>
      <input type="radio" name="reading" value=${reading.key} checked=${reading.key === chosen} disabled=${!isRecorded(reading)}
        onchange=${() => pick(reading.key)} data-testid=${`by-${reading.key}`} />${reading.label}</label>`,
    )}</fieldset>`;
}

/** What the colours mean, with numbers, the unit, and how many tokens have each. */
export function legend(reading, scale) {
  if (!reading.column) return null;
  const named = [reading.label, reading.unit].filter(Boolean).join(", ");
  const entry = (label, num, names) =>
    html`<li class=${num ? null : "none"}><span class=${names} aria-hidden="true">ab</span>${label}<span class="muted num">${number(num)}</span></li>`;
  return html`<div class="token-legend" data-testid="legend">
    <p><strong>${named}</strong><span class="muted"> · ${reading.help}</span></p>
    <ul>${scale.bins.map((bin) => entry(bin.label, bin.numTokens, `swatch ${bin.className}`))}
      ${scale.numUnknown > 0 && entry("not recorded", scale.numUnknown, "swatch")}</ul></div>`;
}

/**
 * The text of a turn, one element for each run of neighbours of one colour. The arrow keys move along its tokens; `tip` shows the values of the one
 * that is looked at. Where no tokens were recorded it is the text alone.
 */
export function TokenBox({ turn, label, reading, scale, tip }) {
  const box = useRef(null);
  const [limit, setLimit] = useState(SHOWN);
  useLayoutEffect(() => {
    if (box.current) fill(box.current, turn, { reading, scale, tip }, limit);
  }, [turn, reading, scale, limit]);
  if (!turn.versions.length)
    return html`<${LongText} text=${turn.text} class="tokens" data-testid="tokens" />`;
  const num = turn.pieces.length;
  return html`<div class="tokens" ref=${box} tabindex="0" role="group" data-testid="tokens"
      aria-label=${`${label}, ${num} tokens; the arrow keys go from one to the next`}></div>
    ${num > limit && html`<button type="button" data-testid="show-all" onclick=${() => setLimit(Infinity)}>Show all ${number(num)} tokens</button>`}`;
}

function fill(box, turn, { reading, scale, tip }, limit) {
  const shown = turn.pieces.slice(0, limit).map(reading.column ? visibleToken : visible);
  const values = reading.column ? turn[reading.column] : [];
  const offsets = offsetsOf(shown);
  const starts = [];
  const nodes = runsOf(shown, values, scale.binOf).map((run) => {
    const node = document.createElement("span");
    node.textContent = run.text;
    if (run.bin >= 0) node.className = scale.bins[run.bin].className;
    starts.push(offsets[run.start]);
    return node;
  });
  box.replaceChildren(...nodes);
  starts.push(offsets[shown.length]);
  listen({ box, offsets, starts, turn }, tip);
}

/** Pointer, tap and arrow keys show one token. */
function listen(text, tip) {
  const { box, turn, offsets } = text;
  let cursor = -1;
  const leave = () => {
    cursor = -1;
    tip.hide();
  };
  const look = (token) => {
    cursor = token;
    tip.show(rangeOf(text, token), turn, token);
  };
  box.onpointermove = (event) => {
    const token = tokenUnder(text, event.clientX, event.clientY);
    if (token !== null && token !== cursor) look(token);
  };
  box.onclick = box.onpointermove;
  box.onpointerleave = () => {
    if (box !== document.activeElement) leave();
  };
  box.onblur = leave;
  box.onkeydown = (event) => {
    const to = keyMove(event.key, cursor, offsets.length - 1);
    if (to === null) return;
    event.preventDefault();
    if (to < 0) return leave();
    intoView(rangeOf(text, to).getClientRects()[0]);
    look(to);
  };
}

/** The token a key leads to; -1 for none, null for a key that is not ours. */
function keyMove(key, cursor, num) {
  if (key === "ArrowRight") return Math.min(cursor + 1, num - 1);
  if (key === "ArrowLeft") return Math.max(cursor - 1, 0);
  if (key === "Home") return 0;
  if (key === "End") return num - 1;
  return key === "Escape" && cursor >= 0 ? -1 : null;
}

function intoView(rect) {
  if (rect && (rect.top < 0 || rect.bottom > innerHeight)) scrollBy(0, rect.top - innerHeight / 2);
}

function rangeOf({ box, offsets, starts }, token) {
  const run = tokenAt(starts, offsets[token]);
  const range = document.createRange();
  const node = box.childNodes[run].firstChild;
  if (!node) return range; // a token without any text
  range.setStart(node, offsets[token] - starts[run]);
  range.setEnd(node, offsets[token + 1] - starts[run]);
  return range;
}

/** The token under a point of the page; null if there is none. */
function tokenUnder({ box, offsets, starts }, x, y) {
  const spot = document.caretRangeFromPoint
    ? document.caretRangeFromPoint(x, y)
    : asRange(document.caretPositionFromPoint(x, y));
  const node = spot?.startContainer;
  if (node?.nodeType !== Node.TEXT_NODE || !box.contains(node)) return null;
  const run = Array.prototype.indexOf.call(box.childNodes, node.parentNode);
  let offset = spot.startOffset;
  if (offset > 0 && (offset === node.length || covers(node, offset - 1, x, y))) offset -= 1; // a caret stands between two
  return Math.min(tokenAt(offsets, starts[run] + offset), offsets.length - 2);
}

function asRange(position) {
  return position && { startContainer: position.offsetNode, startOffset: position.offset };
}

function covers(node, offset, x, y) {
  const range = document.createRange();
  range.setStart(node, offset);
  range.setEnd(node, offset + 1);
  return [...range.getClientRects()].some(
    (box) => x >= box.left && x < box.right && y >= box.top && y < box.bottom,
  );
}

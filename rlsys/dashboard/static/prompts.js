/** What was asked and what is right, and other text that somebody else wrote: always as text, long ones cut. */

import { textOfMessage } from "./conversation.js";
import { number } from "./format.js";
import { html, useState } from "./html.js";
import { visible } from "./tokens.js";

/** Characters shown before somebody asks for all of them: a page with a megabyte in it is slow to scroll. */
const SHOWN = 20_000;

/** A text as it was written; a long one with a button that shows the rest. Other props are those of its box. */
export function LongText({ text, ...props }) {
  const [isWhole, setWhole] = useState(false);
  const isCut = !isWhole && text.length > SHOWN;
  return html`<div ...${props} class=${`said ${props.class ?? ""}`}>${visible(isCut ? text.slice(0, SHOWN) : text)}${
    isCut &&
    html`… <button type="button" data-testid="show-all" onclick=${() => setWhole(true)}>Show all ${number(text.length)} characters</button>`
  }</div>`;
}

/** One message of a conversation: who said it, and what. */
export function message(role, text, key) {
  return html`<div key=${key} class=${`message from-${/^[a-z]+$/.test(role) ? role : "other"}`} data-testid="message">
    <div class="role">${role}</div><${LongText} text=${text} /></div>`;
}

/** JSON in one line if that is short. */
function readable(value) {
  const line = JSON.stringify(value);
  return line.length < 80 ? line : JSON.stringify(value, null, 2);
}

/** The task of a group: its prompt, the right answer, and what else its row holds. */
export function taskBox(answer, isOpen) {
  const hasInfo = Object.keys(answer.info ?? {}).length > 0;
  return html`<details key="task" class="task" open=${isOpen} data-testid="task"><summary>Task</summary>
    ${answer.prompt.map((one, index) => message(String(one.role ?? "prompt"), textOfMessage(one), index))}
    ${answer.answer !== null && html`<div class="message answer"><div class="role">right answer</div><${LongText} text=${answer.answer} /></div>`}
    ${hasInfo && html`<div class="message"><div class="role">info</div><${LongText} text=${readable(answer.info)} /></div>`}</details>`;
}

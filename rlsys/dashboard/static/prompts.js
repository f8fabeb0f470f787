/** What was asked and what is right, and other text that somebody else wrote: always as text, long ones cut. */

import { textOfMessage } from "./conversation.js";
import { h } from "./dom.js";
import { number } from "./format.js";
import { visible } from "./tokens.js";

/** Characters shown before somebody asks for all of them: a page with a megabyte in it is slow to scroll. */
const SHOWN = 20_000;

/** A text as it was written; a long one with a button that shows the rest. */
export function longText(text, props) {
  const box = h("div", { ...props, class: `said ${props?.class ?? ""}` });
  const cut = text.length > SHOWN ? text.slice(0, SHOWN) : text;
  box.append(visible(cut));
  if (cut !== text) {
    const more = h("button", { type: "button", "data-testid": "show-all" }, `Show all ${number(text.length)} characters`);
    more.onclick = () => box.replaceChildren(visible(text));
    box.append("… ", more);
  }
  return box;
}

/** One message of a conversation: who said it, and what. */
export function message(role, text, key) {
  return h("div", { key, class: `message from-${/^[a-z]+$/.test(role) ? role : "other"}`, "data-testid": "message" },
    h("div", { class: "role" }, role), longText(text));
}

/** JSON in one line if that is short. */
function readable(value) {
  const line = JSON.stringify(value);
  return line.length < 80 ? line : JSON.stringify(value, null, 2);
}

/** The task of a group: its prompt, the right answer, and what else its row holds. */
export function taskBox(answer, isOpen) {
  return h("details", { key: "task", class: "task", open: isOpen, "data-testid": "task" },
    h("summary", null, "Task"),
    answer.prompt.map((one, index) => message(String(one.role ?? "prompt"), textOfMessage(one), index)),
    answer.answer !== null && h("div", { class: "message answer" }, h("div", { class: "role" }, "right answer"), longText(answer.answer)),
    Object.keys(answer.info ?? {}).length > 0 && h("div", { class: "message" },
      h("div", { class: "role" }, "info"), longText(readable(answer.info))));
}

/** A conversation turn by turn: what an agent was told, what it answered, which tools it called. */

import { TokenBox } from "./colouring.js";
import { badge } from "./components.js";
import { callInWords, messagesOf } from "./conversation.js";
import { count } from "./format.js";
import { html } from "./html.js";
import { LongText, message } from "./prompts.js";

/** All turns of one agent. `options`: `reading` and `scale` that colour its tokens, and `tip`, see `colouring.js`. */
export function conversation(trajectory, options) {
  return trajectory.turns.map((turn, index) => oneTurn(trajectory, turn, index, options));
}

function oneTurn(trajectory, turn, index, options) {
  const label = `Turn ${index + 1} of ${trajectory.agent}`;
  return html`<section class="turn" key=${index} aria-label=${label} data-testid="turn">
    ${messagesOf(turn.said).map((said, place) => message(said.role, said.text, place))}
    <div class="message from-policy" data-testid="answer">
      <div class="role">${trajectory.agent}<span class="muted"> · ${facts(turn, index)}</span> ${turn.finish === "length" && badge("cut off at the token limit", "warn")}</div>
      <${TokenBox} turn=${turn} label=${label} ...${options} />
    </div>
    ${turn.tool_calls.map(
      (call, place) => html`<div class="call" key=${`call-${place}`} data-testid="tool-call">
      <div class="role">calls a tool</div><${LongText} text=${callInWords(call)} /></div>`,
    )}
  </section>`;
}

function facts(turn, index) {
  const versions = [...new Set(turn.versions)];
  return [
    `turn ${index + 1}`,
    turn.logprobs.length > 0 && count(turn.logprobs.length, "token"),
    versions.length === 1 && `version ${versions[0]}`,
    versions.length > 1 && `versions ${Math.min(...versions)} to ${Math.max(...versions)}`,
    turn.finish && turn.finish !== "stop" && turn.finish !== "length" && `ended by ${turn.finish}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

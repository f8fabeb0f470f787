/** What was said to an agent, taken apart for reading: pure logic, no page. */

const CHATML = /<\|im_start\|>([^\n<]*)\n?/g;
const CHATML_END = "<|im_end|>";

/**
 * The messages in a piece of a prompt as a chat template wrote it: `[{ role, text }]`.
 *
 * Only ChatML is taken apart, which Qwen and many others speak. What stands outside its marks, or any other template, is one message of role `prompt`
 * with all its marks. The opening of the answer that follows is left out: it says nothing.
 */
export function messagesOf(said) {
  const openings = [...said.matchAll(CHATML)];
  const before = said.slice(0, openings[0]?.index ?? said.length);
  const messages = outside(before);
  openings.forEach((opening, index) => {
    const begin = opening.index + opening[0].length;
    const end = openings[index + 1]?.index ?? said.length;
    const [text, ...rest] = said.slice(begin, end).split(CHATML_END);
    const isAnswerOpened = index === openings.length - 1 && !rest.length && !text.trim();
    if (isAnswerOpened) return;
    messages.push({ role: opening[1].trim() || "prompt", text: trimmed(text) });
    messages.push(...outside(rest.join(CHATML_END)));
  });
  return messages;
}

/** Text between messages: nothing if it is only the end of a message that began earlier. */
function outside(text) {
  const left = trimmed(text.replace(CHATML_END, ""));
  return left.trim() ? [{ role: "prompt", text: left }] : [];
}

function trimmed(text) {
  return text.replace(/^\n+|\s+$/g, "");
}

/** A message of a task's prompt as text, with the calls that somebody else's assistant made in it. */
export function textOfMessage(message) {
  const content =
    typeof message.content === "string"
      ? message.content
      : JSON.stringify(message.content ?? "", null, 2);
  const calls = Array.isArray(message.tool_calls)
    ? message.tool_calls.map((call) => JSON.stringify(call))
    : [];
  return [content, ...calls].filter(Boolean).join("\n");
}

/** A call of a tool in one line, `search(query="height of K2", limit=3)`. */
export function callInWords(call) {
  const given = call.arguments;
  if (given === null || typeof given !== "object" || Array.isArray(given))
    return `${call.name}(${JSON.stringify(given ?? null)})`;
  const parts = Object.entries(given).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  return `${call.name}(${parts.join(", ")})`;
}

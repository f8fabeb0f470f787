/**
 * The lines of a log that a page holds, newest first, each with its index in the whole log, which never changes: a page
 * goes on from what it holds, whatever was written meanwhile. Pure logic, no page.
 */

/** The lines of a LogAnswer with their indices. */
export function indexed({ lines, next_before: below }) {
  const first = below ?? 0;
  return lines.map((line, place) => ({ ...line, index: first + lines.length - 1 - place }));
}

/** Lines between those held and newer ones that nobody has asked for yet. */
export function gap(held, fresh) {
  if (!held.length || !fresh.length) return 0;
  return Math.max(fresh.at(-1).index - held[0].index - 1, 0);
}

/**
 * `fresh`, the newest there are, on top of `held`. Only `fresh` if they do not belong together: the file was replaced,
 * or there is a gap between them.
 */
export function joined(held, fresh) {
  if (!held.length || gap(held, fresh) || !isSameLog(held[0], fresh)) return fresh;
  return [...fresh.filter(({ index }) => index > held[0].index), ...held];
}

/** Older lines beneath those held; nothing more if these are others than when they were asked for. */
export function continued(held, older) {
  return held.at(-1)?.index === older[0]?.index + 1 ? [...held, ...older] : held;
}

/** Is the newest line held where it was? */
function isSameLog(top, fresh) {
  if (!fresh.length || fresh[0].index < top.index) return false;
  const again = fresh.find(({ index }) => index === top.index);
  return !again || (again.time_s === top.time_s && again.kind === top.kind && again.text === top.text);
}

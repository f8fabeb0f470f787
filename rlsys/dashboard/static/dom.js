/**
 * Builds the page and keeps it up to date. Text always becomes a text node, whatever it holds: what a model wrote can
 * never become markup. Views describe what they show from scratch; `update` changes only what differs, so that
 * selection, focus, scrolling and open <details> survive.
 *
 *     update(root, h("p", { class: "muted" }, "step ", 12), h("button", { onclick: more }, "More"));
 */

const SVG = "http://www.w3.org/2000/svg";
const LIVE = new Set(["value", "checked", "disabled"]); // properties that say more than their attribute
const OURS = new Set(["key", "keep"]);
const owned = new WeakMap(); // element -> { key, keep, handlers, live }: what attributes cannot carry

/**
 * An element. `props`: attributes; `on…` functions; `style` an object; `key` tells `update` which child is which, and
 * `keep` that it must leave the children alone, because somebody else looks after them.
 * Values false, null and undefined leave a prop out. Children: nodes, text, numbers, arrays of them; null and false
 * are nothing.
 */
export function h(tag, props, ...children) {
  return build(document.createElement(tag), props ?? {}, children);
}

/** The same in SVG. */
export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props ?? {}, children);
}

/** Make `root` show `children`, by changing what differs. A child that is in place already is left as it is. */
export function update(root, ...children) {
  morphChildren(root, nodesOf(children));
}

function build(element, props, children) {
  const own = { key: props.key, keep: props.keep, handlers: {}, live: {} };
  owned.set(element, own);
  element.append(...nodesOf(children));
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined || OURS.has(name)) continue;
    if (name.startsWith("on")) element[name] = own.handlers[name] = value;
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (LIVE.has(name)) element[name] = own.live[name] = value;
    else element.setAttribute(name, value === true ? "" : safe(name, value));
  }
  return element;
}

/** An address is one of ours: a run's text must not become a link to anywhere. */
function safe(name, value) {
  if ((name === "href" || name === "src") && !String(value).startsWith("#")) {
    throw new Error(`${name} must begin with #, not ${value}: links are made by router.link`);
  }
  return value;
}

function nodesOf(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false && child !== true)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

function morphChildren(root, fresh) {
  const keys = new Set(fresh.map(keyOf));
  const keyed = new Map();
  for (const child of [...root.childNodes]) {
    const key = keyOf(child);
    if (key === undefined || fresh.includes(child)) continue;
    if (keys.has(key)) keyed.set(key, child);
    else child.remove();
  }
  let place = root.firstChild;
  for (const next of fresh) {
    const old = alike(place, next) ? place : keyed.get(keyOf(next));
    if (old === undefined || !alike(old, next)) {
      root.insertBefore(next, place);
      if (next === place) place = next.nextSibling;
      continue;
    }
    if (old === place) place = place.nextSibling;
    else root.insertBefore(old, place);
    if (old !== next) morph(old, next);
  }
  while (place) {
    const rest = place.nextSibling;
    place.remove();
    place = rest;
  }
}

function keyOf(node) {
  return owned.get(node)?.key;
}

function alike(old, next) {
  return old && (old === next || (old.nodeName === next.nodeName && keyOf(old) === keyOf(next)));
}

function morph(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.nodeValue !== next.nodeValue) old.nodeValue = next.nodeValue;
    return;
  }
  morphAttributes(old, next);
  morphOwned(old, next);
  if (!owned.get(next)?.keep) morphChildren(old, [...next.childNodes]);
}

function morphAttributes(old, next) {
  const isKept = (name) => name === "style" || (name === "open" && old.nodeName === "DETAILS");
  for (const { name } of [...old.attributes]) {
    if (!isKept(name) && !next.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (!isKept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // Only through the object model: the content security policy forbids setting the attribute.
  if (old.style.cssText !== next.style.cssText) old.style.cssText = next.style.cssText;
}

function morphOwned(old, next) {
  const before = owned.get(old);
  const after = owned.get(next);
  if (!after) return;
  for (const name of Object.keys(before?.handlers ?? {})) old[name] = null;
  Object.assign(old, after.handlers);
  for (const [name, value] of Object.entries({ ...unset(before?.live), ...after.live })) {
    if (name === "value" && (old === document.activeElement || before?.live.value === value)) continue; // it is typed in
    old[name] = value;
  }
  owned.set(old, after);
}

function unset(live) {
  return Object.fromEntries(Object.keys(live ?? {}).map((name) => [name, name === "value" ? "" : false]));
}

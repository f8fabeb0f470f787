/**
 * Templates of the pages: Preact with htm. Text always becomes a text node, whatever it holds: what a model wrote can
 * never become markup. Views describe what they show from scratch; `update` changes only what differs, so that
 * selection, focus, scrolling and open <details> survive.
 *
 *     update(root, html`<p class="muted">step ${12}</p><button onclick=${more}>More</button>`);
 */

import { Component, createRef, h as element, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export { Component, createRef };
export { useLayoutEffect, useRef, useState } from "./vendor/hooks.mjs";

export const html = htm.bind(checked);

/** Make `root` show `children`, by changing what differs; nothing if there are none. */
export function update(root, ...children) {
  render(children, root);
}

/** An element, unless it would be a link to elsewhere or markup: a run's text must become neither. */
function checked(type, props, ...children) {
  for (const name of ["href", "src"]) {
    const value = props?.[name];
    if (value !== undefined && value !== null && !String(value).startsWith("#"))
      throw new Error(`${name} must begin with #, not ${value}: links are made by router.link`);
  }
  if (props?.dangerouslySetInnerHTML) throw new Error(`${type}: text is never markup`);
  return element.call(this, type, props, ...children);
}

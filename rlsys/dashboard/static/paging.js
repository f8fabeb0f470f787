/** Ways from one thing to the next: buttons that are links, and the keys for them, see `keys.js`. */

import { h } from "./dom.js";
import { number } from "./format.js";
import { link } from "./router.js";

/** A link to the previous or next thing (`nav`), or the same greyed out where `href` is null. */
export function neighbour(nav, label, href) {
  const text = nav === "next" ? [label, " ›"] : ["‹ ", label];
  const id = `to-${nav}`;
  if (href === null) return h("button", { key: id, type: "button", disabled: true, "data-testid": id }, text);
  return h("a", { key: id, class: "button", href, "data-nav": nav, "data-testid": id, title: nav === "next" ? "]" : "[" }, text);
}

/** Where one is in a list of pages, and the ways on; nothing if all of it is shown. `size`: rows of a page. */
export function pages({ page, size, num, noun }, hrefOf) {
  if (num <= size) return null;
  const from = page * size + 1;
  const to = Math.min((page + 1) * size, num);
  return h("nav", { key: "pages", class: "tools pages", "aria-label": "Pages" },
    page > 0 ? h("a", { class: "button", href: hrefOf(page - 1), "data-testid": "page-before" }, "‹ Page before") : null,
    h("span", { class: "muted", "data-testid": "page" }, `${number(from)} to ${number(to)} of ${number(num)} ${noun}`),
    to < num ? h("a", { class: "button", href: hrefOf(page + 1), "data-testid": "page-after" }, "Page after ›") : null);
}

/** A field for words to look for; Enter goes to `hrefOf(words)`. */
export function searchField(label, words, hrefOf, go) {
  const onsubmit = (event) => {
    event.preventDefault();
    go(hrefOf(new FormData(event.target).get("q").trim()));
  };
  return h("form", { key: "search", class: "tools", role: "search", onsubmit },
    h("label", { class: "visually-hidden", for: "q" }, label),
    h("input", { id: "q", name: "q", type: "search", value: words, placeholder: label, "data-search": true, "data-testid": "search", autocomplete: "off" }));
}

/** The name of a task, which leads to the task over time if the run's events tell of it. `run`: a RunAnswer. */
export function taskName(run, task) {
  if (!run.has_groups) return h("span", { "data-testid": "task-name" }, task);
  return h("a", { href: link("task", run.summary.id, { task }), "data-testid": "task-link", title: "This task over time" }, task);
}

/** The place of a group, and of one of its episodes if `episode` is given. */
export function rollout(run, { step, group_id, episode }) {
  return link(episode === undefined ? "group" : "episode", run, { step, group_id, episode });
}

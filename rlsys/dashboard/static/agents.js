/** The agents of an episode as a tree to choose from: who called whom, what each was given. */

import { h } from "./dom.js";
import { count, number } from "./format.js";
import { badge } from "./parts.js";
import { treeMove, treeOrder } from "./tree.js";

/** `chosen` is the index of the one that is shown; `choose(index)` is called for another. */
export function agentTree(trajectories, chosen, choose) {
  const order = treeOrder(trajectories);
  const items = order.map((node) => item(trajectories[node.index], node, chosen, choose));
  const tree = h("div", { class: "tree", role: "tree", "aria-label": "Agents of the episode", "data-testid": "tree" }, items);
  tree.onkeydown = (event) => {
    const place = items.indexOf(document.activeElement);
    if (place < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return choose(order[place].index);
    }
    const to = treeMove(order, place, event.key);
    if (to === place) return;
    event.preventDefault();
    items[place].tabIndex = -1;
    items[to].tabIndex = 0;
    items[to].focus();
  };
  return tree;
}

function item(trajectory, node, chosen, choose) {
  const isChosen = node.index === chosen;
  const reward = trajectory.reward === null ? null : `reward ${number(trajectory.reward)}`;
  const advantage = trajectory.advantage === null ? null : `advantage ${number(trajectory.advantage)}`;
  return h("div", {
    role: "treeitem", "aria-level": String(node.depth + 1), "aria-selected": String(isChosen), tabindex: isChosen ? "0" : "-1",
    class: "agent", style: { "--depth": String(node.depth) },
    onclick: () => choose(node.index), "data-testid": "agent", "data-index": String(node.index),
  },
    h("span", { class: "agent-name" }, node.depth > 0 && h("span", { class: "branch", "aria-hidden": "true" }, "└ "), trajectory.agent,
      trajectory.outcome !== "ok" && badge(trajectory.outcome, trajectory.outcome === "failed" ? "bad" : "warn", trajectory.reason || null)),
    h("span", { class: "muted small" }, [count(trajectory.turns.length, "turn"), reward, advantage].filter(Boolean).join(" · ")));
}

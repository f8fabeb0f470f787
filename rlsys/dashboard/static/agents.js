/** The agents of an episode as a tree to choose from: who called whom, what each was given. */

import { outcomeBadge } from "./components.js";
import { count, number } from "./format.js";
import { html } from "./html.js";

/** `chosen` is the index of the one that is shown; `choose(index)` is called for another. */
export function agentTree(trajectories, chosen, choose) {
  const order = treeOrder(trajectories);
  const onkeydown = (event) => {
    const items = [...event.currentTarget.children];
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
  return html`<div class="tree" role="tree" aria-label="Agents of the episode" data-testid="tree" onkeydown=${onkeydown}>
    ${order.map((node) => item(trajectories[node.index], node, chosen, choose))}</div>`;
}

function item(trajectory, node, chosen, choose) {
  const isChosen = node.index === chosen;
  const facts = [
    count(trajectory.turns.length, "turn"),
    trajectory.reward !== null && `reward ${number(trajectory.reward)}`,
    trajectory.advantage !== null && `advantage ${number(trajectory.advantage)}`,
  ];
  return html`<div role="treeitem" aria-level=${node.depth + 1} aria-selected=${isChosen} tabindex=${isChosen ? 0 : -1} class="agent"
    style=${{ "--depth": String(node.depth) }} onclick=${() => choose(node.index)} data-testid="agent" data-index=${node.index}>
    <span class="agent-name">${node.depth > 0 && html`<span class="branch" aria-hidden="true">└ </span>`}${trajectory.agent}
      ${outcomeBadge(trajectory.outcome, trajectory.reason)}</span>
    <span class="muted small">${facts.filter(Boolean).join(" · ")}</span></div>`;
}

/**
 * Agents in the order of a tree, a parent before its children: `[{ index, depth, parent, numChildren }]`.
 *
 * `parent` is an index of `trajectories`. One that names no agent before its own, as a damaged file may, is left out, so that no agent is lost and
 * nothing goes round in circles.
 */
export function treeOrder(trajectories) {
  const parents = trajectories.map((trajectory, index) => {
    const parent = trajectory.parent;
    return Number.isInteger(parent) && parent >= 0 && parent < index ? parent : null;
  });
  const children = trajectories.map(() => []);
  parents.forEach((parent, index) => {
    if (parent !== null) children[parent].push(index);
  });
  const order = [];
  const visit = (index, depth) => {
    order.push({ index, depth, parent: parents[index], numChildren: children[index].length });
    for (const child of children[index]) visit(child, depth + 1);
  };
  parents.forEach((parent, index) => {
    if (parent === null) visit(index, 0);
  });
  return order;
}

/** Where a key leads from a place in `treeOrder`; the place itself where it leads nowhere. As in any tree of a desktop. */
export function treeMove(order, place, key) {
  const { parent, numChildren } = order[place];
  const moves = {
    ArrowDown: Math.min(place + 1, order.length - 1),
    ArrowUp: Math.max(place - 1, 0),
    Home: 0,
    End: order.length - 1,
    ArrowLeft: parent === null ? place : order.findIndex(({ index }) => index === parent),
    ArrowRight: numChildren ? place + 1 : place,
  };
  return moves[key] ?? place;
}

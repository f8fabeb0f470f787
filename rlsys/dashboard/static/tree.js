/** The agents of an episode as a tree: pure logic, no page. */

/**
 * Agents in the order of a tree, a parent before its children: `[{ index, depth, parent, numChildren }]`.
 *
 * `parent` is an index of `trajectories`. One that names no agent before its own, as a damaged file may, is left out, so
 * that no agent is lost and nothing goes round in circles.
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
  const node = order[place];
  const placeOf = (index) => order.findIndex((other) => other.index === index);
  switch (key) {
    case "ArrowDown":
      return Math.min(place + 1, order.length - 1);
    case "ArrowUp":
      return Math.max(place - 1, 0);
    case "ArrowLeft":
      return node.parent === null ? place : placeOf(node.parent);
    case "ArrowRight":
      return node.numChildren ? place + 1 : place;
    case "Home":
      return 0;
    case "End":
      return order.length - 1;
    default:
      return place;
  }
}

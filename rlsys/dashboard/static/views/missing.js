/** An address that names no view. */

import { h } from "../dom.js";
import { empty } from "../parts.js";
import { link } from "../router.js";

export const title = "Nothing here";

export async function render(root, place) {
  root.append(empty(`There is no view ${place.view}.`, h("a", { href: link("runs", null) }, "All runs")));
}

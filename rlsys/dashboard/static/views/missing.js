/** An address that names no view. */

import { empty } from "../components.js";
import { html, update } from "../html.js";
import { link } from "../router.js";

export const title = "Nothing here";

export async function render(root, place) {
  update(root, empty(`There is no view ${place.view}.`, html`<a href=${link("runs", null)}>All runs</a>`));
}

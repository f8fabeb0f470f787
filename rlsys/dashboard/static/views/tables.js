/** Any table of a run, as the server has it. */

import { get } from "../api.js";
import { PRESETS, tableView } from "../datatable.js";
import { html } from "../html.js";
import { link } from "../router.js";

export const title = "Tables";

export async function render(root, place, context) {
  const { tables } = await get("tables", { run: place.run }, context.signal);
  const shown = place.query.get("table") ?? "episodes";
  const tab = ({
    name,
    help,
  }) => html`<a key=${name} class="button" href=${link("tables", place.run, { table: name })} title=${help} data-testid=${`table-${name}`}
    aria-current=${name === shown ? "true" : null}>${name}</a>`;
  return tableView(root, place, context, {
    table: shown,
    presets: ["tasks", "episodes"].flatMap((table) =>
      PRESETS[table].map(([label, asked]) => [label, { table, ...asked }]),
    ),
    head: () =>
      html`<h1 key="title" class="visually-hidden" data-testid="title">Tables</h1><nav key="tables" class="tools" aria-label="Tables">${tables.map(tab)}</nav>`,
  });
}

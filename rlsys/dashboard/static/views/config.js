/** What the run was started with, and how it started. */

import { h, update } from "../dom.js";
import { duration } from "../format.js";
import { copyButton, empty } from "../parts.js";

export const title = "Configuration";

export async function render(root, place, { run }) {
  let sought = "";
  let shown = run;

  function draw() {
    const lines = shown.config.split("\n");
    const found = sought ? lines.filter((line) => line.toLowerCase().includes(sought.toLowerCase())) : lines;
    update(
      root,
      h(
        "div",
        { class: "head", key: "head" },
        h("h1", { class: "visually-hidden" }, "Configuration"),
        h("input", {
          type: "search",
          placeholder: "Show lines with",
          "aria-label": "Search the configuration",
          "data-search": true,
          "data-testid": "filter",
          oninput: ({ target }) => {
            sought = target.value;
            draw();
          },
        }),
        copyButton("Copy", () => shown.config, "copy-config"),
      ),
      shown.config
        ? h("pre", { key: "config", "data-testid": "config", tabindex: "0" }, found.join("\n") || "No line matches.")
        : empty(
            "The run folder has no config.resolved.yaml.",
            "It is written when a run starts; this folder may hold a part of a run only.",
          ),
      facts("Folder", { "": shown.folder }),
      facts("Engines", shown.engines),
      facts(
        "Start-up",
        Object.fromEntries(
          Object.entries(shown.phases).map(([name, seconds]) => [name.replaceAll("_", " "), duration(seconds)]),
        ),
      ),
    );
  }
  draw();
  return async (now) => {
    shown = now;
    draw();
  };
}

function facts(heading, values) {
  if (!Object.keys(values).length) return null;
  return h(
    "section",
    { key: heading },
    h("h2", null, heading),
    h(
      "dl",
      { class: "facts" },
      Object.entries(values).map(([name, value]) =>
        h("div", { key: name }, name && h("dt", null, name), h("dd", null, value)),
      ),
    ),
  );
}

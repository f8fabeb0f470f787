/** What the run was started with, and how it started. */

import { CopyButton, empty, filterField } from "../components.js";
import { duration } from "../format.js";
import { html, update } from "../html.js";

export const title = "Configuration";

export async function render(root, _place, { run }) {
  let sought = "";
  let shown = run;

  function draw() {
    const lines = shown.config.split("\n");
    const found = sought
      ? lines.filter((line) => line.toLowerCase().includes(sought.toLowerCase()))
      : lines;
    const phases = Object.entries(shown.phases).map(([name, seconds]) => [
      name.replaceAll("_", " "),
      duration(seconds),
    ]);
    update(
      root,
      html`<div class="head" key="head"><h1 class="visually-hidden">Configuration</h1>
        ${filterField({ label: "Show lines with", title: "Search the configuration", value: sought, seek })}
        <${CopyButton} label="Copy" text=${() => shown.config} id="copy-config" /></div>
      ${
        shown.config
          ? html`<pre key="config" data-testid="config" tabindex="0">${found.join("\n") || "No line matches."}</pre>`
          : empty(
              "The run folder has no config.resolved.yaml.",
              "It is written when a run starts; this folder may hold a part of a run only.",
            )
      }
      ${facts("Folder", [["", shown.folder]])}${facts("Engines", Object.entries(shown.engines))}${facts("Start-up", phases)}`,
    );
  }
  function seek(text) {
    sought = text;
    draw();
  }
  draw();
  return async (now) => {
    shown = now;
    draw();
  };
}

function facts(heading, values) {
  if (!values.length) return null;
  return html`<section key=${heading}><h2>${heading}</h2>
    <dl class="facts">${values.map(([name, value]) => html`<div key=${name}>${name && html`<dt>${name}</dt>`}<dd>${value}</dd></div>`)}</dl></section>`;
}

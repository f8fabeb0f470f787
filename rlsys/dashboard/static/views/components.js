/** Every component of these pages, with made-up content: to look at while changing one. */

import { Chart } from "../charts.js";
import { chartTools, NOTHING_CHOSEN } from "../choices.js";
import {
  CopyButton,
  Table,
  badge,
  banner,
  empty,
  failure,
  figure,
  filterField,
  fold,
  neighbour,
  pages,
  status,
} from "../components.js";
import { duration, number, percent, quantity } from "../format.js";
import { html, update } from "../html.js";
import { barMark, rangeMark, sparkline } from "../marks.js";
import { LongText, message } from "../prompts.js";

export const title = "Components";

const STATES = ["starting", "running", "silent", "finished", "interrupted", "failed"];
const SCALE = { low: -1, high: 1 };
const XS = Array.from({ length: 60 }, (_, step) => step + 1);
const noisy = (step) => 1 - Math.exp(-step / 20) + 0.15 * Math.sin(step * 2.3);
const LINES = [
  {
    label: "lowest",
    kind: "band",
    colour: "--c1",
    xs: XS,
    ys: XS.map((step) => noisy(step) - 0.3),
  },
  {
    label: "highest",
    kind: "band",
    colour: "--c1",
    xs: XS,
    ys: XS.map((step) => noisy(step) + 0.3),
  },
  { label: "mean", xs: XS, ys: XS.map(noisy), colour: "--c1", dash: [] },
];
const STACK = ["--c7", "--c1", "--c3"].map((colour, index) => ({
  label: `part ${index + 1}`,
  kind: "stack",
  colour,
  xs: XS,
  ys: XS.map((step) => index + 1 + noisy(step) / 2),
}));
const COLUMNS = [
  { label: "Task", order: "task", isHead: true, cell: ({ task }) => task },
  { label: "Reward", order: "reward", isNumber: true, cell: ({ reward }) => number(reward) },
  { label: "Curve", cell: ({ curve }) => sparkline(curve) },
  {
    label: "Range",
    cell: ({ reward }) => rangeMark({ low: reward - 0.2, mean: reward, high: reward + 0.1 }, SCALE),
  },
];
const ROWS = [0.71, -0.4, 0.12].map((reward, index) => ({
  task: `task-${index}`,
  reward,
  curve: [0, reward, reward / 2, 1],
}));

export async function render(root) {
  let choices = NOTHING_CHOSEN;
  let order = "reward desc";
  const draw = () =>
    update(
      root,
      html`<h1>Components</h1>
      ${part("Words", html`<div class="tools">${STATES.map(status)} ${badge("plain")} ${badge("bad", "bad")} ${badge("warn", "warn")} ${badge("good", "good")}</div>`)}
      ${part(
        "Numbers",
        html`<dl class="figures">${figure("Reward", number(0.5231), { note: "mean" })}${figure("Tokens", number(1234567))}
        ${figure("Share", percent(0.123))}${figure("Time", duration(7500))}${figure("Entropy", quantity(0.52, "nats"))}</dl>`,
      )}
      ${part("Banners", html`<div class="banners">${banner("", "To know.")}${banner("warn", "To look at.")}${banner("bad", "To act on.")}</div>`)}
      ${part(
        "Table",
        html`<${Table} columns=${COLUMNS} rows=${ROWS} id="sample" keyOf=${({ task }) => task} order=${order} onOrder=${orderBy} />
        ${pages({ page: 1, size: 3, num: 9, noun: "tasks" }, () => "#/components")}`,
      )}
      ${part(
        "Fields and buttons",
        html`<div class="tools">${filterField({ label: "Filter", value: "", seek: () => {}, id: "sample-filter" })}
        ${neighbour("previous", "Previous", null)}${neighbour("next", "Next", "#/components")}
        <${CopyButton} label="Copy" text="copied" id="sample-copy" /></div>`,
      )}
      ${part("Marks", html`<div class="tools">${barMark(0.6, SCALE)}${barMark(-0.3, SCALE)}${sparkline([1, 3, 2, 5])}</div>`)}
      ${part(
        "Charts",
        html`${chartTools(choices, choose)}<div class="charts">${[
          ["sample-line", LINES],
          ["sample-stack", STACK],
        ].map(
          ([id, lines]) =>
            html`<${Chart} key=${id} id=${id} title=${id} noun="value" lines=${lines} choices=${choices} choose=${choose} marks=${[{ x: 30, text: "an alert" }]} />`,
        )}</div>`,
      )}
      ${part(
        "Texts",
        html`${message("user", "What is 2 + 3?")}<${LongText} text=${"A long text. ".repeat(2000)} style=${{ maxHeight: "6rem", overflow: "auto" }} tabindex="0" />
        ${fold("What can be unfolded", html`<p>Unfolded.</p>`)}`,
      )}
      ${part("Nothing, and errors", html`${empty("Nothing to show.", "What to do about it.")}${failure("Page", { message: "nobody answers", address: "api/run" }, () => {})}`)}`,
    );
  const choose = (changes) => {
    choices = { ...choices, ...changes };
    draw();
  };
  const orderBy = (by) => {
    order = by;
    draw();
  };
  draw();
}

function part(heading, children) {
  return html`<section key=${heading}><h2>${heading}</h2>${children}</section>`;
}

/**
 * Charts of numbers over steps or time: a title that explains, a legend with the values under the cursor, units on both
 * axes, and the numbers as a table beneath. Drag to look closer, double-click to see all; arrow keys move the cursor.
 *
 *     const chart = new Chart({ id: "entropy", title: "Entropy", help: "…", unit: "nats", signal });
 *     root.append(chart.element);
 *     chart.show([{ label: "policy", xs: [1, 2], ys: [0.9, 0.8] }]);
 */

import uPlot from "./vendor/uPlot.esm.js";
import { h, svg, update } from "./dom.js";
import { exact, number } from "./format.js";
import { STEPS_S, sinceBegin } from "./lanes.js";
import { columnsOf, lastOf, newestOf, rangeOf, rowsOf, tick, toldAt } from "./plotting.js";
import { colour, onTheme } from "./theme.js";

const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c8", "--c7"];
const DASHES = [[], [7, 3], [2, 2], [9, 3, 2, 3], [], [7, 3], [2, 2], [9, 3, 2, 3]];
const HEIGHT = 150;
const MAX_ROWS = 2000;

/** One chart. */
export class Chart {
  /**
   * `id`: for tests and links; `help`: what the numbers mean, as a tooltip; `unit` of the values, `noun` what to call
   * them where they have none; `x`: `step` or `time` (seconds since the run began); `note`: a sentence under the
   * title; `sync`: charts of one name share cursor and zoom; `signal`: when the view is left.
   */
  constructor({ id, title, help = "", unit = "", noun = "value", x = "step", note = "", sync = "step", signal }) {
    Object.assign(this, { id, title, help, unit, noun, x, note, sync, signal, plot: null, lines: [], marks: [] });
    this.legend = h("div", { class: "legend", "data-testid": `legend-${id}` });
    this.noteLine = h("p", { class: "note" });
    this.box = h("div", { class: "plot", role: "img", tabindex: "0", onkeydown: (event) => this.#onKey(event) });
    this.xUnit = h("span", { class: "unit x", "data-testid": "unit-x" }, this.#xText(null));
    this.details = h(
      "details",
      { "data-testid": `data-${id}`, ontoggle: () => this.#fillTable() },
      h("summary", null, "Data"),
    );
    this.tableBox = h("div");
    this.details.append(this.tableBox);
    this.reset = h(
      "button",
      { type: "button", class: "quiet", hidden: true, onclick: () => this.#showAll() },
      "Show all",
    );
    this.element = h(
      "section",
      { class: "chart", id: `chart-${id}`, "data-testid": `chart-${id}`, "data-unit": unit },
      h("div", { class: "chart-head" }, h("h3", { title: help }, title), this.reset),
      this.noteLine,
      this.legend,
      h("div", { class: "unit y", "data-testid": "unit-y" }, unit || noun),
      this.box,
      h("div", { class: "chart-foot" }, this.xUnit, this.details),
    );
    this.observer = new ResizeObserver(() => this.#fit());
    this.observer.observe(this.box);
    this.end = new AbortController();
    signal?.addEventListener("abort", () => this.#release(), { signal: this.end.signal });
    onTheme(() => this.#redraw(), this.end.signal);
  }

  /**
   * Show these lines: `{ label, xs, ys, kind, colour, title, isThinned }`; `kind`: `line`, `step` (a value holds until
   * the next), `points` (few of them), `band` (faint, and filled to the line after it, which is one too), `stack` (on
   * top of those before) or `whole` (what a stack is part of). `marks`: `{ x, text }`, drawn as upright lines and told
   * under the title, the newest of them. `span`: the first and last x to show at least, so that charts side by side
   * show the same.
   */
  show(lines, marks = [], span = []) {
    const isSameForm = this.plot && formOf(lines) === formOf(this.lines);
    this.lines = lines.map((line, index) => ({
      kind: "line",
      colour: COLOURS[index % COLOURS.length],
      dash: DASHES[index % DASHES.length],
      ...line,
    }));
    const { lines: drawn, told, numMore } = newestOf(marks);
    this.marks = drawn;
    this.data = columnsOf(this.lines, span);
    this.#drawLegend();
    update(
      this.noteLine,
      told.map(({ x, text }) => h("strong", { class: "mark-text" }, `⚠ ${text} at ${this.#xText(x)}. `)),
      numMore > 0 && h("span", null, `And ${number(numMore)} more. `),
      this.note,
    );
    this.box.setAttribute("aria-label", this.#summary());
    if (this.details.open) this.#fillTable();
    if (isSameForm) this.plot.setData(this.data, !this.isZoomed);
    else this.#redraw();
  }

  /** It is not needed any more: gone from the page, and deaf to all it listens to. */
  close() {
    this.#release();
    this.element.remove();
  }

  #release() {
    this.end.abort();
    this.observer.disconnect();
    this.plot?.destroy();
    this.plot = this.data = null;
  }

  #redraw() {
    if (!this.data || !this.box.clientWidth) return; // it will be, once it has a size
    this.plot?.destroy();
    this.plot = new uPlot(this.#options(), this.data, this.box);
  }

  #fit() {
    const width = this.box.clientWidth;
    if (this.plot && width) this.plot.setSize({ width, height: HEIGHT });
    else this.#redraw();
  }

  #options() {
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: fontOf(),
    };
    const isStacked = this.lines.some(({ kind }) => kind === "stack");
    return {
      width: this.box.clientWidth,
      height: HEIGHT,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(low, high, isStacked) } },
      axes: [
        {
          ...axis,
          size: 24,
          gap: 4,
          space: 60,
          incrs: this.x === "step" ? STEPS : STEPS_S,
          values: (_, splits, __, ___, by) => splits.map((x) => this.#tickOf(x, by)),
        },
        {
          ...axis,
          size: 50,
          gap: 4,
          space: 32,
          values: (_, splits, __, ___, by) => splits.map((value) => tick(value, by)),
        },
      ],
      cursor: {
        sync: { key: this.sync, scales: ["x", null] },
        y: false,
        drag: { x: true, y: false, dist: 8 },
        points: { size: 6 },
      },
      series: [{}, ...this.lines.map(seriesOf)],
      bands: bandsOf(this.lines),
      hooks: {
        setCursor: [(plot) => this.#onCursor(plot.cursor.idx)],
        setScale: [(plot, key) => key === "x" && this.#onZoom(plot)],
        draw: [(plot) => this.#drawMarks(plot)],
      },
    };
  }

  #drawLegend() {
    this.values = this.lines.map(() => h("b", { class: "num" }));
    update(this.legend);
    this.lines.forEach((line, index) => {
      const isSecond = line.kind === "band" && this.lines[index - 1]?.kind === "band";
      this.legend.append(
        h("span", { title: line.title }, isSecond ? null : swatch(line), line.label, " ", this.values[index]),
      );
    });
    this.#onCursor(null);
  }

  #onCursor(index) {
    const x = index === null || index === undefined ? null : this.data[0][index];
    this.lines.forEach((line, at) => {
      this.values[at].textContent = number(toldAt(line, x ?? lastOf(this.lines)));
    });
    this.xUnit.textContent = this.#xText(x);
  }

  #tickOf(x, by) {
    return this.x === "time" ? sinceBegin(x, by) : number(x);
  }

  #xText(x) {
    if (this.x === "time") return x === null ? "time since the run began (h:min:s)" : sinceBegin(x);
    return x === null ? "step" : `step ${number(x)}`;
  }

  #onZoom(plot) {
    const xs = plot.data[0];
    this.isZoomed = xs.length > 1 && (plot.scales.x.min > xs[0] || plot.scales.x.max < xs.at(-1));
    this.reset.hidden = !this.isZoomed;
  }

  #showAll() {
    for (const plot of uPlot.sync(this.sync).plots) plot.setData(plot.data, true);
  }

  #onKey(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!this.plot || !(event.key in moves)) return;
    const from = this.plot.cursor.idx ?? this.data[0].length;
    const index = Math.min(Math.max(from + moves[event.key], 0), this.data[0].length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(this.data[0][index], "x"), top: 10 }, true, true);
    event.preventDefault();
  }

  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--bad");
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const { x } of this.marks) {
      if (x < plot.scales.x.min || x > plot.scales.x.max) continue;
      const left = plot.valToPos(x, "x", true);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  #summary() {
    const last = lastOf(this.lines);
    const parts = this.lines.map((line) => `${line.label} ${number(toldAt(line, last))} ${this.unit}`.trim());
    return `${this.title}, by ${this.x}. Last: ${parts.join(", ")}.`;
  }

  #fillTable() {
    if (!this.details.open) return;
    const rows = rowsOf(this.lines);
    const shown = rows.slice(-MAX_ROWS);
    const left = rows.length - shown.length;
    update(
      this.tableBox,
      this.help && h("p", null, `${this.help}.`),
      h(
        "div",
        { class: "table-box", tabindex: "0" },
        h(
          "table",
          { "data-testid": `table-${this.id}` },
          left > 0 && h("caption", null, `The last ${shown.length} of ${rows.length} rows.`),
          h(
            "thead",
            null,
            h(
              "tr",
              null,
              h("th", { scope: "col" }, this.x),
              this.lines.map(({ label }) =>
                h("th", { class: "num", scope: "col" }, this.unit ? `${label} (${this.unit})` : label),
              ),
            ),
          ),
          h(
            "tbody",
            null,
            shown.map(([x, values]) =>
              h(
                "tr",
                null,
                h("th", { scope: "row" }, this.x === "time" ? sinceBegin(x) : x),
                values.map((value) => h("td", { class: "num" }, exact(value))),
              ),
            ),
          ),
        ),
      ),
    );
  }
}

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

function formOf(lines) {
  return lines.map(({ label, kind = "line" }) => `${kind} ${label}`).join("\n");
}

function seriesOf(line) {
  const stroke = colour(line.colour);
  const isFaint = line.kind === "band";
  const numPoints = line.ys.filter((y) => y !== null).length;
  return {
    stroke: isFaint ? faint(stroke, 0.35) : stroke,
    width: isFaint ? 1 : 1.5,
    dash: isFaint ? [] : line.dash,
    ...(line.kind === "step" && { paths: uPlot.paths.stepped({ align: 1 }) }),
    ...(line.kind === "stack" && { fill: faint(stroke, 0.35), width: 1, dash: [] }),
    points: { show: line.kind === "points" || numPoints < 2, size: 6, fill: stroke },
  };
}

function bandsOf(lines) {
  const bands = [];
  lines.forEach(({ kind, colour: name }, index) => {
    if (kind === "band" && lines[index + 1]?.kind === "band")
      bands.push({ series: [index + 2, index + 1], fill: faint(colour(name), 0.12) });
    if (kind === "stack" && lines[index + 1]?.kind === "stack") bands.push({ series: [index + 2, index + 1] });
  });
  return bands;
}

function faint(rgb, alpha) {
  return rgb.replace(/^rgba?\(([^)]*)\)$/, (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")}, ${alpha})`);
}

function swatch({ kind, colour: name, dash }) {
  const style = { stroke: `var(${name})`, fill: `var(${name})` };
  const isFilled = kind === "band" || kind === "stack";
  return svg(
    "svg",
    { viewBox: "0 0 20 8", "aria-hidden": "true", style },
    isFilled
      ? svg("rect", { x: 0, y: 0, width: 20, height: 8, "fill-opacity": 0.35, "stroke-width": 0 })
      : svg("line", { x1: 0, y1: 4, x2: 20, y2: 4, "stroke-width": 2, "stroke-dasharray": dash.join(" ") || null }),
    kind === "points" && svg("circle", { cx: 10, cy: 4, r: 3 }),
  );
}

function fontOf() {
  return `11px ${getComputedStyle(document.body).fontFamily}`;
}

/**
 * Charts of numbers over steps or time: a title that explains, a legend with the values under the cursor, units on both
 * axes, and the numbers as a table beneath. Drag to look closer, double-click to see all; arrow keys move the cursor, a
 * click or Enter opens the step; a line of the legend hides or, with Shift, isolates it.
 *
 *     html`<${Chart} id="entropy" title="Entropy" unit="nats" lines=${[{ label: "policy", xs: [1, 2], ys: [0.9, 0.8] }]} />`
 */

import uPlot from "./vendor/uPlot.esm.js";
import { AXES, NOTHING_CHOSEN, toggled } from "./choices.js";
import { Table, fold } from "./components.js";
import { exact, number } from "./format.js";
import { Component, createRef, html } from "./html.js";
import { STEPS_S, sinceBegin } from "./lanes.js";
import {
  columnsOf,
  csvOf,
  drawnOf,
  lastOf,
  lookOf,
  nearest,
  newestOf,
  rangeOf,
  rowsOf,
  stepAt,
  tellingOf,
  tick,
  toldAt,
} from "./plotting.js";
import { saveCsv, savePng } from "./saving.js";
import { colour, onTheme } from "./theme.js";

const STEPS = [
  1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7, 1e8,
  1e9, 1e10, 1e11, 1e12,
];
const MAX_ROWS = 2000;

/**
 * One chart. Props:
 *
 * - `id`, for tests and links; `title`; `help`: what the numbers mean, as a tooltip; `note`: a sentence under the title;
 * - `unit` of the values, `noun` what to call them where they have none; `least`: the height, in units, below which the
 *   axis does not shrink, because less of it is noise; `height` in pixels;
 * - `lines`: `{ label, xs, ys, steps, kind, colour, dash, title, isThinned }`; `kind`: `line`, `step` (a value holds until the
 *   next), `points` (few of them), `band` (faint, and filled to the line after it, which is one too), `stack` (on top of
 *   those before) or `whole` (what a stack is part of);
 * - `marks`: `{ x, text }`, drawn as upright lines, the newest of them told under the title; `span`: the first and last x
 *   to show at least, so that charts side by side show the same;
 * - `x`: what x counts, if no `choices` say so; `sync`: charts of one name share the cursor;
 * - `choices` and `choose(changes)`, see `choices.js`, if the page keeps them; `pick(step, line)` opens a step, of
 *   the line nearest to the pointer.
 */
export class Chart extends Component {
  constructor(props) {
    super(props);
    this.box = createRef();
    this.section = createRef();
    this.state = { at: null, isOpen: false, own: NOTHING_CHOSEN };
    this.end = new AbortController();
  }

  get choices() {
    return this.props.choices ?? { ...this.state.own, x: this.props.x ?? "step" };
  }

  #choose(changes) {
    if (this.props.choose) this.props.choose(changes);
    else this.setState(({ own }) => ({ own: { ...own, ...changes } }));
  }

  componentDidMount() {
    this.observer = new ResizeObserver(() => this.#fit());
    this.observer.observe(this.box.current);
    onTheme(() => this.#redraw(), this.end.signal);
    this.#redraw();
  }

  componentDidUpdate() {
    if (this.form !== this.drawnForm || !this.plot) this.#redraw();
    else if (this.data !== this.drawnData) {
      this.drawnData = this.data;
      this.plot.setData(this.data, true);
    }
  }

  componentWillUnmount() {
    this.end.abort();
    this.observer.disconnect();
    this.plot?.destroy();
  }

  /** What is drawn of the props, once for each time that they change. */
  #prepare() {
    const { props, choices } = this;
    const key = [
      props.lines,
      props.span,
      choices.smooth,
      String(choices.hide),
      String(choices.zoom),
      this.#isLog,
      choices.full === props.id,
    ];
    if (this.key?.every((one, index) => one === key[index])) return;
    this.key = key;
    const isHidden = ({ label }) => choices.hide.includes(`${props.id} ${label}`);
    this.lines = props.lines.map((line, index) => ({
      kind: "line",
      ...lookOf(index),
      ...line,
      isHidden: isHidden(line),
    }));
    this.telling = tellingOf(this.lines);
    this.drawn = drawnOf(
      this.telling.filter(({ isHidden }) => !isHidden),
      choices.smooth,
    );
    this.data = columnsOf(this.drawn, choices.zoom ?? props.span ?? [], this.#isLog);
    this.form = JSON.stringify([
      this.drawn.map(({ kind, label }) => [kind, label]),
      this.#isLog,
      this.#height,
    ]);
  }

  get #isLog() {
    return this.choices.log.includes(this.props.id);
  }

  get #isFull() {
    return this.choices.full === this.props.id;
  }

  get #height() {
    return this.#isFull ? Math.max(innerHeight - 240, 200) : (this.props.height ?? 150);
  }

  render(
    { id, title, help = "", unit = "", noun = "value", note = "", marks = [] },
    { at, isOpen },
  ) {
    this.#prepare();
    const { drawn, told, numMore } = newestOf(marks);
    this.marks = drawn;
    const press = (
      what,
      label,
      name,
      isPressed,
      onclick,
    ) => html`<button type="button" class="quiet" title=${name} aria-label=${`${name}: ${title}`}
      aria-pressed=${isPressed} data-testid=${`${what}-${id}`} onclick=${onclick}>${label}</button>`;
    return html`<section class=${this.#isFull ? "chart full" : "chart"} id=${`chart-${id}`} data-testid=${`chart-${id}`} data-unit=${unit} ref=${this.section}
        onkeydown=${(event) => this.#onEscape(event)}>
      <div class="chart-head"><h3 title=${help}>${title}</h3>
        ${this.choices.zoom && html`<button type="button" class="quiet" onclick=${() => this.#choose({ zoom: null })}>Show all</button>`}
        <span class="space"></span>
        ${press("log", "log", "Logarithmic axis", this.#isLog, () => this.#choose({ log: toggled(this.choices.log, id) }))}
        ${press("full", "full", "Full screen", this.#isFull, () => this.#choose({ full: this.#isFull ? null : id }))}
      </div>
      <p class="note">${told.map(({ x, text }) => html`<strong class="mark-text">⚠ ${text} at ${this.#xText(x)}. </strong>`)}
        ${numMore > 0 && html`<span>And ${number(numMore)} more. </span>`}${note}</p>
      <div class="legend" data-testid=${`legend-${id}`}>${this.telling.map((line, index) => this.#entry(line, index, at))}</div>
      <div class="unit y" data-testid="unit-y">${unit || noun}</div>
      <div class="plot" ref=${this.box} role="img" tabindex="0" aria-label=${this.#summary(title, unit)} style=${{ minHeight: `${this.#height}px` }}
        onkeydown=${(event) => this.#onKey(event)}></div>
      <div class="chart-foot"><span class="unit x" data-testid="unit-x">${this.#xText(at)}</span>
        ${fold("Data", isOpen && this.#dataTable(), { id: `data-${id}`, ontoggle: ({ target }) => this.setState({ isOpen: target.open }) })}</div>
    </section>`;
  }

  #entry(line, index, at) {
    const { id } = this.props;
    const isSecond = line.kind === "band" && this.telling[index - 1]?.kind === "band";
    const value = html`<b class="num">${line.isHidden ? "" : number(toldAt(line, at ?? lastOf(this.lines)))}</b>`;
    const inside = html`${isSecond ? null : swatch(line)}${line.label} ${value}`;
    if (this.telling.length < 2) return html`<span title=${line.title}>${inside}</span>`;
    const name = `${id} ${line.label}`;
    const others = this.lines.filter((one) => one !== line).map(({ label }) => `${id} ${label}`);
    const press = ({ shiftKey }) => {
      const rest = this.choices.hide.filter((one) => one !== name && !others.includes(one));
      const isAlone = others.every((one) => this.choices.hide.includes(one));
      this.#choose({
        hide: shiftKey ? (isAlone ? rest : [...rest, ...others]) : toggled(this.choices.hide, name),
      });
    };
    return html`<button type="button" class="entry" aria-pressed=${!line.isHidden} title=${[line.title, "Press to hide or show, with Shift to isolate"].filter(Boolean).join(". ")} onclick=${press}>${inside}</button>`;
  }

  #redraw() {
    const box = this.box.current;
    if (!box?.clientWidth) return; // it will be, once it has a size
    const at = this.state.at;
    this.plot?.destroy();
    this.drawnForm = this.form;
    this.drawnData = this.data;
    this.plot = new uPlot(this.#options(box), this.data, box);
    if (at !== null) this.setState({ at: null });
  }

  #fit() {
    const width = this.box.current?.clientWidth;
    if (this.plot && width) this.plot.setSize({ width, height: this.#height });
    else this.#redraw();
  }

  #options(box) {
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font,
    };
    const isStacked = this.lines.some(({ kind }) => kind === "stack");
    const isLog = this.#isLog;
    const y = isLog
      ? { distr: 3 }
      : { range: (_, low, high) => rangeOf(low, high, isStacked, this.props.least) };
    const isTime = this.choices.x === "time";
    return {
      width: box.clientWidth,
      height: this.#height,
      padding: [8, 14, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, range: (_, low, high) => this.choices.zoom ?? [low, high] }, y },
      axes: [
        {
          ...axis,
          size: 24,
          gap: 4,
          space: 60,
          incrs: isTime ? STEPS_S : STEPS,
          values: (_, splits, __, ___, by) =>
            splits.map((x) => (isTime ? sinceBegin(x, by) : number(x))),
        },
        {
          ...axis,
          size: 50,
          gap: 4,
          space: 32,
          values: (_, splits, __, ___, by) =>
            splits.map((value) =>
              value === null ? "" : isLog ? tick(value, value) : tick(value, by),
            ),
        },
      ],
      cursor: {
        sync: {
          key: this.props.sync ?? "step",
          scales: ["x", null],
          setSeries: false,
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        y: false,
        drag: { x: true, y: false, dist: 8, setScale: false },
        points: { size: 6 },
        bind: { dblclick: () => () => this.#choose({ zoom: null }) },
      },
      series: [{}, ...this.drawn.map(seriesOf)],
      bands: bandsOf(this.drawn),
      hooks: {
        setCursor: [(plot) => this.#onCursor(plot)],
        setSelect: [(plot) => this.#onSelect(plot)],
        draw: [(plot) => this.#drawMarks(plot)],
        ready: [(plot) => plot.over.addEventListener("click", () => this.#pick(plot.cursor.idx))],
      },
    };
  }

  #onCursor(plot) {
    const at =
      plot.cursor.idx === null || plot.cursor.idx === undefined
        ? null
        : (plot.data[0][plot.cursor.idx] ?? null);
    if (at !== this.state.at) this.setState({ at });
  }

  #onSelect(plot) {
    const { left, width } = plot.select;
    if (!width) return;
    const [from, to] = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")].map((x) =>
      Number(x.toPrecision(6)),
    );
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (from < to) this.#choose({ zoom: [from, to] });
  }

  #pick(index) {
    const x = index === null || index === undefined ? null : this.data[0][index];
    const step = stepAt(this.lines, x);
    if (!this.props.pick || step === null) return;
    const line = nearest(this.drawn, x, this.plot.cursor.top, (y) => this.plot.valToPos(y, "y"));
    this.props.pick(stepAt(line ? [line] : this.lines, x), line);
  }

  #xText(x) {
    const axis = this.choices.x;
    if (axis === "time") return x === null ? "time since the run began (h:min:s)" : sinceBegin(x);
    return x === null ? AXES[axis] : `${axis} ${number(x)}`;
  }

  #onKey(event) {
    const moves = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!this.plot) return;
    if (event.key === "Enter") return this.#pick(this.plot.cursor.idx);
    if (event.key === "-") return this.#choose({ zoom: null });
    if (event.key === "+" || event.key === "=") return this.#lookCloser();
    if (!(event.key in moves)) return;
    const from = this.plot.cursor.idx ?? this.data[0].length;
    const index = Math.min(Math.max(from + moves[event.key], 0), this.data[0].length - 1);
    this.plot.setCursor(
      { left: this.plot.valToPos(this.data[0][index], "x"), top: 10 },
      true,
      true,
    );
    event.preventDefault();
  }

  /** At a half of what is shown, about the point that the arrow keys came to. */
  #lookCloser() {
    const { min, max } = this.plot.scales.x;
    const at = this.data[0][this.plot.cursor.idx] ?? (min + max) / 2;
    const from = Math.min(Math.max(at - (max - min) / 4, min), (min + max) / 2);
    this.#choose({ zoom: [from, from + (max - min) / 2].map((x) => Number(x.toPrecision(6))) });
  }

  #onEscape(event) {
    if (event.key !== "Escape" || !this.#isFull) return;
    event.preventDefault();
    this.#choose({ full: null });
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

  #summary(title, unit) {
    const last = lastOf(this.lines);
    const parts = this.lines.map((line) =>
      `${line.label} ${number(toldAt(line, last))} ${unit}`.trim(),
    );
    return `${title}, by ${AXES[this.choices.x]}. Last: ${parts.join(", ")}.`;
  }

  #dataTable() {
    const { id, title, help, unit } = this.props;
    const x = this.choices.x;
    const rows = rowsOf(this.lines);
    const shown = rows.slice(-MAX_ROWS);
    const caption =
      shown.length < rows.length ? `The last ${shown.length} of ${rows.length} rows.` : null;
    const named = ({ label }) => (unit ? `${label} (${unit})` : label);
    const columns = [
      { label: x, isHead: true, cell: ([at]) => (x === "time" ? sinceBegin(at) : at) },
      ...this.lines.map((line, index) => ({
        label: named(line),
        isNumber: true,
        cell: ([, values]) => exact(values[index]),
      })),
    ];
    const look = () => ({ title, lines: this.lines.filter(({ isHidden }) => !isHidden), unit });
    return html`${help && html`<p>${help}.</p>`}<div class="tools">
        <button type="button" data-testid=${`csv-${id}`} onclick=${() => saveCsv(title, csvOf(x, this.lines.map(named), rows))}>CSV</button>
        <button type="button" data-testid=${`png-${id}`} onclick=${() => savePng(this.plot, look())}>PNG</button></div>
      <div class="numbers" role="region" tabindex="0" aria-label=${`Numbers of ${title}`}><${Table} ...${{ columns, rows: shown, id: `table-${id}`, caption }} /></div>`;
  }
}

function seriesOf(line) {
  const stroke = colour(line.colour);
  const isFaint = line.kind === "band" || line.kind === "raw";
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
    if (lines[index + 1]?.kind !== kind) return;
    if (kind === "band")
      bands.push({ series: [index + 2, index + 1], fill: faint(colour(name), 0.12) });
    if (kind === "stack") bands.push({ series: [index + 2, index + 1] });
  });
  return bands;
}

function faint(rgb, alpha) {
  return rgb.replace(
    /^rgba?\(([^)]*)\)$/,
    (_, parts) => `rgba(${parts.split(",").slice(0, 3).join(",")}, ${alpha})`,
  );
}

function swatch({ kind, colour: name, dash }) {
  const style = { stroke: `var(${name})`, fill: `var(${name})` };
  const isFilled = kind === "band" || kind === "stack";
  return html`<svg viewBox="0 0 20 8" aria-hidden="true" style=${style}>
    ${
      isFilled
        ? html`<rect x="0" y="0" width="20" height="8" fill-opacity="0.35" stroke-width="0" />`
        : html`<line x1="0" y1="4" x2="20" y2="4" stroke-width="2" stroke-dasharray=${dash.join(" ") || null} />`
    }
    ${kind === "points" && html`<circle cx="10" cy="4" r="3" />`}</svg>`;
}

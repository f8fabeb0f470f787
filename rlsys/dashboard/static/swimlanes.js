/**
 * Swim-lanes on the page: one row a worker, blank where it was idle. Zoom by buttons, `+` and `-` or by dragging over a stretch of time; move by
 * buttons or arrow keys; the pointer, or a tap, tells what a worker did at a moment.
 */

import { Table, fold } from "./components.js";
import { duration, percent } from "./format.js";
import { Component, createRef, html } from "./html.js";
import { dragged, panned, pathsOf, shapeOf, sinceBegin, spanAt, ticksOf, zoomed } from "./lanes.js";

const HEIGHT = 16;
const NARROW = 600;
const LABEL_PX = 180;
const TICK_PX = 45;
const HINT =
  "Point at a lane, or tap it, to see what its worker did. Drag over a stretch of time to look closer. Nothing is drawn thinner than a pixel; the shares are exact.";

/** The width of the lanes as the page is now: how finely the server should answer. */
export function lanesWidth() {
  const width = document.getElementById("main").clientWidth;
  return Math.max(width <= NARROW ? width : width - LABEL_PX, 200);
}

/**
 * Props: `answer` of `/api/cluster`, `isFollowing` the newest; `look(window)` is called to show another stretch of time, with null the newest, and to
 * follow it. What comes while somebody drags over the lanes is shown after that.
 */
export class Swimlanes extends Component {
  constructor(props) {
    super(props);
    this.area = createRef();
    this.begin = null;
    this.state = { said: HINT, band: null };
    this.#take(props);
  }

  shouldComponentUpdate(next, state) {
    if (next.answer !== this.props.answer) this.#take(next);
    return this.begin === null || state.band !== this.state.band;
  }

  #take({ answer, isFollowing }) {
    this.answer = answer;
    this.window = { from: answer.from_s, to: Math.max(answer.to_s, answer.from_s + 0.001) };
    this.run = { from: answer.begin_s, to: Math.max(answer.end_s, answer.begin_s + 0.001) };
    this.isFollowing = isFollowing;
    this.width = lanesWidth();
  }

  /** Show another stretch of time: at once what is known of it, then what the server answers. */
  #go(to) {
    this.isFollowing = to === null;
    if (to) this.window = to;
    this.forceUpdate();
    this.props.look(to);
  }

  render() {
    const { said, band } = this.state;
    return html`<section key="lanes" class="swimlanes"><div class="tools">${this.#buttons()}</div>
      <div class="legend lane-legend" data-testid="legend-lanes">
        ${this.#activities().map((activity) => html`<span title=${shapeOf(activity).help}>${swatch(activity)}${activity}</span>`)}
        <span><svg viewBox="0 0 20 8" class="blank" aria-hidden="true"></svg>blank: idle</span></div>
      <div class="lanes" ref=${this.area} tabindex="0" role="group" data-testid="lanes"
        aria-label="What every worker did; left and right move, plus and minus zoom. The table below has the shares."
        onkeydown=${(event) => this.#onKey(event)} onpointerdown=${(event) => this.#onDown(event)} onpointermove=${(event) => this.#onMove(event)}
        onpointerup=${(event) => this.#onUp(event)} onpointercancel=${() => this.#drop()}>
        <div class="lane-rows">${this.answer.lanes.map((lane) => this.#row(lane))}${this.#axis()}</div>
        ${band && html`<div class="drag" style=${band}></div>`}
      </div>
      <p class="unit x" data-testid="unit-x">time since the run began (h:min:s)</p>
      <p class="readout muted" role="status" data-testid="readout">${said}</p>
      ${fold("Data", this.#shares(), { id: "data-lanes" })}</section>`;
  }

  #activities() {
    return [
      ...new Set(this.answer.lanes.flatMap((lane) => lane.spans.map((span) => span.activity))),
    ].sort();
  }

  #buttons() {
    const button = (
      id,
      label,
      title,
      to,
      isOff,
    ) => html`<button key=${id} type="button" title=${title} aria-label=${title} disabled=${isOff}
      data-testid=${`lanes-${id}`} onclick=${() => this.#go(to())}>${label}</button>`;
    const { from, to } = this.window;
    const isWhole = to - from >= this.run.to - this.run.from - 0.001;
    return [
      button("in", "+", "Zoom in (+)", () => zoomed(this.window, 2, this.run)),
      button("out", "−", "Zoom out (-)", () => zoomed(this.window, 0.5, this.run), isWhole),
      button(
        "left",
        "‹",
        "Earlier (arrow left)",
        () => panned(this.window, -0.5, this.run),
        from <= this.run.from,
      ),
      button(
        "right",
        "›",
        "Later (arrow right)",
        () => panned(this.window, 0.5, this.run),
        to >= this.run.to,
      ),
      button("whole", "Whole run", "Show the whole run (Home)", () => this.run, isWhole),
      html`<button key="newest" type="button" onclick=${() => this.#go(null)} aria-pressed=${this.isFollowing} data-testid="lanes-newest"
        title="Show the last 10 minutes and follow the run (End)">Newest</button>`,
      html`<span key="shown" class="muted small num" data-testid="lanes-shown">${this.#since(from)} to ${this.#since(to)} (${duration(to - from)})</span>`,
    ];
  }

  #since(moment) {
    return sinceBegin(moment - this.run.from, (this.window.to - this.window.from) / 20);
  }

  #row(lane) {
    const paths = pathsOf(lane.spans, this.window, this.width, HEIGHT);
    const what = Object.entries(lane.by_activity)
      .map(([activity, share]) => `${activity} ${percent(share)}`)
      .join(", ");
    return html`<div key=${lane.worker} class="lane" data-testid="lane" data-worker=${lane.worker}>
      <div class="lane-name" title=${what}>${lane.worker}<span class="muted num">${percent(lane.busy_share)}</span></div>
      <svg class="lane-bar" viewBox=${`0 0 ${this.width} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${`${lane.worker}: ${what}`}>
        ${paths.map(({ activity, path }) => html`<path key=${activity} d=${path} data-activity=${activity} style=${{ fill: `var(${shapeOf(activity).colour})` }} />`)}
      </svg></div>`;
  }

  #axis() {
    const ticks = ticksOf(
      this.window,
      this.run.from,
      Math.max(Math.floor(this.width / 90), 2),
    ).filter(({ share }) => share < 1 - TICK_PX / this.width);
    return html`<div key=" axis" class="lane axis" aria-hidden="true"><div class="lane-name muted"><span>worker</span><span>busy</span></div>
      <div class="ticks">${ticks.map(({ share, label }) => html`<span key=${label} style=${{ left: `${100 * share}%` }}>${label}</span>`)}</div></div>`;
  }

  #shares() {
    const share = (activity) => (lane) =>
      activity in lane.by_activity ? percent(lane.by_activity[activity]) : "";
    const columns = [
      { label: "Worker", isHead: true, cell: (lane) => lane.worker },
      {
        label: "Busy (share of the time shown)",
        isNumber: true,
        cell: (lane) => percent(lane.busy_share),
      },
      ...[...this.#activities(), "idle"].map((activity) => ({
        label: activity,
        isNumber: true,
        title: shapeOf(activity).help,
        cell: share(activity),
      })),
    ];
    return html`<${Table} columns=${columns} rows=${this.answer.lanes} id="lane-shares" keyOf=${(lane) => lane.worker} />`;
  }

  #onKey(event) {
    const moves = {
      ArrowLeft: () => panned(this.window, -0.25, this.run),
      ArrowRight: () => panned(this.window, 0.25, this.run),
      "+": () => zoomed(this.window, 2, this.run),
      "=": () => zoomed(this.window, 2, this.run),
      "-": () => zoomed(this.window, 0.5, this.run),
      Home: () => this.run,
      End: () => null,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#go(moves[event.key]());
  }

  /** How far across the lanes a pointer is, 0 to 1. */
  #share(event) {
    const bar = this.area.current.querySelector(".lane-bar, .ticks").getBoundingClientRect();
    return Math.min(Math.max((event.clientX - bar.left) / bar.width, 0), 1);
  }

  #onDown(event) {
    if (event.button !== 0 || event.target.closest(".lane-name")) return;
    this.begin = this.#share(event);
    if (event.pointerType === "mouse") this.area.current.setPointerCapture(event.pointerId);
  }

  #onMove(event) {
    if (this.begin !== null && event.pointerType === "mouse")
      this.#drawBand(this.begin, this.#share(event));
    else this.#tell(event);
  }

  #onUp(event) {
    const begin = this.begin;
    this.#drop();
    if (begin === null) return;
    const to =
      event.pointerType === "mouse" && dragged(this.window, begin, this.#share(event), this.run);
    if (to) this.#go(to);
    else this.#tell(event);
  }

  #drop() {
    this.begin = null;
    this.setState({ band: null });
  }

  #drawBand(a, b) {
    const area = this.area.current;
    const bar = area.querySelector(".lane-bar, .ticks").getBoundingClientRect();
    const left = bar.left - area.getBoundingClientRect().left + Math.min(a, b) * bar.width;
    this.setState({
      band: {
        top: `${area.scrollTop}px`,
        left: `${left}px`,
        width: `${Math.abs(a - b) * bar.width}px`,
      },
    });
  }

  #tell(event) {
    const row = document
      .elementFromPoint(event.clientX, event.clientY)
      ?.closest(".lane[data-worker]");
    const lane = row && this.answer.lanes.find((one) => one.worker === row.dataset.worker);
    if (!lane) return this.setState({ said: HINT });
    const length = this.window.to - this.window.from;
    const moment = this.window.from + this.#share(event) * length;
    const span = spanAt(lane.spans, moment, (2 * length) / this.width);
    const what = span
      ? `${span.activity} from ${this.#since(span.start_s)} to ${this.#since(span.end_s)} (${duration(span.end_s - span.start_s)})`
      : `idle at ${this.#since(moment)}`;
    this.setState({ said: `${lane.worker}: ${what}` });
  }
}

/** What an activity looks like on a lane. */
function swatch(activity) {
  const { colour, top, height } = shapeOf(activity);
  return html`<svg viewBox="0 0 20 8" aria-hidden="true"><rect x="0" y=${top * 8} width="20" height=${height * 8} style=${{ fill: `var(${colour})` }} /></svg>`;
}

/** A window as it stands in an address; null if there is none. */
export function windowOf(query) {
  const [from, to] = [Number(query.get("from") ?? NaN), Number(query.get("to") ?? NaN)];
  return Number.isFinite(from) && Number.isFinite(to) && from < to ? { from, to } : null;
}

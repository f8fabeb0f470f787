/**
 * Swim-lanes on the page: one row a worker, blank where it was idle. Zoom by buttons, `+` and `-` or by dragging over a
 * stretch of time; move by buttons or arrow keys; the pointer, or a tap, tells what a worker did at a moment.
 */

import { h, svg, update } from "./dom.js";
import { duration, percent } from "./format.js";
import { dragged, panned, pathsOf, shapeOf, sinceBegin, spanAt, ticksOf, zoomed } from "./lanes.js";
import { table } from "./parts.js";

const HEIGHT = 16;
const NARROW = 600;
const LABEL_PX = 180;
const TICK_PX = 45;

/** The width of the lanes as the page is now: how finely the server should answer. */
export function lanesWidth() {
  const width = document.getElementById("main").clientWidth;
  return Math.max(width <= NARROW ? width : width - LABEL_PX, 200);
}

/** `look(window)` is called to show another stretch of time; with null, the newest, and to follow it. */
export class Swimlanes {
  constructor(look) {
    this.look = look;
    this.band = h("div", { class: "drag", hidden: true });
    this.rows = h("div", { class: "lane-rows" });
    this.readout = h("p", { class: "readout muted", role: "status", "data-testid": "readout" });
    this.area = h("div", {
      class: "lanes", tabindex: "0", role: "group", "data-testid": "lanes",
      "aria-label": "What every worker did; left and right move, plus and minus zoom. The table below has the shares.",
      onkeydown: (event) => this.#onKey(event),
      onpointerdown: (event) => this.#onDown(event), onpointermove: (event) => this.#onMove(event),
      onpointerup: (event) => this.#onUp(event), onpointercancel: () => this.#drop(),
    }, this.rows, this.band);
    this.tools = h("div", { class: "tools" });
    this.legend = h("div", { class: "legend lane-legend", "data-testid": "legend-lanes" });
    this.table = h("div");
    this.element = h("section", { key: "lanes", class: "swimlanes" }, this.tools, this.legend, this.area,
      h("p", { class: "unit x", "data-testid": "unit-x" }, "time since the run began (h:min:s)"), this.readout,
      h("details", { class: "data", "data-testid": "data-lanes" }, h("summary", null, "Data"), this.table));
    this.begin = null;
  }

  /** Show an answer of `/api/cluster`; if somebody is dragging over the lanes, after that. */
  show(answer, isFollowing) {
    this.late = this.begin === null ? null : [answer, isFollowing];
    if (this.late) return;
    this.answer = answer;
    this.window = { from: answer.from_s, to: Math.max(answer.to_s, answer.from_s + 0.001) };
    this.run = { from: answer.begin_s, to: Math.max(answer.end_s, answer.begin_s + 0.001) };
    this.isFollowing = isFollowing;
    this.width = lanesWidth();
    this.#draw();
    update(this.table, this.#shares());
    if (!this.readout.textContent) this.#say(null);
  }

  /** Show another stretch of time: at once what is known of it, then what the server answers. */
  #go(to) {
    this.isFollowing = to === null;
    if (to) this.window = to;
    this.#draw();
    this.look(to);
  }

  #draw() {
    update(this.tools, this.#buttons());
    update(this.legend, this.#activities().map((activity) => h("span", { title: shapeOf(activity).help }, swatch(activity), activity)),
      h("span", null, svg("svg", { viewBox: "0 0 20 8", class: "blank", "aria-hidden": "true" }), "blank: idle"));
    update(this.rows, this.answer.lanes.map((lane) => this.#row(lane)), this.#axis());
  }

  #activities() {
    const there = new Set(this.answer.lanes.flatMap((lane) => lane.spans.map((span) => span.activity)));
    return [...there].sort();
  }

  #buttons() {
    const button = (id, label, title, to, isOff) => h("button", {
      key: id, type: "button", title, "aria-label": title, disabled: isOff, "data-testid": `lanes-${id}`, onclick: () => this.#go(to()),
    }, label);
    const { from, to } = this.window;
    const isWhole = to - from >= this.run.to - this.run.from - 0.001;
    return [
      button("in", "+", "Zoom in (+)", () => zoomed(this.window, 2, this.run)),
      button("out", "−", "Zoom out (-)", () => zoomed(this.window, 0.5, this.run), isWhole),
      button("left", "‹", "Earlier (arrow left)", () => panned(this.window, -0.5, this.run), from <= this.run.from),
      button("right", "›", "Later (arrow right)", () => panned(this.window, 0.5, this.run), to >= this.run.to),
      button("whole", "Whole run", "Show the whole run (Home)", () => this.run, isWhole),
      h("button", {
        key: "newest", type: "button", onclick: () => this.#go(null), "aria-pressed": String(this.isFollowing), "data-testid": "lanes-newest",
        title: "Show the last 10 minutes and follow the run (End)",
      }, "Newest"),
      h("span", { key: "shown", class: "muted small num", "data-testid": "lanes-shown" },
        `${this.#since(from)} to ${this.#since(to)} (${duration(to - from)})`),
    ];
  }

  #since(moment) {
    return sinceBegin(moment - this.run.from, (this.window.to - this.window.from) / 20);
  }

  #row(lane) {
    const paths = pathsOf(lane.spans, this.window, this.width, HEIGHT);
    const what = Object.entries(lane.by_activity).map(([activity, share]) => `${activity} ${percent(share)}`).join(", ");
    return h("div", { key: lane.worker, class: "lane", "data-testid": "lane", "data-worker": lane.worker },
      h("div", { class: "lane-name", title: what }, lane.worker, h("span", { class: "muted num" }, percent(lane.busy_share))),
      svg("svg", {
        class: "lane-bar", viewBox: `0 0 ${this.width} ${HEIGHT}`, preserveAspectRatio: "none", role: "img",
        "aria-label": `${lane.worker}: ${what}`,
      }, paths.map(({ activity, path }) => svg("path", { key: activity, d: path, "data-activity": activity, style: { fill: `var(${shapeOf(activity).colour})` } }))));
  }

  #axis() {
    const ticks = ticksOf(this.window, this.run.from, Math.max(Math.floor(this.width / 90), 2))
      .filter(({ share }) => share < 1 - TICK_PX / this.width);
    return h("div", { key: " axis", class: "lane axis", "aria-hidden": "true" }, h("div", { class: "lane-name muted" }, h("span", null, "worker"), h("span", null, "busy")),
      h("div", { class: "ticks" }, ticks.map(({ share, label }) => h("span", { key: label, style: { left: `${100 * share}%` } }, label))));
  }

  #shares() {
    const activities = this.#activities();
    const columns = [
      { label: "Worker", isHead: true, cell: (lane) => lane.worker },
      { label: "Busy (share of the time shown)", isNumber: true, cell: (lane) => percent(lane.busy_share) },
      ...[...activities, "idle"].map((activity) => ({
        label: activity, isNumber: true, title: shapeOf(activity).help, cell: (lane) => (activity in lane.by_activity ? percent(lane.by_activity[activity]) : ""),
      })),
    ];
    return table(columns, this.answer.lanes, { id: "lane-shares", key: (lane) => lane.worker });
  }

  #onKey(event) {
    const moves = {
      ArrowLeft: () => panned(this.window, -0.25, this.run), ArrowRight: () => panned(this.window, 0.25, this.run),
      "+": () => zoomed(this.window, 2, this.run), "=": () => zoomed(this.window, 2, this.run),
      "-": () => zoomed(this.window, 0.5, this.run), Home: () => this.run, End: () => null,
    };
    if (!(event.key in moves) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.#go(moves[event.key]());
  }

  /** How far across the lanes a pointer is, 0 to 1. */
  #share(event) {
    const bar = this.rows.querySelector(".lane-bar, .ticks").getBoundingClientRect();
    return Math.min(Math.max((event.clientX - bar.left) / bar.width, 0), 1);
  }

  #onDown(event) {
    if (event.button !== 0 || event.target.closest(".lane-name")) return;
    this.begin = this.#share(event);
    if (event.pointerType === "mouse") this.area.setPointerCapture(event.pointerId);
  }

  #onMove(event) {
    if (this.begin !== null && event.pointerType === "mouse") this.#drawBand(this.begin, this.#share(event));
    else this.#tell(event);
  }

  #onUp(event) {
    const begin = this.begin;
    this.#drop();
    if (begin === null) return;
    const to = event.pointerType === "mouse" && dragged(this.window, begin, this.#share(event), this.run);
    if (to) this.#go(to);
    else this.#tell(event);
  }

  #drop() {
    this.begin = null;
    this.band.hidden = true;
    if (this.late) this.show(...this.late);
  }

  #drawBand(a, b) {
    const bar = this.rows.querySelector(".lane-bar, .ticks").getBoundingClientRect();
    const left = bar.left - this.area.getBoundingClientRect().left;
    this.band.hidden = false;
    this.band.style.top = `${this.area.scrollTop}px`;
    this.band.style.left = `${left + Math.min(a, b) * bar.width}px`;
    this.band.style.width = `${Math.abs(a - b) * bar.width}px`;
  }

  #tell(event) {
    const row = document.elementFromPoint(event.clientX, event.clientY)?.closest(".lane[data-worker]");
    const lane = row && this.answer.lanes.find((one) => one.worker === row.dataset.worker);
    if (!lane) return this.#say(null);
    const length = this.window.to - this.window.from;
    const moment = this.window.from + this.#share(event) * length;
    this.#say(lane, moment, spanAt(lane.spans, moment, (2 * length) / this.width));
  }

  #say(lane, moment, span) {
    if (!lane) this.readout.textContent = "Point at a lane, or tap it, to see what its worker did. Drag over a stretch of time to look closer. Nothing is drawn thinner than a pixel; the shares are exact.";
    else if (!span) this.readout.textContent = `${lane.worker}: idle at ${this.#since(moment)}`;
    else this.readout.textContent = `${lane.worker}: ${span.activity} from ${this.#since(span.start_s)} to ${this.#since(span.end_s)} (${duration(span.end_s - span.start_s)})`;
  }
}

/** What an activity looks like on a lane. */
function swatch(activity) {
  const { colour, top, height } = shapeOf(activity);
  return svg("svg", { viewBox: "0 0 20 8", "aria-hidden": "true" },
    svg("rect", { x: 0, y: top * 8, width: 20, height: height * 8, style: { fill: `var(${colour})` } }));
}

/** A window as it stands in an address; null if there is none. */
export function windowOf(query) {
  const [from, to] = [Number(query.get("from") ?? NaN), Number(query.get("to") ?? NaN)];
  return Number.isFinite(from) && Number.isFinite(to) && from < to ? { from, to } : null;
}

/** The cluster: who holds the others up, what every worker does, which weights each replica holds, what failed. */

import { get, numbered } from "../api.js";
import { Chart } from "../charts.js";
import { h, update } from "../dom.js";
import { count, date, duration, number, percent } from "../format.js";
import { sinceBegin } from "../lanes.js";
import { barMark } from "../marks.js";
import { badge, empty, failure, ofPolicies, table } from "../parts.js";
import { link, note } from "../router.js";
import { Swimlanes, lanesWidth, windowOf } from "../swimlanes.js";

export const title = "Cluster";

const HELD_UP_BY = {
  rollout: "the rollouts", reward: "the rewards", annotate: "the annotators", trainer: "the trainer",
  weights: "the hand-over of weights", evaluation: "the evaluation", balanced: "nobody",
  straggler: "one slow worker", order: "older groups", environment: "tools and environments", lockstep: "lockstep",
};

export async function render(root, place, { signal, run }) {
  let window = windowOf(place.query);
  const newest = numbered();
  const lanes = new Swimlanes(look);
  const queue = new Chart({
    id: "queue", title: "Groups in the pipe", unit: "groups", x: "time", sync: "time", signal,
    help: "Groups that are somewhere between being issued and being trained, and those of them that are ready to be trained",
  });
  const pipe = h("section", { key: "queue" }, h("h2", null, "Queue depth"), queue.element);

  function look(to) {
    window = to;
    note(link("cluster", place.run, to && { from: to.from.toFixed(3), to: to.to.toFixed(3) }));
    load(run).catch((error) => signal.aborted || update(root, failure(title, error, () => look(to))));
  }
  async function load(now) {
    run = now;
    const isNewest = newest();
    const answer = await get("cluster", { run: place.run, from: window?.from, to: window?.to, width: lanesWidth() }, signal);
    if (isNewest()) draw(answer);
  }
  function draw(answer) {
    if (answer.begin_s === null) return update(root, head(), empty("No worker has been heard of yet.", "This page fills once the run has started its workers."));
    lanes.show(answer, window === null);
    update(root, head(), bottleneck(answer.bottleneck), stale(answer),
      h("h2", { key: "h-lanes" }, "Who did what, and when"),
      run.has_spans && answer.lanes.length ? lanes.element : noLanes(run),
      h("section", { key: "replicas" }, h("h2", null, "Weights held by each replica"), replicas(answer)),
      answer.queue.length ? pipe : null,
      h("section", { key: "restarts" }, h("h2", null, "Workers that failed"), restarts(answer)));
    const points = held(answer);
    const xs = points.map((point) => point.time_s - answer.begin_s);
    queue.show([
      { label: "open", kind: "step", xs, ys: points.map((point) => point.num_open) },
      { label: "ready to be trained", kind: "step", xs, ys: points.map((point) => point.num_finished) },
    ]);
  }
  await load(run);
  return load;
}

function noLanes(run) {
  if (run.policies.length) return ofPolicies(run, "The workers");
  if (run.has_spans) return empty("No worker told what it did in this time.", "Go to another time, or show all of it.");
  if (run.summary.step === 0) return empty("No worker told what it did.", "The lanes fill with the first groups.");
  return empty("The events of this run do not tell what its workers did: it was written by an older version.", "Its steps are in the overview.");
}

/** The queue over just the time that the lanes show. It is told of when it changes: the last still holds at the end. */
function held(answer) {
  if (!answer.queue.length) return [];
  const [first, last] = [answer.queue[0], answer.queue.at(-1)];
  const before = first.time_s > answer.from_s ? [{ time_s: answer.from_s, num_open: null, num_finished: null }] : [];
  const after = last.time_s < answer.to_s ? [{ ...last, time_s: answer.to_s }] : [];
  return [...before, ...answer.queue, ...after];
}

function head() {
  return h("div", { key: "head", class: "head" }, h("h1", { "data-testid": "title" }, "Cluster"));
}

function bottleneck(found) {
  if (!found) return null;
  const rows = Object.entries(found.shares).sort(([, a], [, b]) => b - a);
  return h("section", { key: "bottleneck", class: "bottleneck", "data-testid": "bottleneck" },
    h("h2", null, "Held up by ", h("strong", { "data-testid": "bottleneck-who" }, HELD_UP_BY[found.who] ?? found.who)),
    h("p", null, found.sentence),
    h("details", { class: "data" }, h("summary", null, "Shares of the time of a step, last 20 steps"),
      h("dl", { class: "measures" }, rows.map(([name, share]) => h("div", { key: name },
        h("dt", null, name), h("dd", { class: "num" }, percent(share)), h("dd", { class: "mark-cell" }, barMark(share, { low: 0, high: 1 })))))));
}

/** The replicas that are behind, in words. */
function stale(answer) {
  const rows = answer.replicas.filter((replica) => replica.is_stale);
  if (!rows.length) return null;
  const bound = answer.staleness_bound;
  return h("div", { key: "stale", class: "banner warn", role: "status", "data-testid": "stale" },
    rows.map((replica) => h("p", { key: replica.worker }, h("strong", null, `${replica.worker} is stale: `), why(replica, answer))),
    bound !== null && h("p", { key: " bound" }, `The run allows ${count(bound, "version")}.`));
}

function why(replica, answer) {
  const unseen = answer.end_s - replica.seen_s;
  const held = replica.version === null ? "it never said which version it holds" : `it holds version ${replica.version}, and was ${number(replica.behind)} behind when it last answered; the newest is ${answer.newest_version}`;
  return unseen > 30 ? `${held}. That was ${duration(unseen)} before the last event.` : `${held}.`;
}

function replicas(answer) {
  if (!answer.replicas.length) return empty("No replica has been seen yet.", "Replicas are looked at every few seconds once the run trains.");
  const columns = [
    { label: "Replica", isHead: true, cell: (replica) => replica.worker },
    { label: "Held version (when it answered)", isNumber: true, cell: (replica) => number(replica.version) },
    { label: "Behind then (versions)", isNumber: true, title: "Versions between what it held when it last answered and the newest then", cell: (replica) => number(replica.behind) },
    { label: "", cell: marks },
    { label: "Decodes", isNumber: true, title: "Sequences or groups it is decoding", cell: (replica) => number(replica.num_running) },
    { label: "Waiting", isNumber: true, title: "Sequences or groups that wait for a place", cell: (replica) => number(replica.num_waiting) },
    { label: "Cache used", isNumber: true, cell: (replica) => percent(replica.kv_used) },
    { label: "Tokens/s", isNumber: true, title: "Sampled, over the last minute", cell: (replica) => number(replica.tokens_per_s) },
    { label: "Last answered", isNumber: true, title: "Counted back from the last event of the run", cell: (replica) => (answer.end_s - replica.seen_s < 2 ? "just now" : `${duration(answer.end_s - replica.seen_s)} earlier`) },
    { label: "Restarts", isNumber: true, cell: (replica) => number(replica.restarts) },
  ];
  const staleFirst = [...answer.replicas].sort((a, b) => b.is_stale - a.is_stale);
  const newest = answer.newest_version === null ? "No weights were published yet." : `The newest version is ${answer.newest_version}.`;
  return [
    h("p", { class: "muted small", key: "newest", "data-testid": "newest" }, newest),
    table(columns, staleFirst, { id: "replicas", key: (replica) => replica.worker, rowClass: (replica) => (replica.is_stale ? "overdue" : null) }),
  ];
}

function marks(replica) {
  const all = [!replica.answers && badge("does not answer", "bad", "It failed, or it is busy with something that does not end"), replica.is_stale && badge("stale", "bad", "Further behind than the run allows"), replica.is_loading && badge("taking in weights")].filter(Boolean);
  return all.length ? h("span", { class: "badges" }, all) : "";
}

function restarts(answer) {
  if (!answer.restarts.length) return h("p", { class: "muted", "data-testid": "no-restarts" }, "No worker has failed.");
  const columns = [
    { label: "Worker", isHead: true, cell: (row) => row.worker },
    { label: "Failed at (h:min:s since the run began)", cell: (row) => h("span", { title: date(row.failed_s) }, sinceBegin(row.failed_s - answer.begin_s)) },
    { label: "While", cell: (row) => row.phase },
    { label: "Back after", cell: (row) => (row.back_s === null ? badge("not back", "bad") : duration(row.back_s - row.failed_s)) },
    { label: "What it said", cell: (row) => h("span", { class: "detail" }, row.detail) },
  ];
  return table(columns, answer.restarts, { id: "restarts", key: (row) => `${row.worker} ${row.failed_s}` });
}

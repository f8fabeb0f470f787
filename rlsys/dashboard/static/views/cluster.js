/** The cluster: who holds the others up, what every worker does, which weights each replica holds, what failed. */

import { get, numbered } from "../api.js";
import { Chart } from "../charts.js";
import { Table, badge, empty, failure, fold, ofPolicies } from "../components.js";
import { condition } from "../datatable.js";
import { count, date, duration, number, percent } from "../format.js";
import { html, update } from "../html.js";
import { sinceBegin } from "../lanes.js";
import { machineOf, machineSection } from "../machine.js";
import { barMark } from "../marks.js";
import { link, note } from "../router.js";
import { Swimlanes, lanesWidth, windowOf } from "../swimlanes.js";

export const title = "Cluster";

const HELD_UP_BY = {
  rollout: "the rollouts",
  reward: "the rewards",
  annotate: "the annotators",
  trainer: "the trainer",
  weights: "the hand-over of weights",
  evaluation: "the evaluation",
  balanced: "nobody",
  straggler: "one slow worker",
  order: "older groups",
  environment: "tools and environments",
  lockstep: "lockstep",
};
const QUEUE =
  "Groups that are somewhere between being issued and being trained, and those of them that are ready to be trained";

const SPEED =
  "Tokens sampled in groups, per second that each was at the replica; a slow machine lies below the others";

export async function render(root, place, { signal, run }) {
  let window = windowOf(place.query);
  const newest = numbered();

  function look(to) {
    window = to;
    note(link("cluster", place.run, to && { from: to.from.toFixed(3), to: to.to.toFixed(3) }));
    load(run).catch(
      (error) =>
        signal.aborted ||
        update(
          root,
          failure(title, error, () => look(to)),
        ),
    );
  }
  async function load(now) {
    run = now;
    const isNewest = newest();
    const [answer, machine] = await Promise.all([
      get(
        "cluster",
        { run: place.run, from: window?.from, to: window?.to, width: lanesWidth() },
        signal,
      ),
      get("machine", { run: place.run }, signal),
    ]);
    if (isNewest()) draw(answer, machineOf(machine, answer.begin_s ?? 0));
  }
  function draw(answer, machine) {
    const head = html`<div key="head" class="head"><h1 data-testid="title">Cluster</h1></div>`;
    if (answer.begin_s === null)
      return update(
        root,
        head,
        empty(
          "No worker has been heard of yet.",
          "This page fills once the run has started its workers.",
        ),
      );
    const hasLanes = run.has_spans && answer.lanes.length > 0;
    update(
      root,
      html`${head}<div key="verdicts" class="verdicts">${bottleneck(answer.bottleneck)}${stale(answer)}</div>
      <h2 key="h-lanes">Who did what, and when</h2>
      ${hasLanes ? html`<${Swimlanes} key="lanes" answer=${answer} isFollowing=${window === null} look=${look} />` : noLanes(run)}
      <div key="sections" class="abreast"><section key="replicas"><h2>Weights held by each replica</h2>${replicas(answer)}</section>
      ${
        answer.queue.length > 0 &&
        html`<section key="queue"><h2>Queue depth</h2>
        <${Chart} id="queue" title="Groups in the pipe" unit="groups" x="time" sync="time" help=${QUEUE} lines=${queueLines(answer)} /></section>`
      }
      ${
        answer.speeds.length > 0 &&
        html`<section key="speeds"><h2>Speed of each replica</h2>
        <${Chart} id="speeds" title="Tokens sampled" unit="tokens/s" x="time" sync="time" help=${SPEED} lines=${speedLines(answer)} span=${[answer.from_s - answer.begin_s, answer.to_s - answer.begin_s]} /></section>`
      }
      <section key="restarts"><h2>Workers that failed</h2>${restarts(place.run, answer)}</section></div>
      ${machine && machineSection(machine)}`,
    );
  }
  await load(run);
  return load;
}

function noLanes(run) {
  if (run.policies.length) return ofPolicies(run, "The workers");
  if (run.has_spans)
    return empty(
      "No worker told what it did in this time.",
      "Go to another time, or show all of it.",
    );
  if (run.summary.step === 0)
    return empty("No worker told what it did.", "The lanes fill with the first groups.");
  return empty(
    "The events of this run do not tell what its workers did: it was written by an older version.",
    "Its steps are in the overview.",
  );
}

/** The queue over just the time that the lanes show. It is told of when it changes: the last still holds at the end. */
function queueLines({ queue, begin_s, from_s, to_s }) {
  const [first, last] = [queue[0], queue.at(-1)];
  const before =
    first.time_s > from_s ? [{ time_s: from_s, num_open: null, num_finished: null }] : [];
  const after = last.time_s < to_s ? [{ ...last, time_s: to_s }] : [];
  const points = [...before, ...queue, ...after];
  const xs = points.map(({ time_s }) => time_s - begin_s);
  return [
    { label: "open", kind: "step", xs, ys: points.map(({ num_open }) => num_open) },
    {
      label: "ready to be trained",
      kind: "step",
      xs,
      ys: points.map(({ num_finished }) => num_finished),
    },
  ];
}

function speedLines({ speeds, begin_s }) {
  return speeds.map(({ worker, points }) => ({
    label: worker,
    xs: points.map(({ time_s }) => time_s - begin_s),
    ys: points.map(({ tokens_per_s }) => tokens_per_s),
  }));
}

function bottleneck(found) {
  if (!found) return null;
  const rows = Object.entries(found.shares).sort(([, a], [, b]) => b - a);
  const shares = rows.map(
    ([name, share]) =>
      html`<div key=${name}><dt>${name}</dt><dd class="num">${percent(share)}</dd><dd class="mark-cell">${barMark(share, { low: 0, high: 1 })}</dd></div>`,
  );
  return html`<section key="bottleneck" class="bottleneck" data-testid="bottleneck">
    <h2>Held up by <strong data-testid="bottleneck-who">${HELD_UP_BY[found.who] ?? found.who}</strong></h2><p>${found.sentence}</p>
    ${fold("Shares of the time of a step, last 20 steps", html`<dl class="measures">${shares}</dl>`)}</section>`;
}

/** The replicas that are behind, in words. */
function stale(answer) {
  const rows = answer.replicas.filter((replica) => replica.is_stale);
  if (!rows.length) return null;
  const bound = answer.staleness_bound;
  return html`<div key="stale" class="banner warn" role="status" data-testid="stale">
    ${rows.map((replica) => html`<p key=${replica.worker}><strong>${replica.worker} is stale: </strong>${why(replica, answer)}</p>`)}
    ${bound !== null && html`<p key=" bound">The run allows ${count(bound, "version")}.</p>`}</div>`;
}

function why(replica, answer) {
  const unseen = answer.end_s - replica.seen_s;
  const held =
    replica.version === null
      ? "it never said which version it holds"
      : `it holds version ${replica.version}, and was ${number(replica.behind)} behind when it last answered; the newest is ${answer.newest_version}`;
  return unseen > 30 ? `${held}. That was ${duration(unseen)} before the last event.` : `${held}.`;
}

function replicas(answer) {
  if (!answer.replicas.length)
    return empty(
      "No replica has been seen yet.",
      "Replicas are looked at every few seconds once the run trains.",
    );
  const seen = ({ seen_s }) =>
    answer.end_s - seen_s < 2 ? "just now" : `${duration(answer.end_s - seen_s)} earlier`;
  const columns = [
    { label: "Replica", isHead: true, cell: (replica) => replica.worker },
    {
      label: "Held version (when it answered)",
      isNumber: true,
      cell: (replica) => number(replica.version),
    },
    {
      label: "Behind then (versions)",
      isNumber: true,
      title: "Versions between what it held when it last answered and the newest then",
      cell: (replica) => number(replica.behind),
    },
    { label: "", cell: marks },
    {
      label: "Decodes",
      isNumber: true,
      title: "Sequences or groups it is decoding",
      cell: (replica) => number(replica.num_running),
    },
    {
      label: "Waiting",
      isNumber: true,
      title: "Sequences or groups that wait for a place",
      cell: (replica) => number(replica.num_waiting),
    },
    { label: "Cache used", isNumber: true, cell: (replica) => percent(replica.kv_used) },
    {
      label: "Tokens/s",
      isNumber: true,
      title: "Sampled, over the last minute",
      cell: (replica) => number(replica.tokens_per_s),
    },
    {
      label: "Last answered",
      isNumber: true,
      title: "Counted back from the last event of the run",
      cell: seen,
    },
    { label: "Restarts", isNumber: true, cell: (replica) => number(replica.restarts) },
  ];
  const staleFirst = [...answer.replicas].sort((a, b) => b.is_stale - a.is_stale);
  const newest =
    answer.newest_version === null
      ? "No weights were published yet."
      : `The newest version is ${answer.newest_version}.`;
  const rowClass = (replica) => (replica.is_stale ? "overdue" : null);
  return html`<p class="muted small" data-testid="newest">${newest}</p>
    <${Table} columns=${columns} rows=${staleFirst} id="replicas" keyOf=${(replica) => replica.worker} rowClass=${rowClass} />`;
}

function marks(replica) {
  return html`<span class="badges">${!replica.answers && badge("does not answer", "bad", "It failed, or it is busy with something that does not end")}
    ${replica.is_stale && badge("stale", "bad", "Further behind than the run allows")}${replica.is_loading && badge("taking in weights")}</span>`;
}

function restarts(run, answer) {
  if (!answer.restarts.length)
    return html`<p class="muted" data-testid="no-restarts">No worker has failed.</p>`;
  const columns = [
    { label: "Worker", isHead: true, cell: (row) => row.worker },
    {
      label: "Failed at (h:min:s since the run began)",
      cell: (row) =>
        html`<span title=${date(row.failed_s)}>${sinceBegin(row.failed_s - answer.begin_s)}</span>`,
    },
    { label: "While", cell: (row) => row.phase },
    {
      label: "Back after",
      cell: (row) =>
        row.back_s === null ? badge("not back", "bad") : duration(row.back_s - row.failed_s),
    },
    { label: "What it said", cell: (row) => html`<span class="detail">${row.detail}</span>` },
    {
      label: "",
      cell: (row) =>
        html`<a href=${link("log", run, { filter: condition("worker", row.worker) })} data-testid="worker-log-link">its log</a>`,
    },
  ];
  return html`<${Table} columns=${columns} rows=${answer.restarts} id="restarts" keyOf=${(row) => `${row.worker} ${row.failed_s}`} />`;
}

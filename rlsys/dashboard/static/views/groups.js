/** The groups that a step trained: which of them teach, which failed, and how their rewards are spread. */

import { get } from "../api.js";
import { badge, empty, neighbour, ofPolicies } from "../components.js";
import { tableView } from "../datatable.js";
import { count, number } from "../format.js";
import { html } from "../html.js";
import { scaleOf, spread } from "../marks.js";
import { histogramOf } from "../plotting.js";
import { go } from "../router.js";

export const title = "Groups";

const SHOWN =
  "task, reward, reward_min, equal, failed, truncated, episodes, length, staleness, worker, group_id";
const LABELS = {
  reward: "mean reward",
  reward_min: "lowest to highest",
  equal: "equal rewards",
  length: "length (tokens)",
  staleness: "staleness (versions)",
  worker: "replica",
  group_id: "group",
};

/** Options of a table of groups. `rows()`: what is known of the rewards of each. */
export function groupCells(rows, more) {
  const flag = (kind, word) => (num) => (num ? badge(word ?? num, kind) : "");
  const range = (_, { group_id }) => {
    const group = rows().find((one) => one.group_id === group_id);
    return (
      group &&
      spread(
        group,
        scaleOf(rows().flatMap(({ reward_min, reward_max }) => [reward_min, reward_max])),
      )
    );
  };
  return {
    table: "groups",
    noun: "group",
    labels: LABELS,
    cells: {
      reward_min: range,
      equal: flag("warn", "equal rewards"),
      failed: flag("bad"),
      truncated: flag("warn"),
      ...more,
    },
  };
}

export async function render(root, place, context) {
  let answer = null;
  return tableView(root, place, context, {
    ...groupCells(() => answer.groups),
    usual: { order: "group_id", show: SHOWN },
    fixed: () => `step = ${answer.step ?? -1}`,
    load: async () => {
      answer = await get(
        "groups",
        { run: place.run, step: place.query.get("step") },
        context.signal,
      );
    },
    head: (to) =>
      html`${head(answer, to)}${histogram(answer.groups, place.query.get("filter"), to)}${answer.groups.some((group) => !group.has_rollouts) && notWritten(context.run)}`,
    none: (run) =>
      run.policies.length ? ofPolicies(run, "The groups") : answer.step === null && noStep(),
  });
}

function head(answer, to) {
  const stepTo = (step) => (step === null ? null : to({ step }));
  return html`<div key="head" class="head">
    <h1 data-testid="title">${answer.step === null ? "Groups" : `Groups of step ${number(answer.step)}`}</h1><span class="space"></span>
    ${
      answer.step !== null &&
      html`<nav class="tools" aria-label="Steps">
      ${neighbour("previous", "Previous step", stepTo(answer.previous_step))}${stepField(answer, to)}${neighbour("next", "Next step", stepTo(answer.next_step))}
      ${answer.next_step !== null && html`<a key="newest" class="button" href=${to({ step: null })} data-testid="to-newest">Newest</a>`}</nav>`
    }</div>`;
}

function stepField(answer, to) {
  const onsubmit = (event) => {
    event.preventDefault();
    go(to({ step: new FormData(event.target).get("step") }));
  };
  return html`<form key="step" onsubmit=${onsubmit}><label class="visually-hidden" for="step">Step</label>
    <input id="step" name="step" type="number" class="step" defaultValue=${answer.step} min=${answer.first_step} max=${answer.last_step}
      data-testid="step" title=${`Step ${answer.first_step} to ${answer.last_step}; Enter goes there`} /></form>`;
}

/** Columns that can be pressed: only groups of that reward are listed then. */
function histogram(groups, filter, to) {
  const bins = histogramOf(groups.map((group) => group.reward_mean));
  if (!bins.length) return null;
  const most = Math.max(...bins.map((bin) => bin.count));
  const column = (bin, index) => {
    const isLast = index === bins.length - 1;
    const [label, own] =
      bin.from === bin.to
        ? [number(bin.from), `reward = ${bin.from}`]
        : [
            `${number(bin.from)} to ${number(bin.to)}`,
            `reward >= ${bin.from} and reward ${isLast ? "<=" : "<"} ${bin.to}`,
          ];
    return html`<button key=${index} type="button" class="column" onclick=${() => go(to({ filter: filter === own ? null : own }))} aria-pressed=${filter === own}
      aria-label=${`${count(bin.count, "group")} with a mean reward of ${label}`} data-testid="column" title=${label}>
      <span class="count">${bin.count || ""}</span><span class="fill" style=${{ height: `${(bin.count / most) * 4}rem` }}></span><span class="at">${number(bin.from)}</span></button>`;
  };
  return html`<figure key="histogram" class="histogram" data-testid="histogram">
    <figcaption>Mean reward of the ${count(groups.length, "group")} of this step<span class="muted"> · press a column to list only its groups</span></figcaption>
    <div class="columns">${bins.map(column)}</div><p class="unit">groups (height) by mean reward (across)</p></figure>`;
}

function notWritten(run) {
  const every = run.config.match(/^\s+rollouts_every:\s*(\d+)/m)?.[1];
  const because =
    every === "0"
      ? "record.rollouts_every is 0"
      : `record.rollouts_every${every ? ` is ${every}` : " leaves steps out"}`;
  return html`<p key="not-written" class="muted small" data-testid="not-written">
    What the episodes of this step said was not written, as ${because} in the configuration. A name leads to its task over time.</p>`;
}

function noStep() {
  return empty(
    "No step has trained a group yet.",
    "Groups appear after the first step; what their episodes said only if record.rollouts_every in the configuration is not 0.",
  );
}

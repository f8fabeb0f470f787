/** The groups that a step trained: which of them teach, which failed, and how their rewards are spread. */

import { get } from "../api.js";
import { Table, badge, empty, neighbour, ofPolicies, pages, rollout, searchField, sorted } from "../components.js";
import { count, number } from "../format.js";
import { histogramOf, isInBin } from "../histogram.js";
import { html, update } from "../html.js";
import { rangeMark, scaleOf } from "../marks.js";
import { go, link, note } from "../router.js";

export const title = "Groups";

const PAGE_SIZE = 50;
const SHOWS = [["all", "All"], ["zero_std", "Equal rewards"], ["failed", "Failed"], ["truncated", "Truncated"]];
const NOTHING = {
  all: "No group was trained by this step.",
  zero_std: "No group of this step has equal rewards: each of them can teach something.",
  failed: "No group of this step has an episode that failed.",
  truncated: "No group of this step has an episode that was cut off at the token limit.",
};

export async function render(root, place, { signal, run }) {
  const { query } = place;
  const asked = { step: query.get("step"), page: query.get("page"), show: query.get("show") ?? "all", q: query.get("q") };
  let sort = query.get("sort");
  let answer = null;
  let bin = null;

  async function load() {
    const fresh = await get("groups", { run: place.run, ...asked }, signal);
    if (fresh.step !== answer?.step) bin = null; // columns of another step are others
    answer = fresh;
    draw();
  }
  function draw() {
    const to = (changes) => link("groups", place.run, { ...asked, sort, step: answer.step, page: null, ...changes });
    if (answer.step === null) return update(root, head(answer, to), run.policies.length ? ofPolicies(run, "The groups") : noStep());
    const bins = histogramOf(answer.groups.map((group) => group.reward_mean));
    if (bin !== null && !bins[bin]) bin = null;
    const pick = (index) => {
      bin = index === bin ? null : index;
      draw();
    };
    const sortBy = (by) => {
      sort = by;
      note(link("groups", place.run, { ...asked, sort }));
      draw();
    };
    const isShown = (group) => bin === null || isInBin(bins[bin], group.reward_mean, bin === bins.length - 1);
    const columns = columnsOf(place.run, answer);
    const rows = sorted(answer.groups.filter(isShown), columns, sort);
    update(
      root,
      html`${head(answer, to)}${filters(asked, to)}${histogram(bins, bin, pick, answer)}
      ${rows.some((group) => !group.has_rollouts) && notWritten(run)}
      ${rows.length ? html`<${Table} columns=${columns} rows=${rows} id="groups" keyOf=${({ group_id }) => group_id} sort=${sort} onSort=${sortBy} />` : nothing(asked, to)}
      ${pages({ page: answer.page, size: PAGE_SIZE, num: answer.num_groups, noun: "groups" }, (page) => to({ page }))}`,
    );
  }
  await load();
  return (now) => {
    run = now;
    return load();
  };
}

function head(answer, to) {
  const stepTo = (step) => (step === null ? null : to({ step }));
  return html`<div key="head" class="head">
    <h1 data-testid="title">${answer.step === null ? "Groups" : `Groups of step ${number(answer.step)}`}</h1><span class="space"></span>
    ${answer.step !== null && html`<nav class="tools" aria-label="Steps">
      ${neighbour("previous", "Previous step", stepTo(answer.previous_step))}${stepField(answer, to)}${neighbour("next", "Next step", stepTo(answer.next_step))}
      ${answer.next_step !== null && html`<a key="newest" class="button" href=${to({ step: null })} data-testid="to-newest">Newest</a>`}</nav>`}</div>`;
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

function filters(asked, to) {
  return html`<div key="filters" class="tools">
    ${SHOWS.map(([show, label]) => html`<a key=${show} class="button" href=${to({ show: show === "all" ? null : show })} data-testid=${`show-${show}`}
      aria-current=${asked.show === show ? "true" : null}>${label}</a>`)}
    <span class="space" key="space"></span>${searchField("Find a task by its id", asked.q ?? "", (q) => to({ q }))}</div>`;
}

/** Columns that can be pressed: only groups of that reward are listed then. */
function histogram(bins, chosen, pick, answer) {
  if (!bins.length) return null;
  const most = Math.max(...bins.map((bin) => bin.count));
  const whole = answer.num_groups > answer.groups.length ? "on this page" : "of this step";
  const column = (bin, index) => {
    const label = bin.from === bin.to ? number(bin.from) : `${number(bin.from)} to ${number(bin.to)}`;
    return html`<button key=${index} type="button" class="column" onclick=${() => pick(index)} aria-pressed=${index === chosen}
      aria-label=${`${count(bin.count, "group")} with a mean reward of ${label}`} data-testid="column" title=${label}>
      <span class="count">${bin.count || ""}</span><span class="fill" style=${{ height: `${(bin.count / most) * 4}rem` }}></span><span class="at">${number(bin.from)}</span></button>`;
  };
  return html`<figure key="histogram" class="histogram" data-testid="histogram">
    <figcaption>Mean reward of the ${count(answer.groups.length, "group")} ${whole}<span class="muted"> · press a column to list only its groups</span></figcaption>
    <div class="columns">${bins.map(column)}</div><p class="unit">groups (height) by mean reward (across)</p></figure>`;
}

function columnsOf(run, answer) {
  const scale = scaleOf(answer.groups.flatMap((group) => [group.reward_min, group.reward_max]));
  const field = (name) => ({ value: (group) => group[name], cell: (group) => number(group[name]), isNumber: true });
  return [
    { label: "Task", isHead: true, value: ({ task_id }) => task_id, cell: (group) => named(run, answer.step, group) },
    { label: "Mean reward", title: "Over the episodes of the group", ...field("reward_mean") },
    { label: "Lowest to highest", title: "The line: all rewards of the group; the tick: their mean", cell: (group) => spread(group, scale) },
    { label: "", cell: badges },
    { label: "Episodes", ...field("num_episodes") },
    { label: "Length (tokens)", title: "Tokens sampled in an episode, mean", ...field("length_mean") },
    { label: "Staleness (versions)", title: "Versions between its oldest token and the weights it trained", ...field("staleness") },
    { label: "Replica", value: ({ replica }) => replica, cell: (group) => group.replica },
    { label: "Group", title: "Id of the group", ...field("group_id"), cell: ({ group_id }) => group_id },
  ];
}

/** Its episodes if they were written, else its task over time. */
function named(run, step, { has_rollouts, task_id, group_id }) {
  if (!has_rollouts) return html`<a href=${link("task", run, { task: task_id })} data-row data-testid="task-link" title="The task over time">${task_id}</a>`;
  return html`<a href=${rollout(run, { step, group_id })} data-row data-testid="group-link">${task_id}</a>`;
}

function notWritten(run) {
  const every = run.config.match(/^\s+rollouts_every:\s*(\d+)/m)?.[1];
  const because = every === "0" ? "record.rollouts_every is 0" : `record.rollouts_every${every ? ` is ${every}` : " leaves steps out"}`;
  return html`<p key="not-written" class="muted small" data-testid="not-written">
    What the episodes of this step said was not written, as ${because} in the configuration. A name leads to its task over time.</p>`;
}

/** The rewards of a group beside their mark. */
export function spread({ reward_min: low, reward_mean: mean, reward_max: high }, scale) {
  if (low === null) return null;
  return html`<span class="spread">${rangeMark({ low, mean, high }, scale)}<span class="muted">${number(low)} to ${number(high)}</span></span>`;
}

function badges(group) {
  return html`<span class="badges">${group.is_zero_std && badge("equal rewards", "warn", "All its rewards are equal: it teaches nothing to who compares")}
    ${group.num_failed > 0 && badge(`${group.num_failed} failed`, "bad")}${group.num_truncated > 0 && badge(`${group.num_truncated} truncated`, "warn")}</span>`;
}

function nothing(asked, to) {
  const why = asked.q ? `No group here has a task whose id contains “${asked.q}”.` : (NOTHING[asked.show] ?? NOTHING.all);
  const isAll = asked.show === "all" && !asked.q;
  return html`<div key="nothing">${empty(why, isAll ? null : html`<a href=${to({ show: null, q: null })}>Show all groups of this step</a>`)}</div>`;
}

function noStep() {
  return empty(
    "No step has trained a group yet.",
    "Groups appear after the first step; what their episodes said only if record.rollouts_every in the configuration is not 0.",
  );
}

/** The groups that a step trained: which of them teach, which failed, and how their rewards are spread. */

import { get } from "../api.js";
import { h, update } from "../dom.js";
import { count, number } from "../format.js";
import { histogramOf, isInBin } from "../histogram.js";
import { rangeMark, scaleOf } from "../marks.js";
import { neighbour, pages, rollout, searchField } from "../paging.js";
import { badge, empty, ofPolicies, table } from "../parts.js";
import { go, link } from "../router.js";

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
  const asked = asking(place.query);
  let answer = null;
  let bin = null;

  async function load() {
    const fresh = await get("groups", { run: place.run, ...asked }, signal);
    if (fresh.step !== answer?.step) bin = null; // columns of another step are others
    answer = fresh;
    draw();
  }
  function draw() {
    const to = (changes) => link("groups", place.run, { ...asked, step: answer.step, page: null, ...changes });
    if (answer.step === null) return update(root, head(answer, to), run.policies.length ? ofPolicies(run, "The groups") : noStep());
    const bins = histogramOf(answer.groups.map((group) => group.reward_mean));
    if (bin !== null && !bins[bin]) bin = null;
    const pick = (index) => { bin = index === bin ? null : index; draw(); };
    const isShown = (group) => bin === null || isInBin(bins[bin], group.reward_mean, bin === bins.length - 1);
    const rows = answer.groups.filter(isShown);
    update(root, head(answer, to), filters(asked, to), histogram(bins, bin, pick, answer),
      rows.some((group) => !group.has_rollouts) ? notWritten(run) : null,
      rows.length ? groupTable(place.run, answer, rows) : nothing(asked, to),
      pages({ page: answer.page, size: PAGE_SIZE, num: answer.num_groups, noun: "groups" }, (page) => to({ page })));
  }
  await load();
  return (now) => {
    run = now;
    return load();
  };
}

function asking(query) {
  return { step: query.get("step"), page: query.get("page"), show: query.get("show") ?? "all", q: query.get("q") };
}

function head(answer, to) {
  const stepTo = (step) => (step === null ? null : to({ step }));
  return h("div", { key: "head", class: "head" },
    h("h1", { "data-testid": "title" }, answer.step === null ? "Groups" : `Groups of step ${number(answer.step)}`),
    h("span", { class: "space" }),
    answer.step !== null && h("nav", { class: "tools", "aria-label": "Steps" },
      neighbour("previous", "Previous step", stepTo(answer.previous_step)),
      stepField(answer, to),
      neighbour("next", "Next step", stepTo(answer.next_step)),
      answer.next_step !== null && h("a", { key: "newest", class: "button", href: to({ step: null }), "data-testid": "to-newest" }, "Newest")));
}

function stepField(answer, to) {
  const onsubmit = (event) => {
    event.preventDefault();
    go(to({ step: new FormData(event.target).get("step") }));
  };
  return h("form", { key: "step", onsubmit },
    h("label", { class: "visually-hidden", for: "step" }, "Step"),
    h("input", {
      id: "step", name: "step", type: "number", class: "step", value: answer.step, min: answer.first_step, max: answer.last_step,
      "data-testid": "step", title: `Step ${answer.first_step} to ${answer.last_step}; Enter goes there`,
    }));
}

function filters(asked, to) {
  return h("div", { key: "filters", class: "tools" },
    SHOWS.map(([show, label]) => h("a", {
      key: show, class: "button", href: to({ show: show === "all" ? null : show }), "data-testid": `show-${show}`,
      "aria-current": asked.show === show ? "true" : null,
    }, label)),
    h("span", { class: "space", key: "space" }),
    searchField("Find a task by its id", asked.q ?? "", (q) => to({ q }), go));
}

/** Columns that can be pressed: only groups of that reward are listed then. */
function histogram(bins, chosen, pick, answer) {
  if (!bins.length) return null;
  const most = Math.max(...bins.map((bin) => bin.count));
  const whole = answer.num_groups > answer.groups.length ? "on this page" : "of this step";
  return h("figure", { key: "histogram", class: "histogram", "data-testid": "histogram" },
    h("figcaption", null, `Mean reward of the ${count(answer.groups.length, "group")} ${whole}`,
      h("span", { class: "muted" }, " · press a column to list only its groups")),
    h("div", { class: "columns" }, bins.map((bin, index) => {
      const label = bin.from === bin.to ? number(bin.from) : `${number(bin.from)} to ${number(bin.to)}`;
      return h("button", {
        key: index, type: "button", class: "column", onclick: () => pick(index), "aria-pressed": String(index === chosen),
        "aria-label": `${count(bin.count, "group")} with a mean reward of ${label}`, "data-testid": "column", title: label,
      }, h("span", { class: "count" }, bin.count || ""),
        h("span", { class: "fill", style: { height: `${(bin.count / most) * 4}rem` } }),
        h("span", { class: "at" }, number(bin.from)));
    })),
    h("p", { class: "unit" }, "groups (height) by mean reward (across)"));
}

function groupTable(run, answer, rows) {
  const scale = scaleOf(answer.groups.flatMap((group) => [group.reward_min, group.reward_max]));
  const columns = [
    { label: "Task", isHead: true, cell: (group) => named(run, answer.step, group) },
    { label: "Mean reward", isNumber: true, title: "Over the episodes of the group", cell: (group) => number(group.reward_mean) },
    { label: "Lowest to highest", title: "The line: all rewards of the group; the tick: their mean", cell: (group) => spread(group, scale) },
    { label: "", cell: badges },
    { label: "Episodes", isNumber: true, cell: (group) => number(group.num_episodes) },
    { label: "Length (tokens)", isNumber: true, title: "Tokens sampled in an episode, mean", cell: (group) => number(group.length_mean) },
    { label: "Staleness (versions)", isNumber: true, title: "Versions between its oldest token and the weights it trained", cell: (group) => number(group.staleness) },
    { label: "Replica", cell: (group) => group.replica },
    { label: "Group", isNumber: true, title: "Id of the group", cell: (group) => group.group_id },
  ];
  return table(columns, rows, { id: "groups", key: (group) => group.group_id });
}

/** Its episodes if they were written, else its task over time. */
function named(run, step, group) {
  if (!group.has_rollouts) return h("a", { href: link("task", run, { task: group.task_id }), "data-row": true, "data-testid": "task-link", title: "The task over time" }, group.task_id);
  return h("a", { href: rollout(run, { step, group_id: group.group_id }), "data-row": true, "data-testid": "group-link" }, group.task_id);
}

function notWritten(run) {
  const every = run.config.match(/^\s+rollouts_every:\s*(\d+)/m)?.[1];
  const because = every === "0" ? "record.rollouts_every is 0" : `record.rollouts_every${every ? ` is ${every}` : " leaves steps out"}`;
  return h("p", { key: "not-written", class: "muted small", "data-testid": "not-written" },
    `What the episodes of this step said was not written, as ${because} in the configuration. A name leads to its task over time.`);
}

function spread(group, scale) {
  const low = group.reward_min;
  const high = group.reward_max;
  if (low === null) return null;
  return h("span", { class: "spread" }, rangeMark({ low, mean: group.reward_mean, high }, scale), h("span", { class: "muted" }, `${number(low)} to ${number(high)}`));
}

function badges(group) {
  const all = [
    group.is_zero_std && badge("equal rewards", "warn", "All its rewards are equal: it teaches nothing to who compares"),
    group.num_failed > 0 && badge(`${group.num_failed} failed`, "bad"),
    group.num_truncated > 0 && badge(`${group.num_truncated} truncated`, "warn"),
  ].filter(Boolean);
  return all.length ? h("span", { class: "badges" }, all) : "";
}

function nothing(asked, to) {
  const why = asked.q ? `No group here has a task whose id contains “${asked.q}”.` : NOTHING[asked.show] ?? NOTHING.all;
  const isAll = asked.show === "all" && !asked.q;
  return h("div", { key: "nothing" }, empty(why, isAll ? null : h("a", { href: to({ show: null, q: null }) }, "Show all groups of this step")));
}

function noStep() {
  return empty("No step has trained a group yet.",
    "Groups appear after the first step; what their episodes said only if record.rollouts_every in the configuration is not 0.");
}

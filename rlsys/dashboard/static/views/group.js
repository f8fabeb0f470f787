/** One group: the episodes of one task side by side. */

import { get } from "../api.js";
import { h, update } from "../dom.js";
import { count, number } from "../format.js";
import { barMark, scaleOf } from "../marks.js";
import { neighbour, rollout, taskName } from "../paging.js";
import { badge, figure } from "../parts.js";
import { longText, taskBox } from "../prompts.js";
import { link } from "../router.js";

export const title = "Group";

export async function render(root, place, { signal, run }) {
  const asked = { step: place.query.get("step"), group_id: place.query.get("group_id") };
  const answer = await get("group", { run: place.run, ...asked }, signal);
  const to = (group_id) => (group_id === null ? null : rollout(place.run, { step: answer.step, group_id }));
  update(root, head(run, answer, to), facts(answer), taskBox(answer, true),
    h("h2", null, `${count(answer.episodes.length, "episode")} side by side`), episodes(place.run, answer));
}

function head(run, answer, to) {
  return h("div", { class: "head" },
    h("h1", { "data-testid": "title" }, `Group ${answer.group_id}: `, taskName(run, answer.task_id)),
    answer.is_zero_std && badge("equal rewards", "warn", "It teaches nothing to who compares"),
    h("span", { class: "space" }),
    h("nav", { class: "tools", "aria-label": "Groups of the step" },
      h("a", { class: "button", href: link("groups", run.summary.id, { step: answer.step }), "data-testid": "to-step" }, `Step ${answer.step}`),
      neighbour("previous", "Previous group", to(answer.previous_group_id)),
      neighbour("next", "Next group", to(answer.next_group_id))));
}

function facts(answer) {
  const rewards = answer.episodes.map((episode) => episode.reward).filter((reward) => reward !== null);
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const numFailed = answer.episodes.filter((episode) => episode.outcome === "failed").length;
  return [
    h("dl", { class: "figures" },
      figure("Mean reward", number(mean), { id: "reward-mean" }),
      figure("Lowest to highest", rewards.length ? `${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}` : "–"),
      figure("Failed", number(numFailed), { note: "left out of the mean", title: "A failure is never a reward of 0" }),
      figure("Trained by step", number(answer.step)),
      figure("Rolled out by", answer.replica || "–")),
    answer.is_zero_std && h("p", { class: "banner warn", "data-testid": "zero-std" },
      "All rewards of this group are equal. An algorithm that compares the episodes of a group learns nothing from it."),
  ];
}

function episodes(run, answer) {
  const rewards = scaleOf(answer.episodes.map((episode) => episode.reward));
  const advantages = scaleOf(answer.episodes.map((episode) => episode.advantage));
  return h("div", { class: "episodes", "data-testid": "episodes" },
    answer.episodes.map((episode) => card(run, answer, episode, { rewards, advantages })));
}

function card(run, answer, episode, scales) {
  const href = rollout(run, { step: answer.step, group_id: answer.group_id, episode: episode.episode });
  return h("article", { class: `episode outcome-${episode.outcome}`, "data-testid": "episode" },
    h("h3", null, h("a", { href, "data-row": true, "data-testid": "episode-link" }, `Episode ${episode.episode}`), outcome(episode)),
    h("dl", { class: "measures" },
      measure("Reward", episode.reward, barMark(episode.reward, scales.rewards)),
      parts(episode.parts),
      measure("Advantage", episode.advantage, barMark(episode.advantage, scales.advantages), episode.reward === null ? "none" : "none, or one per token")),
    episode.reason && h("p", { class: "reason" }, episode.reason),
    longText(episode.text || "(it said nothing)", { "data-testid": "text", tabindex: "0", role: "region", "aria-label": `Last words of episode ${episode.episode}` }),
    h("p", { class: "muted small" }, summary(episode)));
}

/** How an episode ended, by word and colour; nothing if it ended well. */
function outcome(episode) {
  if (episode.outcome === "ok") return null;
  return badge(episode.outcome, episode.outcome === "failed" ? "bad" : "warn", episode.reason || null);
}

function measure(name, value, mark, otherwise = "none") {
  return h("div", null, h("dt", null, name), h("dd", { class: "num" }, value === null ? otherwise : number(value)), h("dd", { class: "mark-cell" }, mark));
}

/** What the reward is made of. */
function parts(named) {
  const names = Object.keys(named);
  return names.map((name) => h("div", { class: "part" }, h("dt", null, name), h("dd", { class: "num" }, number(named[name])), h("dd", null)));
}

function summary(episode) {
  const versions = episode.versions;
  return [
    count(episode.num_tokens, "token"),
    count(episode.num_turns, "turn"),
    episode.num_tool_calls > 0 && count(episode.num_tool_calls, "tool call"),
    episode.agents.length > 1 && `${count(episode.agents.length, "agent")}: ${episode.agents.slice(0, 6).join(", ")}${episode.agents.length > 6 ? ", …" : ""}`,
    versions && (versions[0] === versions[1] ? `version ${versions[0]}` : `versions ${versions[0]} to ${versions[1]}`),
  ].filter(Boolean).join(" · ");
}

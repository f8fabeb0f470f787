/** One group: the episodes of one task side by side. */

import { get } from "../api.js";
import {
  badge,
  banner,
  figure,
  neighbour,
  outcomeBadge,
  rollout,
  taskName,
} from "../components.js";
import { NONE, count, duration, number } from "../format.js";
import { html, update } from "../html.js";
import { barMark, scaleOf } from "../marks.js";
import { LongText, taskBox } from "../prompts.js";
import { link } from "../router.js";

export const title = "Group";

const MOST_NAMES = 6;

export async function render(root, place, { signal, run }) {
  const asked = {
    step: place.query.get("step"),
    group_id: place.query.get("group_id"),
    dataset: place.query.get("dataset"),
  };
  const answer = await get("group", { run: place.run, ...asked }, signal);
  const scales = {
    rewards: scaleOf(answer.episodes.map((episode) => episode.reward)),
    advantages: scaleOf(answer.episodes.map((episode) => episode.advantage)),
  };
  update(
    root,
    html`${head(run, answer, asked.dataset)}${facts(answer, asked.dataset)}${taskBox(answer, true)}
    <h2>${count(answer.episodes.length, "episode")} side by side</h2>
    <div class="episodes" data-testid="episodes">${answer.episodes.map((episode) => card(place.run, asked, episode, scales))}</div>`,
  );
}

function head(run, answer, dataset) {
  const id = run.summary.id;
  const to = (group_id) =>
    group_id === null ? null : rollout(id, { step: answer.step, group_id, dataset });
  const up = dataset
    ? link("evaluations", id, { dataset, step: answer.step })
    : link("groups", id, { step: answer.step });
  return html`<div class="head"><h1 data-testid="title">Group ${answer.group_id}: ${taskName(run, answer.task_id)}</h1>
    ${answer.is_zero_std && badge("equal rewards", "warn", "It teaches nothing to who compares")}<span class="space"></span>
    <nav class="tools" aria-label="Groups of the step"><a class="button" href=${up} data-testid="to-step">${dataset} Step ${answer.step}</a>
      ${neighbour("previous", "Previous group", to(answer.previous_group_id))}${neighbour("next", "Next group", to(answer.next_group_id))}</nav></div>`;
}

function facts(answer, dataset) {
  const rewards = answer.episodes
    .map((episode) => episode.reward)
    .filter((reward) => reward !== null);
  const mean = rewards.length
    ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length
    : null;
  const numFailed = answer.episodes.filter((episode) => episode.outcome === "failed").length;
  const equal =
    "All rewards of this group are equal. An algorithm that compares the episodes of a group learns nothing from it.";
  return html`<dl class="figures">${figure("Mean reward", number(mean), { id: "reward-mean" })}
      ${figure("Lowest to highest", rewards.length ? `${number(Math.min(...rewards))} to ${number(Math.max(...rewards))}` : NONE)}
      ${figure("Failed", number(numFailed), { note: "left out of the mean", title: "A failure is never a reward of 0" })}
      ${figure(dataset ? "Evaluated at step" : "Trained by step", number(answer.step))}${figure("Rolled out by", answer.replica || NONE)}</dl>
    ${answer.is_zero_std && banner("warn", equal, { id: "zero-std", role: null })}`;
}

function card(run, asked, episode, { rewards, advantages }) {
  const href = rollout(run, { ...asked, episode: episode.episode });
  const names = Object.keys(episode.parts);
  return html`<article class=${`episode outcome-${episode.outcome}`} data-testid="episode">
    <h3><a href=${href} data-row data-testid="episode-link">Episode ${episode.episode}</a>${outcomeBadge(episode.outcome, episode.reason)}</h3>
    <dl class="measures">${measure("Reward", episode.reward, barMark(episode.reward, rewards))}
      ${names.map((name) => html`<div class="part"><dt>${name}</dt><dd class="num">${number(episode.parts[name])}</dd><dd></dd></div>`)}
      ${measure("Advantage", episode.advantage, barMark(episode.advantage, advantages), episode.reward === null ? "none" : "none, or one per token")}</dl>
    ${episode.reason && html`<p class="reason">${episode.reason}</p>`}
    <${LongText} text=${episode.text || "(it said nothing)"} data-testid="text" tabindex="0" role="region" aria-label=${`Last words of episode ${episode.episode}`} />
    <p class="muted small">${summary(episode)}</p></article>`;
}

function measure(name, value, mark, otherwise = "none") {
  return html`<div><dt>${name}</dt><dd class="num">${value === null ? otherwise : number(value)}</dd><dd class="mark-cell">${mark}</dd></div>`;
}

function summary({ num_tokens, num_turns, seconds, num_tool_calls, agents, versions }) {
  const names = `${agents.slice(0, MOST_NAMES).join(", ")}${agents.length > MOST_NAMES ? ", …" : ""}`;
  return [
    count(num_tokens, "token"),
    count(num_turns, "turn"),
    seconds !== null && duration(seconds),
    num_tool_calls > 0 && count(num_tool_calls, "tool call"),
    agents.length > 1 && `${count(agents.length, "agent")}: ${names}`,
    versions &&
      (versions[0] === versions[1]
        ? `version ${versions[0]}`
        : `versions ${versions[0]} to ${versions[1]}`),
  ]
    .filter(Boolean)
    .join(" · ");
}

/** One episode: who said what, token by token, and what it was worth. */

import { agentTree } from "../agents.js";
import { get } from "../api.js";
import { legend, readingPicker } from "../colouring.js";
import { CopyButton, figure, neighbour, rollout, taskName } from "../components.js";
import { NONE, count, duration, number } from "../format.js";
import { html, update } from "../html.js";
import { taskBox } from "../prompts.js";
import { link, note } from "../router.js";
import { timeline } from "../timeline.js";
import { tokenTip } from "../tip.js";
import { isRecorded, readingOf, scaleOf } from "../tokens.js";
import { conversation } from "../turns.js";

export const title = "Episode";

export async function render(root, place, { signal, run }) {
  const { query } = place;
  const asked = {
    step: query.get("step"),
    group_id: query.get("group_id"),
    episode: query.get("episode") ?? 0,
    dataset: query.get("dataset"),
  };
  const answer = await get("episode", { run: place.run, ...asked }, signal);
  const shown = { agent: Number(query.get("agent") ?? 0), by: query.get("by") ?? "logprob" };
  if (!answer.trajectories[shown.agent]) shown.agent = 0;
  const tip = tokenTip();
  document.body.append(tip.element);
  signal.addEventListener("abort", () => {
    tip.hide();
    tip.element.remove();
  });
  const turns = answer.trajectories.flatMap((trajectory) => trajectory.turns);
  const isTree = answer.trajectories.length > 1;
  const change = (changes) => {
    Object.assign(shown, changes);
    note(link("episode", place.run, { ...asked, agent: shown.agent || null, by: shown.by }));
    draw();
  };
  function draw() {
    const wanted = readingOf(shown.by);
    const reading = isRecorded(wanted, turns) ? wanted : readingOf("none");
    const scale = scaleOf(reading, turns);
    const trajectory = answer.trajectories[shown.agent];
    tip.hide();
    update(
      root,
      html`${head(run, answer, asked.dataset)}${facts(answer, asked.dataset)}${taskBox(answer, false)}${timeline(answer)}
      <div class=${isTree ? "talk-and-tree" : null}>
        ${isTree && html`<div class="side"><h2>Agents</h2>${agentTree(answer.trajectories, shown.agent, (agent) => change({ agent }))}</div>`}
        <div class="talk"><div class="colours">
            ${readingPicker(
              reading.key,
              (one) => isRecorded(one, turns),
              (by) => change({ by }),
            )}
            ${wanted === reading ? legend(reading, scale) : notRecorded(wanted)}</div>
          ${words(answer, trajectory)}
          <div class="turns" key=${shown.agent}>${conversation(trajectory, { reading, scale, tip })}</div></div></div>`,
    );
  }
  draw();
}

function head(run, answer, dataset) {
  const group = { step: answer.step, group_id: answer.group_id, dataset };
  const to = (episode) =>
    episode >= 0 && episode < answer.num_episodes
      ? rollout(run.summary.id, { ...group, episode })
      : null;
  const all =
    answer.num_episodes === 1
      ? "Its group"
      : `All ${count(answer.num_episodes, "episode")} side by side`;
  return html`<div class="head"><h1 data-testid="title">Episode ${answer.episode} of ${taskName(run, answer.task_id)}</h1><span class="space"></span>
    <nav class="tools" aria-label="Episodes of the group">
      <a class="button" href=${rollout(run.summary.id, group)} data-testid="to-group">${all}</a>
      ${neighbour("previous", "Previous", to(answer.episode - 1))}${neighbour("next", "Next", to(answer.episode + 1))}</nav></div>`;
}

function facts(answer, dataset) {
  const root = answer.trajectories[0];
  return html`<dl class="figures">${figure("Reward", number(answer.reward), { id: "reward" })}
      ${Object.entries(answer.parts).map(([name, value]) => figure(`of it: ${name}`, number(value), { id: `part-${name}` }))}
      ${figure("Advantage", root ? advantage(root) : NONE, { id: "advantage" })}
      ${figure("Outcome", root?.outcome ?? NONE, { note: root?.reason || null, id: "outcome" })}
      ${answer.seconds !== null && figure("Took", duration(answer.seconds))}
      ${dataset ? figure("Evaluation", `${dataset}, step ${answer.step}`) : figure("Trained by step", number(answer.step))}</dl>
    <div class="tools replay"><${CopyButton} label="Copy as JSON" text=${() => JSON.stringify(answer, null, 2)} id="copy-json" />
      ${
        answer.replay &&
        html`<${CopyButton} label="Copy replay command" text=${answer.replay} id="copy-replay" />
        <code data-testid="replay" title="Computes its step again, offline, bit for bit">${answer.replay}</code>`
      }</div>`;
}

/** What all tokens of an agent were worth, or why there is no such number. */
function advantage(trajectory) {
  if (trajectory.advantage !== null) return number(trajectory.advantage);
  const isPerToken = trajectory.turns.some((turn) =>
    turn.advantages.some((value) => value !== null),
  );
  return isPerToken ? "one per token" : "none: not trained";
}

function notRecorded(reading) {
  return html`<p class="muted small" data-testid="not-recorded">
    The ${reading.label} of tokens was not recorded: the run is of an older version, or its step wrote no such column.</p>`;
}

/** What is true of all that an agent said. */
function words(answer, trajectory) {
  const parent = trajectory.parent === null ? null : answer.trajectories[trajectory.parent];
  const isOneOfMany = new Set(answer.trajectories.map((one) => one.policy)).size > 1;
  const said = [
    parent && `called by ${parent.agent}`,
    isOneOfMany && `policy ${trajectory.policy}`,
    trajectory.reward !== null && `reward ${number(trajectory.reward)}`,
    `advantage ${advantage(trajectory)}`,
    trajectory.reason,
  ].filter(Boolean);
  return html`<h2 data-testid="who">${trajectory.agent}<small class="muted"> ${said.join(" · ")}</small></h2>`;
}

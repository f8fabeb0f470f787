/** One episode: who said what, token by token, and what it was worth. */

import { agentTree } from "../agents.js";
import { get } from "../api.js";
import { legend, readingPicker } from "../colouring.js";
import { h, update } from "../dom.js";
import { NONE, number } from "../format.js";
import { neighbour, rollout, taskName } from "../paging.js";
import { copyButton, figure } from "../parts.js";
import { taskBox } from "../prompts.js";
import { link, note } from "../router.js";
import { tokenTip } from "../tip.js";
import { isRecorded, readingOf, scaleOf } from "../tokens.js";
import { conversation } from "../turns.js";

export const title = "Episode";

export async function render(root, place, { signal, run }) {
  const { query } = place;
  const asked = { step: query.get("step"), group_id: query.get("group_id"), episode: query.get("episode") ?? 0 };
  const answer = await get("episode", { run: place.run, ...asked }, signal);
  const shown = { agent: Number(query.get("agent") ?? 0), by: query.get("by") ?? "logprob" };
  if (!answer.trajectories[shown.agent]) shown.agent = 0;
  const tip = tokenTip();
  signal.addEventListener("abort", () => tip.hide());

  const talk = h("div", { class: "talk", key: "talk" });
  const side = h("div", { class: "side", key: "side" });
  const change = (changes) => {
    Object.assign(shown, changes);
    note(link("episode", place.run, { ...asked, agent: shown.agent || null, by: shown.by }));
    draw();
  };
  const turns = answer.trajectories.flatMap((trajectory) => trajectory.turns);
  function draw() {
    const wanted = readingOf(shown.by);
    const reading = isRecorded(wanted, turns) ? wanted : readingOf("none");
    const scale = scaleOf(reading, turns);
    const trajectory = answer.trajectories[shown.agent];
    tip.hide();
    if (answer.trajectories.length > 1) {
      update(side, h("h2", null, "Agents"), agentTree(answer.trajectories, shown.agent, (agent) => change({ agent })));
    }
    update(talk,
      h("div", { key: "colours", class: "colours" },
        readingPicker(reading.key, (one) => isRecorded(one, turns), (by) => change({ by })),
        wanted === reading ? legend(reading, scale) : notRecorded(wanted)),
      words(answer, trajectory));
    talk.append(h("div", { class: "turns" }, conversation(trajectory, { reading, scale, tip })));
  }
  update(root, head(run, answer), facts(answer), taskBox(answer, false),
    h("div", { class: answer.trajectories.length > 1 ? "talk-and-tree" : null }, side, talk), tip.element);
  draw();
}

function head(run, answer) {
  const group = { step: answer.step, group_id: answer.group_id };
  const to = (episode) => (episode >= 0 && episode < answer.num_episodes ? rollout(run.summary.id, { ...group, episode }) : null);
  return h("div", { class: "head" },
    h("h1", { "data-testid": "title" }, `Episode ${answer.episode} of `, taskName(run, answer.task_id)),
    h("span", { class: "space" }),
    h("nav", { class: "tools", "aria-label": "Episodes of the group" },
      h("a", { class: "button", href: rollout(run.summary.id, group), "data-testid": "to-group" }, `All ${answer.num_episodes} side by side`),
      neighbour("previous", "Previous", to(answer.episode - 1)),
      neighbour("next", "Next", to(answer.episode + 1))));
}

function facts(answer) {
  const root = answer.trajectories[0];
  return [
    h("dl", { class: "figures" },
      figure("Reward", number(answer.reward), { id: "reward" }),
      Object.entries(answer.parts).map(([name, value]) => figure(`of it: ${name}`, number(value), { id: `part-${name}` })),
      figure("Advantage", root ? advantage(root) : NONE, { id: "advantage" }),
      figure("Outcome", root?.outcome ?? "–", { note: root?.reason || null, id: "outcome" }),
      figure("Trained by step", number(answer.step))),
    h("div", { class: "tools replay" },
      copyButton("Copy as JSON", () => JSON.stringify(answer, null, 2), "copy-json"),
      answer.replay && copyButton("Copy replay command", answer.replay, "copy-replay"),
      answer.replay && h("code", { "data-testid": "replay", title: "Computes its step again, offline, bit for bit" }, answer.replay)),
  ];
}

/** What all tokens of an agent were worth, or why there is no such number. */
function advantage(trajectory) {
  if (trajectory.advantage !== null) return number(trajectory.advantage);
  const isPerToken = trajectory.turns.some((turn) => turn.advantages.some((value) => value !== null));
  return isPerToken ? "one per token" : "none: not trained";
}

function notRecorded(reading) {
  return h("p", { class: "muted small", "data-testid": "not-recorded" },
    `The ${reading.label} of tokens was not recorded: the run is of an older version, or its step wrote no such column.`);
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
  ].filter(Boolean).join(" · ");
  return h("h2", { key: "who", "data-testid": "who" }, trajectory.agent, h("small", { class: "muted" }, ` ${said}`));
}

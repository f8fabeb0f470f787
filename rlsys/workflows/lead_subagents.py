"""Workflow of a lead and parallel subagents with separate contexts (WideSeek-R1, arXiv:2602.04634).

lead       delegate(tasks=["rows a, b", "rows c, d"])    waits for all of them
subagents      each: its task, tools, ..., its answer    in parallel
lead       gets their answers; delegates again, or answers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import PositiveInt

from rlsys.agents.tool_calls import spoken
from rlsys.agents.tools import Tool, Toolbox
from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.errors import ToolError
from rlsys.workflows.tool_use import ToolNames, move, opening_messages, toolbox_of

LEAD = (
    "You lead subagents who work in parallel and know nothing but the task you give them. Split the problem into "
    "independent tasks, delegate them, then put the answers together and reply without calling a tool. You may "
    "delegate again."
)
SUBAGENT = "Do the task that you are given. Call tools where they help. Then reply with the result, and nothing else."


@dataclass(frozen=True, kw_only=True)
class LeadSubagents(Workflow):
    """A lead delegates tasks to subagents that run in parallel, and sees only their final replies.

    A subagent that runs out of context or turns is truncated. A subagent whose tools raise `ToolError` fails, and is
    left out of training. In both cases the lead gets a note, and the episode goes on. A lead that still delegates in
    its last turn is truncated. Every agent weighs the same in the loss, unless `algorithm.over` says otherwise.
    """

    loss_over: ClassVar[Literal["agents"]] = "agents"

    max_subagents: PositiveInt = 10
    """Subagents per call; further tasks are refused."""
    max_subagents_in_all: PositiveInt = 100
    """Subagents per episode."""
    max_depth: PositiveInt = 1
    """Levels of subagents. Those above the last level have `delegate` beside their tools, and lead subagents of their
    own."""
    max_lead_turns: PositiveInt = 10
    """Turns of the lead."""
    max_subagent_turns: PositiveInt = 20
    """Turns of each subagent."""
    tools: ToolNames = ()
    """Tools of subagents, as `module:function`; none may be called `delegate` with `max_depth` above 1. The lead's only
    tool is `delegate`."""
    lead_system: str = LEAD
    """System message of the lead."""
    subagent_system: str = SUBAGENT
    """System message of every subagent."""

    def toolbox(self) -> Toolbox:
        """Tools of one subagent."""
        return toolbox_of(self.tools)

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")
        prompt = opening_messages(self.lead_system, session.task.prompt)
        await lead.use(prompt, Toolbox(self._delegation(session, lead)), max_turns=self.max_lead_turns)

    def _delegation(self, session: Session, lead: Agent) -> Tool:
        """The tool by which `lead` delegates."""

        async def delegate(tasks: list[str]) -> str:
            """Give each task to a subagent of its own. They work in parallel; returns their answers, in order."""
            return self.report(await self.delegate(session, lead, tasks))

        return move(delegate)

    async def delegate(self, session: Session, lead: Agent, tasks: Sequence[str]) -> list[str]:
        """Run a subagent per task, and return each final reply, or the reason why there is none."""
        num_before = sum(agent.name == "subagent" for agent in session.agents)
        num = min(len(tasks), self.max_subagents, self.max_subagents_in_all - num_before)
        subagents = [session.agent("subagent", parent=lead) for _ in tasks[:num]]
        work = (self.work(session, *pair) for pair in zip(subagents, tasks, strict=False))
        answers: list[str] = []
        for subagent, result in zip(subagents, await session.gather(*work), strict=True):
            if isinstance(result, ToolError):
                subagent.fail(str(result))
                answers.append("failed: a tool broke")
            else:
                answers.append(result if isinstance(result, str) else "failed: it ran out of turns or room")
        limits = f"{self.max_subagents} at once, {self.max_subagents_in_all} in all"
        return [*answers, *(f"refused: subagents are limited to {limits}" for _ in tasks[num:])]

    async def work(self, session: Session, subagent: Agent, task: str) -> str:
        """Let one subagent do its task, and return its final reply without its thinking."""
        prompt, toolbox = opening_messages(self.subagent_system, task), self.toolbox()
        if len(subagent.path) < self.max_depth:
            toolbox = Toolbox(*toolbox.tools.values(), self._delegation(session, subagent))
        return spoken(await subagent.use(prompt, toolbox, max_turns=self.max_subagent_turns))

    def report(self, answers: Sequence[str]) -> str:
        """Write the answers as the result of `delegate`."""
        return "\n\n".join(f"Subagent {number}: {answer}" for number, answer in enumerate(answers, 1)) or "No tasks."

"""A lead and parallel subagents with contexts of their own (WideSeek-R1, arXiv:2602.04634).

    lead       delegate(tasks=["rows a, b", "rows c, d"])    waits for all of them
    subagents      each: its task, tools, ..., its answer    side by side
    lead       is told their answers; delegates again, or answers

All that a subagent reads and says on the way stays in its own context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import PositiveInt

from rlsys.agents.session import Agent, AgentStopped, Session
from rlsys.agents.tool_calls import spoken
from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Workflow
from rlsys.agents.workflows.workflow_tools import Moves, ToolNames, opened, toolbox_of
from rlsys.errors import ToolError

LEAD = (
    "You lead subagents who work in parallel and know nothing but the task you give them. Split the problem into "
    "independent tasks, delegate them, then put the answers together and reply without calling a tool. You may "
    "delegate again."
)
SUBAGENT = "Do the task that you are given. Call tools where they help. Then reply with the result, and nothing else."


@dataclass(frozen=True, kw_only=True)
class LeadSubagents(Workflow):
    """A lead delegates tasks to subagents that run in parallel, and sees only their final replies.

    A subagent that is stopped, by its context or its turns, is truncated; one whose tools broke has failed and is left
    out of training. Either way the lead is told, and the episode goes on. A lead that still delegates in its last turn
    is truncated.
    """

    max_subagents: PositiveInt = 10
    """Subagents that one call may start; of more tasks the last are refused."""
    max_subagents_in_all: PositiveInt = 100
    """Subagents of an episode."""
    max_lead_turns: PositiveInt = 10
    """Turns of the lead."""
    max_subagent_turns: PositiveInt = 20
    """Turns of each subagent."""
    tools: ToolNames = ()
    """Tools of subagents, as `module:function`. The lead has one, `delegate`."""
    lead_system: str = LEAD
    """What the lead's context opens with."""
    subagent_system: str = SUBAGENT
    """What every subagent's context opens with."""

    def toolbox(self) -> Toolbox:
        """The tools of one subagent."""
        return toolbox_of(self.tools)

    async def run(self, session: Session) -> None:
        lead = session.agent("lead")

        async def delegate(tasks: list[str]) -> str:
            """Give each task to a subagent of its own. They work in parallel; returns their answers, in order."""
            return self.report(await self.delegate(session, lead, tasks))

        prompt = opened(self.lead_system, session.task.prompt)
        await lead.use(prompt, Moves(delegate), max_turns=self.max_lead_turns)

    async def delegate(self, session: Session, lead: Agent, tasks: Sequence[str]) -> list[str]:
        """What became of each task: a subagent's final reply, or why there is none."""
        num_before = sum(agent.name == "subagent" for agent in session.agents)
        num = min(len(tasks), self.max_subagents, self.max_subagents_in_all - num_before)
        subagents = [session.agent("subagent", parent=lead) for _ in tasks[:num]]
        work = (self.work(session, *pair) for pair in zip(subagents, tasks, strict=False))
        results = await session.gather(*work)
        for subagent, result in zip(subagents, results, strict=True):
            if isinstance(result, ToolError):
                subagent.fail(str(result))
        answers = [result if isinstance(result, str) else f"failed: {_why(result)}" for result in results]
        limits = f"{self.max_subagents} at once, {self.max_subagents_in_all} in all"
        return [*answers, *(f"refused: subagents are limited to {limits}" for _ in tasks[num:])]

    async def work(self, session: Session, subagent: Agent, task: str) -> str:
        """One subagent's part: its final reply, without what it thought before it."""
        prompt = opened(self.subagent_system, task)
        return spoken(await subagent.use(prompt, self.toolbox(), max_turns=self.max_subagent_turns))

    def report(self, answers: Sequence[str]) -> str:
        """What the lead is told."""
        return "\n\n".join(f"Subagent {number}: {answer}" for number, answer in enumerate(answers, 1)) or "No tasks."


def _why(error: AgentStopped | ToolError) -> str:
    return "a tool broke" if isinstance(error, ToolError) else "it ran out of turns or room"

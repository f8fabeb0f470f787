"""Workflow of parallel thinking by spawn and join (APR, arXiv:2504.15466).

parent     thinks, spawn(contexts=["try 3 * 4 first", "try 3 + 4 first"])
children       each: its context, its search, join(text)    in parallel
parent     its thinking so far, then the joined texts; goes on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import PositiveInt

from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Agent, Session, Workflow
from rlsys.errors import ToolError
from rlsys.workflows.tool_use import move, opening_messages

PARENT = (
    "Solve the problem. Where several ways are worth a try, spawn a child for each: they think in parallel, know "
    "nothing but the context you write for them, and hand back what they find. Then answer without calling a tool."
)
CHILD = "Explore what you are given. Then call join with what is worth knowing: nothing else is handed over."
NOTHING = "(nothing joined)"
"""Result of a child that ended without joining."""


@dataclass(frozen=True, kw_only=True)
class SpawnJoin(Workflow):
    """A parent spawns children who see only the contexts that it writes, and continues with the texts that they join.

    A child that never joins returns nothing, and is truncated if it ran out of turns. A child whose tools raise
    `ToolError` fails, and is left out of training. In both cases the episode goes on. The transcript ends with the
    episode's sequential tokens: the longest chain in which every token had to wait for the one before. With enough
    engines for the children, that chain determines the episode's duration.
    """

    max_children: PositiveInt = 10
    """Children per spawn; further contexts are refused."""
    max_parent_turns: PositiveInt = 10
    """Turns of the parent."""
    max_child_turns: PositiveInt = 4
    """Turns of each child."""
    parent_system: str = PARENT
    """System message of the parent."""
    child_system: str = CHILD
    """System message of every child."""

    async def run(self, session: Session) -> None:
        parent = session.agent("parent")
        try:
            await self.solve(session, parent)
        finally:
            counts = f"sequential tokens: {session.num_sequential} of {session.num_sampled}"
            session.note(parent, "workflow", counts)

    async def solve(self, session: Session, parent: Agent) -> None:
        """Let the parent solve the task with the tool `spawn`."""

        async def spawn(contexts: list[str]) -> str:
            """Start a child for each context. They think in parallel; returns what each of them joins, in order."""
            return self.report(await self.spawn(session, parent, contexts))

        prompt = opening_messages(self.parent_system, session.task.prompt)
        await parent.use(prompt, Toolbox(move(spawn)), max_turns=self.max_parent_turns)

    async def spawn(self, session: Session, parent: Agent, contexts: Sequence[str]) -> list[str]:
        """Run a child per context, and return the text that each joined, or `NOTHING`."""
        children = [session.agent("child", parent=parent) for _ in contexts[: self.max_children]]
        joined = await session.gather(*map(self.explore, children, contexts))
        for child, text in zip(children, joined, strict=True):
            if isinstance(text, ToolError):
                child.fail(str(text))
        refused = [f"(refused: at most {self.max_children} children at once)"] * (len(contexts) - len(children))
        return [*(text if isinstance(text, str) else NOTHING for text in joined), *refused]

    async def explore(self, child: Agent, context: str) -> str | None:
        """Let one child explore its context, and return the joined text; None if it does not join."""
        joined: list[str] = []

        async def join(text: str) -> str:
            """Hand this text over to your parent, and end."""
            joined.append(text)
            return ""

        prompt, tools = opening_messages(self.child_system, context), Toolbox(move(join))
        for _ in range(self.max_child_turns):
            reply = await child.act(prompt, tools)
            prompt = await child.answer(reply.calls, tools)
            if joined or not reply.calls:
                break
        else:
            child.is_cut = True
        return "\n".join(joined) or None

    def report(self, joined: Sequence[str]) -> str:
        """Write the joined texts as the result of `spawn`."""
        return "\n\n".join(f"Child {number}: {text}" for number, text in enumerate(joined, 1)) or "No contexts."

"""Workflow of an agent that configures itself by a tool call (ToolSelf, arXiv:2602.07883).

stage 1    search, search, reconfigure(sub_goal=..., strategy=..., tools=["python"], knowledge=..., mode=...)
stage 2    starts from that configuration: python, python, terminate(answer="42")
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import PositiveInt

from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Session
from rlsys.types import Prompt
from rlsys.workflows.tool_use import ToolUse, move, opening_messages

EXECUTOR = (
    "Solve the task in stages. In a stage you work towards its sub-goal with its tools. When it is reached, or leads "
    "nowhere, call reconfigure to begin the next stage. When the task is solved, call terminate with the answer."
)


@dataclass(frozen=True)
class Configuration:
    """Configuration of a stage."""

    sub_goal: str = "Solve the task."
    strategy: str = "Your own."
    tools: tuple[str, ...] = ()
    """Names of the stage's tools, besides `reconfigure` and `terminate`."""
    knowledge: str = "None yet."
    """Findings of earlier stages."""
    mode: Literal["basic", "truncation"] = "basic"
    """Context of the stage. `basic`: the context continues, followed by the configuration. `truncation`: a new context
    with the task and the configuration, which starts a new sample. The paper only names the modes."""

    def __str__(self) -> str:
        lines = {"Sub-goal": self.sub_goal, "Strategy": self.strategy, "Knowledge": self.knowledge}
        lines["Tools"] = ", ".join((*self.tools, "reconfigure", "terminate"))
        return "\n".join(f"{name}: {text}" for name, text in lines.items())


@dataclass(frozen=True, kw_only=True)
class Reconfiguring(ToolUse):
    """One agent works in stages, each with a sub-goal, strategy, tools and knowledge that the agent chooses. The first
    stage has all tools.

    The episode ends with `terminate`, or with a reply without calls. Reward functions score the last turn: with
    `terminate` that is the call, in which `regex` can find `"answer": "(.*?)"`. All stages are one trajectory, and so
    share one reward, which is the label that KTO needs.
    """

    max_turns: PositiveInt = 200
    """Turns of an episode; if the last one still calls tools, the episode is truncated."""
    system: str = EXECUTOR
    """System message of the agent."""

    def __post_init__(self) -> None:
        Executor(self.toolbox()).moves()  # raises `ValueError` for a tool with the name of one of these two

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        executor = Executor(self.toolbox())
        prompt: Prompt | None = opening_messages(self.system, session.task.prompt, str(executor.stage))
        while not executor.is_over:
            stage, tools = executor.stage, executor.moves()
            reply = await agent.act(prompt, tools)
            if not reply.calls:
                return
            prompt = await agent.answer(reply.calls, tools)
            if executor.stage is not stage and executor.stage.mode == "truncation":
                agent.rewrite(opening_messages(self.system, session.task.prompt, str(executor.stage)))
                prompt = None


class Executor:
    """State of one episode, and the two tools that change it."""

    def __init__(self, every: Toolbox) -> None:
        self.every, self.is_over = every, False
        self.stage = Configuration(tools=tuple(every.tools))

    def moves(self) -> Toolbox:
        """Tools of the current stage."""
        others = map(self.every.tools.__getitem__, self.stage.tools)
        return Toolbox(move(self.reconfigure), move(self.terminate), *others)

    async def reconfigure(
        self, sub_goal: str, strategy: str, tools: list[str], knowledge: str, mode: Literal["basic", "truncation"]
    ) -> str:
        """Begin the next stage. knowledge: all that it has to know of what was found so far. mode: basic keeps the
        conversation, truncation forgets all of it but the task and this configuration."""
        if unknown := [name for name in tools if name not in self.every.tools]:
            return f"There are no tools {', '.join(unknown)}; there are {', '.join(self.every.tools) or 'none'}"
        self.stage = Configuration(sub_goal, strategy, tuple(dict.fromkeys(tools)), knowledge, mode)
        return f"The next stage begins.\n{self.stage}"

    async def terminate(self, answer: str) -> str:
        """End the task with its answer."""
        self.is_over = True
        return ""

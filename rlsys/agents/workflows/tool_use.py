"""Workflow of one agent that calls tools until it answers."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Session, Workflow
from rlsys.agents.workflows.workflow_tools import ToolNames, opened, toolbox_of


@dataclass(frozen=True, kw_only=True)
class ToolUse(Workflow):
    """One agent calls tools, also several in one reply, until it replies without a call: that reply is its answer.
    If turn `max_turns` still calls tools, the episode is truncated."""

    tools: ToolNames
    """Typed Python functions, as `module:function`; their signatures and docstrings describe them to the model."""
    system: str = "Call tools where they help. Then answer without calling any."
    """System message of the agent."""

    def toolbox(self) -> Toolbox:
        """Tools of an episode."""
        return toolbox_of(self.tools)

    async def run(self, session: Session) -> None:
        await session.agent("policy").use(opened(self.system, session.task.prompt), self.toolbox())

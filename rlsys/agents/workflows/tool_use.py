"""One agent that calls tools until it answers."""

from __future__ import annotations

from dataclasses import dataclass

from rlsys.agents.session import Session
from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Workflow
from rlsys.agents.workflows.workflow_tools import ToolNames, opened, toolbox_of


@dataclass(frozen=True, kw_only=True)
class ToolUse(Workflow):
    """One agent calls tools, several at once if it likes, and is told their results, until it replies without a call:
    that reply is its answer. Still calling in turn `max_turns`, it is truncated."""

    tools: ToolNames
    """Typed Python functions as `module:function`; what models see of them is their signature and docstring."""
    system: str = "Call tools where they help. Then answer without calling any."
    """What its context opens with."""

    def toolbox(self) -> Toolbox:
        """The tools of an episode."""
        return toolbox_of(self.tools)

    async def run(self, session: Session) -> None:
        await session.agent("policy").use(opened(self.system, session.task.prompt), self.toolbox())

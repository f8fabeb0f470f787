"""Research in rounds, each on a workspace of constant size (IterResearch, arXiv:2511.07327).

    round t sees:    the question, the report so far, the last action and its result
    round t says:    <report>the report, rewritten</report> and a tool call, or the answer

Nothing else of the rounds before is kept. Every round is a sample of its own, which the algorithm `eapo` discounts by
how many rounds came after it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import PositiveInt

from rlsys.agents.session import BudgetSpent, Reply, Session
from rlsys.agents.tool_calls import spoken
from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Workflow
from rlsys.agents.workflows.workflow_tools import ToolNames, opened, toolbox_of
from rlsys.types import Prompt, Task

RESEARCHER = (
    "Answer the question by research, in rounds. In every round you see the question, your report and what your last "
    "action gave; nothing else is remembered. First rewrite the report within <report> and </report>: all that is "
    "known and what is still open. Then call a tool, or reply with the answer and no call."
)
_REPORT = re.compile(r"<report>(.*?)(?:</report>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class State:
    """What a round starts from: nothing that a round before thought within `<think>` and `</think>`."""

    report: str = ""
    """As the round before rewrote it."""
    last: str = ""
    """The last action, and its result."""


@dataclass(frozen=True, kw_only=True)
class Research(Workflow):
    """One agent that starts every round from the question, its report and its last action, and ends with a round that
    calls no tool. Without a report in a round, the one before stays. Out of rounds it is truncated."""

    tools: ToolNames
    """What a round may call, as `module:function`."""
    max_rounds: PositiveInt = 32
    """Rounds of an episode."""
    max_report_chars: PositiveInt = 20_000
    """Longest report, in characters; of a longer one the beginning is kept. With the tools' `max_chars` it bounds what
    a round reads."""
    system: str = RESEARCHER
    """What every round's context opens with."""

    def toolbox(self) -> Toolbox:
        """The tools of an episode."""
        return toolbox_of(self.tools)

    async def run(self, session: Session) -> None:
        agent, tools, state = session.agent("policy"), self.toolbox(), State()
        for left in reversed(range(self.max_rounds)):
            agent.rewrite(self.write(session.task, state))
            reply = await agent.act(None, tools)
            if not reply.calls:
                return
            if left:
                state = self.read(reply, await agent.answer(reply.calls, tools), state)
        raise BudgetSpent(f"round {self.max_rounds}, the last (max_rounds), still called tools")

    def write(self, task: Task, state: State) -> Prompt:
        """The context of a round."""
        if state == State():
            return opened(self.system, task.prompt)
        return opened(
            self.system, task.prompt, f"Your report so far:\n{state.report}\n\nYour last action:\n{state.last}"
        )

    def read(self, reply: Reply, results: Prompt, before: State) -> State:
        """What the next round starts from."""
        text = spoken(reply.text)
        found = _REPORT.search(text)
        report = found[1].strip() if found else before.report
        action = _REPORT.sub("", text).strip()
        result = results if isinstance(results, str) else "\n".join(message["content"] for message in results)
        return State(report[: self.max_report_chars], f"{action}\n{result}")

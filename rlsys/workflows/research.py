"""Workflow of research in rounds, each on a workspace of constant size (IterResearch, arXiv:2511.07327).

    prompt of round t:    the question, the report so far, the last action and its result
    reply of round t:     <report>the report, rewritten</report> and a tool call, or the answer

Nothing else of earlier rounds is kept. Every round is a separate sample; the algorithm `eapo` discounts it by the
number of later rounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import PositiveInt

from rlsys.agents.tool_calls import spoken
from rlsys.agents.workflow import BudgetSpent, Reply, Session
from rlsys.types import Prompt, Task
from rlsys.workflows.tool_use import ToolUse, opening_messages

RESEARCHER = (
    "Answer the question by research, in rounds. In every round you see the question, your report and what your last "
    "action gave; nothing else is remembered. First rewrite the report within <report> and </report>: all that is "
    "known and what is still open. Then call a tool, or reply with the answer and no call."
)
_REPORT = re.compile(r"<report>(.*?)(?:</report>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class State:
    """State between rounds, without the thinking of earlier rounds (`<think>` to `</think>`)."""

    report: str = ""
    """Report, as rewritten in the last round."""
    last: str = ""
    """Last action and its result."""


@dataclass(frozen=True, kw_only=True)
class Research(ToolUse):
    """One agent starts every round from the question, its report and its last action, and ends by calling no tool.

    A round without a report keeps the report before it. Without an answer after `max_rounds`, the episode is truncated.
    """

    max_rounds: PositiveInt = 32
    """Rounds of an episode."""
    max_report_chars: PositiveInt = 20_000
    """Longest report, in characters; the rest is cut. With the tools' `max_chars` it bounds the prompt of a round."""
    system: str = RESEARCHER
    """System message of every round."""

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
        """Write the prompt of a round."""
        if state == State():
            return opening_messages(self.system, task.prompt)
        return opening_messages(
            self.system, task.prompt, f"Your report so far:\n{state.report}\n\nYour last action:\n{state.last}"
        )

    def read(self, reply: Reply, results: Prompt, before: State) -> State:
        """Read a round's reply and results into the state for the next round."""
        text = spoken(reply.text)
        found = _REPORT.search(text)
        report = found[1].strip() if found else before.report
        action = _REPORT.sub("", text).strip()
        result = results if isinstance(results, str) else "\n".join(message["content"] for message in results)
        return State(report[: self.max_report_chars], f"{action}\n{result}")

"""A calculator, and a workflow that offers it in characters of the tiny policy.

    31*49=  ?31*49<eos>  1519>  1519<eos>      prompt, reply, prompt, reply

A reply that begins with `?` calls the calculator; any other is the answer. A policy with a chat template needs none of
this: `{type: tool_use, tools: [examples.tools.calculator:calculator]}` offers the same function by the template.
"""

from __future__ import annotations

import re
from math import prod

from rlsys.agents.tool_calls import ToolCall
from rlsys.agents.tools import Toolbox
from rlsys.agents.workflow import Session, Workflow

CALL, TOLD, WRONG = "?", ">", "!"


def calculator(expression: str) -> str:
    """The product of whole numbers, such as `31*49`."""
    if not re.fullmatch(r"\d{1,9}(\*\d{1,9})*", expression):
        raise ValueError(f"{expression!r} is not a product of whole numbers")
    return str(prod(map(int, expression.split("*"))))


TOOLS = Toolbox(calculator)


class WithCalculator(Workflow):
    """Workflow of one agent that may call the calculator before it answers."""

    async def run(self, session: Session) -> None:
        agent = session.agent("policy")
        reply = await agent.chat(session.task.prompt)
        while reply.startswith(CALL):
            call = ToolCall("calculator", {"expression": reply.removeprefix(CALL)}, f"call_{len(agent.turns)}")
            (result,) = await TOOLS.run([call])
            reply = await agent.chat((result.content if result.outcome == "ok" else WRONG) + TOLD)

"""Tool calls as the text of a policy."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rlsys.agents.tool_calls import CLOSE, OPEN, ToolCall


def write_calls(calls: Iterable[ToolCall]) -> str:
    """Write calls as text that `read_calls` parses back into the same calls."""
    values = ({"name": call.name, "arguments": dict(call.arguments)} for call in calls)
    return "\n".join(f"{OPEN}\n{json.dumps(value, ensure_ascii=False)}\n{CLOSE}" for value in values)

"""Sort six digits by asking a model, up to twice: an ordinary program with an OpenAI client.

    echo '385120>' | OPENAI_BASE_URL=... OPENAI_API_KEY=... python -m examples.openai_agent.agent MODEL

It checks the answer, as any agent can that recognises a correct one, and asks again once. It imports nothing of rlsys.
"""

from __future__ import annotations

import asyncio
import os
import sys

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

MAX_TRIES = 2
ANYWHERE = AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none")
"""Shared client: creating one takes 20 ms, while `with_options` copies it in no time."""


async def solve(prompt: str, base_url: str, api_key: str, model: str) -> float:
    """Return the reward: 1 if the first answer is correct, a half if the second is, else 0."""
    client = ANYWHERE.with_options(base_url=base_url, api_key=api_key)
    messages: list[ChatCompletionMessageParam] = []
    for tries in range(1, MAX_TRIES + 1):
        messages.append({"role": "user", "content": prompt})
        reply = await client.chat.completions.create(model=model, messages=messages)
        answer = reply.choices[0].message.content or ""
        if answer == "".join(sorted(prompt.removesuffix(">"))):
            return 1 / tries
        messages.append({"role": "assistant", "content": answer})
    return 0.0


if __name__ == "__main__":
    at = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    print(asyncio.run(solve(sys.stdin.read().strip(), **at, model=sys.argv[1])))

"""Ready-made reward function that asks a language model on any server with OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import orjson
from openai import APIConnectionError, APIStatusError, AsyncOpenAI, OpenAIError

from rlsys.data.row_adapters import json_text
from rlsys.errors import BUSY, CannotScore, EndpointDown
from rlsys.rewards.reward_registry import JUDGE_TIMEOUT_S
from rlsys.types import Json, Prompt
from rlsys.util.printing import encodable

TEMPLATE = """\
Judge the reply to a task. Say how good it is with one number from {lowest} (wrong) to {highest} (right).
End with a line of its own that is `Score: ` and that number.

Task:
{prompt}

Right answer:
{answer}

Reply:
{completion}
"""
_SCORE = re.compile(
    r"""(?: ^ | \bscore\b (?:\s+is\b)? [^\w.]*? ) [*_`"'(\[]*
    (?P<number> [-+]? (?:\d+(?:\.\d+)?|\.\d+) ) (?: \s*(?P<percent>%) | \s*/\s*(?P<whole>\d+(?:\.\d+)?) )?
    [*_`"')\].]* $""",
    re.IGNORECASE | re.VERBOSE,
)
"""A line that is a number or ends with `score: ` and a number, with optional quotes or emphasis; also `8/10`, `90%`."""


@dataclass(frozen=True, kw_only=True)
class LlmJudge:
    """LLM-as-judge: a model, sampled at temperature 0, scores a completion from `lowest` to `highest`.

    The score must be alone on the last line of the reply, or follow `Score:` at its end. With `lowest` 0, `8/10` and
    `90%` mean that fraction of `highest`; otherwise they are ambiguous. Without a valid score within the bounds, the
    completion cannot be scored.

    The openai client retries failed requests with exponential backoff. All requests of a group, with their retries,
    must fit in `reward.timeout_s`. If a server does not answer in the end, or has no room, the group waits for it.
    """

    base_url: str
    """URL of the server, e.g. `http://127.0.0.1:8000/v1`."""
    model: str
    """Name of the model on that server."""
    template: str = TEMPLATE
    """Prompt of the judge. {prompt}, {completion} and {answer} are replaced by those of the task, {lowest} and
    {highest} by the bounds."""
    lowest: float = 0.0
    """Lowest valid score."""
    highest: float = 1.0
    """Highest valid score."""
    api_key_env: str | None = None
    """Environment variable with the API key; None: the server needs no key."""
    timeout_s: float = JUDGE_TIMEOUT_S
    """Deadline of a request with its retries, seconds; less than `reward.timeout_s`."""
    retries: int = 3
    """Retries of a failed request."""
    cache: str | None = None
    """Folder that caches replies, by a hash of the request; None: no cache."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for invalid fields."""
        if "{completion}" not in self.template:
            raise ValueError("template lacks {completion}")
        if not -math.inf < self.lowest < self.highest < math.inf:
            raise ValueError(f"lowest is {self.lowest} and highest is {self.highest}; give two numbers that ascend")
        if self.api_key_env and not os.environ.get(self.api_key_env):
            raise ValueError(f"api_key_env: the environment has no {self.api_key_env}")
        if self.cache and not Path(self.cache).expanduser().is_absolute():
            raise ValueError(f"cache: {self.cache} is relative, and workers run elsewhere; give an absolute folder")

    async def __call__(self, completion: str, prompt: Prompt, answer: Json) -> float:
        """Score one completion. Raises `CannotScore` if the request is refused, or the reply has no valid score, and
        `EndpointDown` without a reply."""
        asked = self._fill_template(completion, prompt, answer)
        kept = self._cache_file(asked)
        if kept is not None and kept.is_file():
            reply = orjson.loads(kept.read_bytes())["reply"]
        else:
            reply = await self._reply(asked)
            if kept is not None:
                _keep(kept, {"model": self.model, "asked": asked, "reply": reply})
        return self._read(reply)

    def _read(self, reply: str) -> float:
        bounds, end = f"from {self.lowest:g} to {self.highest:g}", reply.strip()[-80:]
        match = _SCORE.search(reply.strip().rpartition("\n")[2].strip())
        if match is None:
            raise CannotScore(f"the judge's reply has no number {bounds} alone on its last line: it ends with {end!r}")
        number, whole = float(match["number"]), 100.0 if match["percent"] else float(match["whole"] or 0)
        if match["percent"] or match["whole"]:
            if self.lowest != 0 or whole == 0:
                raise CannotScore(f"the judge's reply contains no number {bounds}, but a part of a whole: {end!r}")
            number *= self.highest / whole
        if not self.lowest <= number <= self.highest:
            raise CannotScore(f"the judge's reply says {number:g}, which is not {bounds}: {end!r}")
        return number

    def _fill_template(self, completion: str, prompt: Prompt, answer: Json) -> str:
        task = prompt if isinstance(prompt, str) else "\n\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        values = {
            "completion": completion,
            "prompt": task,
            "answer": json_text(answer) if isinstance(answer, list | dict) else str(answer or "(not given)"),
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }
        return re.sub(rf"\{{({'|'.join(values)})\}}", lambda found: values[found[1]], self.template)

    async def _reply(self, asked: str) -> str:
        client = _client(self, asyncio.get_running_loop())
        try:
            async with asyncio.timeout(self.timeout_s):
                done = await client.chat.completions.create(
                    model=self.model, messages=[{"role": "user", "content": asked}], temperature=0
                )
        except TimeoutError as error:
            raise EndpointDown(self.base_url, f"no answer within {self.timeout_s:g} s") from error
        except APIConnectionError as error:
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise EndpointDown(self.base_url, f"asked {self.retries + 1} times: {error}{cause}") from error
        except APIStatusError as error:
            is_busy = error.status_code in BUSY
            if not is_busy and error.status_code < 500:
                raise CannotScore(f"no reply from {self.base_url}: {error}") from error
            raise EndpointDown(self.base_url, f"asked {self.retries + 1} times: {error}", is_busy=is_busy) from error
        except OpenAIError as error:
            raise CannotScore(f"no reply from {self.base_url}: {error}") from error
        return encodable((done.choices[0].message.content if done.choices else None) or "")

    def _cache_file(self, asked: str) -> Path | None:
        """Return the cache file of a request, which may not exist."""
        if self.cache is None:
            return None
        digest = sha256(orjson.dumps([self.base_url, self.model, asked])).hexdigest()
        return Path(self.cache).expanduser() / digest[:2] / f"{digest}.json"


@lru_cache(maxsize=8)
def _client(judge: LlmJudge, loop: asyncio.AbstractEventLoop) -> AsyncOpenAI:
    """Create one client per event loop, since a client's connections belong to one loop."""
    key = os.environ[judge.api_key_env] if judge.api_key_env else "none"
    return AsyncOpenAI(base_url=judge.base_url, api_key=key, timeout=judge.timeout_s, max_retries=judge.retries)


def _keep(path: Path, reply: dict[str, str]) -> None:
    """Write a file atomically, since other processes read and write the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_bytes(orjson.dumps(reply))
    partial.replace(path)

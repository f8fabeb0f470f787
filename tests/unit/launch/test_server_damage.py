"""Odd and damaged requests to both servers of OpenAI's paths, before a model with a tokenizer and a chat template."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlsys.config import Config
from rlsys.gateway.gateway_server import HOST
from rlsys.gateway.http_front import MAX_BODY
from rlsys.gateway.policy_server import PolicyServer
from rlsys.launch.policy_serving import config_to_serve, serve_policy
from rlsys.types import POLICY
from rlsys.util.connection_limits import ConnectionLimits
from tests.damage import ODD_HEADERS, ODD_JSON, with_odd_value, with_other_bytes
from tests.gateways import CALL, WEATHER, user
from tests.models import tiny_qwen3
from tests.served_policies import HEALTHY, KEY, SERVERS, ServerName, Target, listening
from workers.rollout.local_policies import live_policies

pytestmark = pytest.mark.slow

AT_ONCE = 25
LONGEST_S, MOST_MB = 10.0, 500
ANSWERS = {200, 400, 401, 404, 405, 408, 410, 413, 415, 417}
"""Statuses that an odd request may get, besides a closed connection (0)."""
KEYS = ("rollout.max_new_tokens=3", "data.max_prompt_tokens=500", "rollout.slots=32")
TEMPLATE = (
    "{% for m in messages %}<im>{{ m.role }}\n{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<im>assistant\n{% endif %}"
)
_SAID = [
    user("hi"),
    {"role": "assistant", "content": CALL, "tool_calls": [
        {"id": "call_0_0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_0_0", "content": [{"type": "text", "text": "rain"}]},
]  # fmt: skip
_DRAWN = {"model": "policy", "temperature": 0.5, "top_p": 0.9, "seed": 3, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        **_DRAWN, "messages": _SAID, "tools": [WEATHER], "max_tokens": 2, "n": 1, "stop": ["x"], "tool_choice": "auto",
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 0, "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "max_completion_tokens": 3, "modalities": ["text"],
    },
    "/completions": {
        **_DRAWN, "prompt": [[5, 6, 7], "hello"], "max_tokens": 2, "n": 1, "stop": None, "logprobs": 0, "suffix": "",
    },
    "/responses": {
        **_DRAWN, "instructions": "Be brief.", "max_output_tokens": 2, "text": {"format": {"type": "text"}},
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}], "tool_choice": "auto",
        "include": ["message.output_text.logprobs"], "previous_response_id": None,
    },
}  # fmt: skip
PATHS = (*BODIES, "/models", "/models/policy", "/models/%00", "//", "/%ff", "*", "/../etc/passwd", "x" * 9000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that reads any text, byte by byte."""
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<eos>", "<im>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny_qwen3(vocab_size=300, max_position_embeddings=1024, eos_token_id=256).save_pretrained(folder)
    return str(folder)


def before_model(model: str, name: ServerName, scenario: Callable[[Target], Any], limits: ConnectionLimits) -> Any:
    """What the scenario returns. After it a healthy request is answered, and nothing was raised in a workflow."""
    config, _ = config_to_serve(model, KEYS)

    async def main() -> Any:
        if name == "serve":
            async with serve_policy(config, "policy", KEY, limits) as server:
                return await ask(Target(await server.listen(HOST, 0), KEY, "/v1"), server)
        return await before_gateway(config)

    async def before_gateway(config: Config) -> Any:
        async with live_policies(config) as policies, listening("gateway", policies[POLICY], limits) as target:
            result = await ask(target, None)
            assert target.endpoint is not None
            await target.endpoint.while_sound(asyncio.sleep(0))
            return result

    async def ask(target: Target, server: PolicyServer | None) -> Any:
        try:
            result = await scenario(target)
            assert (await target.answer_to(target.request(HEALTHY)))[0] == 200
            return result
        finally:
            if server is not None:
                await server.close()

    return asyncio.run(main())


def odd_request(target: Target, random: Random) -> bytes:
    """A request with something wrong in its JSON, its headers, its path or its bytes."""
    path = random.choice([*BODIES])
    value: Any = BODIES[path]
    for _ in range(random.choice([1, 1, 2, 4])):
        value = with_odd_value(value, random)
    if isinstance(value, dict) and random.random() < 0.2:
        value = {**value, "stream": True}
    body = json.dumps(value).encode()
    match random.randrange(9):
        case 0 | 1 | 2 | 3:
            return target.request(body, path=path)
        case 4:
            odd = random.choice(ODD_JSON).encode()
            return target.request(
                body.replace(b":", b": " + odd + b", ", 1) if random.random() < 0.5 else odd, path=path
            )
        case 5:
            return target.request(body, *random.sample(ODD_HEADERS, random.choice([1, 1, 3])), path=path)
        case 6:
            return target.request(body, path=random.choice(PATHS))
        case 7:
            return with_other_bytes(target.request(body, path=path), random)
        case _:
            whole = target.request(body, path=path)
            return whole[: random.randrange(len(whole))]


def ask_odd(model: str, name: ServerName, random: Random, num: int) -> Counter[int]:
    """Count the statuses of odd requests, `AT_ONCE` at a time. None takes longer than `LONGEST_S`."""

    async def timed(target: Target, sent: bytes) -> int:
        begin_s = time.monotonic()
        status, body = await target.answer_to(sent)
        assert time.monotonic() - begin_s < LONGEST_S, sent[:2000]
        assert status in {0, *ANSWERS}, (status, body, sent[:2000])
        if status >= 400:
            assert json.loads(body)["error"]["message"], (status, body)
        return status

    async def scenario(target: Target) -> Counter[int]:
        statuses = Counter[int]()
        for _ in range(-(-num // AT_ONCE)):
            sent = [odd_request(target, random) for _ in range(AT_ONCE)]
            statuses.update(await asyncio.gather(*(timed(target, each) for each in sent)))
        return statuses

    return before_model(model, name, scenario, ConnectionLimits(request_s=0.5, body_s=0.5))


def most_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("name", SERVERS)
def test_odd_requests_are_answered_and_fail_nothing(model: str, name: ServerName, fuzz_case: int):
    assert ask_odd(model, name, Random(fuzz_case), AT_ONCE)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SERVERS)
def test_thousands_of_odd_requests_cost_little(model: str, name: ServerName):
    ask_odd(model, name, Random("warm"), AT_ONCE)
    before_mb = most_memory_mb()
    statuses = ask_odd(model, name, Random(0), 3000)
    assert statuses[200] > 100 and most_memory_mb() - before_mb < MOST_MB


ODD_BODIES: dict[str, tuple[str, object]] = {
    "a list as the type of an item": ("/responses", {"input": [{"type": []}]}),
    "a section as the type of an item": ("/responses", {"input": [{"type": {}}]}),
    "a list as the type of a tool": ("/responses", {"input": "hi", "tools": [{"type": []}]}),
    "a list as the type of a format": ("/responses", {"input": "hi", "text": {"format": {"type": []}}}),
    "a token beyond the vocabulary": ("/completions", {"prompt": [300]}),
    "a token beyond 64 bits": ("/completions", {"prompt": [[1, 2**64 - 1]]}),
    "a token below 0": ("/completions", {"prompt": [-1]}),
    "true as a token": ("/completions", {"prompt": [True, 10**12]}),
}


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("case", ODD_BODIES)
def test_an_odd_body_is_refused(model: str, name: ServerName, case: str):
    path, body = ODD_BODIES[case]

    async def scenario(target: Target) -> tuple[int, bytes]:
        sent = json.dumps({"model": "policy", **body}).encode()  # type: ignore[dict-item]
        return await target.answer_to(target.request(sent, path=path))

    status, answer = before_model(model, name, scenario, ConnectionLimits())
    assert status == 400 and json.loads(answer)["error"]["message"]


@pytest.mark.parametrize("temperature", [1e-10, 5e-324, 0.0099, -1e-10, 2.0001, 1e308])
def test_a_temperature_that_no_engine_can_draw_with_is_refused(model: str, temperature: float):
    async def scenario(target: Target) -> tuple[int, bytes]:
        sent = {**json.loads(HEALTHY), "temperature": temperature}
        return await target.answer_to(target.request(json.dumps(sent).encode()))

    status, answer = before_model(model, "serve", scenario, ConnectionLimits())
    assert status == 400 and b"temperature: " in answer


LARGE_PIECES = (
    b"[],", b'{"":0},', b'{"role":"user","content":""},', b'{"role":"assistant","content":"","tool_calls":[]},',
    b'{"role":"user","content":"' + 1000 * b"a b " + b'"},',
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("piece", LARGE_PIECES, ids=range(len(LARGE_PIECES)))
def test_the_largest_body_costs_little(model: str, name: ServerName, piece: bytes):
    head, tail = b'{"model":"policy","messages":[', b'{"role":"user","content":""}]}'
    body = head + piece * ((MAX_BODY - len(head) - len(tail)) // len(piece)) + tail

    async def scenario(target: Target) -> tuple[float, int]:
        begin_s = time.monotonic()
        status, _ = await target.answer_to(target.request(body))
        return time.monotonic() - begin_s, status

    before_mb = most_memory_mb()
    seconds, status = before_model(model, name, scenario, ConnectionLimits())
    assert status == 400 and seconds < LONGEST_S and most_memory_mb() - before_mb < MOST_MB

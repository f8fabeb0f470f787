"""`rlsys serve`: an OpenAI client talks to a policy that is not being trained."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from examples.tiny_policy import build_tokenizer
from rlsys.errors import ConfigError
from rlsys.launch.policy_serving import TOKEN_VARIABLE, config_to_serve, serve, serve_policy
from tests.models import tiny_sorter

RLSYS = Path(sys.executable).with_name("rlsys")
KEYS = ("rollout.max_new_tokens=6", "data.max_prompt_tokens=20")
TOKEN = "a token of some length"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tiny_sorter().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def asked(model: str, scenario: Callable[[Any], Awaitable[Any]], token: str = TOKEN) -> Any:
    """What the scenario returns, given a function that asks for a chat completion."""

    async def main() -> Any:
        config, name = config_to_serve(model, KEYS)
        async with serve_policy(config, name, TOKEN) as server:
            url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=token, max_retries=0) as client:

                def chat(content: str, **more: Any) -> Awaitable[Any]:
                    messages = [{"role": "user", "content": content}]
                    return client.chat.completions.create(model=name, messages=messages, **more)  # type: ignore[arg-type]

                try:
                    return await scenario(chat)
                finally:
                    await server.close()

    return asyncio.run(main())


def test_the_client_decides_how_tokens_are_drawn(model: str):
    async def scenario(chat: Any) -> tuple[str, str, set[str]]:
        greedy = [(await chat("312>", temperature=0)).choices[0].message.content for _ in range(2)]
        sampled = await asyncio.gather(*(chat("312>", temperature=1.5, seed=seed) for seed in range(1, 9)))
        return greedy[0], greedy[1], {reply.choices[0].message.content for reply in sampled}

    first, second, sampled = asked(model, scenario)
    assert first == second and len(sampled) > 1


def test_a_model_is_served_under_its_own_name(model: str, monkeypatch: pytest.MonkeyPatch):
    assert config_to_serve("org/name", ("model.dtype=float32",))[1] == "org/name"
    monkeypatch.chdir(model)
    assert config_to_serve(".")[1] == Path(model).name


def test_a_reply_has_usage_logprobs_and_an_end(model: str):
    async def scenario(chat: Any) -> Any:
        return await chat("312>", temperature=0.7, top_p=0.9, logprobs=True, max_tokens=3)

    reply = asked(model, scenario)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 3)
    assert len(reply.choices[0].logprobs.content) == 3 and reply.choices[0].finish_reason == "length"


def test_refusals_name_what_is_wrong(model: str):
    async def too_long(chat: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=r"25 tokens, allowed are 1 to data\.max_prompt_tokens = 20"):
            await chat("1" * 25)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await chat("1", temperature=9)

    async def stranger(chat: Any) -> None:
        with pytest.raises(openai.AuthenticationError, match="not that of this server"):
            await chat("1")

    asked(model, too_long)
    asked(model, stranger, token="another token")


@pytest.mark.slow
def test_the_command_prints_how_to_reach_it_and_ends_on_ctrl_c(model: str):
    command = [str(RLSYS), "serve", model, "--port", "0", "--max-tokens", "3", *KEYS]
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None and child.stderr is not None
        lines = [child.stdout.readline() for _ in range(3)]
        address, name = (line.split()[1] for line in (lines[0], lines[2]))
        with openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0) as client:
            asked = [{"role": "user", "content": "312>"}]
            reply = client.chat.completions.create(model=name, messages=asked, temperature=0)  # type: ignore[arg-type]
        child.send_signal(signal.SIGINT)
        child.wait(60)
        problems = child.stderr.read()
    assert lines[0].startswith("base_url  http://127.0.0.1:") and lines[1] == f"api_key   {TOKEN}\n"
    assert "Traceback" not in problems
    assert reply.usage is not None and reply.usage.completion_tokens == 3


@pytest.mark.slow
def test_unfinished_headers_of_strangers_neither_block_the_command_nor_fill_its_log(model: str, tmp_path: Path):
    """With 400 open files, 600 connections: half of the files stay free, so that each is accepted, and most closed."""
    command = ["sh", "-c", 'ulimit -n 400; exec "$@"', "sh", sys.executable, "-m", "rlsys.cli", "serve", model]
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen([*command, "--port", "0", *KEYS], stdout=subprocess.PIPE, stderr=errors, text=True) as child,
        ExitStack() as held,
    ):
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(3)]
        place = urlsplit(lines[0].split()[1])
        try:
            first = held.enter_context(socket.create_connection((place.hostname, place.port), 20))
            for _ in range(600):
                stranger = held.enter_context(socket.create_connection((place.hostname, place.port), 20))
                with suppress(ConnectionError):  # it may be closed already
                    stranger.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            key = lines[1].split()[1]
            first.sendall(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            assert first.recv(100).startswith(b"HTTP/1.1 200")
        finally:
            child.send_signal(signal.SIGINT)
        child.wait(60)
    assert log.stat().st_size < 50_000


def test_a_short_token_is_refused(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "short")
    with pytest.raises(ConfigError, match=r"RLSYS_SERVE_TOKEN has 5 characters, and needs 16"):
        serve(model, "127.0.0.1", 0, print)

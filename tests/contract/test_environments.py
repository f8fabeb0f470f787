"""What every environment promises, run against the fake and each adapter; then what each adapter adds."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rlsys.agents.environment import Environment, Step, make
from rlsys.agents.environments.mcp import mcp_toolbox
from rlsys.agents.environments.openenv import OpenEnv
from rlsys.agents.tool_calls import ToolCall
from rlsys.errors import ConfigError, EndpointDown, ToolError
from rlsys.testing import FakeEnvironment
from rlsys.types import Json, Message, Prompt, Task
from tests.processes import Holders, stray
from tests.stray_processes import WAYS
from tests.worlds import openenv_server

PLAIN = Task(id="t", prompt="Rules.")
CHAT = Task(id="t", prompt=(Message(role="system", content="S"), Message(role="user", content="Rules.")))
MCP_SERVER = f"{sys.executable} -m tests.mcp_server"
HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None


@dataclass(frozen=True)
class Case:
    """An environment by its name; `SERVER` in it is the address of an OpenEnv server."""

    spec: str
    args: dict[str, Json]
    replies: tuple[str, ...] = tuple(map(str, range(1, 11)))
    """One of them, in this order, ends it with its best reward."""
    best: float | None = 1.0
    bad: str = "I do not know."

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Callable[[], Environment]]:
        """What makes a new one, while its server is up."""
        async with openenv_server() as url:
            yield lambda: make(self.spec.replace("SERVER", url), self.args)


CASES = [
    Case("rlsys.testing:FakeEnvironment", {}),
    Case("gymnasium:tests/Guess-v0", {}),
    Case("openenv:SERVER", {"action": "guess"}),
    Case(f"mcp:{MCP_SERVER}", {}, ("42",), best=None),
    pytest.param(
        Case("reasoning_gym:basic_arithmetic", {"min_terms": 2, "max_terms": 2}, tuple(map(str, range(-9999, 9999)))),
        marks=pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed"),
    ),
]


def play(case: Case, script: Callable[[Callable[[], Environment]], Coroutine[object, object, object]]) -> None:
    async def run() -> None:
        async with case.server() as new:
            await script(new)

    asyncio.run(run())


async def last_step(world: Environment, replies: Iterable[str]) -> Step:
    for reply in replies:
        step = await world.step(reply)
        if step.is_done or step.is_truncated:
            return step
    raise AssertionError("it never ends")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.spec.partition(":")[0])
class TestEveryEnvironment:
    def test_the_opening_keeps_the_form_of_the_prompt(self, case: Case):
        async def script(new: Callable[[], Environment]) -> None:
            world, other = new(), new()
            plain, chat = await world.reset(PLAIN, 1), await other.reset(CHAT, 1)
            assert isinstance(plain, str) and plain.startswith("Rules.")
            assert isinstance(chat, tuple) and [message["role"] for message in chat] == ["system", "user"]
            assert chat[-1]["content"].startswith("Rules.")
            await other.close()
            await world.close()

        play(case, script)

    def test_a_seed_decides_what_happens_and_no_two_share_anything(self, case: Case):
        async def script(new: Callable[[], Environment]) -> None:
            first, second = new(), new()
            assert await first.reset(PLAIN, 7) == await second.reset(PLAIN, 7)
            assert await first.step(case.replies[0]) == await second.step(case.replies[0])
            await second.close()
            await first.close()

        play(case, script)

    def test_it_can_be_played_to_its_end(self, case: Case):
        if case.spec.startswith("reasoning_gym"):
            pytest.skip("one reply ends it; see below")

        async def script(new: Callable[[], Environment]) -> None:
            world = new()
            await world.reset(PLAIN, 3)
            step = await last_step(world, case.replies)
            assert (step.is_done, step.reward) == (True, case.best)
            await world.close()

        play(case, script)

    def test_a_reply_that_makes_no_sense_is_answered(self, case: Case):
        async def script(new: Callable[[], Environment]) -> None:
            world = new()
            await world.reset(PLAIN, 3)
            step = await world.step(case.bad)
            assert isinstance(step.observation, str) and (step.reward or 0.0) <= 0.01
            await world.close()

        play(case, script)

    def test_it_can_be_closed_before_it_began(self, case: Case):
        async def script(new: Callable[[], Environment]) -> None:
            await new().close()

        play(case, script)


def test_the_fake_is_truncated_when_its_tries_are_used_up():
    async def script() -> Step:
        world = FakeEnvironment(tries=2)
        await world.reset(PLAIN, 1)
        return await last_step(world, ["no", "neither"])

    assert asyncio.run(script()).is_truncated


# ------------------------------------------------------------------------------------------------------- by their names


@pytest.mark.parametrize(
    ("spec", "args", "said"),
    [
        ("gymnasium:", {}, "environment 'gymnasium:': say which one after the colon"),
        ("gymnasium:No-v0", {}, "environment 'gymnasium:No-v0': Environment `No` doesn't exist."),
        ("gymnasium:CartPole-v1", {"render": 1}, "environment 'gymnasium:CartPole-v1': "),
        ("gymnasium:Pendulum-v1", {}, "environment 'gymnasium:Pendulum-v1' takes actions in Box("),
        ("gymnasium:tests/Guess-v0", {"actions": ["a"]}, "1 names of actions do not fit Discrete(10, start=1)"),
        ("openenv:nowhere", {}, "environment 'openenv:nowhere': give the server's address"),
        ("openenv:http://a", {"actoin": 1}, "args: got an unexpected keyword argument 'actoin'; it takes url, action"),
        ("rlsys.nothing:A", {}, "No module named 'rlsys.nothing'; give `gymnasium:...`, `reasoning_gym:...`"),
        ("rlsys.testing:FakeWorld", {}, "is not a subclass of rlsys.agents.environment.Environment"),
    ],
)
def test_what_cannot_be_made_is_a_configuration_error(spec: str, args: dict[str, Json], said: str):
    with pytest.raises(ConfigError) as caught:
        make(spec, args)
    assert said in str(caught.value)


@pytest.mark.skipif(HAS_GYM, reason="reasoning-gym is installed")
def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(ConfigError, match=r"No module named 'reasoning_gym'; pip install rlsys\[gym\]"):
        make("reasoning_gym:leg_counting", {})


# ------------------------------------------------------------------------------------------------------------ gymnasium


def first_observation(spec: str, prompt: Prompt = "", **args: Json) -> tuple[Prompt, Environment]:
    world = make(spec, args)
    return asyncio.run(world.reset(Task(id="t", prompt=prompt), 0)), world


def test_gymnasiums_own_environments_are_written_out():
    opening, _ = first_observation("gymnasium:FrozenLake-v1", "Walk.", render_mode="ansi", is_slippery=False)
    assert isinstance(opening, str)
    assert opening.startswith("Walk.\n") and opening.endswith("FFFH\nHFFG")
    assert first_observation("gymnasium:FrozenLake-v1")[0] == "0"


@pytest.mark.parametrize(
    ("reply", "then"), [("down", "4"), ("First left, or rather: RIGHT!", "1"), ("leftmost or uptown: right.", "1")]
)
def test_the_last_word_for_an_action_counts(reply: str, then: str):
    actions: Json = ["left", "down", "right", "up"]
    _, world = first_observation("gymnasium:FrozenLake-v1", is_slippery=False, actions=actions)
    assert asyncio.run(world.step(reply)).observation == then


@pytest.mark.parametrize("reply", ["", "1.5", "x2", "4", "-1"])
def test_an_invalid_reply_lists_the_actions_and_changes_nothing(reply: str):
    _, world = first_observation("gymnasium:FrozenLake-v1", is_slippery=False)
    assert asyncio.run(world.step(reply)) == Step("No action is named in your reply. The actions are 0, 1, 2, 3.")
    assert asyncio.run(world.step("2")).observation == "1"


# -------------------------------------------------------------------------------------------------------- reasoning-gym


@pytest.mark.skipif(not HAS_GYM, reason="reasoning-gym is not installed")
def test_reasoning_gym_scores_the_answer_in_its_tags():
    import reasoning_gym  # type: ignore[import-not-found]

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=5)[0]

    async def script(reply: str) -> tuple[Prompt, Step]:
        world = make("reasoning_gym:basic_arithmetic", {})
        return await world.reset(PLAIN, 5), await world.step(reply)

    opening, step = asyncio.run(script(f"So <answer>{entry['answer']}</answer>."))
    assert opening == f"Rules.\n{entry['question']}"
    assert step == Step("", reward=1.0, is_done=True)
    with pytest.raises(ConfigError, match=r"there is no such task; there are .*basic_arithmetic"):
        make("reasoning_gym:basic_arithmetics", {})


# -------------------------------------------------------------------------------------------------------------- OpenEnv


async def openenv(fault: str, *replies: str, action: str | None = "guess") -> list[Step]:
    async with openenv_server(fault) as url:
        world = OpenEnv(url, action=action)
        try:
            await world.reset(PLAIN, 3)
            return [await world.step(reply) for reply in replies]
        finally:
            await world.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("garbage", r"gave no answer to 'step': JSONDecodeError"),
        ("leave", r"gave no answer to 'step': ConnectionClosed"),
        ("full", r"answers to 'reset': no room for another session \(CAPACITY_REACHED\)"),
        ("broken", r"answers to 'step': division by zero \(EXECUTION_ERROR\)"),
    ],
)
def test_a_server_that_fails_is_not_the_policys_fault(fault: str, said: str):
    with pytest.raises(ToolError, match=said):
        asyncio.run(openenv(fault, "1"))


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(EndpointDown, match=r"ws://127.0.0.1:9/ws does not answer: "):
        asyncio.run(OpenEnv("http://127.0.0.1:9/").reset(PLAIN, 1))


def test_without_a_field_the_reply_is_the_whole_action():
    text, wrong, right = asyncio.run(openenv("", "7", '{"number": 7}', '{"guess": 1}', action=None))
    assert text.observation == "Your reply is not an action: give one JSON object, and nothing else."
    assert wrong.observation == "Your action is refused: guess: Field required (VALIDATION_ERROR)"
    assert right.observation in ("right", "higher")


@pytest.mark.parametrize(
    "reply",
    ["[" * 100_000, '{"guess": ' * 100_000, '{"guess": NaN}', '{"guess": 1e999}', r'{"guess": "\ud800"}', "[1]"],
)
def test_a_reply_that_is_no_json_is_told_so(reply: str):
    (step,) = asyncio.run(openenv("", reply, action=None))
    assert step == Step("Your reply is not an action: give one JSON object, and nothing else.")


def test_an_answer_nested_too_deeply_is_the_servers_fault():
    with pytest.raises(ToolError, match="gave no answer to 'step': RecursionError"):
        asyncio.run(openenv("deep", "1"))


# ---------------------------------------------------------------------------------------------------------- credentials


@pytest.fixture
def key() -> Iterator[str]:
    """Name of an environment variable with a credential."""
    os.environ["TESTS_KEY"] = "hush"
    yield "TESTS_KEY"
    del os.environ["TESTS_KEY"]


@pytest.mark.parametrize(
    ("environment", "args", "problem"),
    [
        ("mcp:http://a", {"api_key_env": "NO_SUCH"}, "api_key_env: the environment has no NO_SUCH"),
        ("mcp:x", {"variables_env": ["NO_SUCH"]}, "variables_env: the environment has no NO_SUCH"),
        ("openenv:http://a", {"api_key_env": "NO_SUCH"}, "api_key_env: the environment has no NO_SUCH"),
        ("mcp:x", {"api_key_env": "PATH"}, "api_key_env is for a URL; a command takes variables_env"),
        ("mcp:http://a", {"variables_env": ["PATH"]}, "variables are for a command; a URL takes api_key_env"),
    ],
)
def test_a_credential_that_cannot_be_given_is_refused(environment: str, args: dict[str, Json], problem: str):
    with pytest.raises(ConfigError, match=problem):
        make(environment, args)


def test_a_command_gets_the_variables_that_are_named(key: str):
    async def script() -> None:
        world = make(f"mcp:{MCP_SERVER}", {"variables_env": [key]})
        try:
            await world.reset(PLAIN, 1)
            assert (await world.tools.run([call("variable", key=key)]))[0].content == "hush"
        finally:
            await world.close()

    asyncio.run(script())


@pytest.mark.parametrize("environment", ["mcp", "openenv"])
def test_a_server_gets_the_key_as_a_bearer_token(environment: str, key: str):
    async def script() -> list[bytes]:
        requests: list[bytes] = []

        async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            world = make(f"{environment}:http://127.0.0.1:{port}/mcp", {"api_key_env": key})
            with pytest.raises(ToolError):
                await world.reset(PLAIN, 1)
            await world.close()
        return requests

    assert b"authorization: bearer hush" in asyncio.run(script())[0].lower()


# ------------------------------------------------------------------------------------------------------------------ MCP


def call(name: str, **arguments: Json) -> ToolCall:
    return ToolCall(name, arguments, "1")


def test_tools_of_an_mcp_server_are_listed_and_called():
    async def script() -> None:
        async with mcp_toolbox(MCP_SERVER) as tools:
            schema = tools.tools["add"].schema["function"]
            assert isinstance(schema, dict) and schema["description"] == "The sum of two numbers."
            parameters = schema["parameters"]
            assert isinstance(parameters, dict) and parameters["required"] == ["a", "b"]
            added, wrong, failed = await tools.run([call("add", a=1, b=2), call("add", a="x"), call("fail", why="no")])
            assert (added.content, added.outcome) == ("3", "ok")
            assert (wrong.outcome, failed.outcome) == ("error", "error")
            assert "valid integer" in wrong.content and "fail" in failed.content

    asyncio.run(script())


def test_a_tool_that_hangs_times_out_and_the_server_continues():
    async def script() -> None:
        async with mcp_toolbox(MCP_SERVER, timeout_s=10) as tools:
            quick = type(tools)(*(replace(each, timeout_s=0.2) for each in tools.tools.values()))
            (hung,) = await quick.run([call("hang")])
            assert hung.outcome == "timeout"
            assert (await tools.run([call("add", a=1, b=1)]))[0].content == "2"

    asyncio.run(script())


@pytest.mark.parametrize("end", ["closed", "dead"])
def test_what_a_server_started_ends_with_it(tmp_path: Path, end: str):
    async def script() -> None:
        async with mcp_toolbox(MCP_SERVER, timeout_s=60) as tools:
            left = await tools.run([call("leave_behind", way=way, pipe=str(holders.pipe)) for way in WAYS])
            assert [each.outcome for each in left] == ["ok"] * len(WAYS)
            if end == "dead":
                await tools.run([call("leave")])

    with closing(Holders(tmp_path)) as holders:
        with pytest.raises(ToolError, match="is gone") if end == "dead" else nullcontext():
            asyncio.run(script())
        assert holders.are_gone()


def test_a_server_that_ignores_its_end_is_killed_with_what_it_started(tmp_path: Path):
    async def script() -> None:
        with pytest.raises(ToolError, match="does not answer"):
            async with mcp_toolbox(shlex.join(stray("a daemon", holders.pipe, "hang")), timeout_s=1):
                pass

    with closing(Holders(tmp_path)) as holders:
        asyncio.run(script())
        assert holders.are_gone()


def test_a_server_ends_with_the_replica_that_started_it(tmp_path: Path):
    with closing(Holders(tmp_path)) as holders:
        server = shlex.join(stray("a daemon", holders.pipe, "hang"))
        code = f"asyncio.run(make('mcp:' + {server!r}, {{}}).reset(Task(id='t', prompt=''), 1))"
        imports = "import asyncio; from rlsys.agents.environment import make; from rlsys.types import Task; "
        with subprocess.Popen([sys.executable, "-c", imports + code]) as replica:
            assert holders.have_started()
            replica.kill()
        assert holders.are_gone()


@pytest.mark.parametrize("environment", ["mcp:http://127.0.0.1:9/mcp", "openenv:http://127.0.0.1:9"])
def test_a_server_that_is_away_is_waited_for(environment: str):
    with pytest.raises(EndpointDown, match=r"127\.0\.0\.1:9/.* does not answer"):
        asyncio.run(make(environment, {}).reset(PLAIN, 1))


def test_a_server_that_cannot_be_started_is_named():
    async def script() -> None:
        async with mcp_toolbox("/no/such/server", timeout_s=5):
            pass

    with pytest.raises(ToolError, match="the MCP server '/no/such/server' does not answer"):
        asyncio.run(script())

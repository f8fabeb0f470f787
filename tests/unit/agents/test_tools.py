"""Tools: a schema from a signature, parallel calls with deadlines, and text for the model in every case."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from rlsys.agents import tools
from rlsys.agents.tool_calls import Malformed, ToolCall
from rlsys.agents.tools import Tool, Toolbox, ToolResult, tool
from rlsys.errors import ToolError, WorkerDied


def search(query: str, limit: int = 5, order: Literal["best", "newest"] = "best") -> list[str]:
    """Titles of the pages that match a query.

    The best first.
    """
    return [f"{query} {order} {n}" for n in range(limit)]


def ran(*calls: ToolCall | Malformed, box: Toolbox) -> list[ToolResult]:
    return asyncio.run(box.run(calls))


def asked(function: Callable[..., Any] | Tool, **arguments: Any) -> ToolResult:
    made = function if isinstance(function, Tool) else tool(function)
    return ran(ToolCall(made.name, arguments, "c"), box=Toolbox(made))[0]


# -------------------------------------------------------------------------------------------------------------- schemas


def test_a_schema_comes_from_the_signature_and_the_docstring():
    assert tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Titles of the pages that match a query.\n\nThe best first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer", "default": 5},
                    "order": {"type": "string", "enum": ["best", "newest"], "default": "best"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


@dataclass
class Shop:
    """A place with prices."""

    factor: float

    async def price(self, of: Annotated[str, Field(description="An article.")], *, schema: int = 1) -> float:
        """What it costs."""
        return self.factor * schema

    def __call__(self, self_: int) -> int:
        """Called as it is."""
        return self_


class Point(BaseModel):
    x: int
    y: int = 0


def test_methods_annotations_models_and_any_name_of_a_parameter_work():
    box = Toolbox(Shop(2.0).price, tool(Shop(1.0), name="shop"))
    properties = box.schemas[0]["function"]["parameters"]["properties"]  # type: ignore[index,call-overload]
    assert properties["of"] == {"type": "string", "description": "An article."}  # type: ignore[index,call-overload]
    calls = [ToolCall("price", {"of": "tea", "schema": 3}, "a"), ToolCall("shop", {"self_": 4}, "b")]
    assert [(r.content, r.outcome) for r in ran(*calls, box=box)] == [("6.0", "ok"), ("4", "ok")]

    def norm(point: Point) -> int:
        """Length in blocks."""
        return abs(point.x) + abs(point.y)

    assert asked(norm, point={"x": -3}).content == "3"


def no_docstring(a: int) -> int:
    return a


def untyped(a) -> int:
    """Has no type."""
    return a


def by_position(a: int, /) -> int:
    """Cannot be named."""
    return a


def many(*a: int) -> int:
    """Any number."""
    return 0


def lost(a: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """A type that is not there."""
    return 0


def strange(a: threading.Lock) -> int:
    """A type without a schema."""
    return 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "the tool 'no_docstring' has no docstring: it is what tells the model when to call it"),
        (untyped, "parameter 'a' of the tool 'untyped' has no type: annotate it"),
        (by_position, "parameter 'a' of the tool 'by_position' cannot be given by name"),
        (many, "parameter 'a' of the tool 'many' cannot be given by name"),
        (strange, "the signature of the tool 'strange' has no schema"),
        (lost, "a type of the tool 'lost' is not found: name 'Nowhere' is not defined"),
        (lambda a: a, "'<lambda>' is no name for a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_says_why(function: Callable[..., Any], message: str):
    with pytest.raises(TypeError, match=message):
        tool(function)


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two tools are called 'search'"):
        Toolbox(search, tool(search))


# -------------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize(
    ("value", "content"),
    [("text", "text"), (None, "null"), (3, "3"), ({"a": [1, None]}, '{"a":[1,null]}'), (Point(x=1), '{"x":1,"y":0}')],
)
def test_results_become_text(value: object, content: str):
    def give() -> object:
        """Something."""
        return value

    result = asked(give)
    assert (result.content, result.outcome, result.is_cut) == (content, "ok", False)


def test_wrong_arguments_are_told_to_the_model():
    result = asked(search, query=3, limt=4, order="oldest")
    assert result.outcome == "error"
    assert result.content == (
        "`search` was called with wrong arguments: query: Input should be a valid string; "
        "order: Input should be 'best' or 'newest'; limt: Extra inputs are not permitted"
    )
    assert asked(search, query="a", limit="2").content == '["a best 0","a best 1"]'


def test_a_tool_of_a_server_gets_arguments_as_they_are():
    async def forward(**arguments: object) -> str:
        return str(arguments)

    remote = Tool("remote", "Elsewhere.", {"type": "object"}, forward)
    assert asked(remote, anything={"a": 1}).content == "{'anything': {'a': 1}}"


def raises() -> str:
    """Breaks."""
    raise KeyError("no such page")


def leaves() -> str:
    """Ends the process."""
    raise SystemExit(3)


def stops() -> str:
    """Raises what no future takes."""
    raise StopIteration


async def times_out() -> str:
    """Has a deadline of its own."""
    raise TimeoutError("too slow")


async def cancels_itself() -> str:
    """Cancels itself."""
    raise asyncio.CancelledError


def unprintable() -> object:
    """Gives what cannot be text."""

    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    return Odd()


@pytest.mark.parametrize(
    ("function", "content"),
    [
        (raises, "KeyError: 'no such page'"),
        (leaves, "SystemExit: 3"),
        (stops, "RuntimeError: StopIteration()"),
        (times_out, "TimeoutError: too slow"),
        (cancels_itself, "CancelledError: the tool cancelled itself"),
        (unprintable, "PydanticSerializationError: "),
    ],
)
def test_what_a_tool_raises_is_told_to_the_model(function: Callable[..., Any], content: str):
    result = asked(function)
    assert result.outcome == "error"
    assert result.content.startswith(content)


@pytest.mark.parametrize("error", [ToolError("the server is gone"), WorkerDied("judge-0", "scoring", "gone")])
def test_infrastructure_errors_propagate_and_cancel_other_calls(error: Exception):
    ended: list[str] = []

    async def slow() -> None:
        """Waits."""
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("slow")

    def gone() -> None:
        """Breaks down."""
        raise error

    with pytest.raises(type(error)) as raised:
        ran(ToolCall("slow", {}, "a"), ToolCall("gone", {}, "b"), box=Toolbox(slow, gone))
    assert raised.value is error
    assert ended == ["slow"]


def test_unknown_and_unreadable_calls_are_answered_too():
    unknown, odd, bad = ran(
        ToolCall("serch", {}, "a"), ToolCall("x" * 999, {}, "b"), Malformed("{", "not JSON", "c"), box=Toolbox(search)
    )
    assert (unknown.outcome, unknown.content) == ("unknown", "No tool is called `serch`; did you mean `search`?")
    assert odd.content.endswith("there are: search") and len(odd.content) < 250
    assert (bad.outcome, bad.content) == ("malformed", "This call cannot be read: not JSON")
    assert ran(ToolCall("a", {}, "c"), box=Toolbox())[0].content == "No tool is called `a`; there are: none"


def test_a_result_of_10_mb_is_cut_with_a_note():
    def dump() -> str:
        """Everything."""
        return "x" * 10_000_000

    result = asked(tool(dump, max_chars=100))
    assert result.is_cut
    assert result.content == "x" * 100 + "\n[cut: the first 100 of 10000000 characters]"
    assert not asked(tool(dump, max_chars=10_000_000)).is_cut


def test_text_that_no_tokenizer_takes_is_made_good():
    def half() -> str:
        """Half a character."""
        return "a\ud800b"

    assert asked(half).content == "a?b"


# ------------------------------------------------------------------------------------------------------------ deadlines


def test_sync_and_async_calls_run_concurrently_and_keep_order():
    barrier = threading.Barrier(3, timeout=10)
    gate = asyncio.Event()

    def meet(number: int) -> int:
        """Waits for the others."""
        barrier.wait()
        return number

    async def opens() -> str:
        """Opens the gate."""
        gate.set()
        return "open"

    async def waits() -> str:
        """Waits for the gate."""
        await gate.wait()
        return "through"

    box = Toolbox(meet, opens, waits)
    calls = [ToolCall("meet", {"number": n}, str(n)) for n in range(3)]
    results = ran(ToolCall("waits", {}, "w"), *calls, ToolCall("opens", {}, "o"), box=box)
    assert [result.content for result in results] == ["through", "0", "1", "2", "open"]


def test_sync_and_async_tools_time_out():
    over, cancelled = threading.Event(), []

    def blocks() -> None:
        """Hangs in a thread."""
        over.wait(30)

    async def waits() -> None:
        """Hangs in the loop."""
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    box = Toolbox(tool(blocks, timeout_s=0.01), tool(waits, timeout_s=0.01))
    results = ran(ToolCall("blocks", {}, "a"), ToolCall("waits", {}, "b"), box=box)
    over.set()
    assert [result.outcome for result in results] == ["timeout", "timeout"]
    assert results[0].content == "blocks took longer than its 0.01 s"
    assert cancelled == [1]


def test_hanging_tool_threads_are_limited_in_number():
    over = threading.Event()

    def blocks() -> None:
        """Hangs in a thread."""
        over.wait(30)

    async def scenario() -> ToolResult:
        box = Toolbox(tool(blocks, timeout_s=0.01))
        call = ToolCall("blocks", {}, "c")
        results = await box.run([call] * tools.MAX_HANGING)
        assert {result.outcome for result in results} == {"timeout"}
        with pytest.raises(ToolError, match=r"64 calls of sync tools \(blocks\) hang past their deadlines"):
            await box.run([call])
        over.set()
        while any(thread.name == "blocks" for thread in threading.enumerate()):  # noqa: ASYNC110  (threads end)
            await asyncio.sleep(0)
        patient = Toolbox(tool(blocks, timeout_s=30))
        return (await patient.run([call]))[0]

    assert asyncio.run(scenario()).outcome == "ok", "once they are over, there is room again"


def test_sync_tools_run_a_bounded_number_at_a_time():
    over = threading.Event()

    def blocks() -> str:
        """Waits for the test."""
        return str(over.wait(30))

    async def scenario() -> tuple[int, list[ToolResult]]:
        box = Toolbox(tool(blocks, timeout_s=20.0))
        work = asyncio.create_task(box.run([ToolCall("blocks", {}, "c")] * (tools.MAX_THREADS + 20)))
        for _ in range(5):
            await asyncio.sleep(0)
        num_running = sum(thread.name == "blocks" for thread in threading.enumerate())
        over.set()
        return num_running, await work

    num_running, results = asyncio.run(scenario())
    assert num_running == tools.MAX_THREADS
    assert {result.content for result in results} == {"True"}


def test_cancelling_the_episode_cancels_its_tools():
    cancelled: list[int] = []
    began = asyncio.Semaphore(0)

    async def waits() -> None:
        """Waits for ever."""
        began.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    async def scenario() -> None:
        running = asyncio.create_task(Toolbox(waits).run([ToolCall("waits", {}, "c")] * 2))
        await began.acquire()
        await began.acquire()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())
    assert cancelled == [1, 1]


def test_a_sync_tool_never_blocks_the_loop_and_keeps_context():
    whose: ContextVar[str] = ContextVar("whose", default="nobody")
    asked_by = threading.Event()

    def waits() -> str:
        """Waits for the loop."""
        assert asked_by.wait(10)
        return whose.get()

    async def scenario() -> ToolResult:
        whose.set("session 3")
        running = asyncio.create_task(Toolbox(waits).run([ToolCall("waits", {}, "c")]))
        await asyncio.sleep(0)
        asked_by.set()
        return (await running)[0]

    assert asyncio.run(scenario()).content == "session 3"


def test_seconds_are_those_of_the_call():
    async def naps() -> None:
        """A moment."""
        await asyncio.sleep(0.02)

    start_s = time.monotonic()
    result = asked(naps)
    assert 0.02 <= result.seconds <= time.monotonic() - start_s


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@given(
    st.text(max_size=8) | st.just("search"), st.dictionaries(st.text(max_size=6) | st.just("query"), VALUES, max_size=3)
)
def test_whatever_is_called_is_answered(name: str, arguments: dict[str, Any]):
    (result,) = ran(ToolCall(name, arguments, "c"), box=Toolbox(search))
    assert isinstance(result.content, str) and result.content

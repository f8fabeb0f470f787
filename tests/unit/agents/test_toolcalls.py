"""Tool calls in a reply: parsing, and the error message for the model when parsing fails."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlsys.agents.tool_calls import (
    CLOSE,
    OPEN,
    Malformed,
    ToolCall,
    describe_tools,
    message_of,
    read_calls,
    spoken,
    with_calls_as_text,
)
from rlsys.types import Json, Message
from tests.call_texts import write_calls

WANTED = '{"query": "K2", "filters": {"year": [1954, {"a": null}]}}'
SEARCH = f'{OPEN}\n{{"name": "search", "arguments": {WANTED}}}\n{CLOSE}'
QUERY: dict[str, Json] = {"query": "K2", "filters": {"year": [1954, {"a": None}]}}


def test_a_reply_without_calls_is_all_content():
    assert read_calls("The answer is 5.\n") == ("The answer is 5.\n", ())


def test_calls_follow_each_other_with_nested_arguments():
    content, calls = read_calls(f'Let me look.\n{SEARCH}\n{OPEN}{{"name": "now"}}{CLOSE} so', "call_2")
    assert content == "Let me look."
    assert calls == (ToolCall("search", QUERY, "call_2_0"), ToolCall("now", {}, "call_2_1"))


def test_the_last_call_may_lack_its_closing_tag():
    assert read_calls(SEARCH.removesuffix(CLOSE))[1] == (ToolCall("search", QUERY, "call_0"),)


def test_tags_within_strings_are_part_of_them():
    call = ToolCall("write", {"text": f'use {OPEN} and {CLOSE}, "so"\n'}, "call_0")
    assert read_calls(write_calls([call])) == ("", (call,))


def test_call_arguments_may_be_a_json_string():
    assert read_calls(OPEN + '{"name": "add", "arguments": "{\\"a\\": 1}"}')[1] == (
        ToolCall("add", {"a": 1}, "call_0"),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"name": "search", "argum', "a call is a JSON object like .*; the call ends without </tool_call>"),
        ("", "Expecting value.*; the call ends without"),
        ("search('K2')</tool_call>", "a call is a JSON object like"),
        ('{"name": "a"}}</tool_call>', "more than one JSON object between the tags"),
        ('["a"]</tool_call>', "it has no `name`"),
        ('{"arguments": {}}</tool_call>', "it has no `name`"),
        ('{"name": 3}</tool_call>', "it has no `name`"),
        ('{"name": "a", "arguments": [1]}</tool_call>', "`arguments` is not a JSON object"),
        ('{"name": "a", "arguments": "{"}</tool_call>', "`arguments` is text that is not JSON"),
        ('{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not JSON"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogates not allowed"),
        ('{"name": "a", "arguments": "{\\"x\\": \\"\\\\ud800\\"}"}</tool_call>', "surrogates not allowed"),
        ('{"name": "a", "arguments": ' + "[" * 100_000, "nested too deeply|Expecting value"),
        ('{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}", "Exceeds the limit"),
    ],
)
def test_a_call_that_cannot_be_read_says_why(text: str, problem: str):
    (call,) = read_calls(OPEN + text)[1]
    assert isinstance(call, Malformed)
    assert pytest.raises(AssertionError, match=problem).matches(AssertionError(call.problem)), call.problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<think>one</think>\n\ntwo", "two"),
        ("opened by the template</think> two", "two"),
        ("\n<think>without end", ""),
        ("</think>", ""),
        ("no thought, <think> is a word", "no thought, <think> is a word"),
    ],
)
def test_what_was_thought_is_not_spoken(text: str, said: str):
    assert spoken(text) == said


def test_calls_in_a_thought_are_not_calls():
    thought, meant = (write_calls([ToolCall("f", {"x": number}, "")]) for number in (1, 2))
    (found,) = read_calls(f"<think>or {thought}</think>so {meant}")[1]
    assert isinstance(found, ToolCall) and found.arguments == {"x": 2} and found.id == "call_0"
    assert read_calls(f"<think>or {thought}")[1] == ()


def test_a_call_that_cannot_be_read_hides_no_other():
    calls = read_calls(f"{OPEN}oops{CLOSE}{SEARCH}{OPEN}also{SEARCH}")[1]
    assert [type(call) for call in calls] == [Malformed, ToolCall, Malformed, ToolCall]
    assert [call.id for call in calls] == ["call_0", "call_1", "call_2", "call_3"]
    assert [call.text for call in calls if isinstance(call, Malformed)] == ["oops", "also"]


TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from([OPEN, CLOSE, f"{{{CLOSE}", '"}}'])
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab{}<>", max_size=3), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text("abc", min_size=1, max_size=3), JSON, max_size=3)


@given(st.lists(st.tuples(st.text("abc_", min_size=1, max_size=5), ARGUMENTS), max_size=4))
def test_what_is_written_is_read_back(calls: list):
    wanted = tuple(ToolCall(name, arguments, f"c_{i}") for i, (name, arguments) in enumerate(calls))
    assert read_calls(write_calls(wanted), "c") == ("", wanted)


PIECES = st.sampled_from(
    [OPEN, CLOSE, "{", "}", "[", '"', ":", ",", '"name"', '"arguments"', "\\u", "1e999", "NaN", " "]
)


@given(st.lists(PIECES | st.text(max_size=5), max_size=12).map("".join))
@example(OPEN * 3)
@example(CLOSE + OPEN)
@example(OPEN + '{"name": "a", "arguments": {"x": "\\ud800"}}')
@example(OPEN + '{"name": "a", "arguments": "{\\"x\\": [\\"\\\\ud800\\"]}"}')
def test_whatever_a_model_says_is_read_and_never_raises(text: str):
    content, calls = read_calls(text)
    assert text.startswith(content)
    assert bool(calls) == (OPEN in text)
    assert len({call.id for call in calls}) == len(calls)
    for call in calls:
        if isinstance(call, ToolCall):
            json.dumps([call.name, dict(call.arguments)], ensure_ascii=False).encode()
    with_calls_as_text(message_of(text))


def test_tool_calls_round_trip_through_the_openai_message_format():
    message = message_of(f"Look.\n{SEARCH}", "c")
    assert message["content"] == "Look."
    (call,) = message.get("tool_calls", [])
    assert isinstance(call, dict) and isinstance(call["function"], dict)
    assert (call["id"], call["type"], call["function"]["name"]) == ("c_0", "function", "search")
    assert json.loads(str(call["function"]["arguments"])) == QUERY
    assert read_calls(with_calls_as_text(message)["content"]) == read_calls(f"Look.\n{SEARCH}")


@pytest.mark.parametrize("text", ["no calls", f"{OPEN}oops", f"{SEARCH}{OPEN}oops"])
def test_a_reply_of_which_something_cannot_be_read_stays_text(text: str):
    assert message_of(text) == Message(role="assistant", content=text)


def test_the_description_of_tools_shows_the_form_that_is_read():
    text = describe_tools([{"type": "function", "function": {"name": "search"}}])
    assert '{"type": "function", "function": {"name": "search"}}' in text
    shown = text[text.index(OPEN) :].replace("<function-name>", '"f"').replace("<arguments-object>", "{}")
    assert read_calls(shown)[1] == (ToolCall("f", {}, "call_0"),)

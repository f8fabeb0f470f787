"""Large bodies cost memory in proportion to their size: no error for each of a million wrong entries."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import pytest

from rlsys.gateway.answers import Refused
from rlsys.gateway.chat_completions import ChatRequest, ReplyRequest, read_request
from rlsys.gateway.completions import CompletionRequest
from rlsys.gateway.model_responses import ResponsesRequest
from tests.growth import growth

SIZE = 1 << 18
USER = '"messages":[{"role":"user","content":"a"}]'
LISTS: dict[str, tuple[type[ReplyRequest], str]] = {
    "messages": (ChatRequest, '"messages":[*]'),
    "parts": (ChatRequest, '"messages":[{"role":"user","content":[*]}]'),
    "calls": (ChatRequest, '"messages":[{"role":"assistant","tool_calls":[*]}]'),
    "tools": (ChatRequest, USER + ',"tools":[*]'),
    "parameters": (ChatRequest, USER + ',"tools":[{"type":"function","function":{"name":"a","parameters":{"a":[*]}}}]'),
    "stop": (ChatRequest, USER + ',"stop":[*]'),
    "modalities": (ChatRequest, USER + ',"modalities":[*]'),
    "unknown": (ChatRequest, USER + ',"unknown":[*]'),
    "prompts": (CompletionRequest, '"prompt":["a",*]'),
    "ids": (CompletionRequest, '"prompt":[[*]]'),
    "input": (ResponsesRequest, '"input":[*]'),
    "input parts": (ResponsesRequest, '"input":[{"role":"user","content":[*]}]'),
    "output parts": (ResponsesRequest, '"input":[{"type":"function_call_output","call_id":"","output":[*]}]'),
    "response tools": (ResponsesRequest, '"input":"a","tools":[*]'),
    "include": (ResponsesRequest, '"input":"a","include":[*]'),
}
ENTRIES = ("1", '"a"', "[]", '{"":0}', '{"type":"text"}', '{"role":"user"}', '{"type":"function"}')


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("place", LISTS)
def test_a_long_list_takes_memory_in_proportion_to_its_size(place: str, entry: str):
    kind, form = LISTS[place]
    entries = ",".join([entry] * (SIZE // (len(entry) + 1)))
    body = f'{{"model":"policy",{form.replace("*", entries)}}}'.encode()
    tracemalloc.start()
    with suppress(Refused):
        asked = read_request(body, kind)
        if isinstance(asked, ResponsesRequest):
            asked.chat(())
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 150 * SIZE, "errors for each entry take some 250"


def test_many_calls_in_one_response_are_read_in_time_of_their_number():
    call = '{"type":"function_call","call_id":"","name":"","arguments":""}'

    def read(num_calls: int) -> None:
        body = f'{{"model":"policy","input":[{",".join([call] * num_calls)}]}}'.encode()
        (message,) = read_request(body, ResponsesRequest).messages()
        assert len(message["tool_calls"]) == num_calls

    assert growth(read, 2000, 20_000) < 40

"""The other paths of an endpoint, with the real `openai` client: responses, and completions of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest

from rlsys.batch.samples import samples_of
from rlsys.testing import ScriptedPolicy
from tests.gateways import CALL, Served, served, session_of, user

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def rain_or_call(prompt: str) -> str:
    return "It rains." if "rain" in prompt else f"Let me see.\n{CALL}"


# ------------------------------------------------------------------------------------------------------------ responses


def test_a_response_is_openais_and_its_tokens_are_recorded():
    async def scenario(here: Served) -> Any:
        return await here.client.responses.create(
            model="policy", instructions="Be brief.", input="2+3?", include=["message.output_text.logprobs"]
        )

    session = session_of(lambda prompt: "five")
    response = served(session, scenario)
    assert (response.status, response.output_text, response.model) == ("completed", "five", "policy")
    assert (response.usage.output_tokens, response.output[0].content[0].logprobs[0].logprob) == (4, -1.0)
    (turn,) = session.episode().trajectories[0].turns
    assert text_of(turn.prompt_ids) == "<system>Be brief.\n<user>2+3?\n<assistant>"


def test_a_response_that_is_cut_is_incomplete():
    async def scenario(here: Served) -> Any:
        return await here.client.responses.create(model="policy", input="2+3?", max_output_tokens=2)

    response = served(session_of(lambda prompt: "five"), scenario)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("goes_on_by", ["items", "id"])
def test_a_conversation_of_responses_is_one_sample(goes_on_by: str):
    async def scenario(here: Served) -> Any:
        first = await here.client.responses.create(model="policy", input=[user("Oslo?")], tools=[WEATHER])
        said, called = first.output
        assert (said.content[0].text, called.name, called.arguments) == ("Let me see.", "weather", '{"city": "Oslo"}')
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "rain"}
        if goes_on_by == "id":
            more = {"input": [result], "previous_response_id": first.id}
        else:
            thought = {"type": "reasoning", "id": "r", "summary": []}
            more = {"input": [user("Oslo?"), thought, *(item.model_dump() for item in first.output), result]}
        return await here.client.responses.create(model="policy", tools=[WEATHER], **more)

    session = session_of(rain_or_call)
    assert served(session, scenario).output_text == "It rains."
    (trajectory,) = session.episode().trajectories
    assert len(trajectory.turns) == 2 and len(list(samples_of(trajectory))) == 1


def test_a_stream_of_a_response_says_what_a_whole_one_says():
    async def scenario(here: Served) -> tuple[Any, list[str], str]:
        kinds, text = [], ""
        asked = {"model": "policy", "input": "Oslo?", "tools": [WEATHER]}
        async with here.client.responses.stream(**asked) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
            return await stream.get_final_response(), kinds, text

    response, kinds, text = served(session_of(rain_or_call), scenario)
    assert text == response.output[0].content[0].text == "Let me see."
    assert (response.output[1].name, response.output[1].arguments) == ("weather", '{"city": "Oslo"}')
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.done") == 2 and "response.function_call_arguments.done" in kinds


def test_a_function_that_a_response_must_call_is_called():
    async def scenario(here: Served) -> Any:
        chosen = {"type": "function", "name": "weather"}
        return await here.client.responses.create(model="policy", input="?", tools=[WEATHER], tool_choice=chosen)

    (called,) = served(session_of(lambda prompt: '{"city": "Rome"}}\n</tool_call>'), scenario).output
    assert (called.type, called.name, called.arguments) == ("function_call", "weather", '{"city": "Rome"}')


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0: a tool of type 'web_search'; only `function` is supported"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0: an item of type 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"previous_response_id": "resp_9"}, "there is no response 'resp_9' in this session"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}, "`json_schema` is not supported"),
        ({"input": []}, "at least 1 item"),
    ],
)
def test_what_a_response_cannot_be_is_refused_by_name(changed: dict[str, Any], message: str):
    async def scenario(here: Served) -> str:
        with pytest.raises(openai.APIStatusError) as error:
            await here.client.responses.create(**{"model": "policy", "input": "?", **changed})
        assert error.value.status_code in (400, 404)
        return str(error.value)

    session = session_of(rain_or_call)
    assert message in served(session, scenario) and not session.agents


# ---------------------------------------------------------------------------------------------------------- completions


def test_a_completion_continues_plain_text_and_is_recorded():
    async def scenario(here: Served) -> Any:
        return await here.client.completions.create(model="policy", prompt="2+3=", stop="\n", logprobs=0)

    session = session_of(ScriptedPolicy(lambda prompt: "5\n7", has_chat_template=True))
    completion = served(session, scenario)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs.token_logprobs) == ("5", "stop", [-1.0, -1.0])
    assert completion.usage.completion_tokens == 2
    (turn,) = session.episode().trajectories[0].turns
    assert (text_of(turn.prompt_ids), turn.text) == ("2+3=", "5\n")


def test_completions_of_several_prompts_and_of_tokens():
    async def scenario(here: Served) -> list[list[str]]:
        several = await here.client.completions.create(model="policy", prompt=["a", "b"], n=2)
        tokens = await here.client.completions.create(model="policy", prompt=[ord("c"), ord("d")])
        return [[choice.text for choice in reply.choices] for reply in (several, tokens)]

    session = session_of(lambda prompt: prompt.upper())
    assert served(session, scenario) == [["A", "A", "B", "B"], ["CD"]]
    assert len(session.episode().trajectories) == 5


def test_a_completion_has_16_tokens_unless_the_client_says_more():
    async def scenario(here: Served) -> list[int]:
        limits: list[dict[str, Any]] = [{}, {"max_tokens": 20}]
        replies = [await here.client.completions.create(model="policy", prompt="?", **limit) for limit in limits]
        return [len(reply.choices[0].text) for reply in replies]

    assert served(session_of(lambda prompt: "x" * 50), scenario) == [16, 20]


def test_a_stream_of_a_completion_says_what_a_whole_one_says():
    async def scenario(here: Served) -> tuple[str, list[str]]:
        stream = await here.client.completions.create(model="policy", prompt="?", stop="END", stream=True)
        chunks = [chunk async for chunk in stream]
        ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason]
        return "".join(chunk.choices[0].text for chunk in chunks), ends

    assert served(session_of(lambda prompt: "an ENDED"), scenario) == ("an ", ["stop"])


@pytest.mark.parametrize("changed", [{"echo": True}, {"suffix": "!"}, {"logprobs": 3}, {"prompt": []}, {"best_of": 2}])
def test_what_a_completion_cannot_be_is_refused(changed: dict[str, Any]):
    async def scenario(here: Served) -> int:
        with pytest.raises(openai.BadRequestError, match=next(iter(changed))) as error:
            await here.client.completions.create(**{"model": "policy", "prompt": "?", **changed})
        return error.value.status_code

    assert served(session_of(rain_or_call), scenario) == 400

"""Endpoint of a session: replies to a client and their records, with the real `openai` client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest

from rlsys.agents.agent import Tell
from rlsys.agents.session_budget import Budget
from rlsys.batch.samples import samples_of
from rlsys.errors import DataError, TaskTooLong, WorkerDied
from rlsys.gateway.http_front import MAX_BODY
from rlsys.testing import ScriptedPolicy
from rlsys.types import Trajectory, Turn
from tests.gateways import CALL, WEATHER, FailingPolicy, HeldPolicy, Served, served, session_of, user
from tests.replicas import until

BODY = {"model": "policy", "messages": [user("hi")]}


def said(trajectory: Trajectory) -> list[str]:
    return [turn.text for turn in trajectory.turns]


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def count_up(prompt: str) -> str:
    return f"reply {prompt.count('<assistant>')}"


# -------------------------------------------------------------------------------------------------------------- replies


def test_a_reply_is_openais_and_its_tokens_are_recorded():
    async def scenario(here: Served) -> Any:
        return await here.chat(user("2+3?"), temperature=0.2, seed=7, logprobs=True)

    session = session_of(lambda prompt: "five")
    reply = served(session, scenario)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "five", "stop")
    assert (reply.model, reply.usage.prompt_tokens, reply.usage.completion_tokens) == ("policy", 22, 4)
    assert [(t.token, t.logprob) for t in choice.logprobs.content] == [(f"token_id:{ord(c)}", -1.0) for c in "five"]
    (trajectory,) = session.episode().trajectories
    (turn,) = trajectory.turns
    assert text_of(turn.prompt_ids) == "<user>2+3?\n<assistant>" and text_of(turn.output_ids) == "five"
    assert turn.logprobs == (-1.0,) * 4 and [(s.version, s.num_tokens) for s in turn.versions] == [(0, 4)]


@pytest.mark.parametrize("stop", ["</answer>", ["never", "</answer>"]])
def test_a_stop_text_ends_a_reply_is_recorded_and_not_told(stop: str | list[str]):
    async def scenario(here: Served) -> list[str]:
        first = (await here.chat(user("2+3?"), stop=stop)).choices[0].message.content
        said = [user("2+3?"), {"role": "assistant", "content": first}, user("Sure?")]
        return [first, (await here.chat(*said, stop=stop)).choices[0].message.content]

    session = session_of(lambda prompt: "<answer>5</answer> and more")
    assert served(session, scenario) == ["<answer>5", "<answer>5"]
    (trajectory,) = session.episode().trajectories
    assert [turn.text for turn in trajectory.turns] == ["<answer>5</answer>"] * 2
    assert len(list(samples_of(trajectory))) == 1, "the conversation goes on from the recorded tokens"


def test_a_stream_says_what_a_whole_reply_says():
    async def scenario(here: Served) -> tuple[str, list[Any], Any]:
        stream = await here.chat(user("?"), tools=[WEATHER], stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        content = "".join(choice.delta.content or "" for choice in choices)
        return content, [choice for choice in choices if choice.delta.tool_calls or choice.finish_reason], chunks[-1]

    content, (called, last), usage = served(session_of(lambda prompt: "Let me see.\n" + CALL), scenario)
    assert content == "Let me see."
    assert called.delta.tool_calls[0].function.name == "weather" and last.finish_reason == "tool_calls"
    assert usage.usage.completion_tokens == len("Let me see.\n" + CALL)


def test_a_stream_is_sent_while_the_reply_is_sampled():
    policy = HeldPolicy(lambda prompt: "never")

    class Telling(ScriptedPolicy):
        async def sample(self, prompt_ids, seed, max_new_tokens=None, stop=(), tell=None):
            assert tell is not None
            tell("Let me see. <tool")
            await policy.gate.wait()
            return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)

    async def scenario(here: Served) -> tuple[str, str]:
        stream = await here.chat(user("?"), tools=[WEATHER], stream=True)
        first = ""
        async for chunk in stream:
            first += chunk.choices[0].delta.content or ""
            if first:
                break
        assert not here.session.agents[0].turns, "the reply is not complete"
        policy.gate.set()
        rest = [chunk.choices[0].delta async for chunk in stream]
        return first, "".join(delta.content or "" for delta in rest)

    assert served(session_of(Telling(lambda prompt: "Let me see. " + CALL)), scenario) == ("Let me see.", "")


def test_what_fails_in_a_stream_ends_it_with_an_error():
    class Telling(ScriptedPolicy):
        async def sample(self, prompt_ids, seed, max_new_tokens=None, stop=(), tell=None):
            assert tell is not None
            tell("Let me")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise TaskTooLong("rollout-0", "encoding a prompt", "too many tokens")

    async def scenario(here: Served) -> str:
        with pytest.raises(openai.APIError, match="too many tokens"):
            async for _ in await here.chat(user("?"), stream=True):
                pass
        return "ended"

    session = session_of(Telling())
    assert served(session, scenario) == "ended" and not session.agents[0].turns


def test_a_reply_that_is_cut_says_so():
    async def scenario(here: Served) -> list[tuple[str, str, int]]:
        replies = [await here.chat(user("hi"), **limit) for limit in ({"max_tokens": 3}, {"max_completion_tokens": 2})]
        return [(r.choices[0].finish_reason, r.choices[0].message.content, r.usage.completion_tokens) for r in replies]

    assert served(session_of(lambda prompt: "a long reply"), scenario) == [("length", "a l", 3), ("length", "a ", 2)]


def test_a_clients_limit_does_not_raise_the_runs():
    async def scenario(here: Served) -> str:
        return (await here.chat(user("hi"), max_tokens=500)).choices[0].message.content

    assert served(session_of(ScriptedPolicy(lambda prompt: "abcdef", max_new_tokens=4)), scenario) == "abcd"


def test_tools_reach_the_model_and_its_calls_are_parsed():
    async def scenario(here: Served) -> Any:
        return (await here.chat(user("?"), tools=[WEATHER])).choices[0]

    session = session_of(lambda prompt: CALL)
    choice = served(session, scenario)
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert "The weather in a city." in text_of(session.agents[0].turns[0].prompt_ids)


def test_with_tool_choice_none_a_call_stays_text():
    async def scenario(here: Served) -> Any:
        return (await here.chat(user("?"), tools=[WEATHER], tool_choice="none")).choices[0]

    choice = served(session_of(lambda prompt: CALL), scenario)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize(
    ("choice", "begin"),
    [
        ("required", "<tool_call>\n"),
        ({"type": "function", "function": {"name": "weather"}}, '<tool_call>\n{"name": "weather", "arguments": '),
    ],
)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_call_that_the_client_wants_is_begun_for_the_policy(choice: Any, begin: str, thinks: bool):
    opened = "<think>" if thinks else ""

    async def scenario(here: Served) -> Any:
        before = [user("?"), *([{"role": "assistant", "content": opened}] if thinks else [])]
        return (await here.chat(*before, tools=[WEATHER], tool_choice=choice)).choices[0]

    session = session_of(lambda prompt: CALL.removeprefix(begin) + " And more.")
    told = served(session, scenario)
    (call,) = told.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
    (turn,) = session.agents[0].turns
    begun = opened + "\n</think>\n\n" * thinks + begin
    assert text_of(turn.prompt_ids).endswith(f"<assistant>{begun}"), "it is context, and not trained"
    assert CALL.startswith(begin) and turn.text in CALL + " And more."


def test_a_conversation_goes_on_from_the_tokens_of_a_call_that_was_begun():
    async def scenario(here: Served) -> None:
        first = (await here.chat(user("?"), tools=[WEATHER], tool_choice="required")).choices[0].message
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
        await here.chat(user("?"), first, result, tools=[WEATHER])

    session = session_of(lambda prompt: "Rain." if "rain" in prompt else CALL.removeprefix("<tool_call>\n"))
    served(session, scenario)
    (trajectory,) = session.episode().trajectories
    assert len(trajectory.turns) == 2 and len(list(samples_of(trajectory))) == 1


def test_without_parallel_calls_a_reply_ends_with_its_first():
    async def scenario(here: Served) -> Any:
        return (await here.chat(user("?"), tools=[WEATHER], parallel_tool_calls=False)).choices[0].message.tool_calls

    session = session_of(lambda prompt: f"{CALL}\n{CALL}")
    assert len(served(session, scenario)) == 1
    assert session.agents[0].turns[0].text == CALL


def test_several_choices_are_replies_from_the_same_place():
    async def scenario(here: Served) -> list[list[str]]:
        first = await here.chat(user("a"), n=3)
        second = await here.chat(user("a"), first.choices[1].message, user("b"), n=2)
        return [[choice.message.content for choice in reply.choices] for reply in (first, second)]

    seen: list[str] = []

    def reply(prompt: str) -> str:
        seen.append(prompt)
        return f"reply {len(seen)}"

    session = session_of(reply)
    assert served(session, scenario) == [["reply 1", "reply 2", "reply 3"], ["reply 4", "reply 5"]]
    trajectories = session.episode().trajectories
    assert sorted(map(said, trajectories)) == [["reply 1"], ["reply 2", "reply 4"], ["reply 3"], ["reply 5"]]
    assert len({seed for policy in session.policies.values() for _, seed in policy.asked}) == 5  # type: ignore[attr-defined]
    assert seen[3] == seen[4] and "reply 2" in seen[3]


def test_if_one_of_several_choices_fails_none_is_recorded():
    async def scenario(here: Served) -> int:
        status, _ = await here.post({**BODY, "n": 3})
        await here.chat(user("hi"))
        return status

    session = session_of(lambda prompt: "four", Budget(max_episode_tokens=9))
    assert served(session, scenario) == 400
    assert [said(trajectory) for trajectory in session.episode().trajectories if trajectory.turns] == [["four"]]


def test_a_call_that_cannot_be_read_stays_text():
    broken = '<tool_call>{"name": "weather", </tool_call>'

    async def scenario(here: Served) -> Any:
        return (await here.chat(user("?"), tools=[WEATHER])).choices[0]

    choice = served(session_of(lambda prompt: broken), scenario)
    assert (choice.message.content, choice.finish_reason) == (broken, "stop")


def test_the_models_are_the_agents_that_can_be_asked():
    async def scenario(here: Served) -> list[str]:
        names = [model.id async for model in here.client.models.list()]
        assert (await here.client.models.retrieve("big")).id == "big"
        with pytest.raises(openai.NotFoundError, match="no model 'huge'"):
            await here.client.models.retrieve("huge")
        return names

    session = session_of({"small": ScriptedPolicy(), "big": ScriptedPolicy()})
    session.bindings = {"lead": "big"}
    assert served(session, scenario) == ["lead", "small", "big"]


def test_the_model_that_is_asked_is_the_agent_that_speaks():
    async def scenario(here: Served) -> None:
        await here.client.chat.completions.create(model="lead", messages=[user("hi")])
        await here.client.chat.completions.create(model="small", messages=[user("hi")])
        with pytest.raises(openai.NotFoundError, match="'gpt-4o' is bound to no policy") as error:
            await here.client.chat.completions.create(model="gpt-4o", messages=[user("hi")])
        assert error.value.code == "model_not_found"

    session = session_of({"small": ScriptedPolicy(lambda p: "s"), "big": ScriptedPolicy(lambda p: "b")})
    session.bindings = {"lead": "big"}
    served(session, scenario)
    spoken = [(t.agent, t.policy, said(t)) for t in session.episode().trajectories]
    assert spoken == [("lead", "big", ["b"]), ("small", "small", ["s"])]


# ------------------------------------------------------------------------------------------------ tokens in, tokens out


def test_a_conversation_that_goes_on_is_one_run_of_tokens():
    async def scenario(here: Served) -> None:
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": "Be brief."}, user("one")]
        for text in ("two", "three"):
            reply = await here.chat(*messages)
            messages += [reply.choices[0].message.model_dump(), user(text)]
        await here.chat(*messages)

    session = session_of(count_up)
    served(session, scenario)
    (trajectory,) = session.episode().trajectories
    assert said(trajectory) == ["reply 1", "reply 2", "reply 3"]
    assert len(list(samples_of(trajectory))) == 1


def test_results_of_tools_go_on_where_the_call_was_made():
    async def scenario(here: Served) -> str:
        asked = user("?")
        called = (await here.chat(asked, tools=[WEATHER])).choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "rain"}
        return (await here.chat(asked, called, result, tools=[WEATHER])).choices[0].message.content

    session = session_of(lambda prompt: "Wet." if "<tool>rain" in prompt else CALL)
    assert served(session, scenario) == "Wet."
    (trajectory,) = session.episode().trajectories
    assert len(trajectory.turns) == 2 and len(list(samples_of(trajectory))) == 1


def test_reformatted_call_arguments_continue_the_same_branch():
    async def scenario(here: Served) -> None:
        called = (await here.chat(user("?"), tools=[WEATHER])).choices[0].message.model_dump(exclude_none=True)
        called["tool_calls"][0]["function"]["arguments"] = '{"city":"Oslo"}'
        await here.chat(user("?"), called, user("and?"), tools=[WEATHER])

    session = session_of(lambda prompt: CALL)
    served(session, scenario)
    assert len(session.agents) == 1


def test_a_branch_shares_what_came_before_and_trains_it_once():
    async def scenario(here: Served) -> None:
        first = (await here.chat(user("a"))).choices[0].message
        second = (await here.chat(user("a"), first, user("b"))).choices[0].message
        await here.chat(user("a"), first, user("c"))  # from an earlier point
        await here.chat(user("a"), first, user("b"), second, user("d"))  # the trunk goes on

    session = session_of(count_up)
    served(session, scenario)
    trunk, branch = session.episode().trajectories
    assert said(trunk) == ["reply 1", "reply 2", "reply 3"] and said(branch) == ["reply 2"]
    assert branch.parent == 0 and len(list(samples_of(trunk))) == 1
    before = (*trunk.turns[0].prompt_ids, *trunk.turns[0].output_ids)
    assert branch.turns[0].prompt_ids[: len(before)] == before
    assert sum(sum(sample.is_trained) for t in (trunk, branch) for sample in samples_of(t)) == 4 * len("reply 1")


def test_two_concurrent_requests_from_one_prefix_make_two_branches():
    policy = HeldPolicy(count_up)

    async def scenario(here: Served) -> None:
        policy.gate.set()
        first = (await here.chat(user("a"))).choices[0].message
        policy.gate.clear()
        both = [asyncio.create_task(here.chat(user("a"), first, user(text))) for text in ("b", "c")]
        await until(lambda: policy.num_waiting == 2)
        policy.gate.set()
        await asyncio.gather(*both)

    session = session_of(policy)
    served(session, scenario)
    trunk, branch = session.episode().trajectories
    assert (said(trunk), said(branch)) == (["reply 1", "reply 2"], ["reply 2"])


def test_a_context_that_is_rewritten_begins_another_agent():
    async def scenario(here: Served) -> None:
        first = (await here.chat(user("a"))).choices[0].message
        edited = {"role": "assistant", "content": first.content + "!"}
        await here.chat(user("a"), edited, user("b"))

    session = session_of(count_up)
    served(session, scenario)
    assert [(t.parent, said(t)) for t in session.episode().trajectories] == [(None, ["reply 1"]), (0, ["reply 2"])]


def test_changed_tools_and_stripped_replies_continue_the_conversation():
    async def scenario(here: Served) -> None:
        told: list[Any] = [user("a")]
        for tools in ({}, {"tools": [WEATHER]}, {}):
            reply = await here.chat(*told, **tools)
            told += [{"role": "assistant", "content": reply.choices[0].message.content.strip()}, user("b")]

    session = session_of(lambda prompt: f"  reply {prompt.count('<assistant>')}\n")
    served(session, scenario)
    (trajectory,) = session.episode().trajectories
    assert said(trajectory) == [f"  reply {n}\n" for n in (1, 2, 3)] and len(list(samples_of(trajectory))) == 1
    offered = ["The weather in a city." in text_of(turn.prompt_ids) for turn in trajectory.turns]
    assert offered == [False, True, True]


def test_calls_are_read_only_where_tools_are_offered():
    async def scenario(here: Served) -> Any:
        return (await here.chat(user("?"))).choices[0].message

    message = served(session_of(lambda prompt: CALL), scenario)
    assert (message.content, message.tool_calls) == (CALL, None)


# -------------------------------------------------------------------------------------------------------- disconnecting


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_disconnect_before_the_reply_cancels_the_turn(is_streamed: bool):
    policy = HeldPolicy(count_up)

    async def scenario(here: Served) -> str:
        policy.gate.set()
        first = (await here.chat(user("a"))).choices[0].message
        policy.gate.clear()
        leaving = asyncio.create_task(here.chat(user("a"), first, user("b"), stream=is_streamed))
        await until(lambda: policy.num_waiting == 1)
        leaving.cancel()
        await until(lambda: policy.num_cancelled == 1)
        policy.gate.set()
        return (await here.chat(user("a"), first, user("b"))).choices[0].message.content

    session = session_of(policy)
    assert served(session, scenario) == "reply 2"
    (trajectory,) = session.episode().trajectories
    assert said(trajectory) == ["reply 1", "reply 2"]


@pytest.mark.parametrize("is_read", [False, True], ids=["in the middle", "after its last text"])
def test_leaving_a_stream_before_its_end_records_nothing(is_read: bool):
    async def scenario(here: Served) -> None:
        stream = await here.chat(user("a"), stream=True)
        async for chunk in stream:
            if chunk.choices[0].finish_reason or (chunk.choices[0].delta.content and not is_read):
                break
        await stream.close()
        await here.chat(user("a"), {"role": "assistant", "content": "reply 1"}, user("b"))

    session = session_of(count_up)
    served(session, scenario)
    (trajectory,) = session.episode().trajectories
    assert said(trajectory) == (["reply 1", "reply 2"] if is_read else ["reply 2"])


def test_closing_a_session_cancels_its_running_requests():
    policy = HeldPolicy()

    async def scenario(here: Served) -> None:
        asked = asyncio.create_task(here.chat(user("hi")))
        await until(lambda: policy.num_waiting == 1)
        await here.endpoint.close()
        assert policy.num_cancelled == 1
        with pytest.raises(openai.APIStatusError, match="the session is over") as error:
            await asked
        assert error.value.status_code == 410

    served(session_of(policy), scenario)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_wrong_token_is_refused():
    async def scenario(here: Served) -> list[int]:
        others = [here.endpoint.api_key[:-1], here.endpoint.api_key + "0", "", "\u00e9"]
        return [(await here.post(BODY, key=key))[0] for key in others]

    session = session_of(count_up)
    assert served(session, scenario) == [401] * 4 and not session.agents


def test_a_token_that_is_no_text_is_refused():
    async def scenario(here: Served) -> bytes:
        host, path = here.endpoint.base_url.removeprefix("http://").split("/", 1)
        reader, writer = await asyncio.open_connection(*host.split(":"))
        head = f"GET /{path}/models HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer ".encode()
        writer.write(head + b"\xff\r\n\r\n")  # as no client would send it
        status = await reader.readline()
        writer.close()
        return status

    assert b" 401 " in served(session_of(count_up), scenario)


def test_a_token_opens_its_own_session_only():
    async def scenario(here: Served) -> tuple[int, int]:
        async with here.gateway.serve(session_of(count_up)) as other:
            theirs = (await here.post(BODY, url=other.base_url))[0]
            return theirs, (await here.post(BODY, url=other.base_url, key=other.api_key))[0]

    assert served(session_of(count_up), scenario) == (401, 200)


def test_an_ended_session_gives_410_and_an_unknown_one_404():
    async def scenario(here: Served) -> list[int]:
        async with here.gateway.serve(session_of(count_up)) as ended:
            pass
        never = [here.endpoint.base_url.replace("/s/0", f"/s/{name}") for name in ("99", "x", "9" * 40)]
        statuses = [await here.post(BODY, url=ended.base_url, key=ended.api_key)]
        statuses += [await here.post(BODY, url=url) for url in [*never, here.endpoint.base_url + "/elsewhere"]]
        return [status for status, _ in statuses]

    assert served(session_of(count_up), scenario) == [410, 404, 404, 404, 404]


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"stop": [""]}, "stop.0", "at least 1 character"),
        ({"stop": 5}, "stop", "valid tuple"),
        ({"tool_choice": "must"}, "tool_choice", "'auto', 'none' or 'required'"),
        ({"tool_choice": "required"}, None, "there are no `tools`"),
        ({"tool_choice": WEATHER}, None, "names the function 'weather', and `tools` has none"),
        (
            {"response_format": {"type": "json_object"}},
            "response_format",
            "`json_object` is not supported: give",
        ),
        ({"top_logprobs": 2}, None, "`top_logprobs` is not supported"),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "'text'"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "weather"),
        ({"parallel_tool_calls": "no calls"}, "parallel_tool_calls", "valid boolean"),
        ({"guided_json": {"type": "object"}}, None, "`guided_json` is not supported"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(changed: dict[str, Any], param: str | None, message: str):
    async def scenario(here: Served) -> tuple[int, Any]:
        return await here.post({**BODY, **changed})

    session = session_of(count_up)
    status, body = served(session, scenario)
    error = body["error"]
    assert (status, error["type"]) == (400, "invalid_request_error") and not session.agents
    assert message in error["message"] and (param is None or str(error["param"]).startswith(param))


def test_malformed_too_deep_and_too_large_bodies_are_refused():
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]

    async def scenario(here: Served) -> list[int]:
        bodies = [b"{", b"[]", b"\xff", {**BODY, "tools": tools}, b" " * (MAX_BODY + 1)]
        return [(await here.post(body))[0] for body in bodies]

    assert served(session_of(count_up), scenario) == [400, 400, 400, 400, 413]


def test_what_says_nothing_is_accepted():
    null = {"n": 1, "stop": None, "logit_bias": {}, "tools": None, "tool_choice": "auto", "parallel_tool_calls": True}
    text = {"response_format": {"type": "text"}, "modalities": ["text"], "top_logprobs": 0, "stream": False}
    more = {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "temperature": 0.2,
        "seed": 1,
        "prediction": {"type": "x"},
    }
    text |= {"stream_options": {"include_obfuscation": False}, "of_another_year": 1}

    async def scenario(here: Served) -> int:
        parts = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        return (await here.post({**BODY, **null, **text, **more, "messages": [*parts, user("hi")]}))[0]

    session = session_of(count_up)
    assert served(session, scenario) == 200
    assert text_of(session.agents[0].turns[0].prompt_ids) == "<system>ab\n<user>hi\n<assistant>"


def test_a_context_over_the_limit_is_openais_error_and_truncates():
    class Short(ScriptedPolicy):
        async def sample(
            self,
            prompt_ids: tuple[int, ...],
            seed: int,
            max_new_tokens: int | None = None,
            stop: tuple[str, ...] = (),
            tell: Tell | None = None,
        ) -> Turn:
            if len(prompt_ids) > 60:
                raise TaskTooLong("rollout-0", "encoding a prompt", "too many tokens")
            return await super().sample(prompt_ids, seed, max_new_tokens, stop, tell)

    async def scenario(here: Served) -> None:
        first = (await here.chat(user("a"))).choices[0].message
        with pytest.raises(openai.BadRequestError) as error:
            await here.chat(user("a"), first, user("b" * 60))
        assert error.value.code == "context_length_exceeded"
        await here.chat(user("a"), first, user("b"))  # shorter, it goes on

    session = session_of(Short(count_up))
    served(session, scenario)
    (trajectory,) = session.episode().trajectories
    assert said(trajectory) == ["reply 1", "reply 2"] and trajectory.outcome.kind == "truncated"


def test_a_budget_that_is_spent_is_refused():
    async def scenario(here: Served) -> str | None:
        await here.chat(user("a"))
        with pytest.raises(openai.BadRequestError, match="max_episode_tokens") as error:
            await here.chat(user("b"))
        return error.value.code

    assert served(session_of(count_up, Budget(max_episode_tokens=5)), scenario) == "budget_spent"


def test_messages_refused_by_the_template_give_a_client_error():
    async def scenario(here: Served) -> int:
        return (await here.post(BODY))[0]

    assert served(session_of(FailingPolicy(error=DataError("no tool messages"))), scenario) == 400


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_failed_worker_gives_503_and_raises_in_the_workflow():
    async def scenario(here: Served) -> None:
        for _ in range(2):
            status, body = await here.post(BODY)
            assert (status, body["error"]["code"]) == (503, "worker_failed")
        with pytest.raises(WorkerDied, match="rollout-0"):
            await here.endpoint.while_sound(asyncio.sleep(math.inf))

    served(session_of(FailingPolicy(error=WorkerDied("rollout-0", "sampling", "gone"))), scenario)


def test_a_failed_worker_ends_an_agent_that_is_at_work():
    async def scenario(here: Served) -> None:
        async def agent() -> None:
            await here.post(BODY)
            await asyncio.sleep(math.inf)

        with pytest.raises(WorkerDied, match="rollout-0"):
            await here.endpoint.while_sound(agent())

    served(session_of(FailingPolicy(error=WorkerDied("rollout-0", "sampling", "gone"))), scenario)


def test_a_failure_says_when_to_try_again():
    async def scenario(here: Served) -> str:
        with pytest.raises(openai.InternalServerError) as error:
            await here.chat(user("hi"))
        return error.value.response.headers["Retry-After"]

    assert served(session_of(FailingPolicy(error=WorkerDied("rollout-0", "sampling", "gone"))), scenario) == "1"


def test_a_server_side_bug_raises_in_the_workflow():
    async def scenario(here: Served) -> None:
        async def agent() -> int:
            return (await here.post(BODY))[0]

        with pytest.raises(ZeroDivisionError):
            await here.endpoint.while_sound(agent())

    served(session_of(lambda prompt: str(1 // 0)), scenario)

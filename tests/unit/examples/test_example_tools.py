"""The calculator example: the workflow's calls, and its demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from examples.tiny_policy import CHARACTERS
from examples.tools.calculator import WithCalculator, calculator
from examples.tools.prepare import demonstration
from rlsys.testing import play_scripted
from rlsys.types import TRUNCATED, Task, Trajectory

TASK = Task(id="t", prompt="31*49=", answer="1519")


def trajectory(reply: Callable[[str], str]) -> Trajectory:
    (only,) = play_scripted(WithCalculator(max_turns=3), TASK, reply).trajectories
    return only


def asking(call: str) -> Callable[[str], str]:
    """Calls once, then says what it was told."""
    return lambda prompt: prompt.rpartition(call)[2].removesuffix(">") if prompt.endswith(">") else call


def test_a_marked_reply_calls_the_calculator_before_the_answer():
    assert [turn.text for turn in trajectory(asking("?31*49")).turns] == ["?31*49", "1519"]
    assert [turn.text for turn in trajectory(lambda prompt: "1520").turns] == ["1520"]


@pytest.mark.parametrize("call", ["?", "?1*", "?2**9", "?1234567890*1"])
def test_an_invalid_call_is_answered_in_known_characters(call: str):
    assert [turn.text for turn in trajectory(asking(call)).turns] == [call, "!"]


def test_a_policy_that_never_stops_calling_is_truncated():
    result = trajectory(lambda prompt: "?1*1")
    assert (result.outcome, len(result.turns)) == (TRUNCATED, 3)


@pytest.mark.parametrize(("is_careless", "calling"), [(False, range(400, 401)), (True, range(70, 130))])
def test_every_demonstration_is_right_and_the_careless_ones_seldom_call(is_careless: bool, calling: range):
    rng = Random(0)
    drawn = [demonstration(rng, is_careless) for _ in range(400)]
    for exchanges in drawn:
        assert exchanges[-1][1] == calculator(exchanges[0][0].removesuffix("="))
        assert set("".join(told + said for told, said in exchanges)) <= set(CHARACTERS)
    assert sum(len(exchanges) == 2 for exchanges in drawn) in calling

"""Readings: the figures of each token in a step, beside its turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from rlsys.algorithm import TrajectoryAdvantage
from rlsys.batch.packing import SampleRef
from rlsys.batch.samples import place_turns, samples_of
from rlsys.replay.rollout_json import RolloutRecord, TokenStats
from rlsys.types import Episode, Task, Trajectory, Turn, VersionSpan
from tests.training import group_of
from workers.train.token_columns import Reader, Speller, TokenColumns


def turn(prompt: tuple[int, ...], output: tuple[int, ...]) -> Turn:
    logprobs, spans = (-0.5,) * len(output), (VersionSpan(0, len(output)),) if output else ()
    return Turn(prompt, output, logprobs, spans, "stop", "")


SPOKEN = Trajectory(
    "lead",
    (
        turn((1, 2), (3,)),
        turn((1, 2, 3, 4), ()),  # said nothing
        turn((1, 2, 3, 5), (6, 7)),
        turn((1, 8), (9,)),  # rewritten: a sample of its own
    ),
)


def columns(*samples: tuple[SampleRef, int], advantages: list[float], is_masked: list[bool]) -> TokenColumns:
    """Of samples and their trained tokens; logprobs are -0, -1, ... and entropies 10 more."""
    count = sum(length for _, length in samples)
    numbers_N = np.arange(count, dtype=np.float32)
    return TokenColumns(
        samples=tuple(ref for ref, _ in samples),
        lengths_S=tuple(length for _, length in samples),
        trainer_logprobs_N=-numbers_N,
        entropies_N=numbers_N + 10,
        advantages_N=np.array(advantages, dtype=np.float32),
        is_masked_N=np.array(is_masked),
    )


def record_of(assigned: Sequence[TrajectoryAdvantage]) -> RolloutRecord:
    payload = (Episode((SPOKEN,)),)
    return RolloutRecord.of(1, Task(id="0", prompt="p"), group_of(0, payload), payload, assigned)


def spell(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


def test_a_turn_has_its_sample_and_known_prompt_length():
    found = [(one.sample, one.num_known) for one in place_turns(SPOKEN)]
    assert found == [(0, 0), (0, 3), (0, 3), (1, 0)]
    assert [sum(sample.is_trained) for sample in samples_of(SPOKEN)] == [3, 1]


def test_each_turn_reads_its_own_tokens_of_its_own_sample():
    first, second = SampleRef(4, 0, 0, 0, 0.5, 1.0), SampleRef(4, 0, 0, 1, 0.5, 1.0)
    made = [
        columns((second, 1), advantages=[0.5], is_masked=[True]),
        columns(
            (SampleRef(3, 0, 0, 0, 0.1, 1.0), 2), (first, 3),
            advantages=[0.1, 0.1, 0.5, 0.5, 0.7], is_masked=[False] * 5,
        ),
    ]  # fmt: skip
    (((one, silent, other, rewritten),),) = Reader(made, Speller(spell)).read(
        4, record_of([TrajectoryAdvantage(0, 0, 0.5)])
    )
    assert one == TokenStats(said="bc", pieces=("d",), trainer_logprobs=(-2.0,), entropies=(12.0,))
    assert silent == TokenStats(said="e")
    assert (other.said, other.pieces) == ("f", ("g", "h")), "not what it had seen and said before"
    assert (other.trainer_logprobs, other.entropies) == ((-3.0, -4.0), (13.0, 14.0))
    assert other.advantages == pytest.approx((0.5, 0.7)), "as they differ from the trajectory's"
    assert (rewritten.said, rewritten.advantages, rewritten.is_masked) == ("bi", (), (True,))


def test_advantages_of_single_samples_are_told_with_their_tokens():
    refs = [SampleRef(0, 0, 0, s, advantage, 1.0) for s, advantage in enumerate((0.5, 0.25))]
    made = columns((refs[0], 3), (refs[1], 1), advantages=[0.5, 0.5, 0.5, 0.25], is_masked=[False] * 4)
    record = record_of([TrajectoryAdvantage(0, 0, 0.5, sample=0), TrajectoryAdvantage(0, 0, 0.25, sample=1)])
    (((one, silent, other, rewritten),),) = Reader([made], Speller(spell)).read(0, record)
    assert (one.advantages, silent.advantages) == ((0.5,), ())
    assert (other.advantages, rewritten.advantages) == ((0.5, 0.5), (0.25,))


def test_a_turn_that_was_not_trained_is_decoded_too():
    (((one, *_),),) = Reader([], Speller(spell)).read(0, record_of([]))
    assert one == TokenStats(said="bc", pieces=("d",))


def test_pieces_keep_the_leading_space_a_decoder_drops():
    tokenizer = Tokenizer(WordLevel({"▁the": 0, "▁sum": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([0]) == "the"
    speller = Speller(lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False))
    assert [speller.piece(token) for token in (0, 1, 2)] == [" the", " sum", "s"]


def test_a_piece_is_decoded_once():
    asked = []
    speller = Speller(lambda ids: (asked.append(ids), spell(ids))[1])
    assert [speller.piece(3) for _ in range(5)] == ["d"] * 5
    assert asked == [(3,), (3, 3)]

"""Samples of trajectories: all tokens of the policy are trained, and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.batch.samples import Sample, meta_of, samples_in, samples_of, versions_of
from rlsys.types import Episode, Trajectory, Turn, VersionSpan


def turn(prompt: tuple[int, ...], output: tuple[int, ...], version: int = 0) -> Turn:
    logprobs = tuple(-float(i + 1) for i in range(len(output)))
    return Turn(prompt, output, logprobs, (VersionSpan(version, len(output)),), "stop", "")


def samples(*turns: Turn) -> list[Sample]:
    return list(samples_of(Trajectory("lead", turns)))


def test_one_turn_is_one_sample_trained_throughout() -> None:
    (sample,) = samples(turn((1, 2), (3, 4), version=6))
    assert sample == Sample((1, 2), (3, 4), (True, True), (-1.0, -2.0), (VersionSpan(6, 2),), turns=((0, 2),))


def test_a_prompt_that_extends_what_came_before_continues_the_sample() -> None:
    (continued,) = samples(turn((1, 2), (3, 4), version=6), turn((1, 2, 3, 4, 90, 91), (5,), version=7))
    is_trained, logprobs = (True, True, False, False, True), (-1.0, -2.0, 0.0, 0.0, -1.0)
    versions = (VersionSpan(6, 2), VersionSpan(7, 1))
    assert continued == Sample((1, 2), (3, 4, 90, 91, 5), is_trained, logprobs, versions, turns=((0, 2), (1, 1)))


def test_a_rewritten_context_starts_a_new_sample() -> None:
    first, second = samples(turn((1, 2), (3, 4)), turn((1, 2, 3, 9), (5,)))
    assert first.completion_ids == (3, 4)
    assert second == Sample((1, 2, 3, 9), (5,), (True,), (-1.0,), (VersionSpan(0, 1),), turns=((1, 1),))


def test_a_turn_without_output_leaves_no_sample() -> None:
    assert samples(turn((1, 2), ())) == []
    assert samples(turn((1, 2), ()), turn((1, 2, 7), (3,)))[0].prompt_ids == (1, 2, 7)


def test_the_order_of_columns_includes_failed_and_subagent_trajectories() -> None:
    lead = Trajectory("lead", (turn((1,), (2,)), turn((5,), (6,))))
    sub = Trajectory("sub", (turn((3,), (4,)),), parent=0)
    order = [index for index, _ in samples_in((Episode((lead, sub)), Episode((sub,))))]
    assert order == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_metadata_counts_tokens_and_equal_prompts_have_equal_keys() -> None:
    lead = Trajectory("lead", (turn((1, 2), (3, 4)), turn((1, 2, 3, 4, 9), (5,))), reward=0.5)
    other = Trajectory("lead", (turn((1, 2), (8,)),))
    (first,), (second,) = (e.trajectories for e in meta_of((Episode((lead,)), Episode((other,)))))
    (sample,), (twin,) = first.samples, second.samples
    assert (sample.num_prompt, sample.num_completion, sample.num_trained) == (2, 4, 3)
    assert sample.prompt_key == twin.prompt_key
    assert first.reward == 0.5


def test_versions_are_counted_oldest_first() -> None:
    trajectory = Trajectory("lead", (turn((1,), (2, 3), version=7), turn((1, 2, 3), (4,), version=5)))
    assert versions_of((Episode((trajectory,)),)) == (VersionSpan(5, 1), VersionSpan(7, 2))


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)


@given(st.lists(st.tuples(st.booleans(), tokens, tokens), min_size=1, max_size=6))
def test_every_sampled_token_is_trained_once_after_its_prompt(
    script: list[tuple[bool, tuple[int, ...], tuple[int, ...]]],
) -> None:
    turns: list[Turn] = []
    for number, (continues, prompt, output) in enumerate(script):
        context = (*turns[-1].prompt_ids, *turns[-1].output_ids) if continues and turns else ()
        turns.append(turn(context + prompt, output, version=number))
    trained: list[tuple[tuple[int, ...], int, float, int]] = []
    for sample in samples(*turns):
        assert len(sample.completion_ids) == len(sample.is_trained) == len(sample.logprobs)
        assert sample.is_trained[0]
        assert sample.is_trained[-1]
        versions = iter([span.version for span in sample.versions for _ in range(span.num_tokens)])
        for t, is_on in enumerate(sample.is_trained):
            if is_on:
                context = (*sample.prompt_ids, *sample.completion_ids[:t])
                trained.append((context, sample.completion_ids[t], sample.logprobs[t], next(versions)))
        assert next(versions, None) is None
    said = [
        ((*t.prompt_ids, *t.output_ids[:i]), t.output_ids[i], t.logprobs[i], number)
        for number, t in enumerate(turns)
        for i in range(len(t.output_ids))
    ]
    assert trained == said

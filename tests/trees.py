"""Samples that share prefixes in every way: strategies for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from rlsys.batch.samples import Sample
from rlsys.types import Episode, VersionSpan
from tests.models import episode_of


@st.composite
def trees(draw: st.DrawFn, max_samples: int = 6) -> list[Sample]:
    """Samples of which each begins with some tokens of an earlier one; in random order."""
    samples: list[Sample] = []
    for _ in range(draw(st.integers(1, max_samples))):
        ids: list[int] = []
        if samples and draw(st.booleans()):
            parent = draw(st.sampled_from(samples))
            whole = [*parent.prompt_ids, *parent.completion_ids]
            ids = whole[: draw(st.sampled_from([len(parent.prompt_ids), draw(st.integers(0, len(whole)))]))]
        ids += draw(st.lists(st.integers(1, 3), min_size=2, max_size=draw(st.sampled_from([3, 40]))))
        num_prompt = draw(st.integers(1, len(ids) - 1))
        if samples and draw(st.booleans()):
            num_prompt = min(len(draw(st.sampled_from(samples)).prompt_ids), len(ids) - 1)
        size = len(ids) - num_prompt
        samples.append(
            Sample(
                tuple(ids[:num_prompt]),
                tuple(ids[num_prompt:]),
                (True,) * size,
                (-1.0,) * size,
                (VersionSpan(0, size),),
            )
        )
    return draw(st.permutations(samples))


def payloads() -> st.SearchStrategy[tuple[Episode, ...]]:
    """Payloads of a group with such samples."""
    return trees().map(lambda samples: tuple(episode_of(sample, float(i)) for i, sample in enumerate(samples)))

"""The longest known sequence that a prompt begins with, against a plain search."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlsys.routing.known_prefixes import NUM_COMPARED, KnownPrefixes

IDS = st.lists(st.integers(0, 2), min_size=1, max_size=40).map(tuple)


@given(
    known=st.lists(st.tuples(IDS, st.integers(0, 1)), max_size=8),
    prompt=IDS,
    mark=st.integers(0, 1),
    cut=st.integers(0, 3),
)
def test_the_longest_prefix_is_found(known, prompt, mark, cut):
    prefixes = KnownPrefixes[tuple[int, ...]]()
    for ids, own in known:
        prefixes.put(ids, ids, own)
    at_most = max(0, len(prompt) - cut)
    fit = [ids for ids, own in known if own == mark and len(ids) <= at_most and prompt[: len(ids)] == ids]
    found = prefixes.longest(prompt, lambda ids, n: ids == prompt[:n], at_most=at_most, mark=mark)
    hidden = any(
        own == mark
        and ids not in fit
        and len(ids) <= at_most
        and ids[-NUM_COMPARED:] == prompt[: len(ids)][-NUM_COMPARED:]
        for ids, own in known
    )
    if not hidden:  # two sequences with the same end have one place
        assert found == max(fit, key=len, default=None)
    assert found is None or prompt[: len(found)] == found


def test_the_least_recently_used_is_forgotten_first():
    prefixes = KnownPrefixes[str]()
    for ids, name in (((1,), "a"), ((2,), "b"), ((3,), "c")):
        prefixes.put(ids, name)
    assert prefixes.longest((1, 9)) == "a"
    assert [prefixes.pop_oldest(), prefixes.pop_oldest()] == ["b", "c"]


def test_a_taken_prefix_is_gone_and_a_mark_can_be_dropped():
    prefixes = KnownPrefixes[str]()
    prefixes.put((1, 2), "a")
    assert prefixes.longest((1, 2, 3), removes=True) == "a"
    assert prefixes.longest((1, 2, 3)) is None
    prefixes.put((1,), "old", mark=1)
    prefixes.put((1,), "new", mark=2)
    assert prefixes.drop(lambda mark: mark == 1) == ["old"] and len(prefixes) == 1

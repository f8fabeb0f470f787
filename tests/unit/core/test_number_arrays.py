"""Arrays of numbers behave like tuples of them, and travel as their bytes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsys.number_arrays import MIN_SHARED_BYTES, BoolArray, FloatArray, IntArray, NumberArray

ints = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=8).map(tuple)
floats = st.lists(st.floats(width=32, allow_nan=False), max_size=8).map(tuple)
flags = st.lists(st.booleans(), max_size=8).map(tuple)
kinds_and_numbers = st.one_of(
    st.tuples(st.just(IntArray), ints), st.tuples(st.just(FloatArray), floats), st.tuples(st.just(BoolArray), flags)
)
slices = st.slices(8)


@given(kinds_and_numbers, slices)
def test_an_array_is_read_like_a_tuple(given: tuple[Any, tuple[Any, ...]], part: slice) -> None:
    kind, numbers = given
    array = kind(numbers)
    assert array == numbers and numbers == array and hash(array) == hash(numbers)
    assert (len(array), list(array), repr(array)) == (len(numbers), list(numbers), repr(numbers))
    assert array[part] == numbers[part] and isinstance(array[part], kind)
    assert [array[i] for i in range(len(numbers))] == list(numbers)
    assert array + array == numbers + numbers == kind.of_parts(numbers, array)
    assert (numbers + array, type(numbers + array)) == (numbers + numbers, tuple)
    assert array != (*numbers, 1) and array != kind((*numbers, 1)) and array != list(numbers)
    assert kind(array) == array and set(map(type, array)) <= {int, float, bool}


@given(kinds_and_numbers, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_it_survives_pickling_and_copying(given: tuple[Any, tuple[Any, ...]], protocol: int) -> None:
    kind, numbers = given
    array = kind(numbers)
    for found in (pickle.loads(pickle.dumps(array, protocol)), copy.deepcopy(array)):
        assert found == array and isinstance(found, kind)


@pytest.mark.parametrize("size", [1, MIN_SHARED_BYTES // 4])
def test_long_ones_travel_as_buffers_and_are_read_without_a_copy(size: int) -> None:
    array, buffers = IntArray(range(size)), list[pickle.PickleBuffer]()
    text = pickle.dumps(array, 5, buffer_callback=buffers.append)
    assert (len(buffers), len(text) < 200) == ((1, True) if size > 1 else (0, True))
    received = [bytearray(buffer.raw()) for buffer in buffers]
    found = pickle.loads(text, buffers=received)
    assert found == array
    if received:
        received[0][:4] = (7).to_bytes(4, "little")
        assert found[0] == 7, "it is a view of what was received"


def test_numpy_reads_its_memory_and_cannot_write_it() -> None:
    array = FloatArray([0.5, -1.25])
    seen = np.asarray(array)
    assert (seen.dtype, seen.tolist()) == (np.float32, [0.5, -1.25])
    assert np.shares_memory(seen, np.asarray(array))
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 1.0
    assert np.asarray(array, np.float64).dtype == np.float64
    assert np.concatenate([IntArray([1]), IntArray([2, 3])], dtype=np.int64).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "numbers"), [(IntArray, [1.5]), (IntArray, ["1"]), (IntArray, [2**31]), (FloatArray, [None])]
)
def test_what_is_not_of_its_type_is_refused(kind: type[NumberArray], numbers: list[Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        kind(numbers)

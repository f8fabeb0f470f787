"""Token ids, logprobs and flags of one turn or sample: sequences of numbers, each in one block of memory.

They compare and hash like tuples of the same numbers. Pickling one copies at most its bytes, and makes no object of
each number: Ray puts long ones into its object store as they are, and the processes that read them share that memory.
A slice shares the memory of its array.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, ClassVar, Self, SupportsIndex, TypeVar, cast, overload

if TYPE_CHECKING:
    import numpy as np

N = TypeVar("N", int, float, bool)

MIN_SHARED_BYTES = 4096
"""Fewest bytes of an array that is pickled as a buffer of its own, which costs more than copying short ones."""


class NumberArray(Sequence[N]):
    """Numbers of one type, which never change."""

    FORMAT: ClassVar[str]
    """Type of the numbers, as in the module `struct`."""
    __slots__ = ("_view",)
    _view: memoryview

    def __init__(self, numbers: Iterable[N] = ()) -> None:
        """Copy the numbers, unless they are such an array. Raises `TypeError` or `OverflowError` for one that is not
        of the type."""
        is_same = type(numbers) is type(self)  # `isinstance` asks the metaclass of `Sequence`, which takes longer
        self._view = numbers._view if is_same else memoryview(self._buffer_of(numbers)).toreadonly()

    @classmethod
    def over(cls, buffer: Any) -> Self:  # noqa: ANN401  (Python 3.12 has a type for it, `collections.abc.Buffer`)
        """Make an array over the bytes of a buffer, without a copy."""
        made = cls.__new__(cls)
        made._view = memoryview(buffer).toreadonly().cast("B").cast(cast("Any", cls.FORMAT))
        return made

    @classmethod
    def of_parts(cls, *parts: Sequence[N]) -> Self:
        """Concatenate; a single part that is not empty is not copied."""
        arrays = [cls(part) for part in parts if len(part)]
        return arrays[0] if len(arrays) == 1 else cls.over(b"".join(array._view for array in arrays))

    @classmethod
    def _buffer_of(cls, numbers: Iterable[N]) -> array:
        return array(cls.FORMAT, numbers)

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[N]:
        return iter(cast("list[N]", self._view.tolist()))

    @overload
    def __getitem__(self, index: SupportsIndex) -> N: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: SupportsIndex | slice) -> N | Self:
        if not isinstance(index, slice):
            return cast("N", self._view[index])
        part = self._view[index]
        return self.over(part if part.contiguous else part.tobytes())

    def __eq__(self, other: object) -> bool:
        if type(other) is type(self):
            return self._view == other._view
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __add__(self, other: Sequence[N]) -> Self:
        return self.of_parts(self, other)

    def __radd__(self, other: tuple[N, ...]) -> tuple[N, ...]:
        return (*other, *self)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _over, (type(self), self._view.tobytes())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        if int(protocol) >= 5 and self._view.nbytes >= MIN_SHARED_BYTES:
            return _over, (type(self), PickleBuffer(self._view))
        return self.__reduce__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:  # noqa: ANN401
        """Numpy's view of the numbers, which shares their memory unless they are converted."""
        import numpy as np

        return np.array(self._view, dtype=dtype, copy=copy)


class IntArray(NumberArray[int]):
    """Integers of 32 bits, such as token ids."""

    FORMAT = "i"
    __slots__ = ()


class FloatArray(NumberArray[float]):
    """Numbers of 32 bits, such as logprobs, which engines compute in this precision."""

    FORMAT = "f"
    __slots__ = ()


class BoolArray(NumberArray[bool]):
    """Flags of one byte each."""

    FORMAT = "?"
    __slots__ = ()

    @classmethod
    def _buffer_of(cls, numbers: Iterable[bool]) -> Any:  # noqa: ANN401
        return memoryview(bytes(numbers)).cast("?")


def _over(kind: type[NumberArray], buffer: Any) -> NumberArray:  # noqa: ANN401
    return kind.over(buffer)

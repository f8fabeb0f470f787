"""Sizes that the pages of a Parquet file give themselves: a reader makes that much room, whatever the file's end says.

    decoded_bytes(source, begin, num_bytes)     # of one column of one group

A page begins with a struct of Thrift's compact protocol: field 2 is its size when decoded, field 3 its size in the
file (`PageHeader` of the format's `parquet.thrift`). pyarrow shows no pages.
"""

from __future__ import annotations

from typing import Protocol

_HEADER_BYTES = 2**14
"""Most bytes of the description of a page: it has the least and greatest value, of 4 KiB at most each."""
_MOST_NESTS, _MOST_PAGES = 8, 4096
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 0, 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_DECODED, _STORED = 2, 3


class ReadableAt(Protocol):
    """A file that is read at a place, as those of pyarrow."""

    def read_at(self, nbytes: int, offset: int, /) -> bytes:
        """Return at most `nbytes` from `offset` on."""


def decoded_bytes(source: ReadableAt, begin: int, num_bytes: int) -> int:
    """Return the sum of the decoded sizes of the pages between `begin` and `begin + num_bytes`. Raises `ValueError` if
    what is there are no pages."""
    if min(begin, num_bytes) < 0:
        raise ValueError(f"a column is said to begin at {begin} and to have {num_bytes} bytes")
    at, end, size = begin, begin + num_bytes, 0
    for _ in range(_MOST_PAGES):
        if at >= end:
            return size
        header = _Header(source.read_at(_HEADER_BYTES, at))
        sizes = header.sizes()
        if not 0 <= sizes.get(_STORED, -1) <= end - at or sizes.get(_DECODED, -1) < 0:
            raise ValueError(f"the description of a page has the sizes {sizes}")
        size += sizes[_DECODED]
        at += header.at + sizes[_STORED]
    raise ValueError(f"a column of a group has more than {_MOST_PAGES} pages")


class _Header:
    """Cursor over the description of a page."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def sizes(self) -> dict[int, int]:
        """Return the integers of the outermost struct by field, and move behind it. Raises `ValueError`."""
        try:
            return self._struct(0)
        except IndexError:
            raise ValueError(f"the description of a page has more than {_HEADER_BYTES} bytes or no end") from None

    def _struct(self, depth: int) -> dict[int, int]:
        found: dict[int, int] = {}
        field = 0
        while (head := self._byte()) & 15 != _STOP:
            field = field + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            if kind in _INTEGERS:
                found[field] = self._integer()
            elif kind not in (_TRUE, _FALSE):  # a field that is true or false has no more than its head
                self._pass_over(kind, depth)
        return found

    def _pass_over(self, kind: int, depth: int) -> None:
        if depth > _MOST_NESTS:
            raise ValueError(f"the description of a page is nested more than {_MOST_NESTS} deep")
        if kind in _INTEGERS:
            self._integer()
        elif kind in (_TRUE, _FALSE, _BYTE):
            self.at += 1
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            num_bytes = self._varint()
            self.at += num_bytes
        elif kind in (_LIST, _SET):
            head = self._byte()
            for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
                self._pass_over(head & 15, depth + 1)
        elif kind == _STRUCT:
            self._struct(depth + 1)
        else:
            raise ValueError(f"the description of a page has a value of kind {kind}")
        if self.at > len(self._data):  # a list may say that it has any number of values
            raise IndexError

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _integer(self) -> int:
        """Read a number whose sign is in its lowest bit."""
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

"""When workers were busy: by far the most lines of a run, so that none of them is decoded before it is shown.

Lines are kept as blocks: where they are in the file, and what time they cover. A narrow window of time reads the lines
of its blocks again. A wide one goes by summaries: of every block, what each worker did, to a sixteenth of the
block's time. A summary is made once, when it is wanted or `summarise` is called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from rlsys.dashboard.run_files import CHUNK_BYTES, Chunk

PREFIX = b'{"kind":"worker_busy"'
"""What a line of these begins with, as `JsonlSink` writes it."""

_LATE_S = 1.0
"""A span is told when it ends, or so much later."""
_MOST_BLOCKS = 12
"""Windows of more blocks than this go by summaries."""
_BINS = 16
"""Of a block's time: what is closer to each other than one of them is one in its summary."""

_NUMBER = rb"(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
_TIME = re.compile(rb'"time_s":' + _NUMBER)
_SPAN = re.compile(
    rb'\{"kind":"worker_busy","time_s":[^,]+,"worker":"([^"\\]*)","activity":"([^"\\]*)",'
    rb'"start_s":' + _NUMBER + rb',"end_s":' + _NUMBER + rb"\}\n"
)


Stretch: TypeAlias = tuple[float, float, float]
"""From when to when a worker was busy with something, once or several times close to each other, and for how many
seconds of that. A plain tuple: there are millions."""

Tracks: TypeAlias = dict[tuple[str, str], list[Stretch]]
"""By worker and activity."""


@dataclass(slots=True)
class Block:
    """Lines that follow each other in the file, of all kinds."""

    offset: int
    end: int
    last_s: float
    """When its last span was told."""
    num_lines: int
    """That should be spans."""
    first_s: float = 0.0
    """Where its earliest span begins; known with the summary."""
    summary: Tracks | None = None
    num_corrupt: int = 0


class Spans:
    """The spans of one file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._blocks: list[Block] = []

    @property
    def num_lines(self) -> int:
        """Spans told so far, damaged ones counted."""
        return sum(block.num_lines for block in self._blocks)

    @property
    def last_s(self) -> float | None:
        """When the last span was told."""
        return self._blocks[-1].last_s if self._blocks else None

    @property
    def num_corrupt(self) -> int:
        """Damaged lines, of the blocks that were summarised."""
        return sum(block.num_corrupt for block in self._blocks)

    def note(self, chunk: Chunk, num_lines: int) -> None:
        """Remember where these lines are, of which so many are spans."""
        if not num_lines:
            return
        told = _TIME.search(chunk.data, chunk.data.rfind(PREFIX))
        last = self._blocks[-1] if self._blocks else None
        last_s = float(told[1]) if told else (last.last_s if last else 0.0)
        end = chunk.offset + len(chunk.data)
        if last and end - last.offset <= CHUNK_BYTES:
            last.end, last.last_s, last.num_lines = end, last_s, last.num_lines + num_lines
            last.summary = None
        else:
            self._blocks.append(Block(chunk.offset, end, last_s, num_lines))

    def unsummarised(self) -> Sequence[Block]:
        """Blocks without a summary, newest first."""
        return [block for block in reversed(self._blocks) if block.summary is None]

    def summarise(self, blocks: Iterable[Block]) -> None:
        """Make their summaries. All blocks but the newest stay as they are, so that a thread may do it on the side."""
        for block in blocks:
            self._summarised(block)

    def within(self, from_s: float, to_s: float) -> Tracks:
        """What was done in a window of time; of a wide one, by summaries."""
        blocks = [block for block in self._blocks if block.last_s + _LATE_S >= from_s]
        after = next((i for i, block in enumerate(blocks) if block.last_s > to_s), len(blocks))
        later = [block for block in blocks[after:] if self._summarised(block).first_s <= to_s]
        blocks = [*blocks[:after], *later]
        is_wide = len(blocks) > _MOST_BLOCKS
        found: Tracks = {}
        for block in blocks:
            tracks = self._summarised(block).summary if is_wide else self._read(block)
            for key, stretches in (tracks or {}).items():
                shown = [s for s in stretches if s[0] <= to_s and s[1] >= from_s]
                found.setdefault(key, []).extend(shown)
        return {key: stretches for key, stretches in found.items() if stretches}

    def _summarised(self, block: Block) -> Block:
        """The block, with its summary."""
        if block.summary is None:
            tracks = self._read(block)
            block.num_corrupt = block.num_lines - sum(map(len, tracks.values()))
            starts_s, ends_s = ([s[i] for stretches in tracks.values() for s in stretches] for i in (0, 1))
            block.first_s = min(starts_s, default=block.last_s)
            gap_s = (max(ends_s, default=block.last_s) - block.first_s) / _BINS
            block.summary = {key: list(merged(stretches, gap_s)) for key, stretches in tracks.items()}
        return block

    def _read(self, block: Block) -> Tracks:
        if self._path is None:
            return {}
        try:
            with self._path.open("rb") as file:
                file.seek(block.offset)
                data = file.read(block.end - block.offset)
        except OSError:  # it was deleted since; the next look finds out
            return {}
        found: defaultdict[tuple[bytes, bytes], list[Stretch]] = defaultdict(list)
        for worker, activity, start, end in _SPAN.findall(data):
            start_s, end_s = float(start), float(end)
            found[worker, activity].append((start_s, end_s, end_s - start_s))
        return {_names(*key): stretches for key, stretches in found.items()}


@lru_cache(maxsize=10_000)
def _names(worker: bytes, activity: bytes) -> tuple[str, str]:
    """One object for each pair, however often it is met."""
    return worker.decode(errors="replace"), activity.decode(errors="replace")


def merged(stretches: Iterable[Stretch], gap_s: float) -> Iterator[Stretch]:
    """One for those that overlap, or are at most so far from each other; in order."""
    in_order = iter(sorted(stretches))
    start_s, end_s, busy_s = next(in_order, (0.0, 0.0, -1.0))
    if busy_s < 0:
        return
    for next_start_s, next_end_s, next_busy_s in in_order:
        if next_start_s - end_s > gap_s:
            yield start_s, end_s, busy_s
            start_s, end_s, busy_s = next_start_s, next_end_s, next_busy_s
        elif next_end_s > end_s:
            busy_s += min(next_busy_s, next_end_s - max(next_start_s, end_s))
            end_s = next_end_s
    yield start_s, end_s, busy_s

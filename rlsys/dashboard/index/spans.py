"""Busy times of workers. They are most lines of a run, so a line is decoded only when it is needed.

Lines are kept as blocks: position in the file and time range. A narrow time window reads the lines of its blocks again.
A wide one uses summaries: the activity of each worker in a block, at a resolution of a sixteenth of the block's time. A
summary is made once, when it is needed or when `summarise` is called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from rlsys.dashboard.index.event_decoding import is_time
from rlsys.dashboard.index.run_files import CHUNK_BYTES, FileChunk
from rlsys.util.regular_files import open_regular

PREFIX = b'{"kind":"worker_busy"'
"""Beginning of these lines, as `JsonlSink` writes them."""

_LATE_S = 1.0
"""Most seconds between the end of a span and its event."""
_MOST_BLOCKS = 12
"""Most blocks of a window that is shown without summaries."""
_BINS = 16
"""Bins of a block's time. Spans closer than one bin are merged in its summary."""

_NUMBER = rb"(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
_TIME = re.compile(rb'"time_s":' + _NUMBER)
_SPAN = re.compile(
    rb'\{"kind":"worker_busy","time_s":[^,]+,"worker":"([^"\\]*)","activity":"([^"\\]*)",'
    rb'"start_s":' + _NUMBER + rb',"end_s":' + _NUMBER + rb"\}\n"
)


Stretch: TypeAlias = tuple[float, float, float]
"""Start, end and busy seconds of one activity, or of several close to each other. A plain tuple, because there are
millions."""

Tracks: TypeAlias = dict[tuple[str, str], list[Stretch]]
"""Stretches by worker and activity."""


@dataclass(slots=True)
class Block:
    """Consecutive lines of the file, of all kinds."""

    offset: int
    end: int
    last_s: float
    """Time of its last span event."""
    num_lines: int
    """Lines of spans, including damaged ones."""
    first_s: float = 0.0
    """Start of its earliest span; known with the summary."""
    summary: Tracks | None = None
    num_corrupt: int = 0


class Spans:
    """The spans of one file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._blocks: list[Block] = []

    @property
    def num_lines(self) -> int:
        """Number of spans so far, including damaged ones."""
        return sum(block.num_lines for block in self._blocks)

    @property
    def last_s(self) -> float | None:
        """Time of the last span event."""
        return self._blocks[-1].last_s if self._blocks else None

    @property
    def num_corrupt(self) -> int:
        """Damaged lines of the summarised blocks."""
        return sum(block.num_corrupt for block in self._blocks)

    def note(self, chunk: FileChunk) -> None:
        """Add a chunk of lines of all kinds."""
        num_lines = chunk.data.startswith(PREFIX) + chunk.data.count(b"\n" + PREFIX)
        if not num_lines:
            return
        stamp = _TIME.search(chunk.data, chunk.data.rfind(PREFIX))
        last = self._blocks[-1] if self._blocks else None
        last_s = float(stamp[1]) if stamp else -1.0
        last_s = last_s if is_time(last_s) else (last.last_s if last else 0.0)
        end = chunk.offset + len(chunk.data)
        if last and end - last.offset <= CHUNK_BYTES:
            last.end, last.last_s, last.num_lines = end, last_s, last.num_lines + num_lines
            last.summary = None
        else:
            self._blocks.append(Block(chunk.offset, end, last_s, num_lines))

    def blocks_to_summarise(self) -> Sequence[Block]:
        """Blocks without a summary, newest first."""
        return [block for block in reversed(self._blocks) if block.summary is None]

    def summarise(self, blocks: Iterable[Block]) -> None:
        """Summarise blocks. All blocks but the newest are final, so a background thread may do it."""
        for block in blocks:
            self._summarise(block)

    def within(self, from_s: float, to_s: float) -> Tracks:
        """Activities in a time window; for a wide window, from summaries."""
        blocks = [block for block in self._blocks if block.last_s + _LATE_S >= from_s]
        after = next((i for i, block in enumerate(blocks) if block.last_s > to_s), len(blocks))
        later = [block for block in blocks[after:] if self._summarise(block).first_s <= to_s]
        blocks = [*blocks[:after], *later]
        is_wide = len(blocks) > _MOST_BLOCKS
        found: Tracks = {}
        for block in blocks:
            tracks = self._summarise(block).summary if is_wide else self._read(block)
            for key, stretches in (tracks or {}).items():
                shown = [s for s in stretches if s[0] <= to_s and s[1] >= from_s]
                found.setdefault(key, []).extend(shown)
        return {key: stretches for key, stretches in found.items() if stretches}

    def _summarise(self, block: Block) -> Block:
        """Summarise the block if needed."""
        if block.summary is None:
            tracks = self._read(block)
            block.num_corrupt = block.num_lines - sum(map(len, tracks.values()))
            starts_s, ends_s = ([s[i] for stretches in tracks.values() for s in stretches] for i in (0, 1))
            block.first_s = min(starts_s, default=block.last_s)
            gap_s = (max(ends_s, default=block.last_s) - block.first_s) / _BINS
            block.summary = {key: list(merge_stretches(stretches, gap_s)) for key, stretches in tracks.items()}
        return block

    def _read(self, block: Block) -> Tracks:
        if self._path is None:
            return {}
        try:
            with open_regular(self._path) as file:
                file.seek(block.offset)
                data = file.read(block.end - block.offset)
        except OSError:  # deleted since; the next read detects it
            return {}
        found: defaultdict[tuple[bytes, bytes], list[Stretch]] = defaultdict(list)
        for worker, activity, start, end in _SPAN.findall(data):
            start_s, end_s = float(start), float(end)
            if is_time(start_s) and is_time(end_s):
                found[worker, activity].append((start_s, end_s, end_s - start_s))
        return {_names(*key): stretches for key, stretches in found.items()}


@lru_cache(maxsize=10_000)
def _names(worker: bytes, activity: bytes) -> tuple[str, str]:
    """Decode names; cached, so that equal pairs share one object."""
    return worker.decode(errors="replace"), activity.decode(errors="replace")


def merge_stretches(stretches: Iterable[Stretch], gap_s: float) -> Iterator[Stretch]:
    """Merge stretches that overlap or are at most `gap_s` apart; yields them in order."""
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

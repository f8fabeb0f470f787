"""Files that every run writes: `events.jsonl`, and `metrics.jsonl` with one row per step or evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import SEEK_END, FileIO
from pathlib import Path
from typing import TypeAlias

import orjson

from rlsys.monitoring.events import EvalDone, Event, FileReplaced, FileStalled, StepDone
from rlsys.util.printing import print_note

MAX_WAITING = 16 * 2**20
"""Bytes of lines kept in memory for one file that cannot be written; later lines are lost."""
Opens: TypeAlias = Callable[[Path], FileIO]
"""Opens a file for reading and appending, unbuffered."""


class JsonlSink:
    """Sink that appends to the files of a run directory, line by line, so a killed run is readable to its last step.

    `events.jsonl`:  {"kind": "weights_published", "time_s": 1767225600.2, "version": 3, ...}
    `metrics.jsonl`: {"step": 3, "time_s": 1767225600.2, "reward/mean": 0.52, ...}
                     {"step": 2, "time_s": 1767225601.7, "eval/held_out/mean": 0.48, ...}

    The metrics of a step may be in several rows: its evaluations, one row per data set, may end after later steps. A
    resumed run appends, on a new line if the last one was cut. It may repeat steps that the killed run took after its
    last checkpoint: of two rows with the same metric of the same step, the later one counts.

    Lines that cannot be written, for example to a full disk, stay in memory and are tried again with the next event, in
    the file opened again. Once they are written, a `FileStalled` follows them. If a file is moved or removed, as by a
    rotation of logs, another begins, with a `FileReplaced`.
    """

    def __init__(self, run_dir: Path, opens: Opens | None = None) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._events = _Lines(run_dir / "events.jsonl", opens or _open_file)
        self._metrics = _Lines(run_dir / "metrics.jsonl", opens or _open_file)

    def handle(self, event: Event, time_s: float) -> None:
        """Write one event, and its metrics if it has any. NaN is written as null."""
        self._events.write(_line({"kind": event.kind, "time_s": time_s, **vars(event)}), time_s)
        if isinstance(event, StepDone | EvalDone):
            self._metrics.write(_line({"step": event.step, "time_s": time_s, **event.metrics}), time_s)
        else:
            self._metrics.write(b"", time_s)
        for lines in (self._events, self._metrics):
            for news in lines.take_news():
                self.handle(news, time_s)

    def close(self) -> None:
        self._events.close()
        self._metrics.close()


class _Lines:
    """Lines on their way into one file."""

    def __init__(self, path: Path, opens: Opens) -> None:
        self._path, self._opens = path, opens
        self._waiting = bytearray()
        self._begun = b""
        """Begin of the line that waits first, which is already in the file."""
        self._stalled_s = self._now_s = 0.0
        """Times of the first failed write, and of the last write."""
        self._problem = ""
        """Why lines wait, or have waited; empty if that is told."""
        self._num_lost = 0
        self._was_replaced = False
        """True from the beginning of another file until that is told."""
        self._file: FileIO | None = self._open()

    def write(self, line: bytes, time_s: float) -> None:
        """Write what waits and then this line; an empty line only tries again."""
        self._now_s = time_s
        self._flush()
        if len(self._waiting) + len(line) > MAX_WAITING:
            self._num_lost += 1
            return
        self._waiting += line
        self._flush()

    def take_news(self) -> Iterator[FileReplaced | FileStalled]:
        """Return, once, that another file began, and how long lines had to wait after they are written."""
        if self._was_replaced:
            self._was_replaced = False
            yield FileReplaced(self._path.name)
        if self._problem and not self._waiting:
            gap = FileStalled(self._path.name, self._problem, self._now_s - self._stalled_s, self._num_lost)
            self._problem, self._num_lost = "", 0
            yield gap

    def close(self) -> None:
        self._flush()
        self._drop_file()
        if self._waiting:
            lines = self._num_lost + self._waiting.count(b"\n")
            print_note(f"rlsys: the last {lines} lines of {self._path} are lost: {self._problem}")

    def _flush(self) -> None:
        try:
            if self._file is not None and self._is_elsewhere(self._file):
                self._drop_file()
                self._was_replaced = True
            if self._file is None:
                self._file = self._open()
            while self._waiting:
                written = self._waiting[: self._file.write(self._waiting)]
                del self._waiting[: len(written)]
                *lines, begun = bytes(written).split(b"\n")
                self._begun = begun if lines else self._begun + begun
        except OSError as error:
            self._drop_file()
            if not self._problem:
                self._stalled_s = self._now_s
                print_note(f"rlsys: {self._path} cannot be written now: {error.strerror}; its lines wait")
            self._problem = error.strerror or repr(error)

    def _open(self) -> FileIO:
        """Open the file; what waits begins a line of its own, unless its begin is in the file."""
        file = self._opens(self._path)
        if not file.tell():  # a new one, or made empty: the line begins in it
            self._waiting[:0], self._begun = self._begun, b""
        elif not self._begun and not self._waiting.startswith(b"\n"):
            file.seek(-1, SEEK_END)
            if file.read(1) != b"\n":  # a killed run or a full disk left an incomplete line
                self._waiting[:0] = b"\n"
        return file

    def _is_elsewhere(self, file: FileIO) -> bool:
        """Return True if the path names no file any more, or another one."""
        try:
            found, own = self._path.stat(), os.fstat(file.fileno())
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino)

    def _drop_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # a network file system may report the failed write once more
                self._file.close()
            self._file = None


def _open_file(path: Path) -> FileIO:
    return path.open("a+b", buffering=0)


def _line(row: Mapping[str, object]) -> bytes:
    return orjson.dumps(row, default=dict, option=orjson.OPT_APPEND_NEWLINE)

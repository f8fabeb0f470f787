"""The rollout recorder: writes the rollouts of trained steps in a process of its own, beside the next steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rlsys.contracts import TrainedGroup
from rlsys.errors import CheckpointError
from rlsys.replay.rollout_json import RolloutRecord
from rlsys.replay.rollout_parquet import write_records
from rlsys.util.deadlines import remote
from workers.ray.call_stream import Parcel
from workers.text.tokenizer import TextTokenizer
from workers.train.token_columns import Reader, Speller, TokenColumns


class Recorder:
    """Writes rollout files for one policy."""

    def __init__(self, model_path: str) -> None:
        """`model_path` has the tokenizer that spells tokens."""
        self._speller = Speller(TextTokenizer.load(model_path).spell)

    @remote("writing {path.name}")
    def write(
        self,
        path: Path,
        step: int,
        trained: Sequence[TrainedGroup],
        kinds: Sequence[str],
        parcel: Parcel,
        *columns: list[TokenColumns],
    ) -> None:
        """Write groups of a step, given without payload and columns. `parcel` has their payloads, then their columns of
        each of `kinds`; `columns` are the per-token results of all ranks.

        Raises `CheckpointError` if the file cannot be written, `PayloadLost` if payloads are lost.
        """
        opened, size = parcel.open(), len(trained)
        reader = Reader(chain(*columns), self._speller)
        payloads, *rows = [opened[i : i + size] for i in range(0, len(opened), size)]

        def records() -> Iterator[RolloutRecord]:
            for i, own in enumerate(trained):
                record = RolloutRecord.of(step, own.task, own.group, payloads[i], own.assigned)
                by_kind = {kind: tuple(row[i]) for kind, row in zip(kinds, rows, strict=True)}
                yield replace(record, columns=by_kind, readings=reader.read(own.place, record))

        try:
            write_records(path, records())
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error

"""Recorded steps of a run up to a given step: all data to train them again, and their results.

Read from the files of the run: checkpoints, `rollouts`, and `events.jsonl`, which has every metric of `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rlsys.errors import DataError
from rlsys.loop.checkpoint_files import checkpoints_of, local_checkpoint, newest_first, problem_of, step_of
from rlsys.monitoring.events import RolledBack, RunStarted, StepDone, WeightsPublished
from rlsys.replay.rollout_json import RolloutRecord, decoder_of
from rlsys.replay.rollout_parquet import read_records, rollout_path
from rlsys.types import PolicyVersion
from rlsys.util.any_paths import RemotePath
from rlsys.util.regular_files import lines_of

_KINDS = tuple(f'{{"kind":"{event.kind}"'.encode() for event in (RunStarted, WeightsPublished, StepDone, RolledBack))
"""Beginnings of the relevant lines; a run has many other events."""


@dataclass(slots=True)
class RunHistory:
    """Recorded results of the steps of a run, without the steps that a resumed run discarded."""

    hashes: dict[PolicyVersion, str] = field(default_factory=dict)
    """Hash of the published weights by version."""
    ends: dict[int, StepDone] = field(default_factory=dict)
    """Results by step."""
    lost: list[range] = field(default_factory=list)
    """Versions that are no longer steps behind the weights: lost with the actor, see `RolledBack`."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the next event of `_KINDS`."""
        if line["kind"] == RunStarted.kind:
            first = line["first_step"]
            self.hashes = {version: hash_ for version, hash_ in self.hashes.items() if version <= first}
            self.ends = {step: end for step, end in self.ends.items() if step <= first}
            self.lost = [range(lost.start, min(lost.stop, first + 1)) for lost in self.lost]
        elif line["kind"] == RolledBack.kind:
            back = decoder_of(RolledBack)(line)
            self.lost.append(range(back.restored + 1, back.version + 1))
            self.ends = {step: end for step, end in self.ends.items() if not self.is_lost(step)}
        elif line["kind"] == WeightsPublished.kind:
            self.hashes[line["version"]] = line["hash"]
        else:
            end = decoder_of(StepDone)(line)
            self.ends[end.step] = end

    def is_lost(self, step: int) -> bool:
        """True if the step was lost with the actor."""
        return any(step in lost for lost in self.lost)


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """Steps of a run after version `start`, up to and including `step`."""

    run: Path
    step: int
    start: PolicyVersion
    """Version of the checkpoint to begin from; 0 without one."""
    checkpoint: Path | None
    """Checkpoint to begin from; None: the initial model."""
    history: RunHistory

    @classmethod
    def of(cls, run: Path, step: int) -> RecordedSteps:
        """Find `step` and the steps before it, from the newest checkpoint older than `step`.

        Raises `DataError`, with the remedy, if the run did not take the step, or rollouts are missing.
        """
        history = read_history(run)
        if step not in history.ends:
            last = f"its last is {max(history.ends)}" if history.ends else "it took none"
            raise DataError(f"{run} took no step {step}: {last}; steps count from 1")
        checkpoint = _newest_before(run, step)
        start = 0 if checkpoint is None else step_of(checkpoint)
        recording = cls(run, step, start, checkpoint, history)
        if missing := next((p for p in map(recording._path, recording._each_step()) if not p.is_file()), None):
            needed = f"the rollouts of steps {start + 1} to {step}"
            raise DataError(
                f"{missing} is not there, and to train step {step} again from {recording.beginning} takes {needed}. "
                "Record every step (record.rollouts_every=1), and keep more checkpoints (checkpoint.every, "
                "checkpoint.keep_last)"
            )
        return recording

    @property
    def steps(self) -> Sequence[int]:
        """Steps to train, in order."""
        return list(self._each_step())

    def _each_step(self) -> Iterator[int]:
        """Yield the steps one by one: a file may say that there are billions."""
        return (step for step in range(self.start + 1, self.step + 1) if not self.history.is_lost(step))

    @property
    def beginning(self) -> str:
        """Name of the starting weights, in words."""
        return (
            "the initial model" if self.checkpoint is None else f"{self.checkpoint.parent.name}/{self.checkpoint.name}"
        )

    def rollouts(self, step: int) -> list[RolloutRecord]:
        """Trained rollouts of a step, in order. Raises `DataError` for a file that does not match the recorded step."""
        path, group_ids = self._path(step), self.history.ends[step].group_ids
        records = read_records(path)
        found = tuple(record.key.group_id for record in records)
        if not records or any(record.step != step for record in records) or group_ids != found:
            raise DataError(
                f"{path} contains groups {_list_ids(found)}, and step {step} trained {_list_ids(group_ids)}: the file "
                "is of another session of the run, or was changed"
            )
        return records

    def _path(self, step: int) -> Path:
        return rollout_path(self.run, step)


def read_history(run: Path) -> RunHistory:
    """Read `events.jsonl`. Raises `DataError` if it cannot be read."""
    history, path = RunHistory(), run / "events.jsonl"
    try:
        for line in lines_of(path):
            if line.startswith(_KINDS):
                with suppress(orjson.JSONDecodeError):  # cut off by a kill; a resumed run emits it again
                    history.add(orjson.loads(line))
    except OSError as error:
        raise DataError(
            f"cannot read {path}, which contains the hashes of weights: {error.strerror or error}"
        ) from error
    except (KeyError, TypeError) as error:
        raise DataError(f"{path}: an event is not of this version of rlsys: {error!r}") from error
    return history


def _newest_before(run: Path, step: int) -> Path | None:
    older = [path for path in newest_first(checkpoints_of(run)) if step_of(path) < step]
    for path in sorted(older, key=step_of, reverse=True):
        if problem_of(path, sizes_only=isinstance(path, RemotePath)) is None:
            return local_checkpoint(path, run)
    return None


def _list_ids(group_ids: Sequence[int]) -> str:
    return ", ".join(map(str, group_ids)) or "none"

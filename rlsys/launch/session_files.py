"""Configuration, events and metrics that one session of a run writes into its folder."""

from __future__ import annotations

from rlsys.config import Config
from rlsys.launch.run_folder import Start, write_run_dir
from rlsys.monitoring.events import Event
from rlsys.monitoring.trackers.jsonl import JsonlSink
from rlsys.types import PolicyVersion


class SessionFiles:
    """Sink that writes `config.resolved.yaml`, `events.jsonl` and `metrics.jsonl` of a run.

    A start may be refused until it has compared the run with the configuration, for example a checkpoint with the
    model. Until `begin`, the files of earlier sessions stay as they are, and events wait in memory.
    """

    def __init__(self, config: Config, start: Start, *, is_new: bool) -> None:
        """`is_new`: the folder holds no run, so the configuration and all events are written at once."""
        self.config, self.start = config, start
        self._sink: JsonlSink | None = None
        self._waiting: list[tuple[Event, float]] = []
        if is_new:
            self._open(0)

    def begin(self, restored: PolicyVersion = 0) -> None:
        """Write the configuration and the events that wait.

        `restored` is the step that the run goes on from, older than that of `start` if its checkpoint was damaged.
        Raises `ConfigError`.
        """
        if self._sink is None:
            checkpoint, run = self.start.checkpoint, self.config
            is_own = checkpoint is not None and checkpoint.parent in (run.checkpoints_at, run.run_dir / "checkpoints")
            self._open(restored if is_own else 0)

    def _open(self, restored: PolicyVersion) -> None:
        write_run_dir(self.config, restored)
        self._sink = JsonlSink(self.config.run_dir)
        for event, time_s in self._waiting:
            self._sink.handle(event, time_s)

    def handle(self, event: Event, time_s: float) -> None:
        if self._sink is None:
            self._waiting.append((event, time_s))
        else:
            self._sink.handle(event, time_s)

    def close(self) -> None:
        """Close the files; drop the events of a start that was refused."""
        if self._sink is not None:
            self._sink.close()

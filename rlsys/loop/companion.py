"""Loops that a run can do without."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from rlsys.types import PolicyVersion


class Companion(Protocol):
    """Loop beside the others that a run can do without."""

    def on_publish(self, version: PolicyVersion) -> None:
        """Note that `version` is the newest."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Run until cancelled."""

    def metrics(self) -> Mapping[str, float]:
        """Return metrics for the row of a step."""

"""Monitoring of a run: the `dashboard` section, and the thresholds of `alerts`."""

from __future__ import annotations

import difflib
from typing import Annotated

from pydantic import AfterValidator, Field

from rlsys.config.config_problems import nested
from rlsys.config.section import Section
from rlsys.monitoring.alerts import RULES


class DashboardSection(Section):
    """Dashboard started with the run, like `rlsys dashboard RUN`. It ends with the run and cannot slow or stop it."""

    enabled: bool = False
    """Start a dashboard."""
    host: str = "127.0.0.1"
    """Address to listen on. An address beyond this machine requires a token: the variable RLSYS_DASHBOARD_TOKEN, or the
    token in the URL that `RUN/logs/dashboard.url` contains."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8321
    """Port; 0: any free port."""


def _known(thresholds: dict[str, float | None]) -> dict[str, float | None]:
    if unknown := [name for name in thresholds if name not in RULES]:
        raise nested(((name,), _not_a_rule(name)) for name in unknown)
    return thresholds


def _not_a_rule(name: str) -> str:
    close = difflib.get_close_matches(name, RULES, n=1)
    return "no such alert; " + (f"did you mean `{close[0]}`?" if close else f"there are: {', '.join(RULES)}")


Thresholds = Annotated[dict[str, float | None], AfterValidator(_known)]

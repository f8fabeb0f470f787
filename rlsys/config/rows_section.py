"""Rows of data, and how conversations about them begin: what sources of training tasks and evaluations share."""

from __future__ import annotations

import re

from pydantic import Field, JsonValue

from rlsys.config.section import PathText, Section
from rlsys.data.row_adapters import Columns


class RowsSection(Section):
    """Where rows are, and how conversations about them begin."""

    path: PathText
    """As a `data.path` of one file."""
    columns: Columns | None = None
    """Column names of these rows; None: `data.columns`."""
    system: str | None = None
    """System message of conversations about these tasks; empty: none; None: `rollout.chat.system`."""
    template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables of the chat template for these tasks, before those of `rollout.chat`; a row's own come first."""


def dataset_name(path: str) -> str:
    """Default name of a data set: `held_out` for `data/held_out.jsonl`, `sums-hard` for `org/sums#hard`."""
    last = re.sub(r"\.(jsonl?|csv|parquet)(\.gz)?$", "", path.rstrip("/").rpartition("/")[2])
    return re.sub(r"[:#*?\[\]]+", "-", last).strip("-") or "data"

"""Section that sources of training tasks and data sets of evaluations share."""

from __future__ import annotations

import re

from pydantic import Field, JsonValue

from rlsys.config.section import PathText, Section
from rlsys.data.row_adapters import Columns


class RowsSection(Section):
    """Location of rows, with the system message and template variables of their conversations."""

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

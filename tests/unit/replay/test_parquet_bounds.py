"""Files of rollouts that are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import Table, parquet

from rlsys.replay.parquet_bounds import open_parquet


def test_a_file_without_a_column_that_rlsys_writes_is_no_file_of_rollouts(tmp_path: Path) -> None:
    parquet.write_table(Table.from_pylist([{"task": "a"}]), path := tmp_path / "step_000001.parquet")
    assert open_parquet(path, ["task"]).metadata.num_rows == 1
    with pytest.raises(ValueError, match="it lacks a column that rlsys writes: b'replica'"):
        open_parquet(path, ["task", "replica"])

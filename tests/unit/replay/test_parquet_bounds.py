"""Files of rollouts that are none."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import binary, integers
from pyarrow import BufferReader, OSFile, Table, parquet

from rlsys.replay.parquet_bounds import BoundedParquet
from rlsys.replay.parquet_pages import decoded_bytes


def test_a_file_without_a_column_that_rlsys_writes_is_no_file_of_rollouts(tmp_path: Path) -> None:
    parquet.write_table(Table.from_pylist([{"task": "a"}]), path := tmp_path / "step_000001.parquet")
    assert BoundedParquet(path, ["task"]).rows.metadata.num_rows == 1
    with pytest.raises(ValueError, match="it lacks a column that rlsys writes: b'replica'"):
        BoundedParquet(path, ["task", "replica"])


def test_the_pages_of_a_file_say_what_its_end_says(tmp_path: Path) -> None:
    rows = [{"text": "t" * num, "number": num, "list": [float(num)] * num} for num in range(3000)]
    parquet.write_table(
        Table.from_pylist(rows), path := tmp_path / "rows.parquet", compression="zstd", row_group_size=700
    )
    metadata = parquet.read_metadata(path)
    with OSFile(str(path)) as source:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for column in map(group.column, range(group.num_columns)):
                begin = column.dictionary_page_offset or column.data_page_offset
                size = decoded_bytes(source, begin, column.total_compressed_size)
                assert 0 < column.total_uncompressed_size - size < 7000  # descriptions of pages, with texts


@given(binary(max_size=60), integers(0, 80))
def test_bytes_that_are_no_pages_are_refused(data: bytes, num_bytes: int) -> None:
    with suppress(ValueError):
        assert decoded_bytes(BufferReader(data), 0, num_bytes) >= 0


def test_pages_without_end_are_refused() -> None:
    page = b"\x25\x00\x15\x00\x00"
    with pytest.raises(ValueError, match="more than 4096 pages"):
        decoded_bytes(BufferReader(page * 5000), 0, len(page) * 5000)


def test_a_list_of_any_number_of_values_is_not_waited_for() -> None:
    endless = b"\x19\xf1" + b"\xff" * 8 + b"\x7f" + b"\x00" * 40
    with pytest.raises(ValueError, match="no end"):
        decoded_bytes(BufferReader(endless), 0, len(endless))

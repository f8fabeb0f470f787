"""Bounds of rollout files that someone else may have written: a small file can decode to gigabytes.

    file = BoundedParquet(path, ["task_id"])
    file.check_group(place, MOST_GROUP_BYTES)
    file.rows.read_row_group(place)

Texts that repeat are stored once and grow when they are read, so only columns of short texts may be stored like that,
as the writer of `rlsys.replay.rollout_parquet` does.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from rlsys.replay.parquet_pages import decoded_bytes
from rlsys.util.regular_files import open_regular

MOST_GROUP_BYTES = 2**28
"""Most decoded bytes of a group: 64 episodes of 100,000 tokens, with what the trainer made of each, have 220 MB."""
_MOST_ROWS, _MOST_GROUP_ROWS = 2**20, 4096
"""Most episodes of a file, and of a group."""
_MOST_FOOTER_BYTES = 2**26
"""Most bytes of the end of a file that describes it: 10,000 groups have 45 MB."""
_END_BYTES = 8
_VALUE_BYTES = 4
_REPEATED = {"RLE_DICTIONARY", "PLAIN_DICTIONARY"}
_ENCODINGS = {"PLAIN", "RLE", "BIT_PACKED", "BYTE_STREAM_SPLIT"}


class BoundedParquet:
    """A Parquet file whose groups can be checked before they are read."""

    def __init__(self, path: Path, dictionaries: Sequence[str]) -> None:
        """Open a file; the columns `dictionaries` are read without writing repeated texts out.

        Raises `ValueError` if it is no Parquet file, lacks one of these columns, or has too many rows, `OSError`, and
        errors of pyarrow.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._dictionaries = frozenset(dictionaries)
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            opened.seek(max(0, size - _END_BYTES))
            end = opened.read(_END_BYTES)
            if not end.endswith(b"PAR1"):
                raise ValueError("it does not end as a Parquet file")
            if (num_bytes := int.from_bytes(end[:4], "little")) > _MOST_FOOTER_BYTES:
                raise ValueError(f"its description has {num_bytes} bytes, and at most {_MOST_FOOTER_BYTES} are read")
            # the same file, even if another has its name now
            self._source = pa.OSFile(f"/proc/self/fd/{opened.fileno()}")
        try:
            self.rows = pq.ParquetFile(
                self._source, read_dictionary=list(dictionaries), page_checksum_verification=True
            )
        except KeyError as error:
            raise ValueError(f"it lacks a column that rlsys writes: {error}") from error
        if self.rows.metadata.num_rows > _MOST_ROWS:
            raise ValueError(f"it has {self.rows.metadata.num_rows} rows, and at most {_MOST_ROWS} are read")

    def check_group(self, place: int, most_bytes: int, names: Collection[str] = ()) -> int:
        """Return the decoded bytes of a group, or of its columns `names`. Raises `ValueError` if they are more than
        `most_bytes`, or columns of long texts are written in a form that can grow further."""
        group, size = self.rows.metadata.row_group(place), 0
        for column in map(group.column, range(group.num_columns)):
            if names and column.path_in_schema not in names:
                continue
            possible = _ENCODINGS | (_REPEATED if column.path_in_schema in self._dictionaries else set())
            if not set(column.encodings) <= possible:
                raise ValueError(f"the column {column.path_in_schema} is not written as rlsys does: {column.encodings}")
            begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            pages = decoded_bytes(self._source, begin, column.total_compressed_size)
            size += max(column.total_uncompressed_size, pages, _VALUE_BYTES * column.num_values)
        if not 0 <= group.num_rows <= _MOST_GROUP_ROWS or not 0 <= size <= most_bytes:
            raise ValueError(
                f"a group has {group.num_rows} rows of {size} bytes; {_MOST_GROUP_ROWS} of {most_bytes} are read"
            )
        return size

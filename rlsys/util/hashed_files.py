"""Sizes and content hashes of files: 128 bits of XXH3, in hexadecimal. They find damage, not forgery."""

from __future__ import annotations

from dataclasses import dataclass
from io import BufferedIOBase
from typing import IO

from xxhash import xxh3_128


@dataclass(frozen=True, slots=True)
class SavedFile:
    """Size and content hash of a file, as its writer reports them."""

    num_bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, content: bytes) -> SavedFile:
        """Return those of a file with this content."""
        return cls(len(content), xxh3_128(content).hexdigest())


class HashedWriter:
    """Stream that hashes the bytes on their way to another stream."""

    def __init__(self, stream: IO[bytes] | BufferedIOBase) -> None:
        self._stream, self._hash, self._num_bytes = stream, xxh3_128(), 0

    @property
    def report(self) -> SavedFile:
        """Size and hash of the bytes that were written so far."""
        return SavedFile(self._num_bytes, self._hash.hexdigest())

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        self._hash.update(data)
        self._num_bytes += len(data)
        return self._stream.write(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._num_bytes

    def fileno(self) -> int:
        """Return the descriptor of the file. Raises `OSError` if it has none."""
        return self._stream.fileno()

    def flush(self) -> None:
        """Pass all bytes on."""
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

"""Ranks read each other's objects as data: a process that joined them could send anything."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from rlsys.errors import CheckpointError
from rlsys.weight_sync.manifest import Rectangle, TensorSpec
from workers.train.plain_objects import PlainUnpickler

PLAIN = [
    {"a": [1, 2.0, "x", None, b"y", (True, {3})]},
    torch.Size([2, 3]),
    torch.bfloat16,
    SavePlan([WriteItem(MetadataIndex("w", [0, 1]), WriteItemType.SHARD)]),
    TensorProperties(torch.float32),
    Rectangle.whole(TensorSpec("w", "float32", (4, 6))),
]


def read(text: bytes) -> object:
    return PlainUnpickler(io.BytesIO(text)).load()


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_data_is_read(value: object) -> None:
    assert read(pickle.dumps(value)) == value


@pytest.mark.parametrize("error", [CheckpointError("no disk"), OSError(28, "full")], ids=repr)
def test_errors_are_read(error: Exception) -> None:
    found = read(pickle.dumps(error))
    assert (type(found), str(found)) == (type(error), str(error))


class Calls:
    """Is read by calling a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize(
    "sent",
    [
        Calls(os.system, "touch ran"),
        Calls(eval, "open('ran', 'w')"),
        Calls(subprocess.Popen, ["touch", "ran"]),
        Calls(getattr, os, "system"),
        Calls(__import__, "os"),
        partial(os.system, "touch ran"),
        FileSystemReader("."),
        Calls(torch.load, "x"),
        Calls(torch.hub.load, "x", "y"),
    ],
    ids=lambda sent: f"{sent.call[0].__name__}" if isinstance(sent, Calls) else type(sent).__name__,
)
def test_nothing_else_is_read(sent: object) -> None:
    with pytest.raises((pickle.UnpicklingError, TypeError), match=r"which is no data|cannot pickle"):
        read(pickle.dumps(sent))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "os"),
        ("torch.distributed.checkpoint.hf_storage", "json"),
        ("rlsys.errors", "first_of"),
        ("builtins", "exec"),
        ("antigravity", "x"),
        ("torch", "load"),
    ],
)
def test_no_name_leads_beyond_the_list(module: str, name: str) -> None:
    text = f"c{module}\n{name}\n.".encode()
    with pytest.raises(pickle.UnpicklingError, match=f"a rank sent {module}.{name}, which is no data"):
        read(text)

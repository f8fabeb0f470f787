"""Python objects that ranks send each other: data, which is read without running code.

Collectives of objects pickle, and torch's checkpoints use them. A process that reaches a rank's port could send a
pickle that runs code, so only data classes and errors of a few modules are built.
"""

from __future__ import annotations

import pickle
from dataclasses import is_dataclass
from enum import Enum

import torch
from torch.distributed import distributed_c10d

MODULES = ("torch.distributed.checkpoint.", "rlsys.weight_sync.manifest")
"""Beginnings of the names of modules whose data classes and enumerations are built."""
PLAIN = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("traceback", "FrameSummary"),
    ("traceback", "StackSummary"),
}
_NAMED = (torch.dtype, torch.layout, torch.memory_format)
ERRORS = ("builtins", "rlsys.errors", "safetensors._safetensors_rust", "torch", "torch.distributed")
"""Modules whose errors are built: a rank tells the others why it failed."""


class PlainUnpickler(pickle.Unpickler):
    """Reads pickles of data. Raises `pickle.UnpicklingError` for all others, before anything of them runs."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in PLAIN or (module == "torch" and isinstance(vars(torch).get(name), _NAMED)):
            return super().find_class(module, name)
        if "." not in name and (module in ERRORS or module.startswith(MODULES)):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module and _is_plain(found):
                return found
        raise pickle.UnpicklingError(f"a rank sent {module}.{name}, which is no data")


def _is_plain(kind: type) -> bool:
    is_data = kind.__module__.startswith(MODULES) and (is_dataclass(kind) or issubclass(kind, Enum))
    return is_data or issubclass(kind, BaseException)


def read_objects_plainly() -> None:
    """Let torch's collectives of this process read objects with `PlainUnpickler`."""
    distributed_c10d._unpickler = PlainUnpickler  # pyrefly: ignore[bad-assignment]

"""Directions of imports that import-linter's contracts (pyproject.toml) cannot express."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_core_and_algorithms_import_without_torch_or_ray():
    program = """
import sys
import rlsys, rlsys.algorithm, rlsys.batch.packing, rlsys.cli, rlsys.config, rlsys.contracts, rlsys.loop.learner
import rlsys.types
from rlsys.config.plugins import KINDS
plugins = [kind.find(name) for kind in KINDS for name in kind.entry_points()]
print([m for m in ("torch", "ray", "transformers", "vllm") if m in sys.modules])
print([m for m in sys.modules if m.startswith("workers.")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n['workers.prometheus']\n", "the latter is a plug-in: its gauges are Ray's"


def test_every_folder_of_code_is_a_package():
    folders = {path.parent for name in ("rlsys", "workers", "algorithms") for path in (ROOT / name).rglob("*.py")}
    assert [str(f) for f in folders if not (f / "__init__.py").exists()] == []

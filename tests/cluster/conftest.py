"""What every test with hosts of their own needs: namespaces, a model and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cluster.lab import Lab, why_not
from tests.cluster.lab_runs import give


@pytest.fixture(scope="module")
def open_lab(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path, data_path: Path
) -> Iterator[Callable[..., Lab]]:
    """Build a lab whose hosts have a model, tasks and a reward at /mnt/given: see `Lab.open`."""
    if reason := why_not():
        pytest.skip(reason)
    with ExitStack() as stack:

        def build(num_hosts: int, *, has_shared_disk: bool = False) -> Lab:
            folder = tmp_path_factory.mktemp("lab")
            lab = stack.enter_context(Lab.open(folder, num_hosts, has_shared_disk=has_shared_disk))
            give(lab, model_path, data_path)
            return lab

        yield build

"""Damaged checkpoints of a real run: each is named or passed over, and none is loaded as something else."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rlsys import Config, export, train
from rlsys.contracts import Files
from rlsys.errors import CheckpointError, RlsysError
from rlsys.launch.offline_commands import export_once, replay_step
from rlsys.launch.run_folder import checkpoint_of, start_of
from rlsys.loop.checkpoint import DriverState, read_state
from rlsys.loop.checkpoint_files import content_problem, first_whole, from_on, hash_files, newest_whole, write_manifest
from rlsys.testing import FakeRun
from rlsys.util.any_paths import AnyPath
from tests.damage import with_odd_value
from tests.jobs import config_of
from tests.training import differing
from workers.train.fsdp import FsdpBackend
from workers.train.optimizer import OptimizerSettings
from workers.train.rank_group import RankGroup

STEPS = (1, 2, 3)
ODD_NAMES = ("", "step_000009", "step_000003\n", "step_", "../step_000002", "\0", "step_000001.tmp", "\u0664" * 50)

pytestmark = pytest.mark.slow


class Pristine:
    """A run of three steps, a checkpoint after each, and what is in them."""

    def __init__(self, config: Config) -> None:
        train(config, progress=False)
        self.config, self.run = config, config.run_dir
        self.backend = FsdpBackend(config.model.path, OptimizerSettings(lr=1e-3, total_steps=4), RankGroup())
        folders = {step: self.run / "checkpoints" / f"step_{step:06d}" for step in STEPS}
        self.contents = {step: contents_of(folder) for step, folder in folders.items()}
        self.states: dict[int, DriverState] = {step: read_state(folder) for step, folder in folders.items()}
        self.weights = {step: self.load(folder) for step, folder in folders.items()}

    def load(self, checkpoint: Path) -> dict[str, Tensor]:
        """A copy of the weights in a checkpoint, as a resume loads them."""
        self.backend.load(checkpoint / "actor")
        return self.backend.full_weights(torch.float32)

    def whole_steps(self, run: Path) -> list[int]:
        """Steps whose checkpoint has the saved contents, under its own name."""
        folders = {step: run / "checkpoints" / f"step_{step:06d}" for step in STEPS}
        return [step for step, folder in folders.items() if contents_of(folder) == self.contents[step]]


def contents_of(folder: Path) -> dict[str, object]:
    """Bytes of the files that a resume reads, by relative path. White space in the manifest has no meaning."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    read = {n: p for n, p in files.items() if n.startswith("actor/") or n in ("driver.json", "groups.jsonl")}
    contents: dict[str, object] = {name: path.read_bytes() for name, path in read.items()}
    with suppress(KeyError, ValueError):
        contents["manifest.json"] = json.loads(files["manifest.json"].read_bytes())
    return contents


@pytest.fixture(scope="module")
def pristine(cluster, model_path: Path, data_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Pristine:
    return Pristine(config_of(model_path, data_path, tmp_path_factory.mktemp("runs"), ["run.steps=3"]))


def cut(path: Path, random: Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: random.randrange(len(data) or 1)])


def change_a_byte(path: Path, random: Random) -> None:
    data = bytearray(path.read_bytes() or b"x")
    data[random.randrange(len(data))] ^= random.randrange(1, 256)
    path.write_bytes(data)


def remove(path: Path, random: Random) -> None:
    path.unlink()


def replace_by_another(path: Path, random: Random) -> None:
    others = files_in(path.parents[2])
    if random.random() < 0.5:  # the same file of another checkpoint
        others = [other for other in others if other.name == path.name]
    path.write_bytes(random.choice(others).read_bytes())


def become_a_folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


def add_a_file(path: Path, random: Random) -> None:
    path.with_name(f"another{path.suffix}").write_bytes(random.choice(files_in(path.parents[1])).read_bytes())


DAMAGES: tuple[Callable[[Path, Random], None], ...] = (
    cut, change_a_byte, remove, replace_by_another, become_a_folder, add_a_file,
)  # fmt: skip


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "latest")


def damage_something(checkpoints: Path, random: Random) -> None:
    """Damage a file, a folder, or what lies beside them."""
    if not (files := files_in(checkpoints)):
        return
    path, kind = random.choice(files), random.random()
    folder = checkpoints / path.relative_to(checkpoints).parts[0]
    if kind < 0.75:
        random.choice(DAMAGES)(path, random)
    elif kind < 0.8:
        shutil.rmtree(folder)
    elif kind < 0.85:  # one checkpoint under the name of another
        other = checkpoints / f"step_{random.choice((1, 2, 3, 7)):06d}"
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
            shutil.copytree(folder, other)
    elif kind < 0.9:
        partial = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(folder, partial)
    else:
        (checkpoints / "latest").write_text(random.choice(ODD_NAMES))


async def damage_by_ranks(checkpoint: AnyPath, files: Files) -> str | None:
    """What three ranks find."""
    names = sorted(files)
    shares = ({name: files[name] for name in names[rank::3]} for rank in range(3))
    return next((problem for share in shares if (problem := content_problem(checkpoint, share))), None)


def checked_start(config: Config) -> tuple[Path, list[str]]:
    """Where a run starts once the ranks have read the files, and what it passed over."""
    start = start_of(config)
    assert start.checkpoint is not None, "nothing restarts at 0"
    checkpoint, problems = asyncio.run(first_whole(from_on(start.checkpoint), damage_by_ranks))
    assert isinstance(checkpoint, Path)
    return checkpoint, [*start.passed_over, *problems]


class Damaged:
    """A copy of the run with some damage."""

    def __init__(self, pristine: Pristine, random: Random, num_damages: int) -> None:
        self._folder = TemporaryDirectory()
        self.run = Path(self._folder.name) / pristine.run.name
        shutil.copytree(pristine.run, self.run, symlinks=True)
        for _ in range(num_damages):
            damage_something(self.run / "checkpoints", random)

    def __enter__(self) -> Path:
        return self.run

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


damages = st.builds(Random, st.integers(0, 2**32)), st.integers(1, 6)


@given(*damages)
@settings(derandomize=True)
def test_a_resume_takes_a_whole_checkpoint_or_is_refused(pristine: Pristine, random: Random, num_damages: int) -> None:
    with Damaged(pristine, random, num_damages) as run:
        whole = pristine.whole_steps(run)
        own = pristine.config.run.model_copy(update={"folder": run.parent, "resume": "auto"})
        config = pristine.config.model_copy(update={"run": own})
        if not whole:
            with pytest.raises(CheckpointError, match=re.escape(str(run))):
                checked_start(config)
            return
        checkpoint, passed_over = checked_start(config)
        step = int(checkpoint.name[5:])
        assert step in whole
        latest = run / "checkpoints" / "latest"
        if latest.read_text().strip() != checkpoint.name:
            assert step == max(whole)
            newer = [path.name for path in latest.parent.glob("step_*[0-9]") if path.name > checkpoint.name]
            assert all(any(name in problem for problem in passed_over) for name in newer)
        assert read_state(checkpoint) == pristine.states[step]
        assert differing(pristine.load(checkpoint), pristine.weights[step]) == []


@pytest.mark.nightly
@given(*damages)
@settings(max_examples=settings().max_examples // 4, derandomize=True)
def test_an_export_has_the_weights_of_its_step(pristine: Pristine, random: Random, num_damages: int) -> None:
    with Damaged(pristine, random, num_damages) as run:
        whole = pristine.whole_steps(run)
        for step in ("latest", *map(str, STEPS)):
            try:
                checkpoint = checkpoint_of(run, step)
                weights = load_file(export(run, run / f"export-{step}", step) / "model.safetensors")
            except CheckpointError:
                assert step == "latest" or int(step) not in whole
            else:
                assert differing(weights, pristine.weights[int(checkpoint.name[5:])]) == []


@pytest.mark.nightly
@given(*damages)
@settings(max_examples=settings().max_examples // 4, derandomize=True)
def test_a_damaged_model_folder_is_exported_again(pristine: Pristine, random: Random, num_damages: int) -> None:
    with Damaged(pristine, random, 0) as run:
        checkpoint = run / "checkpoints" / "step_000003"
        model = export_once(checkpoint)
        for _ in range(num_damages):
            if files := files_in(model):
                random.choice(DAMAGES[:4])(random.choice(files), random)
        assert export_once(checkpoint) == model
        assert differing(load_file(model / "model.safetensors"), pristine.weights[3]) == []


@pytest.mark.nightly
@given(*damages)
@settings(max_examples=settings().max_examples // 4, derandomize=True)
def test_a_replay_of_a_damaged_run_is_exact_or_refused(pristine: Pristine, random: Random, num_damages: int) -> None:
    with Damaged(pristine, random, num_damages) as run, suppress(RlsysError):
        assert replay_step(run, 3).is_equal


@pytest.fixture(scope="module")
def fake_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the real driver on fake workers, stopped with finished groups in its queue."""
    folder = tmp_path_factory.mktemp("fake") / "run"
    run = FakeRun(folder, checkpoint={"every": 1}, asynchrony={"max_staleness": 2})
    assert run.train() == 3
    return folder


@given(st.builds(Random, st.integers(0, 2**32)), st.sampled_from(["driver.json", "groups.jsonl"]))
@settings(derandomize=True)
def test_a_state_changed_by_hand_is_refused_in_words(fake_run: Path, random: Random, name: str) -> None:
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        shutil.copytree(fake_run, folder)
        checkpoint, problems = newest_whole(folder / "checkpoints")
        assert checkpoint is not None and problems == []
        path = checkpoint / name
        if lines := path.read_text().splitlines() if name == "groups.jsonl" else [path.read_text()]:
            place = random.randrange(len(lines))
            lines[place] = json.dumps(with_odd_value(json.loads(lines[place]), random))
        path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint, hash_files(checkpoint))
        with suppress(RlsysError):
            FakeRun(folder, run={"steps": 5}, asynchrony={"max_staleness": 2}).train()


def test_a_deeply_nested_state_is_refused(fake_run: Path, tmp_path: Path) -> None:
    shutil.copytree(fake_run, tmp_path / "run")
    checkpoint, _ = newest_whole(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    (checkpoint / "driver.json").write_text("[" * 100_000)
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint, hash_files(checkpoint))
    with pytest.raises(CheckpointError, match=r"driver\.json cannot be read"):
        read_state(checkpoint)

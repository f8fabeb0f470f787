"""Run folders as an enemy hands them over, and every command that reads one, in a process that is watched.

run = foreign_run(root / "run")         # small, with a checkpoint
spoil(run, Random(7))
assert problems_of(read_all(run, root / "out")) == []
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from ruamel.yaml import YAML

from rlsys.errors import RlsysError
from rlsys.loop.checkpoint_files import hash_files, write_manifest
from rlsys.util.files import CONFIG
from tests.damage import damage, with_odd_value
from tests.histories import History, Shape
from tests.rollouts import rollouts

MOST_MB, MOST_S = 500, 10.0
"""Most memory and time of a command that reads a small run, whatever is in it."""
_PATIENCE_S = 60.0
_PRELOADED = ["tests.foreign", "rlsys.cli", "rlsys.launch", "rlsys.dashboard.serve", "pyarrow.parquet",
    "ruamel.yaml", "rlsys.dashboard.report.html_report", "rlsys.dashboard.query.query_command", "rlsys.data.inspection",
    "rlsys.simulate.measured_profile", "rlsys.replay.run_history", "starlette.testclient", "rlsys.config.changed_keys",
]  # fmt: skip
QUERIES = (
    "select * from episodes order by reward limit 5",
    "select task, change from tasks",
    "select * from steps",
    "select * from evaluations",
    "select * from groups",
    "select * from logs",
    "select * from samples",
    "select * from runs",
    "select * from alerts",
)
PAGES = (
    "runs", "run?run=R", "metrics?run=R", "alerts?run=R", "groups?run=R", "groups?run=R&step=2", "ledger?run=R",
    "group?run=R&step=1&group_id=1", "episode?run=R&step=1&group_id=1&episode=0", "task?run=R&task=task-0",
    "cluster?run=R", "cluster?run=R&from=0&to=2e10", "evaluations?run=R", "machine?run=R", "failures?run=R",
    "compare?run=R&run=R", "tables?run=R", "series?run=R&name=*", "table?run=R&table=episodes", "table?table=runs",
)  # fmt: skip


class Reading(NamedTuple):
    """What a command took, and how it ended."""

    command: str
    seconds: float
    mb: float
    """Memory beyond what the process had before."""
    error: str
    """Traceback of an error that is none of ours, or an answer with status 500; empty if there was none."""


def foreign_run(folder: Path) -> Path:
    """A run of three steps with an evaluation, samples of machines, logs and a checkpoint; answer its folder."""
    history = History(folder, Shape(steps=3, groups=3, size=2, tasks=4))
    history.start()
    for _ in range(3):
        history.step()
    history.end("finished")
    rollouts(folder / "evaluations" / "held_out" / "step_000002.parquet", (1.0, 0.0), step=2)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rollout-0.log").write_text("loading\nERROR: no\n")
    checkpoint = folder / "checkpoints" / "step_000002"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "actor" / "model.safetensors").write_bytes(b"\2" + b"\0" * 7 + b"{}")
    (checkpoint / "groups.jsonl").write_text("")
    (checkpoint / "driver.json").write_text('{"version": 2, "published": {}}')
    write_manifest(checkpoint, hash_files(checkpoint))
    return folder


def read_all(run: Path, out: Path, only: Sequence[str] = ()) -> list[Reading]:
    """Let every command read a run, or those named, in one process; they write to the folder `out`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(theirs, run, out, tuple(only)))
    process.start()
    theirs.close()
    found: list[Reading] = []
    begun = "the start"
    try:
        while ours.poll(_PATIENCE_S):
            told = ours.recv()
            if isinstance(told, Reading):
                found.append(told)
            else:
                begun = told
        found.append(Reading(begun, _PATIENCE_S, 0.0, "it did not end"))
        process.kill()
    except EOFError:
        process.join()
        if process.exitcode:
            found.append(Reading(begun, 0.0, 0.0, f"it was ended by {process.exitcode}"))
    return found


def problems_of(readings: Sequence[Reading]) -> list[Reading]:
    """The readings that took too much, or ended with an error that is none of ours."""
    return [r for r in readings if r.error or r.seconds > MOST_S or r.mb > MOST_MB]


def _read(told: Connection, run: Path, out: Path, only: Sequence[str]) -> None:
    out.mkdir(exist_ok=True)
    os.environ["XDG_CACHE_HOME"] = str(out / "cache")
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for name, command in _commands(run, out):
            if only and name.split(" ", 1)[0] not in only:
                continue
            told.send(name)
            before_mb, begin_s, error = _peak_mb(reset=True), time.process_time(), ""
            try:
                command()
            except (RlsysError, typer.Exit, typer.BadParameter):
                pass
            except BaseException:  # noqa: BLE001  (whatever it is, it is what the test looks for)
                error = traceback.format_exc()
            told.send(Reading(name, time.process_time() - begin_s, _peak_mb() - before_mb, error))
    told.close()
    sys.stdout.flush()
    os._exit(0)  # servers have threads


def _commands(run: Path, out: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every command. Of those that need torch, only what reads the run."""
    from rlsys import cli
    from rlsys.config import Config
    from rlsys.config.loader import load_sections
    from rlsys.dashboard.tail import tail
    from rlsys.launch.offline_commands import EXPORTED, template_of_run
    from rlsys.launch.run_folder import checkpoint_of
    from rlsys.replay.run_history import RecordedSteps

    for sql in QUERIES:
        yield f"query {sql}", lambda sql=sql: cli.query(run, sql)
    yield "report", lambda: cli.report(run, out / "report.html")
    yield "profile", lambda: cli.profile(run, out / "profile.yaml")
    yield "tail", lambda: tail(run, sys.stdout, once=True)
    yield "export", lambda: load_sections(Config, checkpoint_of(run, "latest").parent.parent / CONFIG, EXPORTED)
    yield "export template", lambda: (out / "template").write_text(template_of_run(run / CONFIG) or "")
    yield "replay", lambda: RecordedSteps.of(run, 2).rollouts(2)
    yield "inspect", lambda: cli.inspect_data(str(run / "events.jsonl"))
    yield from _pages(run)


def _pages(run: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ask for every page, without the network."""
    from starlette.testclient import TestClient

    from rlsys.dashboard.http_server import app_of
    from rlsys.dashboard.index.index_followers import IndexFollowers
    from rlsys.dashboard.query.queries import Readings
    from rlsys.dashboard.query.table_queries import Tables
    from rlsys.dashboard.stream import Changes

    readings = Readings(run.parent)
    client = TestClient(app_of(readings, Tables(readings, IndexFollowers()), Changes(readings)))

    def ask(page: str) -> None:
        answer = client.get(f"/api/{page.replace('=R', f'={run.name}')}")
        assert answer.status_code < 500, answer.text
        orjson.loads(answer.content)

    for page in PAGES:
        yield f"page {page}", lambda page=page: ask(page)


def _peak_mb(*, reset: bool = False) -> float:
    """Most memory of this process and of processes that it started; with `reset`, that of this process is now's."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# ------------------------------------------------------------------------------------------------------------- spoil


def spoil(run: Path, random: Random, outside: Path) -> None:
    """Change a run as damage or an enemy would. `outside` is a file that no reader may touch."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and not path.is_symlink())
    for _ in range(random.choice([1, 1, 2, 4])):
        path = random.choice([*3 * [each for each in files if each.parent == run], *files])
        if path.is_file() and not path.is_symlink():
            (damage if random.random() < 0.5 else random.choice(_TRICKS))(path, random)
    if random.random() < 0.3 and (path := run / "rollouts" / "step_000001.parquet").is_file():
        _odd_texts(path, random)
    if random.random() < 0.2:
        foreign_index(run, outside)
    if random.random() < 0.1:
        path = random.choice(files)
        if not path.is_dir():
            path.unlink(missing_ok=True)
            path.symlink_to(random.choice([outside, Path("/dev/zero"), run, Path("/proc/self/mem")]))


def foreign_configuration(run: Path, random: Random, private: Path, marks: Path) -> None:
    """Give a run a configuration that names code in the run, which would leave a file `marks`, and a private file."""
    (run / "planted.py").write_text(f"open({str(marks)!r}, 'w')\n\ndef planted(*args, **kwargs):\n    return 1.0\n")
    code = random.choice([f"{run}/planted.py:planted", "planted:planted", "./planted.py:planted", "planted.py:planted"])
    named = random.choice([str(private), f"file://{private}", f"../../{private.name}", f"{run}/../../{private.name}"])
    command = f"touch {marks}"
    parts = {
        "reward": [{"fn": code}, {"fn": {"fn": code, "args": {"path": named}}}, {"fn": [{"fn": code, "weight": 2}]}],
        "rollout": [
            {"chat": {"template": named}}, {"workflow": code}, {"workflow": {"type": "play", "environment": code}},
            {"workflow": {"type": "openai_agent", "command": command}}, {"tools": [code, f"mcp:{command}"]},
            {"workflow": {"type": "play", "environment": f"mcp:{command}"}}, {"engine": code},
        ],
        "data": [{"path": named}, {"path": code, "columns": {"prompt": named}}, {"path": named, "system": named}],
        "model": [{"path": named}, {"path": f"{private}/..", "tokenizer": named}, {"path": str(run)}],
        "algorithm": [code, {"type": code}], "stabilizer": [code], "tracking": [[code], {"type": code}, [named]],
        "eval": [{"data": {"held_out": named}}, {"data": named, "every": 1}, {"data": {named: named, "x": code}}],
        "checkpoint": [{"copy_to": named}, {"to": named}, {"to": f"file://{private}"}, {"to": [named]}],
        "run": [{"name": named, "folder": str(private)}, {"resume": named}], "alerts": [code, {"notify": command}],
        "dashboard": [f"0.0.0.0:{random.randrange(20_000, 30_000)}"], "plugins": [code, [code]],
        "train": [{"lora": code}],
    }  # fmt: skip
    tree = YAML(typ="safe").load(run / CONFIG)
    for name in random.sample(sorted(parts), random.choice([1, 1, 3, len(parts)])):
        value = random.choice(parts[name])
        tree[name] = with_odd_value(value, random) if random.random() < 0.2 else value
    (run / CONFIG).write_text(json.dumps(tree))  # which is YAML too


def foreign_index(run: Path, victim: Path) -> None:
    """Put an index into a run whose journal names a file as its super-journal, which SQLite deletes with it."""
    with closing(sqlite3.connect(run / "index.sqlite")) as connection:
        connection.executescript(
            "CREATE VIEW episodes AS SELECT 1; CREATE TABLE files (path, size, mtime_ns, head, num_corrupt);"
            "CREATE TRIGGER endless AFTER INSERT ON files BEGIN INSERT INTO files SELECT x, 1, 1, 1, 1 FROM "
            "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c); END"
        )
    magic, name = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7", os.fsencode(victim)
    start = (magic + struct.pack(">IIIII", 0, 0, 1, 512, 4096)).ljust(512, b"\0")
    lock_page = struct.pack(">I", 2**30 // 4096 + 1)
    end = lock_page + name + struct.pack(">II", len(name), sum(name)) + magic
    (run / "index.sqlite-journal").write_bytes(start + end)


def _pipe(path: Path, random: Random) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path, random: Random) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _folder(path: Path, random: Random) -> None:
    path.unlink()
    path.mkdir()


def _hole(path: Path, random: Random) -> None:
    """Make it very large, at no cost."""
    os.truncate(path, path.stat().st_size + random.choice([2**20, 2**27, 2**30]))


def _large_numbers(path: Path, random: Random) -> None:
    """Write another number in place of some."""
    data = path.read_bytes()
    other = random.choice([b"4000000000", b"9007199254740991", b"1.7.6", b"-1", b"1e308", b"9" * 5000, b"0"])
    for number in random.sample([b"1", b"2", b"3", b"0.5", b"1767225600"], 2):
        data = data.replace(b":" + number, b":" + other, random.choice([1, 3, 1000]))
    path.write_bytes(data)


def _repeated(path: Path, random: Random) -> None:
    """Say everything many times, without and with line ends."""
    data = path.read_bytes()[: 2**16]
    path.write_bytes((data if random.random() < 0.5 else data.replace(b"\n", b" ")) * 100)


def _nested(path: Path, random: Random) -> None:
    """Open very many brackets."""
    path.write_bytes(random.choice([b"[", b'{"a":', b"- ", b"a: {"]) * random.choice([1000, 100_000]))


def _odd_texts(path: Path, random: Random) -> None:
    """Change the JSON in a file of rollouts; its checksums are right."""
    if path.suffix != ".parquet":
        return
    try:
        table = pq.read_table(path)
    except (OSError, ValueError):  # it is damaged already
        return
    name, row = random.choice(["session", "session", "task"]), random.randrange(table.num_rows)
    texts = table[name].to_pylist()
    texts[row] = json.dumps(with_odd_value(orjson.loads(texts[row] or "{}"), random)).encode(errors="replace").decode()
    changed = table.set_column(table.schema.get_field_index(name), name, pa.array(texts))
    pq.write_table(changed, path, use_dictionary=False, row_group_size=2)


_TRICKS = (
    _odd_texts,
    _odd_texts,
    _odd_texts,
    _pipe,
    _device,
    _folder,
    _hole,
    _large_numbers,
    _large_numbers,
    _repeated,
    _nested,
)

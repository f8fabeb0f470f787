"""Size of the road of a group: types, files, public methods, and names that are gone.

    python -m benchmarks.road [--short]

* `identity_types`: classes that carry the identity of a group from permit to record: in `rlsys/types.py`,
  `rlsys/contracts.py`, `rlsys/loop`, `rlsys/replay` and `workers`, those with a field or property `group_id`, or one
  whose type is `GroupKey` or such a class. Events, errors and rows of trackers are not read, because they report to
  people; nor is the simulator, which uses these types. `identity_beside` has those that are not of the road, with the
  reason.
* `files`: those of `rlsys`, `workers` and `algorithms` with a function that is called, in any process, while steps 2 to
  4 of a synchronous run of the default configuration take their groups from permit to gradient; `lines` is their
  length, `weights_files` the further ones from gradient to the weights of the next group. `not_counted` has the others
  that are called, by reason, as on the page docs/architecture.md. `page_files` and `page_lines` are of the files that
  the page lists up to the gradient; `not_on_page` are called and not listed, `page_not_called` the reverse.
* `public_methods`: of each class in `workers/rollout`, largest first, properties left out.
* `gone_names_found`: places in `rlsys`, `workers`, `tests` and `docs` that still have a name of the road before.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks import called_files
from benchmarks.measure import ENV, POLL_S, num_rows, parser_of, print_result, sorter, train_command

ROOT = Path(__file__).parents[1]
IDENTITY = ("rlsys/types.py", "rlsys/contracts.py", "rlsys/loop", "rlsys/replay", "workers")
"""Where types of the road are looked for."""
BESIDE = {
    "GroupRecord": "a group that waits for its step, in a checkpoint's file",
    "Replacement": "two groups, for one question to the rewards",
    "_Success": "a success that is stored after its group has ended",
    "_Ask": "a driver's request, in a run of several policies",
}
"""Types with a group's identity that are not of the road -> reason."""
WEIGHTS = (
    "algorithms/gac.py", "rlsys/weight_sync/", "workers/relay/", "workers/train/optimizer.py",
    "workers/model/model_tensors.py", "workers/transport/",
)  # fmt: skip
"""Files from gradient to weights, but for `VERIFIED`."""
VERIFIED = "rlsys/weight_sync/sync.py"
NOT_COUNTED = {
    "it names what travels": (
        "rlsys/types.py", "rlsys/number_arrays.py", "rlsys/contracts.py", "rlsys/stabilizer.py",
        "rlsys/routing/requests.py", "workers/engines/engine.py",
    ),
    "it is a helper": ("rlsys/util/", "workers/train/rank_group.py"),
    "it observes": (
        "rlsys/dashboard/", "rlsys/loop/replica_events.py", "rlsys/loop/rollout_writer.py",
        "rlsys/loop/step_metrics.py", "rlsys/monitoring/", "workers/ray/vitals.py", "workers/rollout/replica_worker.py",
        "workers/train/rank_metrics.py", "workers/train/token_columns.py",
    ),
    "it is of the run, not of a group": (
        "rlsys/cli.py", "rlsys/config/", "rlsys/launch/", "rlsys/loop/checkpoint", "rlsys/loop/recovery.py",
        "rlsys/loop/run_position.py", "rlsys/loop/saver.py", "rlsys/loop/stop_request.py", "workers/ray/cluster",
        "workers/train/state_files.py", "workers/worker_set.py",
    ),
}  # fmt: skip
"""Reason -> files, by how their paths begin."""
GONE = (
    "EngineStay", "GroupRoute", "HostedPolicy", "IssuedTask", "PartialStream", "PartialsRelay", "PlayedGroup",
    "RolledOut", "TurnRouter", "_Journey", "cancel_turn", "give_away", "lease_s", "partial_responses", "recalled",
    "recite_turn", "sample_turn", "session_hosts",
)  # fmt: skip
SEARCHED = ("rlsys", "workers", "tests", "docs")
TEXTS = (".py", ".md", ".json", ".yaml", ".toml")


def main() -> None:
    """Count all, and print the result line."""
    size = parser_of(__doc__).parse_args().size
    of_road, beside = identity_types()
    called = called_in_a_run(2 if size == "short" else 8)
    kinds, page = by_kind(called), page_files()
    print_result(
        {
            "identity_types": of_road,
            "identity_beside": beside,
            "files": len(kinds["road"]),
            "lines": sum(num_lines(path) for path in kinds["road"]),
            "of_files": {path: num_lines(path) for path in sorted(kinds["road"], key=num_lines, reverse=True)},
            "page_files": len(page),
            "page_lines": sum(map(num_lines, page)),
            "not_on_page": sorted(set(kinds["road"]) - set(page)),
            "page_not_called": sorted(set(page) - set(called)),
            "weights_files": kinds.pop("weights"),
            "not_counted": {kind: paths for kind, paths in kinds.items() if kind != "road"},
            "public_methods": public_methods(),
            "gone_names_found": gone_names_found(),
        }
    )


# --------------------------------------------------------------------------------------------------------------- types


def identity_types() -> tuple[list[str], dict[str, str]]:
    """Return the types that carry a group's identity along the road, and those beside it with the reason."""
    types = {node.name: dict(_typed(node)) for path in python_files(IDENTITY) for node in classes_of(path)}
    found = {"GroupKey"}
    while more := {name for name, typed in types.items() if name not in found and _carries(typed, found)}:
        found |= more
    found.discard("GroupKey")
    return sorted(found - BESIDE.keys()), {name: BESIDE[name] for name in sorted(found & BESIDE.keys())}


def _carries(typed: Mapping[str, set[str]], carriers: set[str]) -> bool:
    return "group_id" in typed or any(names & carriers for names in typed.values())


def _typed(node: ast.ClassDef) -> Iterator[tuple[str, set[str]]]:
    """Fields and properties of a class -> the names of their types. A collection of a type is not that type."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id, set(_names(part.annotation))
        elif isinstance(part, ast.FunctionDef) and is_property(part) and part.returns is not None:
            yield part.name, set(_names(part.returns))


def _names(annotation: ast.expr) -> Iterator[str]:
    if isinstance(annotation, ast.BinOp):  # A | None
        yield from _names(annotation.left)
        yield from _names(annotation.right)
    elif isinstance(annotation, ast.Name):
        yield annotation.id


# --------------------------------------------------------------------------------------------------------------- files


def called_in_a_run(groups_per_step: int) -> list[str]:
    """Train a few steps; return the files of this project with a function that is called from the second step on."""
    with tempfile.TemporaryDirectory(prefix="road_") as folder:
        notes, run = Path(folder, "notes"), Path(folder, "runs")
        notes.mkdir()
        shutil.copy(called_files.__file__, notes / "sitecustomize.py")
        command = train_command(
            sorter("short"), run, "run.steps=4", "rollout.replicas=1", "reward.workers=1", "checkpoint.every=0",
            "record.rollouts_every=0", f"train.groups_per_step={groups_per_step}",
        )  # fmt: skip
        env = {name: value for name, value in ENV.items() if name != "RAY_ADDRESS"}  # its processes start with the run
        env["PYTHONPATH"] = f"{notes}:{ROOT}"
        with (notes / "log").open("w") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            while process.poll() is None:  # the run cannot notify us
                if num_rows(run / "run" / "metrics.jsonl"):
                    (notes / "on").touch()
                time.sleep(POLL_S)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}\n{(notes / 'log').read_text()}")
        paths = {Path(line) for file in notes.glob("*.txt") for line in file.read_text().splitlines()}
    inside = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    return sorted(path for path in inside if path.startswith(("rlsys/", "workers/", "algorithms/")))


def by_kind(paths: Iterable[str]) -> defaultdict[str, list[str]]:
    """Sort called files into `road`, `weights`, and the reasons of `NOT_COUNTED`."""
    kinds: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        of_weights = path.startswith(WEIGHTS) and path != VERIFIED
        reasons = (reason for reason, begins in NOT_COUNTED.items() if path.startswith(begins))
        kinds["weights" if of_weights else next(reasons, "road")].append(path)
    return kinds


def page_files() -> list[str]:
    """Return the files that docs/architecture.md lists from permit to gradient."""
    to_gradient, _, _ = (ROOT / "docs/architecture.md").read_text().partition("**From gradient to the weights")
    return re.findall(r"^\d+\. (?:· )?`([\w/.]+)`: ", to_gradient, re.MULTILINE)


def num_lines(path: str) -> int:
    """Return the number of lines of a file of this project."""
    return (ROOT / path).read_bytes().count(b"\n")


# ------------------------------------------------------------------------------------------------------------- classes


def public_methods() -> dict[str, int]:
    """Return the number of public methods of each class in `workers/rollout`, largest first."""
    counts = {
        node.name: sum(
            isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            and not part.name.startswith("_")
            and not is_property(part)
            for part in node.body
        )
        for path in python_files(["workers/rollout"])
        for node in classes_of(path)
    }
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a property."""
    names = {each.id for each in node.decorator_list if isinstance(each, ast.Name)}
    return bool(names & {"property", "cached_property"})


def classes_of(path: Path) -> list[ast.ClassDef]:
    """Return the classes that a file defines, nested ones included."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]


def python_files(places: Iterable[str]) -> list[Path]:
    """Return the Python files at these paths of the project, and in these folders."""
    paths = [ROOT / place for place in places]
    return [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]


# --------------------------------------------------------------------------------------------------------------- names


def gone_names_found() -> list[str]:
    """Return `FILE: NAME` for each name of the road before that a file still has; for `workers`, also the types without
    fields that Python makes of anything."""
    found = []
    for place in SEARCHED:
        gone = (*GONE, "SimpleNamespace") if place == "workers" else GONE
        name = re.compile(rf"(?<!\w)(?:{'|'.join(gone)})(?!\w)")
        for path in sorted((ROOT / place).rglob("*")):
            if path.suffix in TEXTS:
                found += [f"{path.relative_to(ROOT)}: {word}" for word in sorted(set(name.findall(path.read_text())))]
    return found


if __name__ == "__main__":
    main()

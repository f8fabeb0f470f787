"""The Slurm script against stand-ins for Slurm, Ray and rlsys."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.closed_schemas import read_head

SLURM = Path(__file__).parents[3] / "deploy" / "slurm" / "rlsys.sbatch"
BIN = Path(sys.executable).parent

SKIP_OPTIONS = "while case $1 in -*) true ;; *) false ;; esac; do shift; done"
STAND_INS = {
    "scontrol": 'printf "n1\\nn2\\nn3\\n"',
    # It kills its step at TERM, as the real one does; `scancel` signals a step.
    "srun": f'echo "srun $*" >> "$LOG"; {SKIP_OPTIONS}; export SLURM_STEP_ID=$$; "$@" & child=$!; '
    'trap "kill -KILL $child; exit 137" TERM; echo $child > "$STEPS/$$"; wait $child',
    "scancel": 'kill -TERM $(cat "$STEPS/${2#7.}")',
    "apptainer": f'echo "apptainer $*" >> "$LOG"; shift; {SKIP_OPTIONS}; while [ "$1" != img.sif ]; do shift; done; '
    'shift; exec "$@"',
    "sleep": 'test "$1" != 1 || set 0.05; exec /bin/sleep "$1"',
    "hostname": 'echo "10.1.0.1 172.17.0.1 "',
    # A node joins once `ray start` runs there, except those in FAILING, where it ends, and in HANGING.
    "ray": """
        echo "token $RAY_AUTH_TOKEN" >> "$LOG"
        echo "ray $*" >> "$LOG"
        node=${*##*--node-name=}
        node=" ${node%% *} "
        case "$*" in
          "list nodes "*) for each in "$JOINED"/*; do echo "{\\"node_name\\": \\"${each##*/}\\"}"; done ;;
          *--block*)
            case "$FAILING" in *"$node"*) echo "no GPU is left" >&2; exit 1 ;; esac
            case "$HANGING" in *"$node"*) ;; *) touch "$JOINED/$(echo $node)" ;; esac
            exec sleep 60 ;;
        esac""",
}


def submit(folder: Path, rlsys: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """The script as Slurm would start it on three nodes, with `rlsys` replaced by a line of shell."""
    (joined := folder / "joined").mkdir()
    (numbers := folder / "steps").mkdir()
    for name, body in {**STAND_INS, "rlsys": rlsys}.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LOG": str(folder / "log"),
        "JOINED": str(joined),
        "STEPS": str(numbers),
        "FAILING": "",
        "HANGING": "",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_CPUS_PER_TASK": "4",
        **variables,
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["bash", SLURM, *arguments], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def steps(folder: Path) -> list[str]:
    """What `srun` was called with."""
    lines = (folder / "log").read_text().splitlines()
    return [line.removeprefix("srun ") for line in lines if line.startswith("srun ")]


def test_the_script_names_what_never_ran():
    assert re.search(r"never run on a real Slurm", read_head(SLURM))


@pytest.mark.parametrize("script", [SLURM, SLURM.parents[2] / ".ci" / "run"], ids=["slurm", "ci"])
def test_shellcheck_finds_nothing_in_the_scripts(script: Path):
    done = subprocess.run([BIN / "shellcheck", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_slurm_starts_one_ray_per_node_and_then_the_driver(tmp_path: Path):
    job = submit(tmp_path, 'echo "$RAY_ADDRESS $*" $(ls "$JOINED")', "job.yaml", "a.b=c", SLURM_GPUS_ON_NODE="8")
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (0, "10.1.0.1:20007 train job.yaml a.b=c n1 n2 n3\n")
    shared = "--nodes=1 --ntasks=1 --cpus-per-task=4 --overlap --export=ALL"
    start = "ray start --block --num-cpus=4 --num-gpus=8"
    address, head, *others = steps(tmp_path)
    assert address == "--nodes=1 --ntasks=1 --overlap --nodelist=n1 hostname -I"
    assert head == (
        f"{shared} --nodelist=n1 {start} --node-name=n1 --head --node-ip-address=10.1.0.1 --port=20007 "
        "--dashboard-host=127.0.0.1 --disable-usage-stats"
    )
    assert sorted(others) == [
        f"{shared} --nodelist={node} {start} --node-name={node} --address=10.1.0.1:20007" for node in ("n2", "n3")
    ]


@pytest.mark.parametrize(("failing", "names"), [("n1", "n1"), ("n3", "n3"), ("n2 n3", "n[23]")])
def test_slurm_ends_soon_and_names_the_node_on_which_ray_failed(tmp_path: Path, failing: str, names: str):
    job = submit(tmp_path, "echo started", "job.yaml", FAILING=f" {failing} ")
    out, err = job.communicate(timeout=20)
    assert (job.returncode, out) == (1, "")
    assert "no GPU is left" in err
    assert re.search(rf"ray start has ended, with the messages above, on: {names}", err)


def test_slurm_names_the_nodes_that_do_not_join_in_time(tmp_path: Path):
    job = submit(tmp_path, "echo started", "job.yaml", HANGING=" n2 n3 ", RLSYS_JOIN_S="1")
    out, err = job.communicate(timeout=20)
    assert (job.returncode, out) == (1, "")
    assert "not in the Ray cluster after 1 s: n2 n3" in err


@pytest.mark.parametrize(("gpus", "extra"), [("0", ""), ("8", "--nv ")])
def test_slurm_runs_all_of_rlsys_in_an_image_of_apptainer(tmp_path: Path, gpus: str, extra: str):
    job = submit(tmp_path, "echo started", "job.yaml", RLSYS_IMAGE="img.sif", SLURM_GPUS_ON_NODE=gpus)
    assert job.communicate(timeout=30)[0] == "started\n"
    words = f"apptainer exec --bind {tmp_path}:{tmp_path} {extra}img.sif"
    log = (tmp_path / "log").read_text()
    assert all(f"{words} ray start" in line for line in steps(tmp_path)[1:])
    assert f"\n{words} rlsys train job.yaml\n" in log
    assert f"\n{words} bash -c" in log


def test_slurm_runs_all_of_rlsys_in_an_image_of_pyxis(tmp_path: Path):
    job = submit(tmp_path, "echo started", "job.yaml", RLSYS_IMAGE="rlsys+cuda.sqsh", RLSYS_MOUNTS="/shared:/shared")
    assert job.communicate(timeout=30)[0] == "started\n"
    words = (
        "--container-image=rlsys+cuda.sqsh "
        f"--container-mounts=/tmp:/tmp,{tmp_path}:{tmp_path},/shared:/shared --container-workdir={tmp_path}"
    )
    _, *others = steps(tmp_path)
    assert all(words in line for line in others)
    assert sum("ray start" in line for line in others) == 3
    assert any(line.endswith(" rlsys train job.yaml") and "--nodelist=n1" in line for line in others)
    assert not list(tmp_path.glob(".rlsys-step-*"))


@pytest.mark.parametrize(("restarts", "keys"), [("0", ""), ("1", " run.resume=auto")])
def test_slurm_resumes_a_job_that_it_has_queued_again(tmp_path: Path, restarts: str, keys: str):
    job = submit(tmp_path, 'echo "$*"', "job.yaml", SLURM_RESTART_COUNT=restarts)
    assert job.communicate(timeout=30)[0] == f"train job.yaml{keys}\n"


def test_slurm_gives_each_job_a_secret_token_for_ray(tmp_path: Path):
    tokens = []
    for name in ("one", "other"):
        (folder := tmp_path / name).mkdir()
        job = submit(folder, 'echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN"', "f")
        mode, token = job.communicate(timeout=30)[0].split()
        log = (folder / "log").read_text()
        assert (mode, len(token)) == ("token", 64)
        assert {line.split()[1] for line in log.splitlines() if line.startswith("token ")} == {token}
        assert not any(token in line for line in log.splitlines() if not line.startswith("token "))
        tokens.append(token)
    assert tokens[0] != tokens[1]


def test_slurm_ends_with_the_exit_code_of_the_driver(tmp_path: Path):
    job = submit(tmp_path, "exit 3", "job.yaml")
    job.communicate(timeout=30)
    assert job.returncode == 3


@pytest.mark.parametrize("image", ["", "img.sif", "rlsys+cuda.sqsh"])
def test_slurm_forwards_the_termination_warning_to_the_driver(tmp_path: Path, image: str):
    driver = 'trap "echo saved; exit 130" TERM; echo started; while :; do sleep 0.05; done'
    job = submit(tmp_path, driver, "job.yaml", RLSYS_IMAGE=image)
    assert job.stdout
    assert job.stdout.readline() == "started\n"
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=30)
    assert (job.returncode, out) == (130, "saved\n")


def test_slurm_ends_at_the_termination_warning_before_there_is_a_driver(tmp_path: Path):
    job = submit(tmp_path, "echo started", "job.yaml", HANGING=" n1 ")
    while not (tmp_path / "log").exists() or "list nodes" not in (tmp_path / "log").read_text():
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=30)[0] == ""
    assert job.returncode == 143


def test_slurm_without_a_job_file_exits_with_2(tmp_path: Path):
    job = submit(tmp_path, "exit 0")
    job.communicate(timeout=30)
    assert job.returncode == 2

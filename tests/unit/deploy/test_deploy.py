"""Deployment files, checked without their platforms."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda", "kuberay/base/rayjob.yaml", "slurm/rlsys.sbatch"])
def test_deployment_files_name_untested_parts_and_run_rlsys_train(name: str):
    text = (DEPLOY / name).read_text()
    head = "\n".join(text.splitlines()[:5])
    assert re.search(r"never (built|applied|run)", head)
    assert re.search(r"rlsys( |:cpu |:cuda )train", text)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_dockerfile_names_images_only_by_digest(name: str):
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", (DEPLOY / name).read_text(), re.MULTILINE)
    images = {image for image, _ in stages} - {name for _, name in stages}
    assert images
    assert [image for image in images if not re.fullmatch(r"[\w.:/-]+@sha256:[0-9a-f]{64}", image)] == []


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_as_a_user_without_privileges_and_gets_what_the_other_gets(name: str):
    lines = (DEPLOY / name).read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
    ignored = [(DEPLOY / f"{each}.dockerignore").read_text() for each in DOCKERFILES]
    assert ignored[0] == ignored[1]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing_in_the_dockerfile(name: str):
    done = subprocess.run([BIN / "hadolint", DEPLOY / name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")

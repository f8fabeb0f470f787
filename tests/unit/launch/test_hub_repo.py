"""An upload of an export, by processes of their own: `huggingface_hub` reads its environment once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.by_day import first_by_day
from tests.hub_server import TOKEN, HubServer, Repo, serving_hub

pytestmark = pytest.mark.slow
PUSH = """
import sys
from pathlib import Path
from rlsys.errors import RlsysError
from rlsys.launch.hub_repo import HubRepo
name, folder, visibility = sys.argv[1:]
try:
    print(HubRepo.open(name, is_public=visibility == "public").upload(Path(folder), "Step 4 of sums"))
except RlsysError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40, "sub/merges.txt": b"a b\n"}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serving_hub() as server:
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "model"


def push(url: str, name: str, folder: Path, visibility: str = "private", **own: str) -> tuple[int, str]:
    """Exit status, and the last line that the process wrote."""
    home = {"HF_HOME": str(folder.parent / "home"), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": url, "HF_TOKEN": TOKEN}
    environment = {**os.environ, **home, "PYTHONPATH": os.pathsep.join(sys.path), **own}
    command = [sys.executable, "-c", PUSH, name, str(folder), visibility]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def test_an_export_is_pushed_to_a_new_private_repository(hub: HubServer, model: Path):
    assert push(hub.url, "me/sums", model) == (0, f"{hub.url}/me/sums")
    assert hub.repos == {"me/sums": Repo(True, CONTENTS, ["Step 4 of sums"])}
    (model / "config.json").write_bytes(b'{"a": 1}')
    assert push(hub.url, "me/sums", model) == (0, f"{hub.url}/me/sums")
    assert hub.repos["me/sums"].files == {**CONTENTS, "config.json": b'{"a": 1}'}


@pytest.mark.nightly
def test_a_repository_is_public_only_on_request(hub: HubServer, model: Path):
    hub.repos["me/sums"] = Repo(is_private=False)
    status, told = push(hub.url, "me/sums", model)
    assert (status, hub.repos["me/sums"].files) == (1, {})
    assert "ConfigError: --push me/sums: it exists and is public; add --public" in told
    assert push(hub.url, "me/sums", model, "public")[0] == 0
    assert push(hub.url, "me/other", model, "public")[0] == 0
    assert [repo.is_private for repo in hub.repos.values()] == [False, False]


@pytest.mark.parametrize(
    ("name", "own", "message"),
    first_by_day(
        [
            (
                "me/sums",
                {"HF_TOKEN": ""},
                "ConfigError: --push me/sums: there is no token; set HF_TOKEN, or log in with",
            ),
            ("me/sums", {"HF_TOKEN": "hf_wrong"}, "the Hub does not know this token: renew it"),
            ("others/sums", {}, "this token may not write there: the name belongs to others"),
            ("others/theirs", {}, "this token may not write there: the name belongs to others"),
            ("me/su ms", {}, "ConfigError: --push me/su ms: not a name of the Hub"),
            ("me/sums", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it"),
            ("me/sums", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hub cannot be reached: "),
        ],
        2,
    ),
    ids=["no token", "wrong token", "other organisation", "taken", "bad name", "offline", "no network"],
)
def test_a_refused_push_says_why(hub: HubServer, model: Path, name: str, own: dict[str, str], message: str):
    hub.repos["others/theirs"] = Repo(is_private=True)
    status, told = push(hub.url, name, model, **own)
    assert (status, message in told) == (1, True), told
    assert not any(repo.files for repo in hub.repos.values())


def test_a_failed_upload_names_the_folder_and_the_command(hub: HubServer, model: Path):
    hub.takes_commits = False
    status, told = push(hub.url, "me/sums", model)
    assert status == 1
    assert f"the model is in {model}; upload it with `hf upload me/sums {model} .`" in told
    assert "Storage limit reached" in told
    assert (model / "model.safetensors").read_bytes() == CONTENTS["model.safetensors"]

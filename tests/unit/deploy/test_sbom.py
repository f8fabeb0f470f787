"""The bill of materials that the image and `make sbom` have, of the environment of these tests."""

import json
import re
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from rlsys.launch.doctor import locked_versions

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "requirements" / "sbom.py"
SBOM = runpy.run_path(str(SCRIPT))

TEXT = {"type": "string", "minLength": 1}
COMPONENT = {
    "type": "object",
    "properties": {
        "type": {"enum": ["application", "library"]},
        "bom-ref": TEXT,
        "name": TEXT,
        "version": TEXT,
        "purl": {"type": "string", "pattern": r"^pkg:(pypi|generic|deb/debian)/[^@/\s]+@[^\s+]+$"},
        "licenses": {"type": "array", "items": {"type": "object", "properties": {"expression": TEXT}}, "maxItems": 1},
    },
    "required": ["type", "bom-ref", "name", "version", "purl"],
    "additionalProperties": False,
}
DOCUMENT = {
    "type": "object",
    "properties": {
        "bomFormat": {"const": "CycloneDX"},
        "specVersion": {"const": "1.6"},
        "version": {"const": 1},
        "metadata": {"type": "object", "properties": {"component": COMPONENT}, "required": ["component"]},
        "components": {"type": "array", "items": COMPONENT, "uniqueItems": True},
    },
    "required": ["bomFormat", "specVersion", "version", "metadata", "components"],
    "additionalProperties": False,
}
"""The part of CycloneDX that is used here."""


@pytest.fixture(scope="module")
def printed() -> str:
    return subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def document(printed: str) -> dict[str, Any]:
    return json.loads(printed)


def test_the_bill_of_materials_is_of_the_format(document: dict[str, Any]):
    assert [e.message for e in Draft202012Validator(DOCUMENT).iter_errors(document)] == []
    references = [entry["bom-ref"] for entry in document["components"]]
    assert len(set(references)) == len(references)


def test_the_bill_of_materials_lists_every_locked_package(document: dict[str, Any]):
    lock = locked_versions((ROOT / "requirements" / "cpu.lock").read_text())
    entries = {e["name"]: e["version"] for e in document["components"] if e["purl"].startswith("pkg:pypi/")}
    assert {name: entries.get(name) for name in lock} == lock
    assert document["metadata"]["component"]["name"] == "rlsys"


def test_the_same_installation_gives_the_same_bytes(printed: str):
    assert subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=True).stdout == printed


def test_installed_debian_packages_are_listed_and_removed_ones_are_not():
    rows = ["libc6 2.36-9+deb12u10 amd64 installed", "nano 7.2-1 amd64 config-files"]
    document = SBOM["bill_of_materials"]([metadata.distribution("rlsys")], rows)
    assert [entry["purl"] for entry in document["components"] if "deb" in entry["purl"]] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64"
    ]


def test_the_image_makes_its_bill_of_materials_after_its_last_package():
    last_stage = (ROOT / "deploy" / "Dockerfile.cpu").read_text().split("\nFROM ")[-1]
    makes = re.search(r"sbom\.py > /opt/venv/sbom\.cdx\.json", last_stage)
    assert makes
    assert not re.search(r"apt-get|install|COPY", last_stage[makes.end() :])

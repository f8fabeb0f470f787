"""Print the bill of materials of this Python's environment: `python requirements/sbom.py > sbom.cdx.json`.

The format is CycloneDX 1.6, JSON. It lists the interpreter, the Python packages of the environment, and on Debian the
installed Debian packages: all that an image of `deploy/` has. The same installation gives the same bytes.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any
from urllib.parse import quote

PRODUCT = "rlsys"
DEBIAN_ROW = "${Package} ${Version} ${Architecture} ${db:Status-Status}\n"
"""Removed packages whose configuration is left have rows too, of another status than `installed`."""


def component(purl: str, name: str, version: str, licence: str | None = None) -> dict[str, Any]:
    """One entry of the list, under the package URL that scanners look up.

    >>> component("pkg:pypi/six@1.17.0", "six", "1.17.0")["bom-ref"]
    'pkg:pypi/six@1.17.0'
    """
    entry: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licence:
        entry["licenses"] = [{"expression": licence}]
    return entry


def python_component(distribution: metadata.Distribution) -> dict[str, Any]:
    """An installed Python package, with its licence where the package states an SPDX expression."""
    name = re.sub(r"[-_.]+", "-", distribution.name).lower()
    purl = f"pkg:pypi/{name}@{quote(distribution.version, safe='')}"
    licence = next(iter(distribution.metadata.get_all("License-Expression", [])), None)
    return component(purl, name, distribution.version, licence)


def debian_component(row: str) -> dict[str, Any]:
    """A Debian package, from a line such as `tini 0.19.0-1 amd64 installed`."""
    name, version, architecture, _ = row.split()
    return component(f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={architecture}", name, version)


def bill_of_materials(distributions: Iterable[metadata.Distribution], debian_rows: Iterable[str]) -> dict[str, Any]:
    """The CycloneDX document of these packages, sorted, with rlsys as its subject."""
    python = platform.python_version()
    found = {"python": component(f"pkg:generic/python@{python}", "python", python)}
    found |= {entry["purl"]: entry for entry in map(python_component, distributions)}
    installed = [row for row in debian_rows if row.endswith(" installed")]
    found |= {entry["purl"]: entry for entry in map(debian_component, installed)}
    product = found.pop(next(purl for purl in found if purl.startswith(f"pkg:pypi/{PRODUCT}@")))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": product | {"type": "application"}},
        "components": [found[purl] for purl in sorted(found)],
    }


def debian_packages() -> list[str]:
    """One line for each Debian package; none on another system."""
    if not shutil.which("dpkg-query"):
        return []
    query = ["dpkg-query", "--show", f"--showformat={DEBIAN_ROW}"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()


if __name__ == "__main__":
    json.dump(bill_of_materials(metadata.distributions(), debian_packages()), sys.stdout, indent=1)
    print()

"""Look the locked packages up in the OSV database of vulnerabilities: `python requirements/audit.py`.

Fails on each finding that `accepted.txt`, beside this file, does not list with a reason. Where the database cannot be
reached, one line says so and the check passes: a machine without a network can still run `make nightly`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rlsys.launch.doctor import locked_versions

HERE = Path(__file__).parent
DATABASE = "https://api.osv.dev/v1/querybatch"
TIMEOUT_S = 60
OUR_FAULT = (400, 404)
"""HTTP statuses of a database that was reached and does not understand the question."""

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends a batch of queries to the database and returns its reply."""


@dataclass(frozen=True, order=True)
class Finding:
    """A known vulnerability of a locked version."""

    package: str
    version: str
    vulnerability: str
    """Identifier such as GHSA-8qpm-p4r5-j6rf or PYSEC-2026-12."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}: https://osv.dev/vulnerability/{self.vulnerability}"


def find(versions: Mapping[str, str], ask: Ask) -> list[Finding]:
    """All findings of these versions, sorted. `ask` is called again while a reply has further pages.

    A local version such as 2.13.0+cpu is asked for as the release that it is a build of.
    """
    queries = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version.partition("+")[0]}
        for name, version in versions.items()
    ]
    found = set()
    while queries:
        results = ask({"queries": queries})["results"]
        pages = []
        for query, result in zip(queries, results, strict=True):
            name, version = query["package"]["name"], query["version"]
            found |= {Finding(name, version, entry["id"]) for entry in result.get("vulns", [])}
            if token := result.get("next_page_token"):
                pages.append(query | {"page_token": token})
        queries = pages
    return sorted(found)


def accepted_reasons(text: str) -> dict[str, str]:
    """The reason for each accepted vulnerability; a line without one is refused.

    >>> accepted_reasons("# head\\nGHSA-8qpm  only its server is affected, which nothing here starts\\n")
    {'GHSA-8qpm': 'only its server is affected, which nothing here starts'}
    """
    reasons = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            match = re.fullmatch(r"(\S+)\s+(\S.*)", line)
            if match is None:
                raise ValueError(f"accepted vulnerability without a reason: {line!r}; remedy: write it after the name")
            reasons[match[1]] = match[2]
    return reasons


def report(findings: list[Finding], reasons: Mapping[str, str], count: int) -> tuple[list[str], bool]:
    """Lines to print, and whether the check passes. A reason for something that is no longer found fails too."""
    open_ = [finding for finding in findings if finding.vulnerability not in reasons]
    stale = sorted(reasons.keys() - {finding.vulnerability for finding in findings})
    lines = [f"audit: {finding}; remedy: a newer version, or a reason in accepted.txt" for finding in open_]
    lines += [f"audit: {name} is accepted but not found; remedy: delete its line of accepted.txt" for name in stale]
    accepted = len(findings) - len(open_)
    lines.append(f"audit: {count} locked packages, {len(open_)} open and {accepted} accepted vulnerabilities")
    return lines, not (open_ or stale)


def post(url: str) -> Ask:
    """The database at this address."""

    def ask(batch: dict[str, Any]) -> dict[str, Any]:
        request = Request(url, json.dumps(batch).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)

    return ask


def audit(versions: Mapping[str, str], reasons: Mapping[str, str], ask: Ask) -> tuple[list[str], bool]:
    """Lines to print, and whether the check passes, which it does without an answer of the database."""
    try:
        findings = find(versions, ask)
    except OSError as error:
        if isinstance(error, HTTPError) and error.code in OUR_FAULT:
            raise
        return [f"audit: no vulnerability was looked up: the database cannot be reached ({error})"], True
    return report(findings, reasons, len(versions))


def main() -> int:
    """Check all locks; 1 on a finding."""
    versions: dict[str, str] = {}
    for lock in sorted(HERE.glob("*.lock")):
        versions |= locked_versions(lock.read_text())
    lines, passes = audit(versions, accepted_reasons((HERE / "accepted.txt").read_text()), post(DATABASE))
    print(*lines, sep="\n")
    return 0 if passes else 1


if __name__ == "__main__":
    sys.exit(main())

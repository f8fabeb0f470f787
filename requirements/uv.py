"""Run uv with the package sources that pip is configured with: `python requirements/uv.py pip install ...`.

uv installs the lock ten times faster than pip but reads none of pip's settings. This passes them on, from pip's
environment variables and files alike, with one source for each package. torch comes from the index that PyTorch
publishes its CPU builds on, which uv knows by name, or from `find-links` where pip has them. All other packages come
from one index, `index-url` or PyPI. With `--cuda`, as in `python requirements/uv.py --cuda pip install ...`, torch does
too: its builds there are for CUDA. pip's `extra-index-url` is left out: two indexes could offer the same package.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

VALUES = {"index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT"}


def pip_settings(listing: str) -> dict[str, str]:
    """The settings in the output of `pip config list`; an environment variable wins over a file.

    >>> pip_settings("global.cert='/a'\\n:env:.cert='/b'")
    {'cert': '/b'}
    """
    rows = [line.split("=", 1) for line in listing.splitlines() if "=" in line]
    rows.sort(key=lambda row: row[0].startswith(":env:"))
    return {key.rpartition(".")[2]: str(ast.literal_eval(value)) for key, value in rows}


def uv_variables(settings: Mapping[str, str], *, cuda: bool = False) -> dict[str, str]:
    """The environment variables that give uv these settings.

    >>> uv_variables({"find-links": "/wheels /more", "extra-index-url": "https://other"})
    {'UV_FIND_LINKS': '/wheels,/more'}
    """
    variables = {name: settings[key] for key, name in VALUES.items() if key in settings}
    if cuda:
        return variables
    if "find-links" in settings:
        return variables | {"UV_FIND_LINKS": ",".join(settings["find-links"].split())}
    return variables | {"UV_TORCH_BACKEND": "cpu"}


def main(arguments: list[str]) -> int:
    """Run the `uv` beside this Python; variables the user already set are kept."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    cuda = arguments[:1] == ["--cuda"]
    environment = uv_variables(pip_settings(listing.stdout), cuda=cuda) | dict(os.environ)
    environment["VIRTUAL_ENV"] = sys.prefix
    words = [Path(sys.executable).with_name("uv"), *arguments[cuda:]]
    return subprocess.run(words, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

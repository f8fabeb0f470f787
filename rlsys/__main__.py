"""The command `rlsys`, also as `python -m rlsys`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run `rlsys.cli` in a Python that does not search the current folder for modules.

    The folder may be the run of another user. Helpers of `multiprocessing` search the folder first, unless this process
    has the option `-P`. A process without the option replaces itself by one that has it.
    """
    if not sys.flags.safe_path:
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    from rlsys.cli import main

    main()


if __name__ == "__main__":
    main()

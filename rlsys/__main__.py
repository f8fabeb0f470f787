"""The command `rlsys`, also as `python -m rlsys`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run `rlsys.cli`, once Python searches no modules in the current folder: it may be somebody else's run, and
    helpers of `multiprocessing` search it first unless this process has the option `-P`."""
    if not sys.flags.safe_path:
        os.execv(sys.executable, [sys.executable, "-P", *sys.orig_argv[1:]])
    from rlsys.cli import main

    main()


if __name__ == "__main__":
    main()

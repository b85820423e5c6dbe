"""The command: as ``heterollm``, and as ``python -m heterollm``."""

from __future__ import annotations

import gc
import sys

from heterollm.base import INTERRUPTED


def run() -> int:
    """Run the command line; Ctrl-C ends it with one line from its first import on."""
    # Nearly all objects of a command live until its end; looking through them took an eighth of a short one.
    gc.set_threshold(20_000, 20, 20)
    try:
        from heterollm.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())

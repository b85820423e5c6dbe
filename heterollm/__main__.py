"""The command: as ``heterollm``, and as ``python -m heterollm``."""

from __future__ import annotations

import gc
import sys

from heterollm.base import INTERRUPTED


def run() -> int:
    """Run the command line; Ctrl-C ends it with one line from its first import on."""
    # What the imports make lives until the end; looking through it took an eighth of a short command.
    gc.disable()
    try:
        from heterollm.cli import main

        gc.freeze()
        gc.enable()

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(run())

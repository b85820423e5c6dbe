"""The same as the ``heterollm`` command: ``python -m heterollm``."""

from __future__ import annotations

import sys

from heterollm.cli import main

if __name__ == "__main__":
    sys.exit(main())

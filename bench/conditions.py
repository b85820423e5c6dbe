"""What every bench of a whole model needs to know: where it runs, and whether others compute meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heterollm.benchmarks.conditions import (
    commit_of,
    processor_name,
)


def conditions() -> dict[str, Any]:
    """Return the machine, the commit, the load and any chosen processor, for every line of results."""
    from heterollm.kernels.gpu.pocl.target import chosen_target

    return {
        "machine": processor_name(),
        "commit": commit_of(Path(__file__).parent),
        "load_average": os.getloadavg()[0],
        # Rows that name a processor compare with rows that name the same one only.
        "limited_to": chosen_target(),
    }


def with_fixed(function: Callable[..., Any], **fixed: object) -> Callable[..., Any]:
    """Return a function that has its way with these arguments, whatever its caller passes for them."""
    return lambda *arguments, **options: function(*arguments, **{**options, **fixed})

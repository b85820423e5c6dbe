"""Cycle counts of one graph on the emulator, from QNN's own profile.

With ``profiling_level=detailed`` the provider writes a table of events, complete once the session is closed:
https://onnxruntime.ai/docs/execution-providers/QNN-ExecutionProvider.html. The emulator counts cycles of the
host's processor. They are proportional to the emulated tiles, so stages and orders show, and other load on
that processor inflates them; the minimum of several runs repeats. They are not the cycles of any silicon, and
no table of a real Hexagon has been seen.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from heterollm.base import GraphError
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.npu.shards import NpuShard

__all__ = ["profiled_cycles", "read_cycles"]

EVENT = "Accelerator (execute) time (cycles)"
NAME_COLUMN, VALUE_COLUMN, UNIT_COLUMN = "Event Identifier", "Time", "Unit of Measurement"
UNIT = "CYCLES"
FIX = "Install the version of onnxruntime-qnn that this release was tested with."
SHOWN_NAMES = 8


def profiled_cycles(
    model: Path,
    target: QnnTarget,
    shard: NpuShard,
    length: int,
    dtype: np.dtype[Any],
    runs: int,
    folder: Path,
) -> tuple[int, ...]:
    """Run a compiled graph on random data and return the accelerator's cycles of each run after the first.

    The emulator skips zeros, so the data must be random.

    Args:
        model: The wrapper of the shard's context binary, or its model.
        target: Where to run.
        shard: The shard to run.
        length: Tokens of one run.
        dtype: Element type of the activations.
        runs: Runs to count, after one that is not counted.
        folder: Empty folder for the profile, which the caller removes.

    Raises:
        GraphError: The graph does not load or run, or its profile is unexpected.
    """
    table = folder / "profile.csv"
    options = {**target.options, "profiling_level": "detailed", "profiling_file_path": str(table)}
    _run(model, replace(target, options=options), shard, length, dtype, runs + 1)
    cycles = read_cycles(table, shard.label)
    if len(cycles) != runs + 1:
        raise GraphError(f"QNN's profile of {shard.label} has {len(cycles)} runs instead of {runs + 1}.")
    return cycles[1:]


def _run(
    model: Path, target: QnnTarget, shard: NpuShard, length: int, dtype: np.dtype[Any], runs: int
) -> None:
    """Run the graph and drop its session, which completes the table."""
    session = open_session(model, target, shard.label)
    x = np.random.default_rng(0).standard_normal((length, shard.columns), np.float32).astype(dtype)
    y = np.empty((length, shard.rows), dtype)
    call = SessionGraph(session, shard, length, dtype).bind(x, y)
    for _ in range(runs):
        call()


def read_cycles(table: Path, label: str) -> tuple[int, ...]:
    """Return the accelerator's cycles of each run from QNN's table of events.

    Args:
        table: The file that QNN wrote.
        label: Name of the graph in messages.

    Raises:
        GraphError: The file is missing or unreadable, lacks columns or the event, or has a value that is not
            a positive whole number of cycles.
    """
    try:
        with table.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            columns = list(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, ValueError, csv.Error) as error:
        raise GraphError(f"QNN's profile of {label} cannot be read: {error}.", fix=FIX) from error
    missing = [name for name in (NAME_COLUMN, VALUE_COLUMN, UNIT_COLUMN) if name not in columns]
    if missing:
        raise GraphError(
            f"QNN's profile of {label} has no column {missing[0]!r}, but {_listed(columns)}.", fix=FIX
        )
    values = [row for row in rows if row[NAME_COLUMN] == EVENT]
    if not values:
        events = dict.fromkeys(str(row[NAME_COLUMN]) for row in rows)
        raise GraphError(
            f"QNN's profile of {label} has no event {EVENT!r}, but {_listed(list(events))}.", fix=FIX
        )
    return tuple(_cycles(row, label) for row in values)


def _cycles(row: dict[str, Any], label: str) -> int:
    text, unit = row[VALUE_COLUMN], row[UNIT_COLUMN]
    if unit != UNIT or not text or not re.fullmatch(r"[1-9][0-9]{0,17}", text):
        raise GraphError(f"QNN's profile of {label} states {text!r} {unit!r} as {EVENT!r}.", fix=FIX)
    return int(text)


def _listed(names: list[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(repr(name) for name in names[:SHOWN_NAMES])
    return f"{shown} and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else shown

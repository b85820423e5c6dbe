"""A linear shard as numbers that see stages: the features of the tree (HeteroLLM, sections 3.2 and 4.3).

Hexagon's arrays are 32 wide, so that dimensions enter rounded up to 32. Below 32 tokens the emulator's
activation-first graphs move in steps of 4 (measured), so that tokens enter rounded up to 4 too.
"""

from __future__ import annotations

from typing import Final

from heterollm.base import round_up
from heterollm.profiler.records import LinearPoint

ARRAY: Final = 32
"""Width of the matrix unit."""

FINE_STEP: Final = 4
"""Step in tokens below one array's width."""

FEATURES: Final = ("step", "rounded_tokens", "rounded_rows", "rounded_columns", "work")
"""Names of the features; ``step`` is the tokens rounded up to 4, at most one array."""

RISING: Final = (1, 0, 1, 1, 1)
"""Monotone constraint of each feature: 1 where time may not fall; it may fall from one stage to the next."""


def stage(tokens: int) -> int:
    """Return the number of arrays that some tokens fill, rounded up; within one, times never fall."""
    return -(-tokens // ARRAY)


def step_end(tokens: int) -> int:
    """Return tokens rounded up to 4 up to one array, and to 32 beyond."""
    return round_up(tokens, FINE_STEP if tokens <= ARRAY else ARRAY)


def work(point: LinearPoint) -> int:
    """Return multiply-adds in units of 32 cubed, with every dimension rounded up to 32."""
    return stage(point.rows) * stage(point.columns) * stage(point.tokens)


def features(point: LinearPoint) -> tuple[int, ...]:
    """Return the numbers that :data:`FEATURES` names."""
    tokens, rows, columns = stage(point.tokens), stage(point.rows), stage(point.columns)
    step = min(step_end(point.tokens), ARRAY)
    return step, tokens * ARRAY, rows * ARRAY, columns * ARRAY, tokens * rows * columns

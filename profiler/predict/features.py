"""A linear slice as numbers that see stages: what time may depend on (HeteroLLM, sections 3.2 and 4.3).

Hexagon's arrays are 32 wide, so dimensions enter rounded up to 32 beside their remainders. Below 32 tokens
the emulator's activation-first graphs move in steps of 4 (measured), so tokens enter rounded to that too.
"""

from __future__ import annotations

from typing import Final

from heterollm.base import round_up
from heterollm.profiler.records import LinearPoint

__all__ = [
    "ARRAY",
    "FEATURES",
    "FORMS",
    "MONOTONE_FEATURES",
    "features",
    "round_up",
    "stage",
    "stage_tokens",
    "work",
]

ARRAY: Final = 32
"""Width of the matrix unit."""

FINE_STEP: Final = 4
"""Step in tokens below one array's width."""

FORMS: Final = ("", "matmul_nbits", "matmul_nbits_int8", "activation_first", "weight_first")
"""Forms that have a feature of their own; any other has none of them set."""

FEATURES: Final = (
    "tokens",
    "rows",
    "columns",
    "stage_tokens",
    "rounded_tokens",
    "rounded_rows",
    "rounded_columns",
    "remaining_tokens",
    "remaining_rows",
    "remaining_columns",
    "token_tiles",
    "rows_per_column",
    "weight_bytes",
    "flops",
    "work",
    "bits",
    "integer_inputs",
    "streamed",
    *(f"form_{form or 'none'}" for form in FORMS),
)
"""Names of the features, in order."""

MONOTONE_FEATURES: Final = ("stage_tokens", "rounded_tokens", "rounded_rows", "rounded_columns", "work")
"""Those that never fall as tokens, rows or columns rise: a split on any other could make more work faster."""


def stage(tokens: int) -> int:
    """Return how many arrays the tokens fill, the last perhaps in part: times may only rise within one."""
    return -(-tokens // ARRAY)


def stage_tokens(tokens: int) -> int:
    """Return tokens rounded up to 4 up to one array, and to 32 beyond."""
    return round_up(tokens, FINE_STEP if tokens <= ARRAY else ARRAY)


def work(point: LinearPoint) -> int:
    """Return multiply-adds with every dimension rounded up to the array, in arrays' worth (32 cubed)."""
    return stage(point.rows) * stage(point.columns) * stage(point.tokens)


def features(point: LinearPoint) -> tuple[float, ...]:
    """Return the numbers named by :data:`FEATURES`."""
    tokens, rows, columns = point.tokens, point.rows, point.columns
    values = (
        tokens,
        rows,
        columns,
        stage_tokens(tokens),
        *(round_up(size, ARRAY) for size in (tokens, rows, columns)),
        *(size % ARRAY for size in (tokens, rows, columns)),
        stage(tokens),
        rows / columns,
        point.weight_bytes,
        point.flops,
        work(point),
        point.bits,
        point.integer_inputs,
        point.streamed,
        *(point.form == form for form in FORMS),
    )
    return tuple(float(value) for value in values)

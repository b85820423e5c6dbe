"""Codes at the edges of integer NPU graphs: of the inputs that no norm writes, and of the outputs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.base import round_up
from heterollm.kernels.formats import LARGEST_CODE, CodeGrid
from heterollm.kernels.gpu import DeviceMemory, GlueKernels, Launch, NpuCodes, SharedArray, pointwise_work
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import (
    GRIDS,
    Exact,
    Form,
    OperatorCheck,
    StepCategory,
    Timed,
    Values,
    by_width,
)

STEPS: Final[Mapping[str, StepCategory]] = {"reading of codes": "other"}

CODE_FILES: Final = ("codes.h", "npu_codes.cl")


def write_codes(on: GlueKernels, x: SharedArray, codes: NpuCodes, *, tokens: int, columns: int) -> Launch:
    """Return the launch that writes the codes of ``x [tokens, columns]``, in the activation type."""
    label = "writing of codes"
    x.require(tokens * columns * on.item_bytes, f"{label} input")
    arguments = (x, np.int32(columns), *codes.arguments(tokens, columns, label))
    kernel, _, items = on.kernel(CODE_FILES, "write_npu_codes", rounded=codes, widths=(columns,))
    work = functools.partial(pointwise_work, tokens * columns, 4, on.item_bytes, codes.code_bytes)
    return on.runtime.launch(kernel, arguments, (tokens * items,), (items,), label, work=work)


def read_codes(
    on: GlueKernels, codes: NpuCodes, out: DeviceMemory, *, tokens: int, member_rows: tuple[int, ...]
) -> Launch:
    """Return the launch that writes the values of output codes ``[tokens, rows]``, and counts them.

    Args:
        on: The device's kernels.
        codes: The codes.
        out: ``[tokens, rows]`` in the activation type.
        tokens: Tokens.
        member_rows: Rows of each member.
    """
    rows = sum(member_rows)
    label = "reading of codes"
    codes.outputs.require(tokens * rows * codes.code_bytes, f"{label} input")
    codes.require_factors(tokens, label)
    out.require(tokens * rows * on.item_bytes, f"{label} output")
    steps = codes.grid.member_steps
    kernel, style, items = on.kernel(
        CODE_FILES,
        "read_npu_codes",
        lambda _: {"MEMBER_STEPS": len(steps)} if steps else {},
        rounded=codes,
        widths=(rows,),
    )
    span = on.span(style)
    arguments = (
        *(codes.outputs, codes.factors, out, codes.counts, np.int32(codes.place)),
        *(np.float32(codes.grid.output_step), np.int32(rows), np.int32(span)),
        *(_steps_of_members(steps, member_rows) if steps else ()),
    )
    work = functools.partial(pointwise_work, tokens * rows, 4, codes.code_bytes, on.item_bytes)
    size = round_up(-(-rows // span), items), tokens
    return on.runtime.launch(kernel, arguments, size, (items, 1), label, work=work)


def _steps_of_members(steps: tuple[float, ...], rows: tuple[int, ...]) -> Iterator[np.generic]:
    """Yield the first row and the step of each member."""
    for first, step in zip(itertools.accumulate(rows, initial=0), steps, strict=False):
        yield from (np.int32(first), np.float32(step))


@dataclass(frozen=True, slots=True)
class CodesCase:
    """Codes of an input that are written, and read as if they were an NPU's output."""

    tokens: int
    columns: int
    grid: CodeGrid
    writes: bool = True
    reads: bool = True

    @property
    def _members(self) -> tuple[int, ...]:
        count = max(1, len(self.grid.member_steps))
        share = self.columns // count
        return (*[share] * (count - 1), self.columns - share * (count - 1))

    def launches(self, on: GlueKernels, data: Data) -> Iterator[Launch]:
        tokens, columns = self.tokens, self.columns
        codes = data.codes(self.grid, tokens, columns)
        if self.writes:
            yield write_codes(on, data.inputs("x", tokens, columns), codes, tokens=tokens, columns=columns)
        if self.reads:
            out = data.output("values", tokens, columns)
            yield read_codes(on, codes, out, tokens=tokens, member_rows=self._members)

    def exact(self, data: Values) -> Exact:
        values = self.grid.values(*self.grid.codes(data["x"]), self._members)
        return {"values": values.astype(np.float64)}


CHECKS: Final = tuple(
    OperatorCheck("codes for the NPU", f"5 tokens, {title}", CodesCase(5, 192, grid), "values")
    for title, grid in (
        ("a scale for each token", CodeGrid(1 / LARGEST_CODE, 1 / LARGEST_CODE, per_token=True)),
        ("static", CodeGrid(8 / LARGEST_CODE, 8 / LARGEST_CODE, per_token=False)),
        ("static, 8 bits", CodeGrid(5 / 127, 5 / 127, False, 8, (5 / 127, 3 / 127, 4 / 127))),
    )
)


WRITE_CODES: Final = Timed(
    forms={Form(codes="uint16"): "write_codes", Form(codes="uint8"): "write_codes_uint8"},
    case=lambda at: CodesCase(at.sizes.tokens, at.sizes.hidden, GRIDS[at.form.codes], reads=False),
    # No norm writes them; the outputs of an ffn are those of its last linear.
    points=by_width(lambda scope: (spec.columns for spec in scope.layer if not spec.follows_norm)),
)
READ_CODES: Final = Timed(
    forms={Form(codes="uint16"): "read_codes", Form(codes="uint8"): "read_codes_uint8"},
    case=lambda at: CodesCase(at.sizes.tokens, at.sizes.hidden, GRIDS[at.form.codes], writes=False),
    points=by_width(lambda scope: (spec.rows for spec in scope.layer)),
)

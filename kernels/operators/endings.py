"""Linear layers of one token with the operator behind them, which on GPUs their own launch computes.

:mod:`heterollm.kernels.gpu.endings` has these launches. Elsewhere the operator has a launch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors, reference
from heterollm.kernels.gpu import (
    AddedToStream,
    Ending,
    GlueKernels,
    GpuLinear,
    HeadShape,
    Launch,
    NormedInput,
    OpenClError,
    OpenClLaunch,
    Segments,
    groups_of,
    scratch_codes,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.gated_activation import GatedCase
from heterollm.kernels.operators.norm import EPSILON, NormCase
from heterollm.kernels.operators.operator import Exact, OperatorCheck, StepCategory, Values, check_case
from heterollm.kernels.operators.rope import RopeCase
from heterollm.kernels.ops import WeightFormat

STEPS: Final[Mapping[str, StepCategory]] = {}
"""They have the names of their linear layers."""

SQUARES: Final = 70
"""Sums of squares of a normed input: more than a work-group has rows."""

CODE_TOLERANCE: Final = 0.55
"""Largest error of an int8 code, in codes: half of one, and the rounding of the value before it."""


@dataclass(frozen=True, slots=True)
class EndingCase:
    """A linear layer of one token and the operator behind it.

    The layer has the rows that the operator reads. With ``integer_inputs`` it reads int8 codes, and a norm
    or an activation writes those of the next layer. In one launch, ``normed`` inputs are yet to be divided by
    the root mean square of their row.
    """

    behind: NormCase | GatedCase | RopeCase
    columns: int
    weight: WeightFormat
    integer_inputs: bool = False
    normed: bool = False

    def launches(self, on: GlueKernels, data: Data) -> Iterator[Launch]:
        runtime, rows, behind = on.runtime, self._rows, self.behind
        members = [data.table(own, self.columns, self.weight, f"member {at}") for at, own in enumerate(rows)]
        packed = GpuLinear.pack(
            runtime, members, activation_dtype=data.dtype, integer_inputs=self.integer_inputs
        )
        x, y = data.inputs("x", 1, self.columns), data.output("y", 1, sum(rows))
        seen, codes = data.values["x"].astype(np.float64), None
        if self.integer_inputs:
            seen = reference.round_inputs(seen, self.weight.block)
            codes = scratch_codes(runtime, self.weight, 1, self.columns)
            if not isinstance(behind, RopeCase):
                behind = replace(behind, rounds=self.weight)
        style, *others = on.variants
        linear = packed.launch(x, y, tokens=1, rounded=codes, style=None if others else style, label="linear")
        if codes is not None:
            # The launch may have had a test of its own, which uses the same memory.
            yield on.round_output(x, codes, 1, self.columns)
        data.given = Segments(y, y, rows, (0,) * len(rows))
        (own,) = behind.launches(on, data)
        ending, normed = own.ending, None
        if ending is None or linear.remade is None or not ending.suits:
            yield linear
            yield own
            ending = None
        else:
            if self.normed:
                normed = self._normed(data)
                seen /= np.sqrt(data.values["squares"].sum() / self.columns + EPSILON)
            linear = linear.remade(normed, ending)
            yield linear
        data.values["linear"] = reference.linear(seen, members)
        runtime.finish()
        self._put_next_inputs(data, ending, linear)

    @property
    def _rows(self) -> tuple[int, ...]:
        if isinstance(self.behind, NormCase):
            return (self.behind.hidden,)
        if isinstance(self.behind, GatedCase):
            return (self.behind.width,) * len(self.behind.splits)
        return self.behind.shape.rows

    @property
    def _output(self) -> str:
        """Name of the next layer's inputs."""
        return "normed" if isinstance(self.behind, NormCase) else "activated"

    def _normed(self, data: Data) -> NormedInput:
        squares = data.put("squares", np.linspace(0, 3, SQUARES, dtype=np.float32))
        x = data.put("float x", data.values["x"].astype(np.float32))
        return NormedInput(x, squares, SQUARES, self.columns, EPSILON)

    def _put_next_inputs(self, data: Data, ending: Ending | None, linear: Launch) -> None:
        """Put the next layer's inputs as numbers, where they are codes or are yet to be divided."""
        copy, values = data.on.runtime.copy, np.empty((1, self._rows[0]), np.float32)
        if self.integer_inputs and not isinstance(self.behind, RopeCase):
            values = data.rounded(self.weight, 1, self._rows[0])
        elif isinstance(ending, AddedToStream):
            copy(values, ending.x)
        else:
            return
        if isinstance(ending, AddedToStream):
            handed = ending.handed(groups_of(cast("OpenClLaunch", linear)))
            squares = np.empty(handed.parts, np.float32)
            copy(squares, handed.squares)
            values /= np.sqrt(squares.sum() / handed.columns + handed.epsilon)
        data.put(self._output, values)

    def exact(self, data: Values) -> Exact:
        found = self.behind.exact(data)
        if self.integer_inputs and self._output in found:
            exact = found[self._output]
            blocks = np.abs(exact).reshape(-1, self.weight.block).max(axis=1) / 127
            allowed = CODE_TOLERANCE * np.repeat(blocks, self.weight.block)
            codes = data[self._output].astype(np.float64)
            # Rounded values are right if no code is off.
            found[self._output] = np.where(np.abs(codes - exact) <= allowed, codes, exact)
        return found


def wrong_ending(on: GlueKernels) -> str:
    """Return the first check that fails, with its error; an empty text if linear layers end rightly."""
    for check in {check.case: check for check in CHECKS}.values():
        try:
            found = check_case(check.case, on, np.random.default_rng(0))
        except (KernelError, OpenClError) as error:
            return f"{check.operator}, {check.title}: {error}"
        for output, numbers in found.items():
            half = on.item_bytes == 2 or numbers[0].dtype == np.float16
            errors = linear_errors(*numbers)
            if not errors.within("fp16" if half else "fp32"):
                return f"{check.operator}, {check.title}: wrong {output} (NMSE {errors.nmse:.1e})"
    return ""


_KINDS: Final = (
    ("int4", WeightFormat(4, 32), False, 128),
    ("int4, w4a8", WeightFormat(4, 32), True, 64),
    ("int8", WeightFormat(8, 32), False, 64),
    ("f16", WeightFormat(16), False, 128),
)
"""Title, weights, whether inputs are codes, and width of a head: one of 128 lies in two row tiles."""

CHECKS: Final = tuple(
    OperatorCheck(operator, title, EndingCase(behind, 288, weight, integer, normed), output)
    for title, weight, integer, head_dim in _KINDS
    for operator, behind, normed, output in (
        ("linear and norm", NormCase(1, 224, 0, biased=True), False, "normed"),
        ("linear and activation", GatedCase(1, 160, (0, 0)), True, "activated"),
        (
            *("linear and RoPE", RopeCase(1, 70, HeadShape(3, 1, head_dim, 80), (0, 0, 0), normed=True)),
            *(True, "keys"),
        ),
    )
)

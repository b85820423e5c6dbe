"""Linear layers on random data beside their float64 oracles.

`heterollm doctor` and the kernel tests run them. :class:`heterollm.kernels.gpu.GpuLinear` has their launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import LinearWeight, concatenate_rows, random_weight, reference, zero_code
from heterollm.kernels.gpu import GpuLinear, GpuRuntime, KernelStyle, RoundedInputs, Variant
from heterollm.kernels.npu import INTEGER_FORMS, GraphForm, LinearRanges, LinearShard, NpuBackend, NpuShard
from heterollm.kernels.operators.data import (
    GUARD,
    PADDING_ROWS,
    GuardedOutput,
    Numbers,
    fill_slot,
    run_launches,
)
from heterollm.kernels.operators.operator import StepCategory
from heterollm.kernels.ops import PARTS, WeightFormat

STEPS: Final[Mapping[str, StepCategory]] = dict.fromkeys((*PARTS, "router", "head"), "linear")
"""Those of layers have the names of their groups."""

FORMATS: Final = (
    *(WeightFormat(4, block, symmetric) for symmetric in (True, False) for block in (32, 64, 128)),
    WeightFormat(8, 32),
    WeightFormat(8, 32, symmetric=False),
    WeightFormat(4, 32, symmetric=False, minimum=True),
    WeightFormat(8, 16, symmetric=False, minimum=True),
    WeightFormat(8, 32, scales="tensor"),
    WeightFormat(16),
    WeightFormat(32),
)
ROUNDED_FORMATS: Final = (
    WeightFormat(4, 32),
    WeightFormat(8, 32),
    WeightFormat(4, 32, symmetric=False, minimum=True),
)
"""Formats of the layers and of the head at ``w4a8``."""


@dataclass(frozen=True, slots=True)
class LinearCase:
    """A group of linear layers, or the part of one that a launch or an NPU graph computes.

    Args:
        weight: Number format of the weights.
        rows: Outputs of each member.
        columns: Inputs.
        tokens: Rows of the activations.
        kept: Range of outputs that is computed, for each member; default all. On the GPU alone.
        inputs: Range of inputs that is multiplied; default all. On the GPU alone.
        first_token: Rows of both slots that lie before the first token. On the GPU alone.
        integer_inputs: Whether the inputs are rounded to int8 for each block of the weights (``w4a8``).
        seed: Of the random data.
    """

    weight: WeightFormat
    rows: tuple[int, ...]
    columns: int
    tokens: int
    kept: tuple[tuple[int, int], ...] | None = None
    inputs: tuple[int, int] | None = None
    first_token: int = 0
    integer_inputs: bool = False
    seed: int = 0

    def __str__(self) -> str:
        form = (", split" if self.kept else "") + (", range of inputs" if self.inputs else "")
        return f"{self.tokens} token{'s' * (self.tokens > 1)}{form}"

    def data(self, dtype: DTypeLike) -> tuple[list[LinearWeight], NDArray[Any]]:
        """Return the weights of the members, and the activations of a type."""
        generator = np.random.default_rng(self.seed)
        members = [random_weight(generator, rows, self.columns, self.weight) for rows in self.rows]
        start, stop = self.inputs or (0, self.columns)
        return members, generator.standard_normal((self.tokens, stop - start), np.float32).astype(dtype)

    def exact(self, members: Sequence[LinearWeight], x: NDArray[Any]) -> NDArray[np.float64]:
        """Return the exact result ``[tokens, kept rows]`` for weights and activations."""
        seen = reference.round_inputs(x, self.weight.block) if self.integer_inputs else x
        return reference.linear(seen, members, self.kept, self.inputs)

    def on_gpu(
        self,
        gpu: GpuRuntime,
        dtype: DTypeLike,
        *,
        output_dtype: DTypeLike | None = None,
        style: KernelStyle | Variant | None = None,
    ) -> Numbers:
        """Compute the case on the GPU.

        Args:
            gpu: The device.
            dtype: Type of the activations.
            output_dtype: Type of the output; default that of the activations.
            style: Kernel family or variant; default the first that works.

        Raises:
            KernelError: The kernel wrote outside its output.
        """
        members, x = self.data(dtype)
        linear = GpuLinear.pack(gpu, members, activation_dtype=dtype, integer_inputs=self.integer_inputs)
        y = run_linear(
            gpu,
            linear,
            x,
            first_token=self.first_token,
            kept=self.kept,
            inputs=self.inputs,
            output_dtype=output_dtype,
            style=style,
        )
        return y, self.exact(members, x)

    def on_npu(self, npu: NpuBackend, length: int, form: GraphForm | None = None) -> Numbers:
        """Compute the case on the NPU, in a graph whose rows behind the tokens are NaN.

        Args:
            npu: The device.
            length: Standard length of the graph.
            form: Form of the graph; default the first that is legal.
        """
        members, x = self.data(npu.activation_dtype)
        ranges = tuple((0, rows) for rows in self.rows)
        weight = concatenate_rows(members)
        key = f"case {self.seed} {self.weight} {self.rows} {self.columns}"
        part = LinearShard(weight, 0, "o", ranges, key, integer_inputs=self.integer_inputs)
        if form in INTEGER_FORMS:
            return run_codes(npu, part, x, length, form)
        return run_part(npu, part, x, length, form), self.exact(members, x)

    def on_both(
        self, gpu: GpuRuntime, npu: NpuBackend, length: int, form: GraphForm | None = None
    ) -> Numbers:
        """Compute the case on the NPU and, in place of the exact result, on the GPU."""
        on_gpu, _ = self.on_gpu(gpu, npu.activation_dtype)
        return self.on_npu(npu, length, form)[0], on_gpu.astype(np.float64)


def _linears() -> tuple[LinearCase, ...]:
    """Return every format for one token and many, whole and split; then those with rounded inputs."""
    found = []
    for number_format in FORMATS:
        one = LinearCase(number_format, (192, 100), 256, 1)
        many = replace(one, tokens=37)
        found += [one, many, replace(many, kept=((128, 192), (0, 100))), replace(many, inputs=(128, 256))]
    for number_format in ROUNDED_FORMATS:
        found += [LinearCase(number_format, (256,), 256, tokens, integer_inputs=True) for tokens in (1, 32)]
    return tuple(found)


LINEARS: Final = _linears()
"""The linear layers of `heterollm doctor`, which the kernel tests run in every style and type."""


def run_linear(
    gpu: GpuRuntime,
    linear: GpuLinear,
    x: NDArray[Any],
    *,
    first_token: int = 0,
    kept: Sequence[tuple[int, int]] | None = None,
    inputs: tuple[int, int] | None = None,
    output_dtype: DTypeLike | None = None,
    rounded: RoundedInputs | None = None,
    style: KernelStyle | Variant | None = None,
) -> NDArray[Any]:
    """Return the output of one launch on activations that lie between rows of NaN.

    Args:
        gpu: The device.
        linear: The packed weights.
        x: The activations ``[tokens, inputs]``.
        first_token: Rows of both slots that lie before them.
        kept: Range of outputs of each member; default all.
        inputs: Range of inputs that is multiplied; default all.
        output_dtype: Type of the output; default that of the activations.
        rounded: Codes of the activations, where another launch has left them.
        style: Kernel family or variant; default the first that works.

    Raises:
        KernelError: The kernel wrote before or behind its output.
    """
    tokens, width = x.shape
    rows = sum(stop - start for start, stop in kept or [(0, rows) for rows in linear.member_rows])
    slot = np.full((first_token + tokens + PADDING_ROWS, width), np.nan, x.dtype)
    slot[first_token : first_token + tokens] = x
    out = GuardedOutput(gpu, (first_token + tokens, rows), output_dtype or x.dtype)
    launch = linear.launch(
        fill_slot(gpu, slot),
        out.slot,
        tokens=tokens,
        first_token=first_token,
        kept=kept,
        columns=inputs,
        output_dtype=output_dtype,
        rounded=rounded,
        style=style,
        label="case",
    )
    run_launches(gpu, [launch])
    y = out.read()
    if np.any(y[:first_token].view(np.uint8) != GUARD):
        raise KernelError("A kernel wrote before its output.")
    return y[first_token:]


def run_part(
    npu: NpuBackend, part: NpuShard, x: NDArray[Any], length: int, form: GraphForm | None = None
) -> NDArray[Any]:
    """Return the output of an NPU graph on activations that lie before rows of NaN.

    Args:
        npu: The device.
        part: Part of a linear layer or of a block.
        x: The activations ``[tokens, inputs]``, in the type of the NPU.
        length: Standard length of the graph.
        form: Form of the graph; default the first that is legal.
    """
    padded = np.full((length, x.shape[1]), np.nan, npu.activation_dtype)
    padded[: len(x)] = x
    y = np.full((length, part.rows), np.nan, npu.activation_dtype)
    npu.prepare(part, length, form).bind({"x": padded}, {"y": y})()
    return y[: len(x)]


def run_codes(npu: NpuBackend, part: LinearShard, x: NDArray[Any], length: int, form: GraphForm) -> Numbers:
    """Return the output codes of an integer graph beside exact ones, which stand for all within one step.

    Args:
        npu: The device.
        part: Part of a linear layer; its ranges are those of ``x`` and of its output.
        x: The activations ``[tokens, inputs]``.
        length: Standard length of the graph; rows behind the tokens have the largest code.
        form: Form of the graph.
    """
    exact = reference.linear(x, [part.weight])
    largest = float(np.abs(exact).max()), float(np.abs(x).max())
    ranges = LinearRanges(*largest, bits=8 if form == "static_int8" else 16)
    grid, zero = ranges.grid, zero_code(ranges.bits)
    padded, y = (np.full((length, width), 2 * zero - 1, grid.dtype) for width in (x.shape[1], part.rows))
    padded[: len(x)] = grid.codes(x)[0]
    npu.prepare(replace(part, ranges=ranges), length, form).bind({"x": padded}, {"y": y})()
    centred = (padded[: len(x)].astype(np.float64) - zero) * grid.input_step
    expected = np.clip(reference.linear(centred, [part.weight]) / grid.output_step, -zero, zero - 1)
    found = y[: len(x)].astype(np.float64) - zero
    return np.where(np.abs(found - expected) <= 1, expected, found), expected

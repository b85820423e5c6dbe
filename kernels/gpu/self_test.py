"""A quick test of a variant of the linear kernels on the present device, before its first use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import LINEAR_NMSE, linear, linear_errors, random_weight, round_inputs
from heterollm.kernels.gpu.binding import OpenClError
from heterollm.kernels.gpu.expert_lists import ExpertLists, ExpertShape
from heterollm.kernels.gpu.launch import Launch
from heterollm.kernels.gpu.memory import SharedArray
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.variants import BuildError, Variant
from heterollm.kernels.ops import Routing, WeightFormat

ROWS: Final = 70
TOKENS: Final = (1, 9)
"""Tokens for the kernels for a few tokens and for those for many."""

WRONG_NMSE: Final = 1e-5
"""Far above the rounding of float16 outputs (1e-7), far below the error of one wrong element."""


EXPERTS: Final = Routing(2, 1)
EXPERT_TOKENS: Final = (1, 40)


class Launches(Protocol):
    """A packed linear layer."""

    def launch(self, x: SharedArray, y: SharedArray, *, tokens: int, style: Variant, label: str) -> Launch:
        """Return a launch."""


class GroupedLaunches(Protocol):
    """A packed linear layer of experts."""

    def launch(
        self,
        x: SharedArray,
        y: SharedArray,
        lists: ExpertLists,
        *,
        shape: ExpertShape,
        style: Variant,
        label: str,
    ) -> Launch:
        """Return a launch of experts."""


def try_linear(
    pack: Callable[..., Launches],
    runtime: GpuRuntime,
    variant: Variant,
    number_format: WeightFormat,
    dtype: type[np.float16 | np.float32],
    *,
    integer_inputs: bool,
) -> None:
    """Compute one small linear layer.

    Args:
        pack: Packs the weights of a layer for the device.
        runtime: The device.
        variant: The kernels to try.
        number_format: Format of the weights.
        dtype: Type of inputs and outputs.
        integer_inputs: Whether inputs are rounded to int8.

    Raises:
        BuildError: The variant does not build or run, or its numbers are wrong.
    """
    generator = np.random.default_rng(0)
    columns = 4 * max(number_format.block, 16)
    weight = random_weight(generator, ROWS, columns, number_format)
    layer = pack([weight])
    for tokens in TOKENS:
        x, exact = _inputs(runtime, generator, (tokens, columns), dtype)
        y = runtime.shared((tokens, ROWS), dtype)
        seen = round_inputs(exact, number_format.block) if integer_inputs else exact
        make = functools.partial(layer.launch, x, y, tokens=tokens, style=variant, label="self-test")
        _check(runtime, make, y, linear(seen, [weight]), variant)


def try_experts(
    pack: Callable[..., GroupedLaunches],
    runtime: GpuRuntime,
    variant: Variant,
    number_format: WeightFormat,
    dtype: type[np.float16 | np.float32],
    *,
    integer_inputs: bool,
) -> None:
    """Compute small linear layers of two experts, the last token's by the second.

    Arguments and errors are those of :func:`try_linear`.
    """
    generator = np.random.default_rng(0)
    columns = 4 * max(number_format.block, 16)
    weights = [random_weight(generator, ROWS, columns, number_format) for _ in range(EXPERTS.experts)]
    layer = pack(weights, experts=EXPERTS.experts)
    for tokens in EXPERT_TOKENS:
        shape = ExpertShape(EXPERTS, tokens)
        x, exact = _inputs(runtime, generator, (tokens, columns), dtype)
        y = runtime.shared((tokens, ROWS), dtype)
        places = runtime.shared((shape.places, 4), np.int32)
        last = tokens - 1
        used = [(0, at, min(shape.step, last - at), 0) for at in range(0, last, shape.step)]
        places.write([*used, (1, last, 1, 0)])
        lists = replace(ExpertLists.allocate(runtime, shape), places=places)
        seen = round_inputs(exact, number_format.block) if integer_inputs else exact
        right = np.concatenate([linear(seen[:last], weights[:1]), linear(seen[last:], weights[1:])])
        make = functools.partial(layer.launch, x, y, lists, shape=shape, style=variant, label="self-test")
        _check(runtime, make, y, right, variant)


def _inputs(
    runtime: GpuRuntime,
    generator: np.random.Generator,
    shape: tuple[int, int],
    dtype: type[np.float16 | np.float32],
) -> tuple[SharedArray, NDArray[np.float64]]:
    """Return random inputs on the device and their exact values."""
    x = runtime.shared(shape, dtype)
    x.write(generator.standard_normal(shape))
    return x, x.read().astype(np.float64)


def _check(
    runtime: GpuRuntime,
    make: Callable[[], Launch],
    y: SharedArray,
    right: NDArray[np.float64],
    variant: Variant,
) -> None:
    """Run the launch that ``make`` returns, and compare its output with the right one."""
    try:
        make()()
        runtime.finish()
    except OpenClError as error:
        raise BuildError(f"it does not run ({error}).") from error
    errors = linear_errors(y.read(), right)
    # Half sums are to meet the gate of linear layers themselves.
    allowed = LINEAR_NMSE["fp16"] if variant.style == "half" else WRONG_NMSE
    if not errors.nmse <= allowed:
        raise BuildError(f"it computes wrong numbers (NMSE {errors.nmse:.1e}).")

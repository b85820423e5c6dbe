"""Checks and times one candidate of a search on a device.

A candidate is checked on small odd shapes against float64 before it is timed. During its first run it is in
quarantine: a candidate that takes the process or the driver down stays there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import ComputeType, linear, linear_errors, random_weight, round_inputs
from heterollm.kernels.gpu import (
    BuildError,
    GpuLinear,
    GpuRuntime,
    KernelParameters,
    OpenClError,
    ShapeClass,
    Variant,
)

CHECK_ROWS: Final = (77, 200)
CHECK_KEPT: Final = ((64, 77), (0, 130))
"""Row ranges that neither start nor end at multiples of the kernels' row step."""

CHECK_TOKENS: Final = {"one": (1,), "few": (3, 5), "many": (9, 33, 141)}
FULL_CHECK_TOKENS: Final = {"one": (1,), "few": (2, 8), "many": (17, 130)}
"""Tokens of the checks of candidates, and of a winner: each step of a few tokens is a program."""

CHECK_LIMIT_S: Final = 10.0
"""Limit of the time of a small launch, which is a millisecond's work."""

GUARD: Final = 0xA5

COPIES_BYTES: Final = 128 * 2**20
"""Weights that one or a few tokens pass over: memory is the limit there, not a cache."""


@dataclass(frozen=True, slots=True)
class TuningJob:
    """One shape class to tune, and the layer to time for it.

    Args:
        shape: The class.
        rows: Output rows of the layer.
        columns: Its inputs.
        tokens: Lengths that are timed together.
        copies_bytes: Size of the weights that are read in turn, at least.
    """

    shape: ShapeClass
    rows: int
    columns: int
    tokens: tuple[int, ...]
    copies_bytes: int = 0


class Checker:
    """Small launches of one shape class, held against float64."""

    def __init__(self, runtime: GpuRuntime, shape: ShapeClass) -> None:
        self._runtime = runtime
        self._shape = shape
        self._cases: dict[int, tuple[GpuLinear, NDArray[Any], NDArray[np.float64]]] = {}

    def check(self, parameters: KernelParameters, *, winner: bool = False) -> None:
        """Compute small layers with these parameters.

        Args:
            parameters: The parameters.
            winner: Whether to compute the lengths that are left for a winner.

        Raises:
            BuildError: They do not build, run or finish, or the numbers are wrong.
        """
        tokens = (FULL_CHECK_TOKENS if winner else CHECK_TOKENS)[self._shape.tokens]
        layer, x, exact = self._case(parameters.depth_inputs)
        for count in tokens:
            y = self._run(layer, x[:count], parameters)
            compute: ComputeType = "fp16" if self._shape.half else "fp32"
            errors = linear_errors(y, exact[:count])
            if not errors.within(compute):
                raise BuildError(f"it computes {count} tokens wrongly (NMSE {errors.nmse:.1e}).")

    def _case(self, depth: int) -> tuple[GpuLinear, NDArray[Any], NDArray[np.float64]]:
        # More inputs than are held at a time, and then some.
        unit = self._shape.weight.block or 16
        columns = (max(depth, 64) // unit + 1) * unit
        if columns not in self._cases:
            tokens = max(*CHECK_TOKENS[self._shape.tokens], *FULL_CHECK_TOKENS[self._shape.tokens])
            generator = np.random.default_rng(columns)
            members = [random_weight(generator, rows, columns, self._shape.weight) for rows in CHECK_ROWS]
            dtype = np.float16 if self._shape.half else np.float32
            x = generator.standard_normal((tokens, columns)).astype(dtype)
            rounded = self._shape.integer_inputs
            layer = GpuLinear.pack(self._runtime, members, activation_dtype=dtype, integer_inputs=rounded)
            seen = round_inputs(x, self._shape.weight.block) if rounded else x.astype(np.float64)
            self._cases[columns] = layer, x, linear(seen, members, CHECK_KEPT)
        return self._cases[columns]

    def _run(self, layer: GpuLinear, x: NDArray[Any], parameters: KernelParameters) -> NDArray[Any]:
        """Return the output of one launch from token 1 on, whose surroundings must stay as they are."""
        first, (count, columns) = 1, x.shape
        rows = sum(stop - start for start, stop in CHECK_KEPT)
        slot = self._runtime.shared((first + count, columns), x.dtype)
        out = self._runtime.shared(((first + count) * rows * x.itemsize + 1024,), np.uint8)
        slot.write(np.concatenate([np.full((first, columns), np.nan, x.dtype), x]))
        out.write(GUARD)
        variant = Variant(parameters.style, parameters=parameters)
        where = {"tokens": count, "first_token": first, "kept": CHECK_KEPT}
        try:
            launch = layer.launch(slot, out, style=variant, label="tuning check", **where)
            wait(self._runtime, launch())
        except OpenClError as error:
            raise BuildError(f"it does not run ({error}).") from error
        written = out.read()
        start, stop = first * rows * x.itemsize, (first + count) * rows * x.itemsize
        y: NDArray[Any] = written[start:stop].view(x.dtype).reshape(count, rows)
        clean = bool(np.all(written[:start] == GUARD) and np.all(written[stop:] == GUARD))
        if not clean:
            raise BuildError(f"it writes outside of its {count} tokens.")
        return y


def wait(runtime: GpuRuntime, event: Any, limit_s: float = CHECK_LIMIT_S) -> None:  # noqa: ANN401 - an OpenCL event
    """Wait for a launch, but not for ever.

    Raises:
        BuildError: It failed or did not end in time.
    """
    runtime.flush()
    deadline = time.monotonic() + limit_s
    while event.command_execution_status > 0:  # complete is 0, an error is negative
        if time.monotonic() > deadline:
            raise BuildError(f"it did not finish within {limit_s:.0f} s.")
        time.sleep(0.0002)
    if event.command_execution_status < 0:
        raise BuildError(f"it failed with OpenCL error {event.command_execution_status}.")
    try:
        runtime.finish()
    except KernelError as error:
        raise BuildError(error.message) from error


class TuningWorkload:
    """The launches that are timed for one job."""

    def __init__(self, runtime: GpuRuntime, job: TuningJob) -> None:
        self._runtime = runtime
        self._job = job
        generator = np.random.default_rng(0)
        shape = job.shape
        weight = random_weight(generator, job.rows, job.columns, shape.weight)
        dtype = np.float16 if shape.half else np.float32
        size_bytes = shape.weight.weight_bytes(job.rows, job.columns)
        limit_bytes = min(job.copies_bytes, runtime.traits.global_bytes // 16)
        self._layers = [
            GpuLinear.pack(runtime, [weight], activation_dtype=dtype, integer_inputs=shape.integer_inputs)
            for _ in range(max(1, limit_bytes // size_bytes))
        ]
        most = max(job.tokens)
        self._x = runtime.shared((most, job.columns), dtype)
        self._y = runtime.shared((most, job.rows), dtype)
        self._x.write(generator.standard_normal((most, job.columns)))

    def call(self, parameters: KernelParameters) -> Callable[[], None]:
        """Return the call that runs all launches and waits; it raises BuildError where one fails."""
        variant = Variant(parameters.style, parameters=parameters)
        launches: Sequence[Callable[[], Any]] = [
            layer.launch(self._x, self._y, tokens=tokens, style=variant, label="tuning")
            for layer in self._layers
            for tokens in self._job.tokens
        ]

        def run() -> None:
            try:
                for launch in launches:
                    launch()
                self._runtime.finish()
            except (OpenClError, KernelError) as error:
                raise BuildError(f"it does not run ({error}).") from error

        return run

    def calls_per_run(self) -> int:
        """Return the launches of one call."""
        return len(self._layers) * len(self._job.tokens)

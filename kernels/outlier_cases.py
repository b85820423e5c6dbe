"""Shadow outliers on random data beside their float64 oracle, for `heterollm doctor` and the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.cases import GUARD, GuardedOutput, Numbers, fill_slot, run_launches, slot_values
from heterollm.kernels.gpu import (
    DeviceMemory,
    GpuOutliers,
    GpuRuntime,
    HotWeights,
    OutlierList,
    found_bytes,
    outlier_flag_bytes,
)

LOW, HIGH = -1.28, 1.27
ROOM = 16
"""Cold channels of a batch, so few that cases need several batches."""


@dataclass(frozen=True, slots=True)
class OutlierCases:
    """Cases of shadow outliers.

    Args:
        gpu: The device.
        outliers: Its launches.
        dtype: Type of activations and weights.
        generator: Makes the data.
    """

    gpu: GpuRuntime
    outliers: GpuOutliers
    dtype: np.dtype[Any]
    generator: np.random.Generator

    def product(
        self,
        tokens: int,
        columns: int,
        member_rows: tuple[int, ...],
        npu_rows: tuple[int, ...],
        *,
        channels: int,
        hot: int,
        covered: int | None = None,
        repeats: int = 1,
    ) -> Numbers:
        """Multiply the outliers of some channels; return the products of the NPU's rows.

        Args:
            tokens: Rows.
            columns: Channels.
            member_rows: Rows of each member.
            npu_rows: Leading rows of each member that the NPU computes.
            channels: Channels with outliers.
            hot: Hot channels, of which about half have outliers.
            covered: Tokens that the NPU computes; default all.
            repeats: Runs of the same launches.

        Raises:
            KernelError: The list has other channels, or a kernel wrote elsewhere.
        """
        generator, covered = self.generator, tokens if covered is None else covered
        used = generator.choice(columns, channels, replace=False)
        known = np.concatenate([used[: hot // 2], np.setdiff1d(np.arange(columns), used)])[:hot]
        x = generator.uniform(-1.2, 1.2, (tokens, columns))
        at = generator.integers(0, covered, channels)
        x[at, used] = generator.uniform(2, 60, channels) * generator.choice([-1, 1], channels)
        # Rows that the NPU does not compute are not read.
        x[covered:] = np.nan
        x = x.astype(self.dtype)
        weights = generator.standard_normal((columns, sum(member_rows))).astype(self.dtype)
        place = np.full(columns, -1, np.int32)
        place[known] = np.arange(len(known))
        held = weights[known] if len(known) else np.full((1, sum(member_rows)), np.nan, self.dtype)
        hot_weights = HotWeights(
            self.gpu.upload(held), self.gpu.upload(place), member_rows, columns, LOW, HIGH
        )
        found = self._list(columns)
        out = GuardedOutput(self.gpu, (tokens, sum(member_rows)), self.dtype)
        for _ in range(repeats):
            self._run(fill_slot(self.gpu, x), found, hot_weights, out, weights, (tokens, covered), npu_rows)
        hot_found = sorted(set(known.tolist()) & set(used.tolist()))
        cold_found = sorted(set(used.tolist()) - set(known.tolist()))
        listed = slot_values(found.found)[: 2 + channels].tolist()
        if listed != [len(hot_found), len(cold_found), *hot_found, *cold_found]:
            raise KernelError(f"Outliers are in channels {hot_found} and {cold_found}, not {listed}.")
        rest = x[:covered].astype(np.float32)
        rest = rest - np.clip(rest, np.float32(LOW), np.float32(HIGH))
        exact = np.zeros((tokens, sum(member_rows)))
        exact[:covered] = rest.astype(np.float64) @ weights.astype(np.float64)
        own = np.concatenate([np.arange(n) < r for n, r in zip(member_rows, npu_rows, strict=True)])
        actual = out.read()
        if np.any(actual[:, ~own].copy().view(np.uint8) != GUARD):
            raise KernelError("A kernel wrote rows that the NPU does not compute.")
        return actual[:, own], exact[:, own]

    def _list(self, columns: int) -> OutlierList:
        size = outlier_flag_bytes(columns)
        found = self.gpu.shared((found_bytes(columns) // 4,), np.int32)
        return OutlierList(DeviceMemory(self.gpu.scratch(size), size), found, self.gpu.shared((2,), np.int32))

    def _run(
        self,
        x: Any,  # noqa: ANN401
        found: OutlierList,
        hot: HotWeights,
        out: GuardedOutput,
        weights: NDArray[Any],
        tokens: tuple[int, int],
        npu_rows: tuple[int, ...],
    ) -> None:
        """Run all launches, with the weights of cold channels in batches."""
        fetched = fill_slot(self.gpu, np.full((ROOM, weights.shape[1]), np.nan, self.dtype))
        whole, covered = tokens
        launches = self.outliers.find(x, found, hot, tokens=covered)
        product = self.outliers.multiply(
            x, found, hot, out.slot, tokens=whole, covered=covered, npu_rows=npu_rows
        )
        run_launches(self.gpu, [*launches, product])
        found.found.acquire()
        cold = found.cold.copy()
        found.found.release()
        adding = self.outliers.multiply(
            x, found, hot, out.slot, tokens=whole, covered=covered, npu_rows=npu_rows, fetched=fetched
        )
        for first in range(0, len(cold), ROOM):
            own = cold[first : first + ROOM]
            for slot, values in ((fetched, weights[own]), (found.batch, np.array([first, len(own)]))):
                slot.acquire()
                slot.array[: len(values)] = values
                slot.release()
            run_launches(self.gpu, [adding])

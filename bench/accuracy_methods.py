"""The methods of bench/accuracy.py: linears on integer grids, computed in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from heterollm.calibration.int8_check import Int8Statistics, int8_checked
from heterollm.calibration.int8_records import Int8Calibration
from heterollm.kernels.formats import quantize
from heterollm.kernels.ops import Member

CHECKED_TOKENS = 64
SMOOTH_POWER = 0.5
LLM_INT8_THRESHOLD = 6.0
HEADROOM = 1.5
"""Range of 16-bit grids over the largest magnitude."""

Method = Callable[["Linears", Tensor], Tensor]


def rounded(values: Tensor, largest: Tensor | float, bits: int = 8) -> Tensor:
    """Return values on a symmetric grid that reaches to the largest magnitude."""
    top = (1 << (bits - 1)) - 1
    step = torch.as_tensor(largest).clamp_min(1e-30) / top
    return (values / step).round_().clamp_(-top - 1, top).mul_(step)


@dataclass
class Linears:
    """Linears of a layer that read the same input."""

    modules: list[nn.Linear]
    calibrated: Int8Calibration | None = None
    statistics: Int8Statistics | None = None
    channels: Tensor = field(default_factory=lambda: torch.zeros(1))
    outputs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        parts = [module.weight.detach() for module in self.modules]
        self.weight = torch.cat(parts)
        # Codes and scales of precision w8a8.
        int8 = [quantize(part.numpy(), bits=8, block=32, scale_kind="tensor").dequantize() for part in parts]
        self.by_tensor = torch.from_numpy(np.concatenate(int8))
        self.by_row = rounded(self.weight, self.weight.abs().amax(1, keepdim=True))
        self.rows = [len(part) for part in parts]
        self.outputs = [0.0] * len(parts)
        members = [Member(str(place), rows) for place, rows in enumerate(self.rows)]
        self.statistics = Int8Statistics(members, self.weight.shape[1])

    @property
    def inputs(self) -> float:
        """The largest input."""
        return float(self.channels.max())

    def of_rows(self, outputs: Sequence[float]) -> Tensor:
        """Return magnitudes of members for each output row."""
        return torch.tensor(outputs).repeat_interleave(torch.tensor(self.rows))

    def measure(self, x: Tensor) -> Tensor:
        """Add an input to the statistics, and return the output."""
        y = x @ self.weight.T
        self.channels = torch.maximum(self.channels, x.abs().amax(0))
        parts = torch.split(y.abs(), self.rows, dim=1)
        self.outputs = [max(old, float(part.max())) for old, part in zip(self.outputs, parts, strict=True)]
        assert self.statistics is not None
        self.statistics.add(x.numpy(), y.numpy(), self.weight.numpy())
        self.calibrated = self.statistics.record()
        return y

    def check(self, x: Tensor) -> Tensor:
        """Measure the errors of all thresholds, choose one, and return the output."""
        assert self.calibrated is not None
        part, weight = x[:CHECKED_TOKENS].numpy(), self.by_tensor.numpy()
        self.calibrated = int8_checked(
            *(self.calibrated, weight, part),
            inputs=self.inputs,
            outputs=self.outputs,
            member_rows=self.rows,
        )
        factors = self.channels.clamp_min(1e-5) ** SMOOTH_POWER
        factors /= self.weight.abs().amax(0).clamp_min(1e-5) ** (1 - SMOOTH_POWER)
        self.smooth = factors / factors.mean()
        smoothed = self.weight * self.smooth
        self.smooth_weight = rounded(smoothed, smoothed.abs().max())
        self.smooth_weight_by_row = rounded(smoothed, smoothed.abs().amax(1, keepdim=True))
        return x @ self.weight.T


# -- methods: a group and its input give its output -----------------------------------------------------


def exact(one: Linears, x: Tensor) -> Tensor:
    """Compute with floats."""
    return x @ one.weight.T


def static(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 8-bit grids, one scale for each weight."""
    return rounded(rounded(x, one.inputs) @ one.by_tensor.T, one.of_rows(one.outputs))


def static_by_row(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 8-bit grids, a scale for each output row of a weight."""
    return rounded(rounded(x, one.inputs) @ one.by_row.T, one.of_rows(one.outputs))


def int16(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 16-bit grids."""
    y = rounded(x, HEADROOM * one.inputs, 16) @ one.by_tensor.T
    return rounded(y, HEADROOM * one.of_rows(one.outputs), 16)


def by_token(one: Linears, x: Tensor) -> Tensor:
    """Compute with 8-bit inputs with a scale for each token, float outputs."""
    return rounded(x, x.abs().amax(1, keepdim=True)) @ one.by_tensor.T


def smooth(one: Linears, x: Tensor) -> Tensor:
    """Compute with static 8-bit grids after factors moved from inputs into weights."""
    if len(one.modules) == 1:  # no norm before it could take the factors
        return static(one, x)
    return rounded(_smoothed(one, x) @ one.smooth_weight.T, one.of_rows(one.outputs))


def smooth_by_row(one: Linears, x: Tensor) -> Tensor:
    """Compute as :func:`smooth`, with a scale for each output row of a weight."""
    if len(one.modules) == 1:
        return static_by_row(one, x)
    return rounded(_smoothed(one, x) @ one.smooth_weight_by_row.T, one.of_rows(one.outputs))


def _smoothed(one: Linears, x: Tensor) -> Tensor:
    return rounded(x / one.smooth, float((one.channels / one.smooth).max()))


def llm_int8(one: Linears, x: Tensor) -> Tensor:
    """Compute with 8-bit inputs by token and weights by row, columns of large inputs in floats."""
    large = x.abs().amax(0) > LLM_INT8_THRESHOLD
    rest = x * ~large
    largest = rest.abs().amax(1, keepdim=True)
    return rounded(rest, largest) @ one.by_row.T + x[:, large] @ one.weight[:, large].T


def clamped(one: Linears, x: Tensor) -> Tensor:
    """The shadow's NPU part alone: outliers are cut off."""
    assert one.calibrated is not None
    shadow = one.calibrated.shadow
    return rounded(rounded(x, shadow.threshold) @ one.by_tensor.T, one.of_rows(shadow.outputs))


def shadow(one: Linears, x: Tensor) -> Tensor:
    """Compute with clamped 8-bit inputs, and the rest in floats with float weights."""
    return clamped(one, x) + _beyond(one, x)


def shadow_with_float_outputs(one: Linears, x: Tensor) -> Tensor:
    """Compute as :func:`shadow`, without a grid for the NPU's output."""
    assert one.calibrated is not None
    return rounded(x, one.calibrated.shadow.threshold) @ one.by_tensor.T + _beyond(one, x)


def _beyond(one: Linears, x: Tensor) -> Tensor:
    assert one.calibrated is not None
    limit = one.calibrated.shadow.threshold
    channels = x.abs().amax(0) > limit
    rest = x[:, channels] - x[:, channels].clamp(-limit, limit)
    return rest @ one.weight[:, channels].T


# -- what ranks a group -----------------------------------------------------------------------------------


def importance(one: Linears) -> float:
    """Return the largest input over the step, as the paper ranks."""
    assert one.calibrated is not None
    return one.inputs / one.calibrated.shadow.threshold * 127


def error(one: Linears) -> float:
    """Return the mean token's error of 8 bits."""
    assert one.calibrated is not None
    assert one.calibrated.errors is not None
    return one.calibrated.errors.token_nmse


def gain(one: Linears) -> float:
    """Return the error that the shadow takes away."""
    assert one.calibrated is not None
    return one.calibrated.gain

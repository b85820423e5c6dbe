"""Reference operators, one for each processor, measured repeatedly through a run to show drift."""

from __future__ import annotations

from typing import Final

from heterollm.base import ProfileError
from heterollm.kernels.device import Device
from heterollm.kernels.npu import LinearShape
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.profiler.measure.linears import LinearBench
from heterollm.profiler.records import LinearPoint, Processor
from heterollm.profiler.work import WorkPoint

__all__ = ["ReferenceOperators"]

TOKENS: Final = 64
SPEC: Final = OpSpec("o", 0, (Member("o", 1024),), 1024, WeightFormat(4, 32), "x", "y")


class ReferenceOperators:
    """Measures one small linear layer on each processor.

    Args:
        device: The opened device.

    Attributes:
        processors: The processors that can compute it.
    """

    def __init__(self, device: Device) -> None:
        self.processors: tuple[Processor, ...] = ("gpu",)
        self._form = ""
        if device.npu is not None:
            forms = device.npu.forms(LinearShape(SPEC.weight, SPEC.columns), TOKENS)
            if TOKENS in device.npu.standard_lengths and forms:
                self.processors, self._form = ("gpu", "npu"), forms[0]
        self._bench = LinearBench(device)

    def measure(self, processor: Processor) -> tuple[float, ...]:
        """Return samples of a processor's time in microseconds.

        Raises:
            ProfileError: It could not be measured.
        """
        form = self._form if processor == "npu" else ""
        point = LinearPoint.of(SPEC, TOKENS, form=form, streamed=False)
        record = self._bench.measure(WorkPoint(processor, point, 0, SPEC))[0]
        if record.failed:
            raise ProfileError(record.error)
        return record.samples_us

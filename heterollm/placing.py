"""The calls of one group of linears: its parts on both processors, and the hand-over between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from heterollm.kernels.device import Device
from heterollm.kernels.gpu_layers import Segments
from heterollm.kernels.gpu_linear import GpuLinear
from heterollm.kernels.handover import HandOver, hand_over_calls
from heterollm.kernels.npu import NpuGraph
from heterollm.kernels.opencl_launch import Launch
from heterollm.kernels.opencl_memory import SharedArray
from heterollm.kernels.ops import Group, OpSpec
from heterollm.kernels.rounding import RoundedInputs
from heterollm.npu_slices import npu_slice
from heterollm.solver.plan import Placement
from heterollm.weights import ModelWeights

if TYPE_CHECKING:
    from heterollm.slot_check import SlotCheck

__all__ = ["Call", "Part", "Placer"]

Call: TypeAlias = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What is computed at one place of a pass, and where.

    Args:
        spec: The group.
        linear: Its weights on the GPU.
        placement: Who computes what.
        tokens: Tokens of the pass.
        source: Slot of the input.
        npu_output: Slot that the NPU writes.
        gpu_output: Slot that the GPU writes.
        rounded: Where the codes of the input lie, if the kernel that wrote it left any.
    """

    spec: OpSpec
    linear: GpuLinear
    placement: Placement
    tokens: int
    source: SharedArray
    npu_output: SharedArray
    gpu_output: SharedArray
    rounded: RoundedInputs | None

    @property
    def label(self) -> str:
        """What to call it in traces and errors."""
        return f"{self.spec.layer}.{self.spec.group}"


class Placer:
    """Puts groups where a plan says.

    The order of a group's calls on coherent memory: the launches that write its input, the signal, the GPU's
    part, the wait for the signal, the NPU's graphs. So the GPU goes from the input's kernels to its part
    without waiting for the host. No wait follows, since the kernels that read the output are enqueued
    after the NPU has returned. Mapped memory must be acquired before the GPU's part is enqueued.

    Args:
        device: The opened device.
        weights: The model's weights.
        after_every_operator: Whether the queue is finished after every operator.
        check: Takes note of what the calls touch, in the debug mode; None otherwise.
    """

    def __init__(
        self, device: Device, weights: ModelWeights, *, after_every_operator: bool, check: SlotCheck | None
    ) -> None:
        self._device = device
        self._runtime = device.gpu
        self._weights = weights
        self._after_every_operator = after_every_operator
        self._check = check
        self._graphs: dict[tuple[int, Group, tuple[int, ...], str | None, int], NpuGraph] = {}

    def clear(self) -> None:
        """Drop the graphs; nothing compiled may run afterwards."""
        self._graphs.clear()

    def merges(self, tokens: int) -> bool:
        """Whether launches of a pass are merged where they follow each other."""
        traits = self._runtime.traits
        return tokens == 1 and traits.is_cpu and traits.coherent and not self._after_every_operator

    def end_operator(self, calls: list[Call]) -> None:
        """Append what ends each operator that the GPU computes: nothing, but in the baseline."""
        if self._after_every_operator:
            calls.append(self._runtime.finish)

    def place(self, calls: list[Call], part: Part, hand_over: Callable[[], HandOver]) -> Segments:
        """Append the calls of one group and return where its output lies.

        Args:
            calls: Those of the pass so far.
            part: What is computed.
            hand_over: Returns the wait for the input, where there is one.
        """
        placement, rows = part.placement, part.spec.member_rows
        if not placement.npu_lengths:
            calls.append(self._gpu_part(part, part.gpu_output))
            self.end_operator(calls)
            return Segments(part.gpu_output, part.gpu_output, rows, (0,) * len(rows))
        row_cut = placement.npu_rows != rows
        covered = min(part.tokens, sum(placement.npu_lengths))
        launch = None
        if row_cut:
            kept = tuple(zip(placement.npu_rows, rows, strict=True))
            launch = self._gpu_part(part, part.gpu_output, kept=kept)
        elif covered < part.tokens:
            # A sequence cut leaves one segment: the GPU writes the rows below those of the NPU.
            launch = self._gpu_part(part, part.npu_output, first_token=covered)
            if self._check is not None:
                columns = sum(rows) * self._device.activation_dtype.itemsize
                self._check.note_rows(launch, part.npu_output, covered * columns)
        calls += self._start(part, hand_over(), launch, turns=not row_cut)
        calls += self._graph_calls(part)
        if not part.source.coherent:
            calls += [part.source.release, part.npu_output.release]
        if launch is not None:
            self.end_operator(calls)
        other = part.gpu_output if row_cut else part.npu_output
        return Segments(part.npu_output, other, rows, placement.npu_rows)

    def _gpu_part(self, part: Part, output: SharedArray, **options: Any) -> Launch:  # noqa: ANN401
        tokens = part.tokens - options.get("first_token", 0)
        if "first_token" not in options:
            options["rounded"] = part.rounded
        return part.linear.launch(part.source, output, tokens=tokens, label=part.label, **options)

    def _start(self, part: Part, hand_over: HandOver, launch: Launch | None, *, turns: bool) -> list[Call]:
        """Return the calls that start the GPU's part, if there is one, and let the NPU at its input.

        Args:
            part: What is computed.
            hand_over: The wait for the input.
            launch: The GPU's part.
            turns: Whether both parts write one slot. Mapped memory must not be written by a kernel, so where
                the memory is not coherent they take turns.
        """
        flush = self._runtime.flush
        if not part.source.coherent:
            acquire = hand_over_calls(hand_over, part.source, part.npu_output)
            if launch is None:
                return acquire
            return [launch, *acquire] if turns else [*acquire, launch, flush]
        if hand_over.strategy == "finish":
            # It waits for all that is enqueued, so that the GPU's part comes after it.
            return [hand_over] if launch is None else [hand_over, launch, flush]
        if hand_over.launch is not None and self.merges(part.tokens):
            # The signal and the GPU's part go into the launch of the kernels that write the input.
            started = [] if launch is None else [launch]
            return [hand_over.launch, *started, hand_over.sent, hand_over.wait]
        if launch is None:
            return [hand_over]
        return [hand_over.mark, launch, flush, hand_over.wait]

    def end(self, hand_over: HandOver | None, tokens: int) -> list[Call]:
        """Return the calls that wait for the end of a pass of so many tokens.

        The queue is finished in any case, which costs little once all is done: a flag does not tell that a
        kernel failed.
        """
        finish = self._runtime.finish
        if hand_over is None or hand_over.strategy in ("finish", "event"):
            return [finish]
        if hand_over.launch is not None and self.merges(tokens):
            return [hand_over.launch, hand_over.sent, hand_over.wait, finish]
        return [hand_over, finish]

    def _graph_calls(self, part: Part) -> list[Call]:
        placement, dtype = part.placement, self._device.activation_dtype
        rows, total = sum(placement.npu_rows), sum(placement.npu_lengths)
        x = part.source.view(dtype, (total, part.spec.columns))
        y = part.npu_output.view(dtype, (total, rows))
        calls: list[Call] = []
        first = 0
        for length in placement.npu_lengths:
            graph = self._graph(part.spec, placement, length)
            places = slice(first, first + length)
            call = graph.bind(x[places], y[places])
            if self._check is not None:
                self._check.note_graph(call, part.label, x[places], y[places])
            calls.append(call)
            first += length
        return calls

    def _graph(self, spec: OpSpec, placement: Placement, length: int) -> NpuGraph:
        npu = self._device.npu
        assert npu is not None  # loading has checked the plan
        key = (spec.layer, spec.group, placement.npu_rows, placement.form, length)
        if key not in self._graphs:
            # The slice is dropped: its stacked members would hold the weights once more.
            part = npu_slice(self._weights, spec, placement.npu_rows)
            self._graphs[key] = npu.prepare(part, length, placement.form)  # type: ignore[arg-type]
        return self._graphs[key]

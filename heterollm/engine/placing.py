"""The calls of one group of linears: its parts on both processors, and the hand-over between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from heterollm.engine.npu_slices import npu_part
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuLinear, Launch, RoundedInputs, Segments, SharedArray
from heterollm.kernels.npu import NpuGraph
from heterollm.kernels.ops import Group, OpSpec
from heterollm.kernels.sync import HandOver, hand_over_calls
from heterollm.model import ModelWeights
from heterollm.solver import Placement

if TYPE_CHECKING:
    from heterollm.engine.slot_check import SlotCheck

__all__ = ["Call", "Part", "Placer"]

Call: TypeAlias = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What is computed at one place of a pass, and where.

    Args:
        spec: The group.
        placement: Who computes what.
        tokens: Tokens of the pass.
        source: Slot of the input.
        npu_output: Slot that the NPU writes.
        gpu_output: Slot that the GPU writes.
        hand_over: Returns the wait for the input; called where there is one.
    """

    spec: OpSpec
    placement: Placement
    tokens: int
    source: SharedArray
    npu_output: SharedArray
    gpu_output: SharedArray
    hand_over: Callable[[], HandOver]

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
        return tokens == 1 and self._runtime.merges_launches and not self._after_every_operator

    def end_operator(self, calls: list[Call]) -> None:
        """Append what ends each operator that the GPU computes: nothing, but in the baseline."""
        if self._after_every_operator:
            calls.append(self._runtime.finish)

    def place(
        self, calls: list[Call], part: Part, linear: GpuLinear, rounded: RoundedInputs | None
    ) -> Segments:
        """Append the calls of one group of linears and return where its output lies.

        Args:
            calls: Those of the pass so far.
            part: What is computed.
            linear: Its weights on the GPU.
            rounded: Where the codes of the input lie, if the kernel that wrote it left any.
        """
        placement, rows = part.placement, part.spec.member_rows

        def launch(output: SharedArray, **options: Any) -> Launch:  # noqa: ANN401 - those of the launch
            return linear.launch(part.source, output, label=part.label, **options)

        if not placement.npu_lengths:
            calls.append(launch(part.gpu_output, tokens=part.tokens, rounded=rounded))
            self.end_operator(calls)
            return Segments(part.gpu_output, part.gpu_output, rows, (0,) * len(rows))
        if placement.npu_rows != rows:
            kept = tuple(zip(placement.npu_rows, rows, strict=True))
            own = launch(part.gpu_output, tokens=part.tokens, kept=kept, rounded=rounded)
            self._run(calls, part, [own])
            return Segments(part.npu_output, part.gpu_output, rows, placement.npu_rows)
        launches = []
        covered = sum(placement.npu_lengths)
        if covered < part.tokens:
            # A sequence cut leaves one segment: the GPU writes the rows below those of the NPU.
            own = launch(part.npu_output, tokens=part.tokens - covered, first_token=covered)
            if self._check is not None:
                columns = sum(rows) * self._device.activation_dtype.itemsize
                self._check.note_rows(own, part.npu_output, covered * columns)
            launches.append(own)
        self._run(calls, part, launches, turns=True)
        return Segments(part.npu_output, part.npu_output, rows, placement.npu_rows)

    def place_block(self, calls: list[Call], part: Part, launches: Sequence[Launch]) -> Segments:
        """Append the calls of a block of groups that the NPU computes, or a share of it.

        Args:
            calls: Those of the pass so far.
            part: What is computed.
            launches: The GPU's kernels, in order; without any the NPU computes all of it.

        Returns:
            Where the output lies: two sums to be added, or one.
        """
        self._run(calls, part, launches)
        assert part.spec.then is not None
        rows = part.spec.then.member_rows
        if launches:
            return Segments(part.npu_output, part.gpu_output, rows, (0,), join="sum")
        return Segments(part.npu_output, part.npu_output, rows, rows)

    def _run(self, calls: list[Call], part: Part, launches: Sequence[Launch], *, turns: bool = False) -> None:
        """Append the calls of both parts.

        Args:
            calls: Those of the pass so far.
            part: What is computed.
            launches: The GPU's kernels, if it has a part.
            turns: Whether both parts write one slot. Mapped memory must not be written by a kernel, so where
                the memory is not coherent they take turns.
        """
        calls += self._start(part, launches, turns=turns)
        calls += self._graph_calls(part)
        if not part.source.coherent:
            calls += [part.source.release, part.npu_output.release]
        if launches:
            self.end_operator(calls)

    def _start(self, part: Part, launches: Sequence[Launch], *, turns: bool) -> list[Call]:
        """Return the calls that start the GPU's part, if there is one, and let the NPU at its input."""
        hand_over = part.hand_over()
        started: list[Call] = [*launches, self._runtime.flush] if launches else []
        if not part.source.coherent:
            acquire = hand_over_calls(hand_over, part.source, part.npu_output)
            return [*launches, *acquire] if turns else [*acquire, *started]
        if hand_over.strategy == "finish":
            # It waits for all that is enqueued, so that the GPU's part comes after it.
            return [hand_over, *started]
        if hand_over.launch is not None and self.merges(part.tokens):
            # The signal and the GPU's part go into the launch of the kernels that write the input.
            return [hand_over.launch, *launches, hand_over.sent, hand_over.wait]
        return [hand_over.mark, *started, hand_over.wait] if launches else [hand_over]

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
        total = sum(placement.npu_lengths)
        rows = sum(placement.npu_rows) if part.spec.then is None else part.spec.then.rows
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
            part = npu_part(self._weights, spec, placement.npu_rows)
            self._graphs[key] = npu.prepare(part, length, placement.form)  # type: ignore[arg-type]
        return self._graphs[key]

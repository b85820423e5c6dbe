"""Emits the steps of an operator: the shards of both processors, and the wait between them."""

from __future__ import annotations

from collections.abc import Sequence

from heterollm.engine.builder import PassBuilder, PlacedOperator
from heterollm.engine.npu_slices import npu_part
from heterollm.engine.step import NOT_RUN, Buffer, Call, LinearWork, Step, shard_name
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuLinear, Launch, Segments, SharedArray
from heterollm.kernels.npu import NpuGraph
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights
from heterollm.solver import Placement

__all__ = ["SplitEmitter"]


class SplitEmitter:
    """Emits each operator as its placement says.

    The order of an operator's steps on coherent memory: the kernels that write its input, the signal, the
    GPU's shard, the wait for the signal, the NPU's graphs. So the GPU goes from the input's kernels to its
    shard without waiting for the host. No wait follows, since the kernels that read the output are enqueued
    after the NPU has returned. Mapped memory must be acquired before the GPU's shard is enqueued.

    Args:
        device: The opened device.
        weights: The model's weights.
    """

    def __init__(self, device: Device, weights: ModelWeights) -> None:
        self._device = device
        self._weights = weights
        self._graphs: dict[tuple[int, Group, tuple[int, ...], str | None, int], NpuGraph] = {}

    def clear(self) -> None:
        """Drop the graphs; nothing compiled may run afterwards."""
        self._graphs.clear()

    def linear(self, steps: PassBuilder, here: PlacedOperator, linear: GpuLinear) -> Segments:
        """Append the steps of one group of linears and return where its output lies.

        Args:
            steps: Those of the pass so far.
            here: The group.
            linear: Its weights on the GPU.
        """
        spec, placement, tokens = here.spec, here.placement, steps.tokens
        rows = spec.member_rows
        if not placement.npu_lengths:
            launch = linear.launch(
                here.source, here.gpu_output, tokens=tokens, rounded=here.rounded, label=here.name
            )
            steps.steps += self._rows(steps, here, launch, here.gpu_output, (0,) * len(rows))
            steps.end_operator(here.operator, here.layer)
            return Segments(here.gpu_output, here.gpu_output, rows, (0,) * len(rows))
        if placement.npu_rows != rows:
            kept = tuple(zip(placement.npu_rows, rows, strict=True))
            launch = linear.launch(
                here.source,
                here.gpu_output,
                tokens=tokens,
                kept=kept,
                rounded=here.rounded,
                label=here.name,
            )
            own = self._rows(steps, here, launch, here.gpu_output, placement.npu_rows)
            self._split(steps, here, own)
            return Segments(here.npu_output, here.gpu_output, rows, placement.npu_rows)
        # A sequence cut leaves one segment: the GPU writes the rows below those of the NPU.
        self._split(steps, here, self._tokens_left(steps, here, linear), one_output=True)
        return Segments(here.npu_output, here.npu_output, rows, placement.npu_rows)

    def block(self, steps: PassBuilder, here: PlacedOperator, gpu: Sequence[Step]) -> Segments:
        """Append the steps of a block of groups that the NPU computes, or a share of it.

        Args:
            steps: Those of the pass so far.
            here: The block.
            gpu: Steps of the GPU's share, in order; without any the NPU computes all of it.

        Returns:
            Where the output lies: two sums to be added, or one.
        """
        self._split(steps, here, gpu)
        assert here.spec.then is not None
        rows = here.spec.then.member_rows
        if gpu:
            return Segments(here.npu_output, here.gpu_output, rows, (0,), join="sum")
        return Segments(here.npu_output, here.npu_output, rows, rows)

    def end(self, steps: PassBuilder, *, waits: bool) -> None:
        """Append the steps that wait for the end of a pass.

        The queue is finished in any case, which costs little once all is done: a flag does not tell that a
        kernel failed.

        Args:
            steps: Those of the pass so far.
            waits: Whether to wait by the strategy of the pass before.
        """
        hand_over = steps.hand_over(None) if waits else None
        if hand_over is not None and hand_over.strategy not in ("finish", "event"):
            if hand_over.launch is not None and steps.merges:
                steps.flag(None, hand_over.launch)
                steps.sent(None)
            else:
                steps.mark(None)
            steps.wait(None)
        steps.finish()

    # -- pieces --------------------------------------------------------------------------------------

    def _split(
        self, steps: PassBuilder, here: PlacedOperator, gpu: Sequence[Step], *, one_output: bool = False
    ) -> None:
        """Append the steps of both processors.

        Args:
            steps: Those of the pass so far.
            here: The operator.
            gpu: Steps of the GPU's shard, if it has one.
            one_output: Whether both processors write one slot. Mapped memory must not be written by a kernel,
                so where the memory is not coherent they take turns.
        """
        mapped = not here.source.coherent
        if mapped:
            self._start_mapped(steps, here, gpu, one_output=one_output)
        else:
            self._start(steps, here, gpu)
        self._graph_runs(steps, here)
        if mapped:
            steps.release(here)
        if gpu:
            steps.end_operator(here.operator, here.layer)

    def _start(self, steps: PassBuilder, here: PlacedOperator, gpu: Sequence[Step]) -> None:
        """Append what starts the GPU's shard and lets the NPU at its input."""
        hand_over = steps.hand_over(here)
        if hand_over.strategy == "finish":
            # It waits for all that is enqueued, so that the GPU's shard comes after it.
            steps.wait(here)
            _enqueue(steps, here, gpu)
        elif hand_over.launch is not None and steps.merges:
            # The signal and the GPU's shard go into the launch of the kernels that write the input.
            steps.flag(here, hand_over.launch)
            steps.steps += gpu
            steps.sent(here)
            steps.wait(here)
        else:
            steps.mark(here)
            _enqueue(steps, here, gpu)
            steps.wait(here)

    def _start_mapped(
        self, steps: PassBuilder, here: PlacedOperator, gpu: Sequence[Step], *, one_output: bool
    ) -> None:
        if one_output:
            steps.steps += gpu
        # Nothing may be enqueued between the mark and the acquiring: mapping waits for the whole queue.
        steps.mark(here)
        steps.wait(here)
        steps.acquire(here)
        if not one_output:
            _enqueue(steps, here, gpu)

    def _rows(
        self,
        steps: PassBuilder,
        here: PlacedOperator,
        launch: Launch,
        output: SharedArray,
        npu_rows: tuple[int, ...],
    ) -> list[Step]:
        """Return the steps of the rows of each member from ``npu_rows`` on."""
        spec = here.spec
        label = shard_name(here.name, spec, tuple(zip(npu_rows, spec.member_rows, strict=True)))
        work = LinearWork.of_rows(spec, steps.tokens, spec.rows - sum(npu_rows))
        return steps.shard(here, launch, label, here.source, output, work, here.rounded)

    def _tokens_left(self, steps: PassBuilder, here: PlacedOperator, linear: GpuLinear) -> list[Step]:
        """Return the steps of the tokens behind those of the NPU, in its slot; none if it has all."""
        spec, first = here.spec, sum(here.placement.npu_lengths)
        count = steps.tokens - first
        if count <= 0:
            return []
        launch = linear.launch(here.source, here.npu_output, tokens=count, first_token=first, label=here.name)
        item = self._device.activation_dtype.itemsize
        reads = self._token_bytes(steps, here.source, spec.columns * item, first, count)
        writes = self._token_bytes(steps, here.npu_output, spec.rows * item, first, count)
        label = f"{here.name} tokens {first}:{steps.tokens}"
        return steps.shard(here, launch, label, reads, writes, LinearWork.of_rows(spec, count, spec.rows))

    def _graph_runs(self, steps: PassBuilder, here: PlacedOperator) -> None:
        spec, placement = here.spec, here.placement
        dtype, total = self._device.activation_dtype, sum(placement.npu_lengths)
        rows = sum(placement.npu_rows) if spec.then is None else spec.then.rows
        x = here.source.view(dtype, (total, spec.columns))
        y = here.npu_output.view(dtype, (total, rows))
        shard = shard_name(here.name, spec, tuple((0, own) for own in placement.npu_rows))
        form = "" if placement.form is None else f" as {placement.form}"
        first = 0
        for length in placement.npu_lengths:
            if spec.then is None:
                work = LinearWork.of_rows(spec, length, rows)
            else:
                work = LinearWork.of_block(spec, length, placement.npu_rows[0])
            tokens = slice(first, first + length)
            reads = self._token_bytes(steps, here.source, spec.columns * dtype.itemsize, first, length)
            writes = self._token_bytes(steps, here.npu_output, rows * dtype.itemsize, first, length)
            label = f"{shard} tokens {first}:{first + length}{form}"
            run: Call = NOT_RUN
            if steps.builds_graphs:
                run = self._graph(spec, placement, length).bind(x[tokens], y[tokens])
            steps.graph(here, run, label, reads, writes, work)
            first += length

    @staticmethod
    def _token_bytes(steps: PassBuilder, slot: SharedArray, row_bytes: int, first: int, count: int) -> Buffer:
        return steps.part_of(slot, first * row_bytes, (first + count) * row_bytes)

    def _graph(self, spec: OpSpec, placement: Placement, length: int) -> NpuGraph:
        npu = self._device.npu
        assert npu is not None  # loading has checked the plan
        key = (spec.layer, spec.group, placement.npu_rows, placement.form, length)
        if key not in self._graphs:
            # The slice is dropped: its stacked members would hold the weights once more.
            part = npu_part(self._weights, spec, placement.npu_rows)
            self._graphs[key] = npu.prepare(part, length, placement.form)  # type: ignore[arg-type]
        return self._graphs[key]


def _enqueue(steps: PassBuilder, here: PlacedOperator, gpu: Sequence[Step]) -> None:
    """Append the GPU's shard and its start."""
    if gpu:
        steps.steps += gpu
        steps.flush(here)

"""Builds a pass: appends kernels, graph runs and waits, each with the buffers that it reads and writes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

from heterollm.engine.lanes import Lane
from heterollm.engine.placed import HandedOver, Memory, PlacedOp, codes_of, place_of
from heterollm.engine.step import (
    Action,
    Buffer,
    Call,
    LinearWork,
    Operator,
    Step,
    Wait,
    operator_name,
)
from heterollm.engine.waits import PassFences
from heterollm.kernels.gpu import (
    ROUNDING,
    DeviceMemory,
    GpuRuntime,
    KvLayer,
    KvMemory,
    Launch,
    RecurrentLayer,
    RoundedInputs,
    SharedArray,
)
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.kernels.sync import Fence
from heterollm.solver import Placement, Plan

SCRATCH_CODES = Buffer("scratch_codes")
"""GPU memory for int8 codes between a rounding kernel and the linear that follows it."""


class PassBuilder:
    """Appends the steps of one pass.

    Args:
        phase: Phase of the pass.
        tokens: Tokens of the pass, or rows of the head.
        plan: The plan, which has no part for the NPU once that has failed.
        placements: Operator and placement by layer and group.
        fences: The waits of the pass.
        lane: The memory of the pass.
        names: The buffers of that memory and of the state of sessions.
        runtime: The GPU.
        keys: In prefill the border of :attr:`heterollm.engine.kept_passes.KeptPasses.key_borders` at or
            behind the last position.
        state: The memory of the state of sessions.
        row_words: Words of the step buffer for each token, if each belongs to another session; else 0.
        after_every_operator: Whether to finish the queue after every operator.
        builds_graphs: Whether to build the NPU's graphs; steps without them are readable but cannot run.

    Attributes:
        steps: The steps so far.
        merges: Whether consecutive launches will be merged.
        has_endings: Whether linear layers will compute the operators around them.
    """

    def __init__(
        self,
        phase: Phase,
        tokens: int,
        plan: Plan,
        placements: Mapping[tuple[int, Group], tuple[OpSpec, Placement]],
        fences: PassFences,
        lane: Lane,
        names: Mapping[DeviceMemory, Buffer],
        runtime: GpuRuntime,
        state: KvMemory,
        *,
        keys: int = 0,
        row_words: int = 0,
        after_every_operator: bool,
        builds_graphs: bool = True,
    ) -> None:
        self.builds_graphs = builds_graphs
        self.phase: Phase = phase
        self.tokens = tokens
        self.keys = keys
        self.row_words = row_words
        self.plan = plan
        self.placements = placements
        self.steps: list[Step] = []
        self._state = state
        self.merges = tokens == 1 and runtime.merges_launches and not after_every_operator
        self.has_endings = tokens == 1 and runtime.has_endings and not after_every_operator
        self._fences = fences
        self.lane = lane
        self.names = names
        self._runtime = runtime
        self._after_every_operator = after_every_operator

    def layer_cache(self, layer: int) -> KvLayer:
        """Return the keys and values of a layer."""
        return self._state.layers[layer]

    def recurrent(self, layer: int) -> RecurrentLayer:
        """Return the recurrent state of a layer."""
        return self._state.recurrent[layer]

    # -- GPU -----------------------------------------------------------------------------------------

    def kernel(
        self,
        operator: Operator,
        layer: int | None,
        launch: Launch,
        *,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        ends: bool = True,
        label: str = "",
        work: LinearWork | None = None,
    ) -> None:
        """Append a glue kernel, and the end of its operator unless more kernels of it follow."""
        self.steps.append(self.prepared(operator, layer, launch, reads, writes, label=label, work=work))
        if ends:
            self.end_operator(operator, layer)

    def prepared(
        self,
        operator: Operator,
        layer: int | None,
        launch: Launch,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
        *,
        label: str = "",
        work: LinearWork | None = None,
    ) -> Step:
        """Return the step of a glue kernel without appending it."""
        label = label or operator_name(operator, layer)
        return self._step(operator, layer, "kernel", label, launch, reads, writes, work=work)

    def prepared_read(
        self, operator: Operator, layer: int, run: Call, label: str, reads: Sequence[Memory]
    ) -> Step:
        """Return the step of the host that waits for the queue and reads weights, without appending it."""
        return self._step(operator, layer, "read_weights", label, run, reads)

    def shard(
        self,
        op: PlacedOp,
        launch: Launch,
        label: str,
        reads: Memory,
        writes: Memory,
        work: LinearWork,
        rounded: RoundedInputs | None = None,
    ) -> list[Step]:
        """Return the steps of a linear's kernel, with rounding of its input if necessary, without appending.

        Args:
            op: The operator.
            launch: The kernel.
            label: Name of the shard.
            reads: The input.
            writes: The output.
            work: The work of the kernel.
            rounded: Existing codes of the input, which the kernel reads instead.
        """
        source: tuple[Memory, ...] = (reads,)
        steps = []
        *before, kernel = launch.parts
        if before and before[0].label != ROUNDING:
            # Inputs that only this kernel reads split, or weights in several buffers.
            before, kernel = [], launch
        for rounding in before:
            codes = (SCRATCH_CODES,)
            name = f"{op.name} {ROUNDING}"
            steps.append(self._step(ROUNDING, op.layer, "kernel", name, rounding, source, codes))
            source = codes
        if rounded is not None:
            source = codes_of(rounded)
        steps.append(self._step(op.operator, op.layer, "kernel", label, kernel, source, (writes,), work=work))
        return steps

    def flag(self, op: HandedOver | None, launch: Launch) -> None:
        """Append the kernel that raises the flag."""
        layer = None if op is None else op.layer
        self.steps.append(self._step("flag", layer, "kernel", f"flag before {place_of(op)}", launch))

    # -- NPU -----------------------------------------------------------------------------------------

    def graph(
        self,
        op: HandedOver,
        run: Call,
        label: str,
        reads: Sequence[Buffer],
        writes: Buffer,
        work: LinearWork | None = None,
    ) -> None:
        """Append a run of an NPU graph; one without weights has no work of linear layers."""
        step = self._step(op.operator, op.layer, "graph", label, run, reads, (writes,), work=work)
        self.steps.append(step)

    # -- host ----------------------------------------------------------------------------------------

    def fence(self, op: HandedOver | None) -> Fence:
        """Return the fence before an operator's NPU graphs, or for None at the end of the pass."""
        operator, layer = ("end", None) if op is None else (op.operator, op.layer)
        return self._fences.before(operator, layer, self._awaited)

    def _awaited(self) -> Hashable:
        """Return the GPU's work since the last wait."""
        behind = itertools.takewhile(lambda step: step.wait is None, reversed(self.steps))
        return tuple([(step.operator, step.work) for step in behind if step.processor == "gpu"])

    def mark(self, op: HandedOver | None) -> None:
        """Append the mark of a fence; strategy ``finish`` needs none."""
        fence = self.fence(op)
        if fence.strategy != "finish":
            self._host(op, "mark", fence.mark)

    def sent(self, op: HandedOver | None) -> None:
        """Append the note that a launched kernel is the mark of a fence."""
        self._host(op, "sent", self.fence(op).sent)

    def wait(self, op: HandedOver | None) -> None:
        """Append the wait of a fence."""
        fence = self.fence(op)
        buffer = "logits" if op is None else self.names[op.npu_source].name
        self._host(op, "wait", fence.wait, wait=Wait(buffer, fence.strategy))

    def flush(self, op: HandedOver) -> None:
        """Append a flush of the queue."""
        self._host(op, "flush", self._runtime.flush)

    def submit_layer(self, layer: int) -> None:
        """Append a flush behind layers 0, 1, 3, 7 and so on of a pass without graphs, whose fences flush.

        A driver may submit nothing before a flush. So the GPU starts early and has work while the host
        enqueues as many layers again, at the price of a few flushes a pass.
        """
        if layer & (layer + 1) or self.merges or self._after_every_operator:
            return
        if not any(step.action == "graph" for step in self.steps):
            last, label = self.steps[-1], f"flush behind layer {layer}"
            self.steps.append(self._step(last.operator, layer, "flush", label, self._runtime.flush))

    def hand_over(self, op: HandedOver, gpu: Sequence[Step], acquire: Callable[[], None]) -> None:
        """Append the GPU's shard and what comes before the NPU's graphs: fence and maps.

        Args:
            op: The operator.
            gpu: Steps of the GPU's shard, if it has one.
            acquire: Appends the maps of memory that is not coherent.
        """
        mapped = not op.npu_source.coherent
        if mapped and not self._runtime.maps_beside_kernels:
            # No kernel may be enqueued between mark and acquire, since mapping waits for the whole queue.
            self.mark(op)
            self.wait(op)
            acquire()
            self._enqueue(op, gpu)
            return
        fence = self.fence(op)
        if fence.strategy == "finish":
            # The wait covers the whole queue, so that the GPU's shard must follow it.
            self.wait(op)
            self._enqueue(op, gpu)
        elif fence.launch is not None and self.merges:
            # The mark and the GPU's shard join the launch of the kernels that write the input.
            self.flag(op, fence.launch)
            self.steps += gpu
            self.sent(op)
            self.wait(op)
        else:
            self.mark(op)
            self._enqueue(op, gpu)
            self.wait(op)
        if mapped:
            acquire()

    def acquire(self, op: HandedOver, read_bytes: int, written_bytes: int) -> None:
        """Append the mapping of the input for reading and of the output for writing.

        Args:
            op: The operator.
            read_bytes: First bytes of the input, which the NPU reads.
            written_bytes: First bytes of the output, which the NPU writes; kernels may write the others.
        """
        read = functools.partial(op.npu_source.acquire_to_read, read_bytes)
        self._host(op, "acquire_to_read", read, reads=(self.byte_range(op.npu_source, 0, read_bytes),))
        write = functools.partial(op.npu_target.acquire, written_bytes)
        self._host(op, "acquire", write, writes=(self.byte_range(op.npu_target, 0, written_bytes),))

    def release(self, op: HandedOver) -> None:
        """Append the unmapping of input and output."""
        self._host(op, "release", op.npu_source.release, reads=(op.npu_source,))
        self._host(op, "release", op.npu_target.release, writes=(op.npu_target,))

    def on_host(
        self,
        op: HandedOver,
        action: Action,
        run: Call,
        *,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
    ) -> None:
        """Append another step of the host."""
        self._host(op, action, run, reads=reads, writes=writes)

    def finish(self) -> None:
        """Append the wait for the whole queue at the end of the pass."""
        self._host(None, "finish", self._runtime.finish)

    def end_operator(self, operator: Operator, layer: int | None) -> None:
        """Append the end of an operator on the GPU, which is a step only in the baseline."""
        if self._after_every_operator:
            label = f"finish {operator_name(operator, layer)}"
            self.steps.append(self._step(operator, layer, "finish", label, self._runtime.finish))

    # -- helpers -------------------------------------------------------------------------------------

    def _enqueue(self, op: HandedOver, gpu: Sequence[Step]) -> None:
        """Append the GPU's shard and flush the queue."""
        if gpu:
            self.steps += gpu
            self.flush(op)

    def byte_range(self, memory: SharedArray, start: int, stop: int) -> Buffer:
        """Return a range of bytes of a buffer."""
        return Buffer(self.names[memory].name, start, stop)

    def _step(
        self,
        operator: Operator,
        layer: int | None,
        action: Action,
        label: str,
        run: Call,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        *,
        work: LinearWork | None = None,
        wait: Wait | None = None,
    ) -> Step:
        return Step(
            operator=operator,
            layer=layer,
            tokens=self.tokens if work is None else work.tokens,
            lane=self.lane.number,
            processor="gpu" if action == "kernel" else "npu" if action == "graph" else "host",
            action=action,
            label=label,
            reads=self._buffers(reads),
            writes=self._buffers(writes),
            wait=wait,
            work=work,
            run=run,
        )

    def _host(
        self,
        op: HandedOver | None,
        action: Action,
        run: Call,
        *,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        wait: Wait | None = None,
    ) -> None:
        operator: Operator = "end of pass" if op is None else op.operator
        layer = None if op is None else op.layer
        label = f"{action} before {place_of(op)}"
        self.steps.append(self._step(operator, layer, action, label, run, reads, writes, wait=wait))

    def _buffers(self, memories: Sequence[Memory]) -> tuple[Buffer, ...]:
        once = dict.fromkeys(memories)
        return tuple([memory if isinstance(memory, Buffer) else self.names[memory] for memory in once])

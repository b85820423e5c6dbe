"""Builds a pass step by step: appends kernels, graph runs and waits with the buffers that they touch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from heterollm.engine.step import (
    NOT_RUN,
    Action,
    Buffer,
    Call,
    LinearWork,
    Operator,
    Step,
    Wait,
    operator_name,
)
from heterollm.engine.waits import PassHandOvers
from heterollm.kernels.gpu import (
    GpuRuntime,
    Launch,
    MergedLaunch,
    RoundedInputs,
    Segments,
    SharedArray,
    merge_launches,
)
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.kernels.sync import Fence
from heterollm.solver import Placement

__all__ = ["Memory", "PassBuilder", "PlacedOperator", "merge_steps"]

Memory: TypeAlias = "SharedArray | Buffer"
"""A buffer by its memory, or by its name."""

SCRATCH_CODES = Buffer("scratch_codes")
"""Memory of the GPU's own, through which a kernel that rounds hands int8 codes to the linear behind it."""


@dataclass(frozen=True, slots=True)
class PlacedOperator:
    """An operator of a pass: who computes it, and in which buffers.

    Args:
        spec: The group of linears, or the block.
        placement: Who computes what.
        source: Slot of the input.
        npu_output: Slot that the NPU writes.
        gpu_output: Slot that the GPU writes.
        rounded: Where the kernel that writes the input leaves its int8 codes; None if it leaves none.
    """

    spec: OpSpec
    placement: Placement
    source: SharedArray
    npu_output: SharedArray
    gpu_output: SharedArray
    rounded: RoundedInputs | None

    @property
    def operator(self) -> Operator:
        """Its name."""
        return self.spec.group

    @property
    def layer(self) -> int | None:
        """Its decoder layer; None for the head."""
        return None if self.spec.layer < 0 else self.spec.layer

    @property
    def name(self) -> str:
        """The operator with its layer, such as ``3.qkv``."""
        return operator_name(self.operator, self.layer)


class PassBuilder:
    """Appends the steps of one pass.

    Args:
        phase: Which placements of the plan the pass uses.
        tokens: Tokens of the pass, or rows of the head.
        placements: By layer and group, each operator and who computes it.
        hand_overs: The waits of the pass.
        names: The buffers of all memory that host and device share.
        runtime: The GPU.
        after_every_operator: Whether the queue is finished after every operator.
        builds_graphs: Whether the NPU's graphs are built; steps of others can be read, and not run.

    Attributes:
        builds_graphs: As given.
        names: As given.
        steps: Those so far.
        merges: Whether launches that follow each other become one at the end.
    """

    def __init__(
        self,
        phase: Phase,
        tokens: int,
        placements: Mapping[tuple[int, Group], tuple[OpSpec, Placement]],
        hand_overs: PassHandOvers,
        names: Mapping[SharedArray, Buffer],
        runtime: GpuRuntime,
        *,
        after_every_operator: bool,
        builds_graphs: bool = True,
    ) -> None:
        self.builds_graphs = builds_graphs
        self.phase: Phase = phase
        self.tokens = tokens
        self.placements = placements
        self.steps: list[Step] = []
        self.merges = tokens == 1 and runtime.merges_launches and not after_every_operator
        self._hand_overs = hand_overs
        self.names = names
        self._runtime = runtime
        self._after_every_operator = after_every_operator

    # -- the GPU -------------------------------------------------------------------------------------

    def kernel(
        self,
        operator: Operator,
        layer: int | None,
        launch: Launch,
        *,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        ends: bool = True,
    ) -> None:
        """Append a kernel between the linears, and the end of its operator unless more of it follows."""
        self.steps.append(self.prepared(operator, layer, launch, reads, writes))
        if ends:
            self.end_operator(operator, layer)

    def prepared(
        self,
        operator: Operator,
        layer: int | None,
        launch: Launch,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
    ) -> Step:
        """Return the step of a kernel between the linears, not appended."""
        return self._kernel(operator, layer, launch, operator_name(operator, layer), reads, writes)

    def shard(
        self,
        here: PlacedOperator,
        launch: Launch,
        label: str,
        reads: Memory,
        writes: Memory,
        work: LinearWork,
        rounded: RoundedInputs | None = None,
    ) -> list[Step]:
        """Return the steps of a linear's kernel, not appended: rounding of its input first where it needs it.

        Args:
            here: The operator that it is a part of.
            launch: The kernel.
            label: Name of the shard.
            reads: The input.
            writes: The output.
            work: What it computes.
            rounded: Codes of the input that are there already; the kernel reads them alone.
        """
        source: tuple[Memory, ...] = (reads,)
        steps = []
        *before, kernel = launch.parts
        for rounding in before:
            name = f"{here.name} rounding of inputs"
            codes = (SCRATCH_CODES,)
            steps.append(self._kernel("rounding of inputs", here.layer, rounding, name, source, codes))
            source = codes
        if rounded is not None:
            source = codes_of(rounded)
        steps.append(self._kernel(here.operator, here.layer, kernel, label, source, (writes,), work))
        return steps

    def flag(self, here: PlacedOperator | None, launch: Launch) -> None:
        """Append the kernel that raises the flag."""
        layer = None if here is None else here.layer
        self.steps.append(self._kernel("flag", layer, launch, f"flag before {_place(here)}", (), ()))

    # -- the NPU -------------------------------------------------------------------------------------

    def graph(
        self, here: PlacedOperator, run: Call, label: str, reads: Buffer, writes: Buffer, work: LinearWork
    ) -> None:
        """Append a run of an NPU graph."""
        self.steps.append(
            Step(
                operator=here.operator,
                layer=here.layer,
                tokens=work.tokens,
                processor="npu",
                action="graph",
                label=label,
                reads=(reads,),
                writes=(writes,),
                work=work,
                run=run,
            )
        )

    # -- the host ------------------------------------------------------------------------------------

    def hand_over(self, here: PlacedOperator | None) -> Fence:
        """Return the wait for the input of an operator's NPU graphs; without one, for the end of the pass."""
        if here is None:
            return self._hand_overs.before("end")
        return self._hand_overs.before(here.spec.group, here.spec.layer)

    def mark(self, here: PlacedOperator | None) -> None:
        """Append the signal that :meth:`wait` waits for; ``finish`` needs none."""
        wait = self.hand_over(here)
        if wait.strategy != "finish":
            self._host(here, "mark", wait.mark)

    def sent(self, here: PlacedOperator | None) -> None:
        """Append the note that the signal is among the kernels that were launched."""
        self._host(here, "sent", self.hand_over(here).sent)

    def wait(self, here: PlacedOperator | None) -> None:
        """Append the wait for the input of an operator's NPU graphs, or for the end of the pass."""
        wait = self.hand_over(here)
        buffer = "logits" if here is None else self.names[here.source].name
        self._host(here, "wait", wait.wait, wait=Wait(buffer, wait.strategy))

    def flush(self, here: PlacedOperator) -> None:
        """Append the start of what is enqueued."""
        self._host(here, "flush", self._runtime.flush)

    def acquire(self, here: PlacedOperator) -> None:
        """Append the host's taking of mapped memory: the input to read, the output to write."""
        self._host(here, "acquire_to_read", here.source.acquire_to_read, reads=(here.source,))
        self._host(here, "acquire", here.npu_output.acquire, writes=(here.npu_output,))

    def release(self, here: PlacedOperator) -> None:
        """Append the giving back of mapped memory."""
        self._host(here, "release", here.source.release, reads=(here.source,))
        self._host(here, "release", here.npu_output.release, writes=(here.npu_output,))

    def finish(self) -> None:
        """Append the wait for the whole queue at the end of the pass."""
        self._host(None, "finish", self._runtime.finish)

    def end_operator(self, operator: Operator, layer: int | None) -> None:
        """Append the end of an operator that the GPU computes: nothing, but in the baseline."""
        if self._after_every_operator:
            self.steps.append(
                Step(
                    operator=operator,
                    layer=layer,
                    tokens=self.tokens,
                    processor="host",
                    action="finish",
                    label=f"finish {operator_name(operator, layer)}",
                    run=self._runtime.finish,
                )
            )

    # -- pieces --------------------------------------------------------------------------------------

    def part_of(self, memory: SharedArray, start: int, stop: int) -> Buffer:
        """Return a range of bytes of a buffer."""
        return Buffer(self.names[memory].name, start, stop)

    def _kernel(
        self,
        operator: Operator,
        layer: int | None,
        launch: Launch,
        label: str,
        reads: Sequence[Memory],
        writes: Sequence[Memory],
        work: LinearWork | None = None,
    ) -> Step:
        return Step(
            operator=operator,
            layer=layer,
            tokens=self.tokens if work is None else work.tokens,
            processor="gpu",
            action="kernel",
            label=label,
            reads=self._buffers(reads),
            writes=self._buffers(writes),
            work=work,
            run=launch,
        )

    def _host(
        self,
        here: PlacedOperator | None,
        action: Action,
        run: Call,
        *,
        reads: Sequence[Memory] = (),
        writes: Sequence[Memory] = (),
        wait: Wait | None = None,
    ) -> None:
        self.steps.append(
            Step(
                operator="end of pass" if here is None else here.operator,
                layer=None if here is None else here.layer,
                tokens=self.tokens,
                processor="host",
                action=action,
                label=f"{action} before {_place(here)}",
                reads=self._buffers(reads),
                writes=self._buffers(writes),
                wait=wait,
                run=run,
            )
        )

    def _buffers(self, memories: Sequence[Memory]) -> tuple[Buffer, ...]:
        once = dict.fromkeys(memories)
        return tuple([memory if isinstance(memory, Buffer) else self.names[memory] for memory in once])


def codes_of(rounded: RoundedInputs | None) -> tuple[SharedArray, ...]:
    """Return the slots of int8 codes; none without them."""
    memories = () if rounded is None else (rounded.codes, rounded.blocks)
    return tuple(memory for memory in memories if isinstance(memory, SharedArray))


def segments_of(value: Segments | None) -> tuple[SharedArray, ...]:
    """Return the slots in which a linear's output lies; none without one."""
    return () if value is None else (value.a, value.b)


def merge_steps(runtime: GpuRuntime, steps: Sequence[Step]) -> list[Step]:
    """Return steps in which those that follow each other are one launch, where the device gains by it."""
    left = iter(steps)
    found = []
    for call in merge_launches(runtime, [step.run for step in steps]):
        if isinstance(call, MergedLaunch):
            found.append(_joined([next(left) for _ in call.labels], call))
        else:
            found.append(next(left))
    return found


def _joined(steps: Sequence[Step], launch: MergedLaunch) -> Step:
    layers = {step.layer for step in steps}
    works = [step.work for step in steps if step.work is not None]
    return Step(
        operator="merged",
        layer=layers.pop() if len(layers) == 1 else None,
        tokens=steps[0].tokens,
        processor="gpu",
        action="kernel",
        label=f"{steps[0].label} to {steps[-1].label}",
        reads=_all_of(step.reads for step in steps),
        writes=_all_of(step.writes for step in steps),
        work=sum(works[1:], works[0]) if works else None,
        merged=tuple(_within(step) for step in steps),
        run=launch,
    )


def _within(step: Step) -> Step:
    """Return a step without its own call, which would keep a kernel that never runs by itself."""
    return Step(
        operator=step.operator,
        layer=step.layer,
        tokens=step.tokens,
        processor=step.processor,
        action=step.action,
        label=step.label,
        reads=step.reads,
        writes=step.writes,
        work=step.work,
        run=NOT_RUN,
    )


def _all_of(buffers: Iterable[tuple[Buffer, ...]]) -> tuple[Buffer, ...]:
    return tuple(dict.fromkeys(buffer for some in buffers for buffer in some))


def _place(here: PlacedOperator | None) -> str:
    return "the end of the pass" if here is None else here.name

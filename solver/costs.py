"""Interfaces of costs: times of both processors, their slowdown of each other, and sync overheads.

The time of a split group is ``max(T_gpu(shard), T_npu(shard)) + T_sync`` (HeteroLLM, section 4.3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from heterollm.kernels.ops import OpSpec


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Factors by which each processor is slower while the other runs."""

    gpu: float = 1.0
    npu: float = 1.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.gpu < math.inf and 1.0 <= self.npu < math.inf):
            raise ValueError(f"slowdown factors {self.gpu} and {self.npu} must be at least 1")


class ShadowTimes(NamedTuple):
    """Times that the shadow of an operator takes on the GPU, in microseconds.

    Attributes:
        find_us: Time to find and list the channels with outliers, for which both processors wait.
        product_us: Time to multiply hot channels, while the NPU's graph runs.
        join_us: Time behind the graph: the product of other channels, and what the sum adds to the kernel
            that reads the output.
    """

    find_us: float = 0.0
    product_us: float = 0.0
    join_us: float = 0.0


NO_SHADOW: Final = ShadowTimes()


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times that syncs and submissions add on a device, in microseconds.

    Args:
        hand_over_us: Delay from the end of a kernel to the start of an NPU graph that reads its output. It is
            negative where the wait for the kernel hides more of the graph's start than the delay.
        refill_us: Extra delay of a kernel that is submitted to an empty queue.
        map_us: Time to map the input and the output of an NPU graph where memory is not coherent, and again
            to unmap them; both without the time by size.
        map_us_per_value: Additional time for each value of the input and the output, for example to clean
            caches; paid twice too.
        return_us: Time to copy the NPU's output back through the queue, behind the GPU's shard; 0 where the
            processors share memory.
        empties_queue: Whether a sync waits for the whole queue. The GPU's shard then starts together with the
            NPU's, in an empty queue; otherwise it follows the operator before.
        submit_us: Time to submit a kernel to a busy queue; infinite if unknown, and every refill then counts.
        hidden_us: Time of a graph's start that a wait hides, already subtracted in ``hand_over_us``. It holds
            only where the NPU was free for that long.
        merges_launches: Whether a pass of one token is one launch, so that submitting is never slower than
            computing.
        endings: Groups whose first operator before them the linear layer before that computes in a pass of
            one token, by place, with the rows from which it does.
    """

    hand_over_us: float = 0.0
    refill_us: float = 0.0
    map_us: float = 0.0
    map_us_per_value: float = 0.0
    return_us: float = 0.0
    empties_queue: bool = False
    submit_us: float = math.inf
    hidden_us: float = 0.0
    merges_launches: bool = True
    endings: tuple[tuple[str, float], ...] = ()

    def mapping_us(self, values: int) -> float:
        """Return the time to map, and that to unmap, an input and an output of so many values together."""
        return self.map_us + self.map_us_per_value * values


class Costs(Protocol):
    """Times of a model's groups on a device, in a busy queue and without syncs.

    Only the NPU has a time for an ffn; the GPU's shard of it is linears and an activation.
    """

    @property
    def overheads(self) -> Overheads:
        """Times that syncs and submissions add."""
        ...

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Return the GPU's time for some rows of each member; ``math.inf`` if it cannot run them."""
        ...

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Return the time of one NPU graph of a group or ffn; ``math.inf`` if the NPU cannot run it."""
        ...

    def slowdown(self, spec: OpSpec, tokens: int, form: str = "", length: int = 0) -> Slowdown:
        """Return the slowdown of both processors in a split of this group.

        Args:
            spec: The group or ffn.
            tokens: Tokens of the pass.
            form: Form of the NPU's graphs, if they compute in integers.
            length: Length of the longest of these.
        """
        ...

    def codes_us(
        self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int
    ) -> tuple[float, float]:
        """Return the GPU's times to write the input codes of an integer graph and to read its output codes.

        Args:
            spec: The group or ffn.
            member_rows: The NPU's rows of each member.
            tokens: Tokens of the pass.
            covered: Tokens of these that the NPU computes.
        """
        ...

    def shadow_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int) -> ShadowTimes:
        """Return the times of a group's shadow of outliers in the mean layer; arguments as above."""
        ...

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """Return the time of the glue operators before a group; ``down`` has ``spec.columns`` inputs."""
        ...

    def kernels_us(self, spec: OpSpec) -> tuple[float, ...]:
        """Return the time of each kernel of these operators, in order, in a pass of one token."""
        ...

    def mixture_us(self, tokens: int, kind: str = "") -> tuple[float, ...]:
        """Return the GPU's time of each kernel of the mixture in layers of a kind, in order; empty without.

        The tokens choose all experts evenly. The norm before the experts counts where no group has it.
        """
        ...


class Errors(Protocol):
    """Microseconds by which predicted times of a device may be off, with the names of :class:`Costs`."""

    sync_us: float

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Return the error of the GPU's time for some rows of each member."""
        ...

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Return the error of the time of one NPU graph."""
        ...

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """Return the error of the time of the glue operators before a group."""
        ...


class CachedCosts:
    """Costs of one model that cache the answers of others, by the places of groups."""

    def __init__(self, costs: Costs) -> None:
        self.overheads = costs.overheads
        self._costs = costs
        self._gpu_us: dict[tuple[str, int, tuple[int, ...], int], float] = {}
        self._npu_us: dict[tuple[str, tuple[int, ...], int, str], float] = {}
        self._slowdowns: dict[tuple[str, int, str, int], Slowdown] = {}
        self._codes_us: dict[tuple[str, tuple[int, ...], int, int], tuple[float, float]] = {}
        self._shadow_us: dict[tuple[str, tuple[int, ...], int, int], ShadowTimes] = {}
        self._between_us: dict[tuple[str, int, int], float] = {}

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """See :class:`Costs`."""
        key = spec.place, spec.columns, member_rows, tokens
        found = self._gpu_us.get(key)
        if found is None:
            found = self._gpu_us[key] = self._costs.gpu_us(spec, member_rows, tokens)
        return found

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """See :class:`Costs`."""
        key = spec.place, member_rows, length, form
        found = self._npu_us.get(key)
        if found is None:
            found = self._npu_us[key] = self._costs.npu_us(spec, member_rows, length, form)
        return found

    def slowdown(self, spec: OpSpec, tokens: int, form: str = "", length: int = 0) -> Slowdown:
        """See :class:`Costs`."""
        key = spec.place, tokens, form, length
        found = self._slowdowns.get(key)
        if found is None:
            found = self._slowdowns[key] = self._costs.slowdown(spec, tokens, form, length)
        return found

    def codes_us(
        self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int
    ) -> tuple[float, float]:
        """See :class:`Costs`."""
        key = spec.place, member_rows, tokens, covered
        found = self._codes_us.get(key)
        if found is None:
            found = self._codes_us[key] = self._costs.codes_us(spec, member_rows, tokens, covered)
        return found

    def shadow_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int, covered: int) -> ShadowTimes:
        """See :class:`Costs`."""
        key = spec.place, member_rows, tokens, covered
        found = self._shadow_us.get(key)
        if found is None:
            found = self._shadow_us[key] = self._costs.shadow_us(spec, member_rows, tokens, covered)
        return found

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """See :class:`Costs`."""
        key = spec.place, spec.columns, tokens
        found = self._between_us.get(key)
        if found is None:
            found = self._between_us[key] = self._costs.between_us(spec, tokens)
        return found

    def kernels_us(self, spec: OpSpec) -> tuple[float, ...]:
        """See :class:`Costs`."""
        return self._costs.kernels_us(spec)

    def mixture_us(self, tokens: int, kind: str = "") -> tuple[float, ...]:
        """See :class:`Costs`."""
        return self._costs.mixture_us(tokens, kind)


def joint_time_us(
    gpu_us: float, npu_us: float, slowdown: Slowdown, npu_begin_us: float = 0.0
) -> tuple[float, float]:
    """Return the times at which both shards end; each is slowed only while the other runs.

    Args:
        gpu_us: Time of the GPU's shard alone, which begins at 0.
        npu_us: Time of the NPU's shard alone.
        slowdown: Factors while both run.
        npu_begin_us: Begin of the NPU's shard.
    """
    if gpu_us <= npu_begin_us:
        return gpu_us, npu_begin_us + npu_us
    left_us = gpu_us - npu_begin_us
    gpu_end, npu_end = left_us * slowdown.gpu, npu_us * slowdown.npu
    if gpu_end <= npu_end:
        # The rest of the NPU's shard runs alone.
        npu_end = gpu_end + npu_us - gpu_end / slowdown.npu
    else:
        gpu_end = npu_end + left_us - npu_end / slowdown.gpu
    return npu_begin_us + gpu_end, npu_begin_us + npu_end

"""What passes are made of: who is asked for placements, a pass while it is compiled, and a compiled one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from heterollm.engine.placing import Call
from heterollm.engine.waits import PassHandOvers
from heterollm.kernels.gpu import Launch, MergedLaunch, OpenClRuntime, Segments, SharedArray, merge_launches
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.solver import GPU_ONLY, Placement

__all__ = ["CompiledPass", "GpuAlone", "PassRequest", "Placed", "Placements"]


class Placements(Protocol):
    """Who computes what, such as a :class:`Plan`."""

    def placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement:
        """Return who computes a group of linears in a pass of so many tokens."""
        ...

    def block_placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement | None:
        """Return who computes a feed-forward block; None where its groups have placements of their own."""
        ...


class GpuAlone:
    """Gives everything to the GPU, whatever the plan says."""

    def placement(self, _phase: Phase, _length: int, _spec: OpSpec) -> Placement:
        """Return the GPU's placement."""
        return GPU_ONLY

    def block_placement(self, _phase: Phase, _length: int, _spec: OpSpec) -> None:
        """Cut nothing as a block."""


@dataclass(slots=True)
class PassRequest:
    """A pass that is being compiled: which one, the calls so far, and its waits."""

    phase: Phase
    tokens: int
    hand_overs: PassHandOvers
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Placed:
    """A group, and who computes it in this pass."""

    spec: OpSpec
    placement: Placement


@dataclass(slots=True)
class CompiledPass:
    """One pass, ready to run: its calls in order, and the launches that name the session's KV cache."""

    calls: list[Call] = field(default_factory=list)
    cache_launches: list[Launch | MergedLaunch] = field(default_factory=list)
    output: Segments | None = None
    bound_cache: SharedArray | None = None

    def merge(self, runtime: OpenClRuntime) -> None:
        """Make one launch of those that follow each other, where the device gains by it."""
        self.calls = merge_launches(runtime, self.calls)
        left = [launch for launch in self.cache_launches if launch in self.calls]
        self.cache_launches = [*left, *(call for call in self.calls if isinstance(call, MergedLaunch))]

    def bind_cache(self, cache: SharedArray) -> None:
        """Point the launches at a session's cache, if they are not there yet."""
        if self.bound_cache is not cache:
            for launch in self.cache_launches:
                launch.replace(self.bound_cache, cache)
            self.bound_cache = cache

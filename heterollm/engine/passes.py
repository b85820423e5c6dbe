"""Passes: one while it is compiled, and a compiled one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from heterollm.engine.placing import Call
from heterollm.engine.waits import PassHandOvers
from heterollm.kernels.gpu import GpuRuntime, Launch, MergedLaunch, Segments, SharedArray, merge_launches
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.solver import Placement

__all__ = ["CompiledPass", "PassRequest", "Placed"]


@dataclass(slots=True)
class PassRequest:
    """A pass that is being compiled: which one, its placements, its waits, and the calls so far."""

    phase: Phase
    tokens: int
    placements: Mapping[tuple[int, Group], tuple[OpSpec, Placement]]
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

    def merge(self, runtime: GpuRuntime) -> None:
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

"""Times of attention: dense on each processor, and sparse, from a profile."""

from __future__ import annotations

import functools

from heterollm.base import ProfileError
from heterollm.profiler.records import Profile
from heterollm.solver.profile_costs import ProfileCosts
from heterollm.solver.sparse.costs import SparseTimes


class ProfileAttentionCosts:
    """Times of one layer's attention on a profiled device; see :class:`.attention_times.AttentionCosts`.

    Args:
        profile: The measurements.
        costs: The times of the model.
    """

    def __init__(self, profile: Profile, costs: ProfileCosts) -> None:
        self._device = profile.device
        self._costs = costs
        self._known: dict[tuple[int, int], SparseTimes] = {}
        self.dense_us = functools.cache(costs.dense_attention_us)
        self.follows_graphs = bool(profile.description.get("coherent", True))
        self.slowdown = costs.slowdown_of_bounds("compute", "compute")
        self.hand_over_us = costs.overheads.hand_over_us + 2 * costs.overheads.map_us

    @property
    def estimates_on_npu(self) -> bool:
        """Whether the NPU's times to estimate scores were measured."""
        return bool(self.sparse(64, 256).scores_us)

    def on_npu_us(self, tokens: int, keys: int) -> float:
        """Return the time of attention on the NPU, with hand-overs.

        Raises:
            ProfileError: The profile has none.
        """
        time_us = self._costs.npu_attention_us(tokens, keys)
        if time_us is None:
            raise ProfileError(
                f"The profile of {self._device} has no times of attention on the NPU.",
                fix="Run `heterollm profile MODEL --technique npu-attention --update`.",
            )
        return time_us

    def sparse(self, tokens: int, keys: int) -> SparseTimes:
        """Return the times of sparse attention.

        Raises:
            ProfileError: The profile has none.
        """
        known = self._known.get((tokens, keys))
        if known is None:
            known = self._costs.sparse_attention(tokens, keys)
            if known is None:
                raise ProfileError(
                    f"The profile of {self._device} has no times of sparse attention.",
                    fix="Run `heterollm profile MODEL --technique shadowattn --update`.",
                )
            self._known[tokens, keys] = known
        return known

"""Experts of a mixture in plans: the groups of a layer that the NPU computes, and the options of the pass.

Only passes of prefill have entries; the GPU computes all experts in decode.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from msgspec import Struct

from heterollm.base import Amount, Count, OptionError, PlanError, Positive

Overflow = Literal["gpu", "drop", "pad"]
"""Fate of tokens beyond a capacity: the GPU computes them, or nobody does; ``pad`` takes capacities that hold
all calibrated loads."""


class ExpertGroup(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Experts in one NPU graph.

    Args:
        experts: The experts, by falling popularity.
        capacity: Most tokens that it computes for each of them.
    """

    experts: tuple[Count, ...]
    capacity: Positive


class ExpertsPlacement(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="experts"):
    """The placement of a layer's experts; the GPU computes those in no group.

    Args:
        groups: The NPU's groups, in the order in which it runs them.
        overflow: Fate of tokens beyond a capacity.
        form: Form of the NPU graphs; None is the backend's first choice.
        predicted_us: Predicted mean time.
    """

    groups: tuple[ExpertGroup, ...] = ()
    overflow: Overflow = "gpu"
    form: str | None = None
    predicted_us: Amount | None = None

    @property
    def rows(self) -> int:
        """Rows of all graphs, filled or not."""
        return sum(len(group.experts) * group.capacity for group in self.groups)

    def capacities(self, experts: int) -> tuple[int, ...]:
        """Return the capacity of each of a layer's experts; 0 on the GPU.

        Raises:
            PlanError: An expert is given twice or is not the layer's, or a group is empty.
        """
        found = [0] * experts
        for group in self.groups:
            if not group.experts:
                raise PlanError(f"A group of capacity {group.capacity} has no experts.", fix="Leave it out.")
            for expert in group.experts:
                if not 0 <= expert < experts or found[expert]:
                    raise PlanError(
                        f"Expert {expert} is given twice, or is not among the {experts} of the layer.",
                        fix="Name each expert in one group at most.",
                    )
                found[expert] = group.capacity
        return tuple(found)


EXPERTS_ON_GPU: Final = ExpertsPlacement()


class ExpertsEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of passes of prefill in ranges of lengths and of layers, both inclusive.

    Args:
        lengths: Least and most tokens of the pass.
        layers: First and last layer.
        placement: The groups on the NPU, with the predicted time of the longest pass.
        shortest_us: Predicted mean time of the shortest pass.
    """

    lengths: tuple[Positive, Positive]
    layers: tuple[Count, Count]
    placement: ExpertsPlacement
    shortest_us: Amount | None = None

    def serves(self, tokens: int, layer: int) -> bool:
        """Whether the entry is for a pass of so many tokens, and for a layer."""
        return self.lengths[0] <= tokens <= self.lengths[1] and self.holds(layer)

    def holds(self, layer: int) -> bool:
        """Whether the entry is for a layer."""
        return self.layers[0] <= layer <= self.layers[1]


class ExpertsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the technique ``npumoe``.

    Args:
        overflow: Fate of tokens beyond a capacity.

    Raises:
        OptionError: There is no such fate.
    """

    overflow: Overflow = "gpu"

    def __post_init__(self) -> None:
        if self.overflow not in get_args(Overflow):
            raise OptionError(
                f"There is no overflow {self.overflow!r:.40}.", fix=f"Choose {', '.join(get_args(Overflow))}."
            )

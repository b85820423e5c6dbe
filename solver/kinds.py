"""Kinds of layers as the solver plans them: alike groups of several kinds are one group to place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heterollm.kernels.ops import Group, OpSpec, joined_specs
from heterollm.model import LayerKind, kinds_of_specs
from heterollm.solver.costs import Costs


@dataclass(frozen=True, slots=True)
class PlacedKind:
    """A kind of layers with the groups that the solver places for it.

    Args:
        kind: The layers.
        specs: Their groups in order; a group that an earlier kind has alike is that kind's.
        ffn: Some of these groups as one operator, an ffn or ``o_ffn``; None where nothing places them so.
    """

    kind: LayerKind
    specs: tuple[OpSpec, ...]
    ffn: OpSpec | None = None

    @property
    def name(self) -> str:
        """Name in plans; empty if all layers of the model are alike."""
        return self.kind.name

    @property
    def count(self) -> int:
        """Number of the layers."""
        return self.kind.count

    @property
    def operators(self) -> tuple[OpSpec, ...]:
        """The groups, and the ffn."""
        return self.specs if self.ffn is None else (*self.specs, self.ffn)

    @property
    def paths(self) -> tuple[tuple[OpSpec, ...], ...]:
        """The operators of a layer, in order: its groups, and with the ffn in place of some of them."""
        ffn = self.ffn
        if ffn is None:
            return (self.specs,)
        replaced = (ffn if spec.group == ffn.parts[0] else spec for spec in self.specs)
        return self.specs, tuple(spec for spec in replaced if spec.group not in ffn.parts[1:])


def placed_kinds(
    specs: Sequence[OpSpec], costs: Costs, longest: int, joined: Sequence[Group]
) -> tuple[PlacedKind, ...]:
    """Return the kinds of layers of a model.

    Groups are alike if their sizes and formats are equal and the operators before them take as long. They
    share resident slices and, but for passes of one token, placements: apart they would double the search,
    and the file, of a plan. The groups that can be an ffn are shared together or not at all.

    Args:
        specs: Every group of the model.
        costs: Times of both processors.
        longest: Tokens of the longest pass.
        joined: Groups for which feed-forward networks may be placed as one operator, the best first.
    """
    known: dict[object, tuple[OpSpec, ...]] = {}
    kinds = kinds_of_specs([spec for spec in specs if spec.experts is None])

    def shared(own: tuple[OpSpec, ...]) -> tuple[OpSpec, ...]:
        if len(kinds) == 1:
            return own
        alike = [spec.anywhere for spec in own]
        before_us = [costs.between_us(spec, tokens) for spec in own for tokens in (1, longest)]
        return known.setdefault((*alike, *before_us), own)

    found = []
    for kind in kinds:
        parts = [part for ffn in _ffns(kind.specs, joined or ("ffn",)) for part in ffn.parts]
        pair = tuple(spec for spec in kind.specs if spec.group in parts)
        units = [pair, *((spec,) for spec in kind.specs if spec.group not in parts)]
        chosen = {spec.group: spec for unit in units for spec in shared(unit)}
        own = tuple(chosen[spec.group] for spec in kind.specs)
        found.append(PlacedKind(kind, own, next(_ffns(own, joined), None)))
    return tuple(found)


def _ffns(specs: Sequence[OpSpec], joined: Sequence[Group]) -> Iterator[OpSpec]:
    """Yield the first operator of some groups that a layer has; none if it has none."""
    own = {spec.group: spec for spec in joined_specs(specs)}
    yield from [own[group] for group in joined if group in own][:1]

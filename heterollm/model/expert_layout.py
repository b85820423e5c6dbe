"""Lists the tensors and the operators of a mixture's routers and experts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.model.blocks import MixtureBlock
from heterollm.model.config import ModelConfig
from heterollm.model.families import FAMILIES
from heterollm.model.family import Family, Mixture
from heterollm.model.tensor_file import TensorFile
from heterollm.model.tensor_rows import TensorRows


def router_name(config: ModelConfig, layer: int) -> str:
    """Return the tensor name of a router's weight, ``[experts, hidden]``."""
    return f"{_layer_prefix(config, layer)}{_mixture(config).router}.weight"


def expert_rows(config: ModelConfig, layer: int, expert: int) -> dict[str, TensorRows]:
    """Return the weight's tensor and rows of gate, up and down of an expert.

    Rows of a stacked tensor ``[experts, rows, k]`` count through all experts.
    """
    prefix = _layer_prefix(config, layer)
    members, width = _mixture(config).members, _block(config, layer).width
    found: dict[str, TensorRows] = {}
    for member, module in members.items():
        together = [other for other, own in members.items() if own == module]
        rows = config.hidden_size if member == "down" else width
        before = together.index(member) + (0 if "{expert}" in module else expert * len(together))
        name = f"{prefix}{module.format(expert=expert)}.weight"
        found[member] = TensorRows(name, before * rows, (before + 1) * rows)
    return found


def expert_tensors(config: ModelConfig, layer: int, mixture: MixtureBlock) -> dict[str, tuple[int, ...]]:
    """Return the shape of the router's tensor, and of those of the experts, of a layer."""
    experts = mixture.routing.experts
    shapes: dict[str, tuple[int, ...]] = {router_name(config, layer): (experts, config.hidden_size)}
    stacked = "{expert}" not in _mixture(config).members["down"]
    for member, rows in expert_rows(config, layer, experts - 1).items():
        columns = mixture.width if member == "down" else config.hidden_size
        if stacked:
            shapes[rows.name] = (experts, rows.stop // experts, columns)
        else:
            for expert in range(experts):
                shapes[expert_rows(config, layer, expert)[member].name] = (rows.stop, columns)
    return shapes


def experts_apart(files: Mapping[str, TensorFile], family: Family | None) -> dict[str, TensorFile]:
    """Return the files of tensors by name, those of single experts in place of :attr:`Mixture.stacked`."""
    if family is None or family.mixture is None:
        return dict(files)
    found, modules = {}, family.mixture.members
    for name, file in files.items():
        module = next((own for own in family.mixture.stacked if name.endswith(f".{own}")), None)
        entry = file.entries[name]
        if module is None or len(entry.shape) != 3:
            found[name] = file
            continue
        (experts, rows, columns), members = entry.shape, family.mixture.stacked[module]
        size = (entry.stop - entry.start) // (experts * len(members))
        for place, (expert, member) in enumerate(itertools.product(range(experts), members)):
            start = entry.start + place * size
            part = replace(entry, shape=(rows // len(members), columns), start=start, stop=start + size)
            own = f"{name.removesuffix(module)}{modules[member].format(expert=expert)}.weight"
            found[own] = replace(file, entries={own: part})
    return found


def expert_specs(config: ModelConfig, specs: Sequence[OpSpec]) -> tuple[OpSpec, ...]:
    """List the experts of every layer that has some, in the format of its first group, or in their own.

    Args:
        config: The model.
        specs: Those groups, by :func:`op_specs`.

    Raises:
        OptionError: No legal block divides the inputs of an expert.
    """
    first = {spec.layer: spec for spec in reversed(specs)}
    longest = max(spec.weight.block for spec in specs)
    mixtures = config.blocks(MixtureBlock).items()
    return tuple(_experts(config, first[layer], block, longest) for layer, block in mixtures)


def _experts(config: ModelConfig, like: OpSpec, block: MixtureBlock, longest: int) -> OpSpec:
    """Return the experts of a layer like one of its groups; ``longest`` is the most that shares a scale."""
    stored = config.stored
    kept = stored is not None and like.weight == stored.of_group(like.group, like.columns)

    def weight(columns: int) -> WeightFormat:
        if stored is not None and kept:
            return stored.of_group("experts", columns)
        shared = effective_block(columns, longest) if like.weight.block else 0
        return structs.replace(like.weight, block=shared)

    down = replace(
        like,
        group="experts",
        members=(Member("down", config.hidden_size),),
        columns=block.width,
        weight=weight(block.width),
        source="activated",
        target="feed_forward_delta",
        before=(),
        reader="",
    )
    return replace(
        down,
        members=tuple(Member(name, block.width) for name in ("gate", "up")[not block.gated :]),
        columns=config.hidden_size,
        weight=weight(config.hidden_size),
        source="linear_input",
        then=down,
        experts=block.routing,
    )


def _block(config: ModelConfig, layer: int) -> MixtureBlock:
    block = config.per_layer[layer].find(MixtureBlock)
    assert block is not None  # the layer has experts
    return block


def _layer_prefix(config: ModelConfig, layer: int) -> str:
    return FAMILIES[config.model_type].tensors.layer.format(layer=layer)


def _mixture(config: ModelConfig) -> Mixture:
    mixture = FAMILIES[config.model_type].mixture
    assert mixture is not None  # the model has experts
    return mixture

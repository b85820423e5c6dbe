"""Where the weights of a model lie in a GGUF file.

llama.cpp's changes of tensors: https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.stored.gguf_architecture import Architecture, key_heads
from heterollm.model.stored.gguf_delta import DECAY, delta_places, read_delta_heads
from heterollm.model.stored.gguf_file import GgufFile, GgufPlace, GgufRows
from heterollm.model.stored.gguf_names import LAYER_TENSOR, LONE_EXPERT, MODULES, OTHERS, TOP_MODULES
from heterollm.model.stored.gguf_rope import ROPE_TENSORS

FUSED: Final = "attn_qkv"
MEMBERS: Final = ("attn_q", "attn_k", "attn_v")
PERMUTED: Final = ("attn_q", "attn_k")
KEYS_AND_VALUES: Final = ("attn_k_b", "attn_v_b")
"""The weights that make keys and values of latent vectors, the first of which is transposed."""
FUSED_EXPERTS: Final = ("ffn_gate_exps", "ffn_up_exps")
"""Members of a stack that has the rows of both for each expert."""
STACKED: Final = len(("expert", "row", "column"))


def places(file: GgufFile, architecture: Architecture) -> dict[str, GgufPlace]:
    """Return the place of each weight by its Hugging Face name; a tensor without such a name keeps its own.

    Raises:
        CheckpointError: Tensors do not fit each other.
        UnsupportedModelError: Rows of one weight have several types.
    """
    top = {**TOP_MODULES, **architecture.top}
    if "token_embd.weight" not in file.entries:
        top["output"] = top["token_embd"]  # a tied embedding under the head's name
    found: dict[str, GgufPlace] = {}
    for own, layer, below in file.layer_tensors():
        if (lone := LONE_EXPERT.fullmatch(own)) and architecture.experts:
            module = architecture.experts[f"{lone[2]}_exps"].format(lone[3])
            found[f"{architecture.layer}.{layer}.{module}.weight"] = _whole(file, own)
        else:
            found |= _of_layer(file, architecture, own, layer, below)
    for own in file.entries:
        if not LAYER_TENSOR.fullmatch(own) and own not in ROPE_TENSORS:
            module, _, ending = own.rpartition(".")
            name, shape = f"{top[module]}.{ending}" if module in top else own, file.entries[own].shape
            if "{}" not in name:
                found[name] = _whole(file, own)
            elif len(shape) == STACKED:
                for at, start in enumerate(range(0, shape[0] * shape[1], shape[1])):
                    found[name.format(at)] = GgufPlace(shape[1:], (GgufRows(own, start, start + shape[1]),))
    return found


def layer_numbers(file: GgufFile, architecture: Architecture) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of layers whose numbers the metadata states, one for each layer or for all.

    Raises:
        CheckpointError: A number is missing or not finite.
    """
    found = {}
    for field, (name, shape) in architecture.numbers.items():
        stated = file.metadata.get(field)
        numbers = stated if isinstance(stated, list) else [stated] * file.layers
        if len(numbers) != file.layers or not all(
            type(one) is float and math.isfinite(one) for one in numbers
        ):
            raise CheckpointError(f"{file.path}: {field} is no list of {file.layers} numbers.")
        for layer, number in enumerate(numbers):
            found[f"{architecture.layer}.{layer}.{name}"] = np.full(shape, number, np.float32)
    return found


def _of_layer(
    file: GgufFile, architecture: Architecture, own: str, layer: str, below: str
) -> Mapping[str, GgufPlace]:
    """Return the places of the weights that begin in a tensor of a layer."""
    module, _, ending = below.rpartition(".")
    shape, modules = file.entries[own].shape, {**MODULES, **architecture.modules}
    delta = None
    if f"blk.{layer}.{DECAY}" in file.entries and not architecture.has_spaces:
        delta = delta_places(file, own, below, read_delta_heads(file, architecture.heads_in_turns))
    other = {**OTHERS, **architecture.others}.get(below)

    def named(module: str) -> str:
        return f"{architecture.layer}.{layer}.{module}.{ending}"

    if delta is not None:
        axis = other.axis if other else None
        return {
            f"{architecture.layer}.{layer}.linear_attn.{name}": _with_axis(place, axis)
            for name, place in delta.items()
        }
    if module in KEYS_AND_VALUES:
        # Files that have both of these forms repeat the weight.
        is_first = module == KEYS_AND_VALUES[0] and f"blk.{layer}.attn_kv_b.weight" not in file.entries
        return {named(modules["attn_kv_b"]): _by_heads(file, layer)} if is_first else {}
    if other is not None:
        place = _with_axis(_whole(file, own), other.axis)
        if other.flat:
            place = place._replace(shape=(math.prod(shape),))
        return {f"{architecture.layer}.{layer}.{other.name}": place}
    stacked = FUSED_EXPERTS if module == "ffn_gate_up_exps" else (module,)
    if architecture.experts.keys() >= {*stacked} and len(shape) == STACKED:
        rows = shape[-2] // len(stacked)
        every = [architecture.experts[one].format(expert) for expert in range(shape[0]) for one in stacked]
        return {
            named(name): GgufPlace((rows, shape[-1]), (GgufRows(own, at * rows, (at + 1) * rows),))
            for at, name in enumerate(every)
        }
    for name, members in architecture.joined.items():
        if module in members:
            owns = [f"blk.{layer}.{member}.{ending}" for member in members]
            return {named(name): _joined(file, owns)} if module == members[0] else {}
    if module == FUSED and architecture.grouped:
        return {named(modules[module]): _grouped(file, own)}
    if module == FUSED and module not in modules:
        counts = [file.count("attention.head_count"), *[key_heads(file, architecture)] * 2]
        return _divided(file, architecture, own, [named(modules[one]) for one in MEMBERS], counts)
    place = _whole(file, own)
    if architecture.permuted and module in PERMUTED:
        heads = file.count("attention.head_count") if module == "attn_q" else key_heads(file, architecture)
        place = _whole(file, own, heads)
    return {named(modules[module]) if module in modules else own: place}


def _by_heads(file: GgufFile, layer: str) -> GgufPlace:
    """Return the place of the weight of keys and values of latent vectors, from two tensors."""
    owns = [f"blk.{layer}.{module}.weight" for module in KEYS_AND_VALUES]
    shapes = [file.entries[own].shape if own in file.entries else () for own in owns]
    if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
        raise CheckpointError(f"{file.path} lacks {' or '.join(owns)}, or their shapes do not fit.")
    (heads, latent, key_rows), (_, value_rows, _) = shapes
    parts = tuple(GgufRows(own, 0, math.prod(shape[:-1])) for own, shape in zip(owns, shapes, strict=True))
    return GgufPlace((heads * (key_rows + value_rows), latent), parts, heads=heads)


def _with_axis(place: GgufPlace, axis: int | None) -> GgufPlace:
    """Return a place with an axis of one element in its shape."""
    shape = place.shape
    return place if axis is None else place._replace(shape=(*shape[:axis], 1, *shape[axis:]))


def _whole(file: GgufFile, own: str, heads: int = 0) -> GgufPlace:
    """Return the place of a weight that a tensor holds alone."""
    shape = file.entries[own].shape
    rows = shape[0] if len(shape) == 1 else math.prod(shape[:-1])
    if heads and rows % (2 * heads):
        raise CheckpointError(f"{file.path}: {own} has {rows} rows, which {heads} heads cannot share.")
    return GgufPlace(shape, (GgufRows(own, 0, rows, heads),))


def _divided(
    file: GgufFile, architecture: Architecture, own: str, names: Sequence[str], counts: Sequence[int]
) -> Mapping[str, GgufPlace]:
    """Return the places of queries, keys and values that a tensor holds one after the other."""
    shape = file.entries[own].shape
    if shape[0] % sum(counts):
        raise CheckpointError(
            f"{file.path}: {own} has {shape[0]} rows, which {sum(counts)} heads cannot share."
        )
    found, start, width = {}, 0, shape[0] // sum(counts)
    for name, member, count in zip(names, MEMBERS, counts, strict=True):
        heads = count if architecture.permuted and member in PERMUTED else 0
        part = GgufRows(own, start, start + count * width, heads)
        found[name] = GgufPlace((count * width, *shape[1:]), (part,))
        start = part.stop
    return found


def _grouped(file: GgufFile, own: str) -> GgufPlace:
    """Return the place of a weight with q, k and v of each head, all of which a tensor holds in turn."""
    shape, heads = file.entries[own].shape, file.count("attention.head_count")
    if shape[0] % (3 * heads):
        raise CheckpointError(f"{file.path}: {own} has {shape[0]} rows, which {heads} heads cannot share.")
    width = shape[0] // (3 * heads)
    starts = (width * (member * heads + head) for head in range(heads) for member in range(3))
    return GgufPlace(shape, tuple(GgufRows(own, start, start + width) for start in starts))


def _joined(file: GgufFile, owns: Sequence[str]) -> GgufPlace:
    """Return the place of a weight, or of one for each expert, whose rows several tensors share."""
    entries = [file.entries[own] for own in owns if own in file.entries]
    shapes = [entry.shape for entry in entries]
    alike = len({(*shape[:-2], shape[-1], len(shape)) for shape in shapes}) == 1
    if len(entries) < len(owns) or not alike or len(shapes[0]) == 1:
        raise CheckpointError(f"{file.path} lacks {' or '.join(owns)}, or their shapes do not fit.")
    if len({entry.kind for entry in entries}) > 1:
        raise UnsupportedModelError(
            f"{file.path}: {' and '.join(owns)}, rows of one weight, have the types "
            f"{' and '.join(entry.kind for entry in entries)}.",
            fix="Take a file in which both have the same.",
        )
    experts = range(math.prod(shapes[0][:-2]))
    rows = [(own, shape[-2]) for own, shape in zip(owns, shapes, strict=True)]
    parts = tuple(GgufRows(own, at * count, (at + 1) * count) for at in experts for own, count in rows)
    return GgufPlace((*shapes[0][:-2], sum(count for _, count in rows), shapes[0][-1]), parts)

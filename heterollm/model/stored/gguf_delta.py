"""Where the tensors of gated delta nets lie in a GGUF file, whose heads may stand in another order.

Checkpoints have the value heads of a key head side by side. llama.cpp's converters of Qwen3.5 put the first
of each key head first, then the second of each; files of Qwen3-Next keep the order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.stored.gguf_blocks import block_type
from heterollm.model.stored.gguf_file import GgufFile, GgufPlace, GgufRows

DECAY: Final = "ssm_a"
"""Tensor that only layers with a delta net have; it is -exp of the checkpoint's."""
OUTPUT: Final = "ssm_out.weight"
GATED_NORM: Final = "linear_attn.norm.weight"
"""Name of a norm to whose weight the converter adds nothing."""
DECAY_LOG: Final = ".A_log"

MOST_HEADS: Final = 10_000
"""A limit that refuses a damaged number before any list over heads is made."""

BY_VALUE_HEAD: Final[Mapping[str, tuple[str, bool, bool]]] = {
    "attn_qkv.weight": ("in_proj_qkv.weight", True, True),
    "ssm_conv1d.weight": ("conv1d.weight", True, True),
    "attn_gate.weight": ("in_proj_z.weight", False, True),
    "ssm_alpha.weight": ("in_proj_a.weight", False, False),
    "ssm_beta.weight": ("in_proj_b.weight", False, False),
    DECAY: ("A_log", False, False),
    "ssm_dt.bias": ("dt_bias", False, False),
}
"""Names in the checkpoint; whether queries and keys come first; whether heads are as wide as values."""


class DeltaHeads(NamedTuple):
    """The heads of a delta net.

    Args:
        keys: Key heads.
        values: Value heads.
        key_dim: Width of a key head.
        value_dim: Width of a value head.
        order: Where each value head stands in the file.
    """

    keys: int
    values: int
    key_dim: int
    value_dim: int
    order: tuple[int, ...]


def read_delta_heads(file: GgufFile, in_turns: bool) -> DeltaHeads:
    """Return the heads that the metadata states.

    Args:
        file: The file.
        in_turns: Whether its value heads stand in turns.

    Raises:
        CheckpointError: A number is missing, or one does not divide another.
    """
    keys, values = file.count("ssm.group_count"), file.count("ssm.time_step_rank")
    inner = file.count("ssm.inner_size")
    if values > MOST_HEADS or values % keys or inner % values:
        raise CheckpointError(
            f"{file.path}: a delta net of {keys} key heads (ssm.group_count), {values} value heads "
            f"(ssm.time_step_rank) and {inner} values (ssm.inner_size), of another shape than possible."
        )
    order = tuple(range(values))
    if in_turns:
        order = tuple(key + turn * keys for key in range(keys) for turn in range(values // keys))
    return DeltaHeads(keys, values, file.count("ssm.state_size"), inner // values, order)


def delta_places(file: GgufFile, own: str, below: str, heads: DeltaHeads) -> dict[str, GgufPlace] | None:
    """Return the places of the weights in a tensor of a delta net, by names below ``linear_attn``.

    Args:
        file: The file.
        own: Name of the tensor.
        below: Its name below the layer.
        heads: The heads.

    Returns:
        None for a tensor of another block.

    Raises:
        CheckpointError: The tensor has another shape than the heads say.
        UnsupportedModelError: Blocks of the output's inputs cross heads.
    """
    shape = file.entries[own].shape
    per_key = heads.values // heads.keys
    if below in BY_VALUE_HEAD:
        name, has_keys, wide = BY_VALUE_HEAD[below]
        first = 2 * heads.keys * heads.key_dim if has_keys else 0
        width = heads.value_dim if wide else 1
        starts = [first + place * width for place in heads.order]
        ranges = [(0, first)] * has_keys + [(start, start + width) for start in starts]
        return {name: _place(file, own, ranges)}
    if below in ("ssm_in.weight", "ssm_ba.weight"):  # by key heads
        values = per_key * (heads.value_dim if below == "ssm_in.weight" else 1)
        widths = [heads.key_dim] * 2 + [values] * 2 if below == "ssm_in.weight" else [values] * 2
        ends = [*itertools.accumulate(widths, initial=0)]
        members = [
            [(ends[-1] * key + start, ends[-1] * key + stop) for key in range(heads.keys)]
            for start, stop in itertools.pairwise(ends)
        ]
        last = _place(file, own, members.pop(), whole=False)
        names = ("in_proj_qkv", "in_proj_z") if below == "ssm_in.weight" else ("in_proj_b", "in_proj_a")
        others = _place(file, own, [*itertools.chain(*members)], whole=False)
        if shape[0] != ends[-1] * heads.keys:
            raise _misshapen(file, own)
        return {f"{names[0]}.weight": others, f"{names[1]}.weight": last}
    if below == OUTPUT:
        scales = block_type(file.entries[own].kind).scale_block
        moved = heads.order != tuple(range(heads.values))
        if moved and scales and heads.value_dim % scales:
            raise UnsupportedModelError(
                f"{file.path}: {own} has blocks of {scales} inputs, which heads of {heads.value_dim} values, "
                "in another order than the checkpoint's, do not share."
            )
        if shape[-1] != heads.values * heads.value_dim:
            raise _misshapen(file, own)
        whole = GgufPlace(shape, (GgufRows(own, 0, shape[0]),), heads.order if moved else ())
        return {"out_proj.weight": whole}
    return {"norm.weight": _place(file, own, [(0, shape[0])])} if below == "ssm_norm.weight" else None


def _place(file: GgufFile, own: str, ranges: Sequence[tuple[int, int]], *, whole: bool = True) -> GgufPlace:
    """Return the place of a weight that consists of some rows of a tensor, or of all of them."""
    shape = file.entries[own].shape
    rows = sum(stop - start for start, stop in ranges)
    if whole and rows != shape[0]:
        raise _misshapen(file, own)
    return GgufPlace((rows, *shape[1:]), tuple(GgufRows(own, *one) for one in _joined(ranges)))


def _joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges, those that follow each other as one."""
    first, last = ranges[0]
    for start, stop in ranges[1:]:
        if start != last:
            yield first, last
            first = start
        last = stop
    yield first, last


def _misshapen(file: GgufFile, own: str) -> CheckpointError:
    shape = [*file.entries[own].shape]
    return CheckpointError(f"{file.path}: {own} {shape} is of another shape than its heads (ssm) say.")

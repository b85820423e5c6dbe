"""The slots of a pass: their readers, sizes and memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from heterollm.engine.experts.slots import ExpertSlots
from heterollm.engine.npu_attention.slots import NpuAttentionSlots
from heterollm.engine.shadow.slots import ShadowSlots
from heterollm.engine.sparse.slots import SparseSlots
from heterollm.engine.techniques.slots import EngineSizes, TechniqueSlots
from heterollm.kernels.gpu import FACTOR_BYTES, LARGEST_CODE_BYTES, ExpertLists, ExpertShape, code_bytes
from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import FUSED, STREAM_INPUT, OpSpec, Routing, joined_specs
from heterollm.model import (
    AttentionBlock,
    DeltaNetBlock,
    FfnBlock,
    LatentAttentionBlock,
    LaurelBlock,
    MixtureBlock,
    ModelConfig,
    expert_specs,
)
from heterollm.solver import Plan

TECHNIQUES: Final[tuple[TechniqueSlots, ...]] = (
    ShadowSlots(),
    SparseSlots(),
    NpuAttentionSlots(),
    ExpertSlots(),
)

HEAD_ROWS: Final = 32
"""Positions whose logits are computed at once."""

SHORT_PASS: Final = 16
"""Tokens up to which plans have entries of their own for decode passes."""

NPU_CODES, NPU_OUTPUT_CODES, NPU_FACTORS = "npu_codes_in", "npu_codes_out", "npu_factors"
NPU_STREAM_CODES: Final = "npu_codes_stream"
"""Slots of integer graphs, see :class:`heterollm.kernels.gpu.NpuCodes`; all operators share them."""

ROUTER_LOGITS, EXPERT_ROWS, EXPERT_GATE_UP = "router_logits", "expert_rows", "expert_gate_up"
EXPERT_ACTIVATED, EXPERT_OUTPUT = "expert_activated", "expert_output"
"""Slots of a mixture of experts: the router's logits; rows in the order of experts, inputs and later outputs;
their intermediate values; and the sum of each token."""

LAYER_ROWS, LAYER_INPUTS = "layer_rows", "layer_inputs"
"""Slots of layers' embeddings of tokens: rows of their table, which the host writes, and those embeddings."""

HOST_SLOTS: Final = ("logits", LAYER_ROWS)
"""Slots that the host reads or writes, and no NPU graph."""

GATED_OUTPUT: Final = "gated_output"
"""Slot of the output of a network behind the gate of whole tokens or a norm of its own, and of Laurel."""

NORMED_OUTPUTS: Final = {FfnBlock.NAME: GATED_OUTPUT, MixtureBlock.NAME: EXPERT_OUTPUT}
"""Slot of the output of a block behind a norm of its own, by name of the block."""

EXPERT_LISTS: Final[dict[str, str]] = {
    name: f"expert_{name}" for name in ("chosen", "weights", "source", "position", "places")
}
"""Slots of the lists of :class:`heterollm.kernels.gpu.ExpertLists`."""

DELTA_MIXED, DELTA_FACTORS, DELTA_OUTPUT = "delta_mixed", "delta_factors", "delta_output"
"""Slots of a delta net: q, k and v behind the convolution, factors of heads, and output before its norm."""

STREAMS: Final = "streams"
"""Slot of several residual streams, beside the one that a layer computes."""

GATE_CUTOFFS: Final = "gate_cutoffs"
"""Slot of the cutoff of each token's gates."""

LATENT_OUTPUT: Final = "latent_output"
"""Slot of the sums of latent vectors, before they are made to values."""

PRIVATE_SLOTS: Final = (
    *("residual", "query", "gpu_output", "head_gpu_output", NPU_FACTORS, LAYER_INPUTS, STREAMS, GATE_CUTOFFS),
    *(ROUTER_LOGITS, EXPERT_ROWS, EXPERT_GATE_UP, EXPERT_ACTIVATED, EXPERT_OUTPUT, GATED_OUTPUT),
    *(DELTA_MIXED, DELTA_FACTORS, DELTA_OUTPUT),
    *EXPERT_LISTS.values(),
    *(slot for own in TECHNIQUES for slot in own.PRIVATE),
)
"""Slots that neither the host nor the NPU reads or writes."""


def is_private(slot: str) -> bool:
    """Return whether only kernels of the GPU read and write a slot, which is then in the GPU's memory."""
    slot = slot.partition(".")[0]
    return slot in PRIVATE_SLOTS or slot.endswith(("_codes", "_blocks"))


def is_for_host(slot: str) -> bool:
    """Return whether the host reads or writes a slot, and no NPU graph."""
    return slot.partition(".")[0] in HOST_SLOTS


def lane_slot(slot: str, lane: int) -> str:
    """Return the slot that stands for ``slot`` in a lane; one head serves all lanes."""
    return slot if lane == 0 or slot == "logits" or slot.startswith("head_") else f"{slot}.{lane}"


def pool_sizes(
    config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, item_bytes: int, context: int
) -> dict[str, int]:
    """Return the size of every slot of every lane, those of chunks before that of batches.

    Args:
        config: The model.
        specs: Every group of it.
        plan: The plan.
        item_bytes: Size of an activation.
        context: Positions of a session.
    """
    found: dict[str, int] = {}
    for lane, own in enumerate((*[plan] * plan.lanes, *_batches(plan))):
        for slot, size in _lane_sizes(config, specs, own, item_bytes, context).items():
            found.setdefault(lane_slot(slot, lane), size)
    return found


def chunk_sizes(
    config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, item_bytes: int, context: int, tokens: int
) -> dict[str, int]:
    """Return the bytes of each slot of the first lane that a chunk of so many tokens uses, from its start.

    Rows follow one another in all of them. The other arguments are those of :func:`pool_sizes`.
    """
    return _lane_sizes(config, specs, replace(plan, chunk_length=tokens), item_bytes, context)


def _batches(plan: Plan) -> Iterator[Plan]:
    """Yield the plan of passes of several sessions, if these have a lane of their own."""
    if plan.uses_npu:
        decode = tuple(entry for entry in plan.entries if entry.phase == "decode")
        tokens = min(SHORT_PASS, plan.chunk_length)
        yield replace(plan, entries=decode, slices=(), schedule=None, chunk_length=tokens)


def _lane_sizes(
    config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, item_bytes: int, context: int
) -> dict[str, int]:
    """Return the sizes of the slots of a lane, by the names that they have in the first."""
    tokens = plan.chunk_length
    padded = max(tokens, _npu_tokens(plan, head=False))
    head_npu = _npu_tokens(plan, head=True)
    head_rows = max(HEAD_ROWS, head_npu)
    widest = max(spec.rows for spec in specs if spec.group != "head")
    heads = max(block.heads * block.head_dim for block in config.blocks(AttentionBlock).values())
    stages = (stage.blocks for layer in config.per_layer for stage in layer.stages)
    mixers = AttentionBlock, DeltaNetBlock, LaurelBlock
    beside = any(len(blocks) > 1 and isinstance(blocks[0], mixers) for blocks in stages)
    sizes = {
        "residual": tokens * config.hidden_size * 4,
        "linear_input": padded * config.hidden_size * item_bytes,
        "query": tokens * heads * 4,
        "attention_output": 0,
        # Takes what a norm writes that only adds; no memory is empty.
        "activated": padded * (config.hidden_size if beside else 1) * item_bytes,
        "npu_output": padded * widest * item_bytes,
        "gpu_output": tokens * widest * item_bytes,
        "head_input": head_rows * config.hidden_size * item_bytes,
        "logits": HEAD_ROWS * config.vocab_size * 4,
    }
    for spec in specs:
        if spec.group != "head":
            sizes[spec.source] = max(padded * spec.columns * item_bytes, sizes.get(spec.source, 0))
    if any(entry.group in FUSED for entry in plan.placed):
        sizes[STREAM_INPUT] = padded * config.hidden_size * item_bytes
    if head_npu:
        sizes["head_npu_output"] = head_rows * config.vocab_size * item_bytes
        sizes["head_gpu_output"] = HEAD_ROWS * config.vocab_size * item_bytes
    if not any(entry.placement.npu_lengths for entry in plan.placed):
        sizes["npu_output"] = item_bytes
    if config.layer_vocabulary:
        columns = config.layer_input_columns
        sizes |= {LAYER_ROWS: tokens * columns * 4, LAYER_INPUTS: tokens * columns * item_bytes}
    if config.blocks(LatentAttentionBlock):
        sizes[LATENT_OUTPUT] = tokens * heads * item_bytes
    for net in config.blocks(DeltaNetBlock).values():
        sizes[DELTA_MIXED] = tokens * net.shape.channels * item_bytes
        sizes[DELTA_FACTORS] = tokens * net.shape.factors * 4
        sizes[DELTA_OUTPUT] = tokens * net.shape.value_columns * 4
    networks = config.blocks(FfnBlock).values()
    if any(block.sparsity for block in networks):
        sizes[GATE_CUTOFFS] = tokens * 4
    if config.streams > 1:
        sizes[STREAMS] = tokens * config.streams * config.hidden_size * 4
    gated = config.blocks(LaurelBlock) or any(block.token_gated for block in networks)
    if gated or any(FfnBlock.NAME in stage.own_norms for layer in config.per_layer for stage in layer.stages):
        sizes[GATED_OUTPUT] = tokens * config.hidden_size * item_bytes
    experts = next(iter(expert_specs(config, specs)), None)
    if experts is not None:
        sizes |= _expert_sizes(experts, tokens, item_bytes)
    own = itertools.chain(_code_sizes(specs, tokens), _npu_code_sizes(specs, plan))
    of = EngineSizes(config, specs, plan, item_bytes, context)
    added = (pair for one in TECHNIQUES for pair in one.sizes(of))
    for slot, size in (*added, *own):
        sizes[slot] = max(size, sizes.get(slot, 0))
    return sizes


def _expert_sizes(spec: OpSpec, tokens: int, item_bytes: int) -> dict[str, int]:
    """Return the sizes of the slots of a mixture of experts."""
    assert spec.experts is not None  # by expert_specs
    assert spec.then is not None
    shape = ExpertShape(spec.experts, tokens)
    hidden, width = spec.columns, spec.then.columns
    sizes = {
        ROUTER_LOGITS: tokens * spec.experts.experts * 4,
        EXPERT_ROWS: shape.pairs * hidden * item_bytes,
        EXPERT_GATE_UP: shape.pairs * spec.rows * item_bytes,
        EXPERT_ACTIVATED: shape.pairs * width * item_bytes,
        EXPERT_OUTPUT: tokens * hidden * item_bytes,
    }
    sizes |= {EXPERT_LISTS[name]: size for name, size in _list_sizes(spec.experts, tokens).items()}
    if spec.integer_inputs:
        for slot, own in ((EXPERT_ROWS, spec), (EXPERT_ACTIVATED, spec.then)):
            codes, blocks = code_bytes(shape.pairs, own.columns, own.weight.block)
            sizes |= {f"{slot}_codes": codes, f"{slot}_blocks": blocks}
    return sizes


@functools.lru_cache(maxsize=64)
def _list_sizes(routing: Routing, tokens: int) -> dict[str, int]:
    """Return the sizes of the lists that serve every pass of at most so many tokens."""
    # Fewer tokens may have more steps of rows, as each is shorter.
    shapes = (ExpertShape(routing, count) for count in range(1, tokens + 1))
    sizes = ExpertLists.sizes(ExpertShape(routing, tokens))
    return sizes | {"places": max(ExpertLists.sizes(shape)["places"] for shape in shapes)}


def _npu_code_sizes(specs: Sequence[OpSpec], plan: Plan) -> Iterator[tuple[str, int]]:
    every = (*specs, *joined_specs(specs))
    for entry in plan.placed:
        if entry.placement.form not in INTEGER_FORMS:
            continue
        tokens = max(sum(entry.placement.npu_lengths), plan.longest_pass(entry, HEAD_ROWS))
        for spec in filter(entry.holds, every):
            rows = spec.rows if spec.then is None else spec.then.rows
            yield NPU_CODES, tokens * spec.input_columns * LARGEST_CODE_BYTES
            if spec.fused:
                yield NPU_STREAM_CODES, tokens * spec.columns * LARGEST_CODE_BYTES
            yield NPU_OUTPUT_CODES, tokens * rows * LARGEST_CODE_BYTES
            yield NPU_FACTORS, tokens * FACTOR_BYTES


def _code_sizes(specs: Sequence[OpSpec], tokens: int) -> Iterator[tuple[str, int]]:
    """Yield the slots of rounded inputs, see :class:`heterollm.kernels.gpu.RoundedInputs`."""
    for spec in specs:
        if spec.integer_inputs:
            rows = HEAD_ROWS if spec.group == "head" else tokens
            codes, blocks = code_bytes(rows, spec.columns, spec.weight.block)
            yield f"{spec.source}_codes", codes
            yield f"{spec.source}_blocks", blocks


def _npu_tokens(plan: Plan, *, head: bool) -> int:
    """Return the most rows of the NPU's graphs, padding included; 0 without graphs."""
    return max(
        (
            sum(entry.placement.npu_lengths)
            for entry in plan.placed
            if (entry.group == "head") is head and entry.lengths[0] <= plan.longest_pass(entry, HEAD_ROWS)
        ),
        default=0,
    )

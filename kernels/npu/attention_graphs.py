"""Causal attention as one NPU graph without weights: queries, keys and values are its inputs.

Ranges of keys are joined by running maxima and sums, as in flash attention: Hexagon's softmax over all keys
has three times the error. Numbers of each token, the limits, say how many keys of a range it sees: one graph
serves every position of a pass.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import helper

from heterollm.kernels.npu.linear_graphs import GraphBody
from heterollm.kernels.npu.shards import RANGE_KEYS, AttentionShard
from heterollm.kernels.npu.tensors import KEYS, LIMITS, OUTPUT, QUERIES, VALUES

HIDDEN: Final = 30_000.0
"""Taken from scores of hidden keys: their exponentials are 0, and float16 holds the difference."""

VANISHING: Final = -60.0
"""Least power of an exponential, which is 0 in float16. Hexagon's are NaN or large below -88 (measured on the
emulator), and scores differ by hundreds."""


def build_attention(shard: AttentionShard, body: GraphBody) -> None:
    """Append the nodes of attention from queries, keys, values and limits to :data:`OUTPUT`.

    Queries hold the scale of scores. Every token sees the first key, so that hidden ranges add nothing.
    """
    group, heads, columns = shard.group, shard.kv_heads, shard.head_dim
    sizes = np.array([stop - start for start, stop in shard.ranges], np.int64)
    body.tensors |= {
        "sizes": sizes,
        "ones": np.ones(len(sizes), np.int64),
        "last_axis": np.array([-1], np.int64),
        "grouped": np.array([1, heads, -1, columns], np.int64),
        "by_head": np.array([1, shard.heads, -1, columns], np.int64),
        "by_token": np.array([1, -1, shard.heads * columns], np.int64),
        "places": np.arange(min(RANGE_KEYS, shard.keys), dtype=body.dtype).reshape(1, 1, 1, -1),
        "least": np.array(-1.0, body.dtype),
        "most": np.array(0.0, body.dtype),
        "hidden": np.array(HIDDEN, body.dtype),
        "vanishing": np.array(VANISHING, body.dtype),
    }
    body.add("Reshape", [QUERIES, "grouped"], "queries_grouped")
    ranges = range(len(sizes))
    for name, axis, parts in ((KEYS, 3, "sizes"), (VALUES, 2, "sizes"), (LIMITS, 1, "ones")):
        if len(sizes) > 1:
            body.nodes.append(
                helper.make_node("Split", [name, parts], [f"{name}_{index}" for index in ranges], axis=axis)
            )
        else:
            body.add("Identity", [name], f"{name}_0")
    running = ("", "", "")
    for index, size in enumerate(sizes.tolist()):
        running = _join(body, group, index, size, running)
    _, total, weighted = running
    body.add("Div", [weighted, total], "attended")
    body.add("Reshape", ["attended", "by_head"], "attended_heads")
    body.add("Transpose", ["attended_heads"], "attended_tokens", perm=[0, 2, 1, 3])
    body.add("Reshape", ["attended_tokens", "by_token"], OUTPUT)


def _join(
    body: GraphBody, group: int, index: int, size: int, running: tuple[str, str, str]
) -> tuple[str, str, str]:
    """Append the nodes of a range of keys; return the names of maximum, sum and weighted values so far."""

    def own(name: str) -> str:
        return f"{name}_of_{index}"

    places = "places"
    if size != body.tensors["places"].shape[-1]:
        places = own("places")
        body.tensors[places] = np.arange(size, dtype=body.dtype).reshape(1, 1, 1, -1)
    body.add("Sub", [f"{LIMITS}_{index}", places], own("ahead"))
    body.add("Clip", [own("ahead"), "least", "most"], own("seen"))
    body.add("Mul", [own("seen"), "hidden"], own("token_mask"))
    body.add("Concat", [own("token_mask")] * group, own("mask"), axis=2)
    body.add("MatMul", ["queries_grouped", f"{KEYS}_{index}"], own("products"))
    body.add("Add", [own("products"), own("mask")], own("scores"))
    body.add("ReduceMax", [own("scores"), "last_axis"], own("largest"), keepdims=1)
    largest = own("largest")
    if index:
        largest = own("running_largest")
        body.add("Max", [running[0], own("largest")], largest)
    body.add("Sub", [own("scores"), largest], own("below"))
    _exponential(body, own("below"), own("weights"))
    body.add("ReduceSum", [own("weights"), "last_axis"], own("sum"), keepdims=1)
    body.add("MatMul", [own("weights"), f"{VALUES}_{index}"], own("weighted"))
    if not index:
        return largest, own("sum"), own("weighted")
    body.add("Sub", [running[0], largest], own("lower"))
    _exponential(body, own("lower"), own("factor"))
    joined = []
    for before, name in zip(running[1:], ("sum", "weighted"), strict=True):
        body.add("Mul", [before, own("factor")], own(f"scaled_{name}"))
        body.add("Add", [own(f"scaled_{name}"), own(name)], own(f"running_{name}"))
        joined.append(own(f"running_{name}"))
    return largest, joined[0], joined[1]


def _exponential(body: GraphBody, source: str, target: str) -> None:
    body.add("Max", [source, "vanishing"], f"{target}_powers")
    body.add("Exp", [f"{target}_powers"], target)

"""Sizes of the NPU's contexts, of which each needs room in one process domain."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from heterollm.kernels.npu import CONTEXT_BYTES
from heterollm.kernels.ops import GraphMemory, OpSpec


def context_sizes(
    graphs: Iterable[tuple[OpSpec, tuple[int, ...], Collection[int]]], memory: GraphMemory, others: int = 0
) -> list[int]:
    """Return the bytes of contexts, in the order in which a pass runs their graphs.

    Graphs of a layer share a context where lengths share weights; else each graph has one.

    Args:
        graphs: Groups with the rows of each member and the lengths of their graphs.
        memory: How memory counts.
        others: Bytes of other graphs, such as those of experts.
    """
    sizes: list[int] = []
    last: int | None = None
    for spec, rows, lengths in sorted(graphs, key=lambda graph: (graph[0].layer < 0, graph[0].layer)):
        if memory.copies_by_length:
            sizes += [spec.graph_bytes(rows, (length,), memory) for length in sorted(lengths)]
            continue
        own = spec.graph_bytes(rows, lengths, memory)
        if spec.layer == last and sizes[-1] + own <= CONTEXT_BYTES:
            sizes[-1] += own
        else:
            sizes.append(own)
        last = spec.layer
    whole, rest = divmod(others, CONTEXT_BYTES)
    return [*sizes, *[CONTEXT_BYTES] * whole, rest]

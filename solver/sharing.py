"""Chunk-sharing graphs: which parts of a model serve every chunk of a prompt (llm.npu, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.ops import GraphMemory, OpSpec
from heterollm.solver.plan import Plan

LINEAR_PARTS: Final = ("qkv", "o", "ffn")
"""Linear parts of a layer as llm.npu counts them: the feed-forward network is one."""


@dataclass(frozen=True, slots=True)
class GraphSharing:
    """The parts of all layers that serve every chunk of a prompt, and the memory that this saves.

    Args:
        chunks: Chunks of the prompt.
        norms: Norms. Nothing but the length of a chunk changes them: shared.
        linears: Linear parts: shared, too.
        attentions: Attentions, which depend on the chunk's position. llm.npu builds them for each chunk; here
            a GPU kernel reads position and length from the step buffer, so that one serves all chunks.
        graphs: NPU graphs that serve all chunks.
        held_bytes: Their memory.
        separate_bytes: The memory of graphs for each chunk.
    """

    chunks: int
    norms: int
    linears: int
    attentions: int
    graphs: int
    held_bytes: int
    separate_bytes: int

    @property
    def parts(self) -> int:
        """Norms, linear parts and attentions."""
        return self.norms + self.linears + self.attentions

    @property
    def shareable(self) -> int:
        """Parts that do not depend on the chunk's position."""
        return self.norms + self.linears

    @property
    def saved_fraction(self) -> float:
        """The fraction of the graphs' memory that sharing saves."""
        return 1.0 - self.held_bytes / self.separate_bytes if self.separate_bytes else 0.0


def graph_sharing(
    plan: Plan,
    specs: Sequence[OpSpec],
    prompt: int,
    norms: int,
    memory: GraphMemory,
) -> GraphSharing:
    """Return what the chunks of a prompt share under a plan.

    Args:
        plan: The plan.
        specs: Every group of the model.
        prompt: Tokens of the prompt.
        norms: Norms of a layer before or behind attention and feed-forward network.
        memory: How the memory of graphs counts.

    Raises:
        PlanError: The plan has no entry for a chunk.
    """
    body = [spec for spec in specs if spec.group != "head"]
    layers = len({spec.layer for spec in body})
    lengths = [length for _, length in plan.chunks(prompt)]
    flown = plan.of_flights if len(lengths) > 1 else plan

    held: dict[tuple[OpSpec, tuple[int, ...]], set[int]] = {}
    separate_bytes = 0
    for length in lengths:
        for spec, placement in flown.operators("prefill", length, body):
            if graphs := set(placement.npu_lengths):
                held.setdefault((spec, placement.npu_rows), set()).update(graphs)
                separate_bytes += spec.graph_bytes(placement.npu_rows, graphs, memory)
    return GraphSharing(
        chunks=len(lengths),
        norms=norms * layers,
        linears=len(LINEAR_PARTS) * layers,
        attentions=sum(spec.group == "o" for spec in body),
        graphs=sum(map(len, held.values())),
        held_bytes=sum(spec.graph_bytes(rows, graphs, memory) for (spec, rows), graphs in held.items()),
        separate_bytes=separate_bytes,
    )

"""Chunk-sharing graphs: the NPU graphs that serve every chunk of a prompt (llm.npu, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heterollm.kernels.ops import GraphMemory, OpSpec
from heterollm.solver.plan import Plan


@dataclass(frozen=True, slots=True)
class GraphSharing:
    """The NPU graphs of a prompt's chunks, and the memory that sharing them saves.

    Nothing but a chunk's length changes a linear layer's graph. llm.npu builds the graphs of attention, which
    depend on the position, for each chunk. Here a GPU kernel reads position and length from the step buffer.

    Args:
        chunks: Chunks of the prompt.
        graphs: NPU graphs that serve all chunks.
        separate_graphs: NPU graphs if each chunk had its own.
        held_bytes: The memory of the shared graphs.
        separate_bytes: The memory of graphs for each chunk.
    """

    chunks: int
    graphs: int
    separate_graphs: int
    held_bytes: int
    separate_bytes: int

    @property
    def saved_fraction(self) -> float:
        """The fraction of the graphs' memory that sharing saves."""
        return 1.0 - self.held_bytes / self.separate_bytes if self.separate_bytes else 0.0


def graph_sharing(plan: Plan, specs: Sequence[OpSpec], prompt: int, memory: GraphMemory) -> GraphSharing:
    """Return what the chunks of a prompt share under a plan.

    Args:
        plan: The plan.
        specs: Every group of the model.
        prompt: Tokens of the prompt.
        memory: How the memory of graphs counts.

    Raises:
        PlanError: The plan has no entry for a chunk.
    """
    body = [spec for spec in specs if spec.group != "head"]
    lengths = [length for _, length in plan.chunks(prompt)]
    flown = plan.of_flights if len(lengths) > 1 else plan

    held: dict[tuple[OpSpec, tuple[int, ...]], set[int]] = {}
    separate_graphs = separate_bytes = 0
    for length in lengths:
        for spec, placement in flown.operators("prefill", length, body):
            if graphs := set(placement.npu_lengths):
                held.setdefault((spec, placement.npu_rows), set()).update(graphs)
                separate_graphs += len(graphs)
                separate_bytes += spec.graph_bytes(placement.npu_rows, graphs, memory)
    return GraphSharing(
        chunks=len(lengths),
        graphs=sum(map(len, held.values())),
        separate_graphs=separate_graphs,
        held_bytes=sum(spec.graph_bytes(rows, graphs, memory) for (spec, rows), graphs in held.items()),
        separate_bytes=separate_bytes,
    )

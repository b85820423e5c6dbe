"""Contexts of an NPU: graphs in one binary, which open and close together, within a limit of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from heterollm.base import GIB
from heterollm.kernels.npu.protocol import GraphForm
from heterollm.kernels.npu.session import Handles, HeldSession
from heterollm.kernels.npu.shards import GraphShard, ShardKey, WeightShard

SlicePlace: TypeAlias = tuple[int, str, tuple[int, ...], tuple[int, ...]]
"""Layer, group, rows of each member, and experts."""

GraphIdentity: TypeAlias = tuple[ShardKey, GraphForm, int]
"""Shard, form and length of a graph."""


PackedGraph: TypeAlias = tuple[GraphShard, GraphForm, int]
"""Shard, form and length of a graph to open or build."""

CONTEXT_BYTES: Final = GIB
"""Most weights of a context of several slices. One larger than a process domain never loads
(onnxruntime#20930), and large ones leave much of a domain empty; Qualcomm's own Llama 2 7B has four of
1.0 GB (ai-hub-models#85)."""


def fits_domains(sizes: Iterable[int], memory_bytes: int, domain_bytes: int) -> bool:
    """Return whether contexts fit: each, in order, lies whole in the first process domain with room for it.

    Args:
        sizes: Bytes of the contexts.
        memory_bytes: Bytes of all domains; the last one may have fewer than the others.
        domain_bytes: Bytes of a domain.
    """
    free: list[int] = []
    for size in sizes:
        place = next((place for place, room in enumerate(free) if size <= room), len(free))
        if place == len(free):
            free.append(min(domain_bytes, memory_bytes - place * domain_bytes))
        free[place] -= size
        if free[place] < 0:
            return False
    return True


@dataclass(frozen=True, slots=True)
class ContextGraph:
    """A graph that is to share a context with others.

    Args:
        layer: Decoder layer; -1 for the head.
        group: Name of the group.
        npu_rows: Leading rows of each member.
        length: Tokens of one run.
        form: Graph form; None for the first legal one.
        shard: Returns the shard, whose weights are copied only while a binary is looked for or built.
        experts: The experts of a group of them; empty for others.
    """

    layer: int
    group: str
    npu_rows: tuple[int, ...]
    length: int
    form: GraphForm | None
    shard: Callable[[], WeightShard]
    experts: tuple[int, ...] = ()

    @property
    def slice(self) -> SlicePlace:
        """Identity of its weights within a model."""
        return self.layer, self.group, self.npu_rows, self.experts

    @property
    def place(self) -> tuple[SlicePlace, int, GraphForm | None]:
        """Identity of the graph within a model."""
        return self.slice, self.length, self.form


class SharingVerdict(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether graphs may share contexts on a machine.

    Args:
        status: ``pass``; ``fail``; or ``unverified`` where such a binary compiles and cannot be loaded.
        reason: The observation.
        reuses_io: Whether the library also counts a buffer once that all graphs of a context use.
        io_reason: Why it does not; empty if it does.
    """

    status: Literal["pass", "fail", "unverified"]
    reason: str
    reuses_io: bool = False
    io_reason: str = ""


class ContextPackager(Protocol):
    """An NPU that can put several graphs into one context."""

    @property
    def context_layers(self) -> int:
        """Layers that share a context; 0 if each graph has a context of its own."""

    def package(self, contexts: Sequence[Sequence[ContextGraph]]) -> None:
        """State which graphs of a model share a context, before they are prepared."""

    def test_sharing(self) -> SharingVerdict:
        """Run the self-test of shared contexts in child processes, and keep its verdict.

        Raises:
            CacheError: The cache cannot be written.
        """


class HeldContext:
    """The open or closed sessions of all graphs of one context binary.

    Args:
        size_bytes: Memory that the context takes while it is open.
        graphs: Its graphs.
        sessions: Their sessions, open, in the order in which they were opened.
        open_again: Opens them again.
        handles: Shared memory as the context knows it; None where all memory is the host's.
    """

    def __init__(
        self,
        size_bytes: int,
        graphs: Sequence[GraphIdentity],
        sessions: Sequence[Any],
        open_again: Callable[[], Sequence[Any]],
        handles: Handles | None = None,
    ) -> None:
        self.size_bytes = size_bytes
        self._open_again = open_again
        self.graphs = {
            key: HeldSession(session, lambda number=number: self._open(number), handles)  # type: ignore[misc]
            for number, (key, session) in enumerate(zip(graphs, sessions, strict=True))
        }

    @property
    def is_open(self) -> bool:
        """Whether its sessions are open."""
        return any(held.is_open for held in self.graphs.values())

    def close(self) -> None:
        """Close all sessions, the first one, to which the others' graphs belong, last."""
        for held in reversed(self.graphs.values()):
            held.close()

    def _open(self, number: int) -> Any:  # noqa: ANN401 - onnxruntime ships no types
        sessions = self._open_again()
        for held, session in zip(self.graphs.values(), sessions, strict=True):
            held.adopt(session)
        return sessions[number]


class HeldContexts:
    """All contexts of a backend, those that were opened longest ago first."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[tuple[GraphIdentity, ...], HeldContext] = OrderedDict()
        self._of_graph: dict[GraphIdentity, tuple[GraphIdentity, ...]] = {}

    @property
    def open_bytes(self) -> int:
        """Memory that the open contexts take."""
        return sum(context.size_bytes for context in self._contexts.values() if context.is_open)

    def __contains__(self, graph: GraphIdentity) -> bool:
        """Return whether some context has a graph."""
        return graph in self._of_graph

    def add(self, context: HeldContext) -> None:
        """Add a context as the one that was opened last."""
        graphs = tuple(context.graphs)
        self._contexts[graphs] = context
        self._of_graph.update(dict.fromkeys(graphs, graphs))

    def session(self, graph: GraphIdentity) -> HeldSession:
        """Return the session of a graph, whose context then counts as opened last."""
        graphs = self._of_graph[graph]
        self._contexts.move_to_end(graphs)
        return self._contexts[graphs].graphs[graph]

    def make_room(self, size_bytes: int, memory_bytes: int, domain_bytes: int) -> None:
        """Close the contexts that were opened longest ago until one more of a size fits the domains."""
        left = [context for context in self._contexts.values() if context.is_open]
        while left and not fits_domains(
            (*(context.size_bytes for context in left), size_bytes), memory_bytes, domain_bytes
        ):
            left.pop(0).close()

    def release(self, shard: ShardKey) -> None:
        """Drop the contexts that have graphs of a shard."""
        for graphs in {self._of_graph[graph] for graph in self._of_graph if graph[0] == shard}:
            self._contexts.pop(graphs).close()
            for graph in graphs:
                del self._of_graph[graph]

    def clear(self) -> None:
        """Drop all contexts."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
        self._of_graph.clear()


def context_label(graphs: Sequence[PackedGraph]) -> str:
    """Return the name of a context in messages."""
    shard, form, length = graphs[0]
    if len(graphs) == 1:
        return f"{shard.label} ({form}, {length} tokens)"
    shards = " and ".join(dict.fromkeys(own.label for own, _, _ in graphs))
    lengths = ", ".join(map(str, dict.fromkeys(tokens for _, _, tokens in graphs)))
    return f"{shards} ({form}, {lengths} tokens in one context)"

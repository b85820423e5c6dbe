"""Puts the prepared calls of a pass into ones that are recorded, and says what each of them is.

Kernels carry a label, of which linear layers alone name their layer. The others lie between these in a list,
so that the layer of a norm is that of the linear behind it, and attention's that of the one before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

from heterollm.kernels.gpu import ChainedLaunch
from heterollm.kernels.npu import Form, NpuBackend, NpuBlock, NpuGraph, NpuPart
from heterollm.kernels.ops import Group, OpSpec, feed_forward_block
from heterollm.trace.recorder import Call, Recorder, Site
from heterollm.trace.spans import LinearWork, PartCategory

__all__ = ["CallTracer", "GraphCall", "TracedNpu"]

LINEAR: Final = re.compile(r"(-?\d+)\.(\w+)")
"""The label of a linear layer's kernel: its layer, -1 for the head, and its group."""

KINDS: Final[Mapping[str, PartCategory]] = {
    "head": "linear",
    "rope": "attention",
    "attention": "attention",
    "attention join": "attention",
    "norm": "norm",
    "final norm": "norm",
    "activation": "activation",
    "embedding": "embedding",
    "join": "join",
    "flag": "signal",
}
FOLLOWING: Final = frozenset({"rope", "attention", "attention join", "activation", "flush", "release"})
"""What belongs to the layer of the linear before it."""

LEADING: Final = frozenset({"norm", "rounding of inputs", "flag", "wait"})
"""What belongs to the layer of the linear after it."""

WHOLE_MODEL: Final = -1
"""The head's layer."""


@dataclass(frozen=True, slots=True)
class GraphCall:
    """A run of an NPU graph that says what it computes.

    Args:
        run: The run.
        layer: Decoder layer; -1 for the head.
        group: Name of the group.
        rows: Output rows of all members, or the width of a block.
        length: Tokens of the graph.
    """

    run: Call
    layer: int
    group: Group
    rows: int
    length: int

    def __call__(self) -> None:
        """Run the graph."""
        self.run()


class TracedNpu:
    """An NPU backend whose graphs say what they compute; everything else is that of the backend.

    Args:
        npu: The backend.
    """

    def __init__(self, npu: NpuBackend) -> None:
        self._npu = npu

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the backend's own
        return getattr(self._npu, name)

    def prepare(self, part: NpuPart, length: int, form: Form | None = None) -> _TracedGraph:
        """Return a graph as the backend does."""
        rows = part.width if isinstance(part, NpuBlock) else part.rows
        return _TracedGraph(self._npu.prepare(part, length, form), part.layer, part.group, rows, length)


class _TracedGraph:
    def __init__(self, graph: NpuGraph, layer: int, group: str, rows: int, length: int) -> None:
        self._graph = graph
        self._what: tuple[Any, ...] = (layer, group, rows, length)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the graph's own
        return getattr(self._graph, name)

    def bind(self, x: NDArray[Any], y: NDArray[Any]) -> GraphCall:
        return GraphCall(self._graph.bind(x, y), *self._what)


class CallTracer:
    """Makes recorded calls of those of a pass.

    Args:
        recorder: Where they are recorded.
        specs: The model's groups.
    """

    def __init__(self, recorder: Recorder, specs: Sequence[OpSpec]) -> None:
        self._recorder = recorder
        self._specs: dict[tuple[int, str], OpSpec] = {(spec.layer, spec.group): spec for spec in specs}
        for (layer, group), spec in list(self._specs.items()):
            down = self._specs.get((layer, "down"))
            block = feed_forward_block(spec, down) if group == "gate_up" and down is not None else None
            if block is not None:
                self._specs[layer, "ffn"] = block

    def traced(self, calls: Sequence[Call], tokens: int) -> list[Call]:
        """Return calls that do the same in the same order, and are recorded.

        Args:
            calls: Prepared calls of one list.
            tokens: How many tokens the list takes.
        """
        plain = _unfolded(calls)
        layers = _layers(plain)
        works = self._works(plain, tokens)
        made = []
        for call, places, work in zip(plain, layers, works, strict=True):
            made.append(self._one(call, places, work))
        return made

    # -- pieces --------------------------------------------------------------------------------------

    def _one(self, call: Call, layers: Sequence[int | None], work: LinearWork | None) -> Call:
        recorder, layer = self._recorder, layers[0]
        if isinstance(call, GraphCall):
            return recorder.timed(call.run, self._site("graph", call.group, layer, work))
        wait = _wait_of(call)
        if wait is not None:
            polls = wait.strategy not in ("finish", "event")
            site = Site("engine", "wait", _waited_for(wait), layer, polls=polls)
            return recorder.timed(call, recorder.number_of(site))
        if hasattr(call, "label"):
            return self._launch(call, layers, work)
        name = _name(call)
        if name in ("finish", "hand_to_host"):
            return recorder.timed(call, self._site("wait", name, None))
        if name in ("mark", "sent", "flush", "release") or name.startswith("acquire"):
            return recorder.timed(call, self._site("hand-over", name, layer))
        return recorder.timed(call, self._site("call", name or "call", layer))

    def _site(
        self,
        category: Any,  # noqa: ANN401 - one of the engine's categories
        operator: str,
        layer: int | None,
        work: LinearWork | None = None,
    ) -> int:
        return self._recorder.number_of(Site("engine", category, operator, layer, work))

    def _launch(self, call: Any, layers: Sequence[int | None], work: LinearWork | None) -> Call:  # noqa: ANN401
        labels = _labels(call)
        names = [_operator(label) for label in labels]
        kinds = {_category(label) for label in labels}
        layer = layers[0] if len(set(layers)) == 1 else None
        operator = names[0]
        merged: tuple[str, ...] = ()
        if len(names) > 1:
            merged = tuple(
                name if at is None else f"{at}.{name}" for name, at in zip(names, layers, strict=True)
            )
            operator = f"{merged[0]} to {merged[-1]}" if layer is None else f"{names[0]} to {names[-1]}"
        # The signal rides with other kernels, and says nothing of what the launch is.
        told = kinds - {"signal"} or kinds
        category: PartCategory = told.pop() if len(told) == 1 else "merged"
        kernel = Site("gpu", category, operator, layer, work, merged)
        return self._recorder.launch(
            _enqueue(call), self._site("launch", operator, layer), self._recorder.number_of(kernel)
        )

    def _works(self, calls: Sequence[Call], tokens: int) -> list[LinearWork | None]:
        """Return what each call computes of linear layers."""
        graphs: dict[tuple[int, str], list[GraphCall]] = defaultdict(list)
        for call in calls:
            if isinstance(call, GraphCall):
                graphs[call.layer, call.group].append(call)
        seen: dict[tuple[int, str], int] = defaultdict(int)
        found: list[LinearWork | None] = []
        for call in calls:
            if isinstance(call, GraphCall):
                found.append(self._graph_work(call))
                continue
            total: LinearWork | None = None
            for label in _labels(call):
                key = _linear(label)
                if key is None or key not in self._specs:
                    continue
                work = self._kernel_work(key, tokens, graphs[key], seen[key])
                seen[key] += 1
                total = work if total is None else total + work
            found.append(total)
        return found

    def _graph_work(self, call: GraphCall) -> LinearWork | None:
        spec = self._specs.get((call.layer, call.group))
        if spec is None:
            return None
        if spec.then is not None:
            return LinearWork.of_block(spec, call.length, call.rows)
        return LinearWork.of_rows(spec, call.length, call.rows)

    def _kernel_work(
        self, key: tuple[int, str], tokens: int, graphs: Sequence[GraphCall], place: int
    ) -> LinearWork:
        """Return what the GPU computes of a group beside the NPU's graphs.

        Of a block it runs two linears: the rows of gate and up, and the columns of down.
        """
        spec = self._specs[key]
        taken = graphs[0].rows if graphs else 0
        if spec.then is not None:
            width = spec.member_rows[0] - taken
            first = LinearWork.of_rows(spec, tokens, width * len(spec.members))
            if place == 0:
                return first
            whole = LinearWork.of_block(spec, tokens, width)
            flops, size = whole.flops - first.flops, whole.weight_bytes - first.weight_bytes
            return LinearWork(tokens, width, spec.then.rows, flops, size)
        if taken == spec.rows:
            return LinearWork.of_rows(spec, tokens - sum(graph.length for graph in graphs), taken)
        return LinearWork.of_rows(spec, tokens, spec.rows - taken)


def _unfolded(calls: Sequence[Call]) -> list[Call]:
    """Return the calls with those in two that do two things."""
    plain: list[Call] = []
    for call in calls:
        if isinstance(call, ChainedLaunch):
            plain += [call.before, call]
        elif _is_wait(call) and (wait := _wait_of(call)).strategy != "finish":
            plain += [wait.mark, wait.wait]
        else:
            plain.append(call)
    return plain


def _layers(calls: Sequence[Call]) -> list[tuple[int | None, ...]]:
    """Return the layer of every part of every call; None outside of layers."""
    words = [_words(call) for call in calls]
    flat = [word for of_call in words for word in of_call]
    known = [_layer_of(word) for word in flat]
    found = list(known)
    before: int | None = None
    for place, word in enumerate(flat):
        before = known[place] if known[place] is not None else before
        if word in FOLLOWING:
            found[place] = before
    after: int | None = None
    for place in reversed(range(len(flat))):
        after = known[place] if known[place] is not None else after
        if flat[place] in LEADING:
            found[place] = after
    layers = iter(found)
    return [tuple(None if (at := next(layers)) == WHOLE_MODEL else at for _ in of_call) for of_call in words]


def _words(call: Call) -> tuple[str, ...]:
    """Return what tells the layer of each part of a call."""
    if isinstance(call, GraphCall):
        return (f"{call.layer}.{call.group}",)
    name = _name(call)
    if _is_wait(call) or name in ("mark", "sent", "wait") or name.startswith("acquire"):
        return ("wait",)
    return _labels(call) or (name,)


def _labels(call: Any) -> tuple[str, ...]:  # noqa: ANN401 - a prepared call
    if isinstance(call, GraphCall) or _is_wait(call):
        return ()
    merged: tuple[str, ...] | None = getattr(call, "labels", None)
    if merged is not None:
        return merged
    return (call.label,) if hasattr(call, "label") else ()


def _layer_of(word: str) -> int | None:
    if word in ("head", "final norm"):
        return WHOLE_MODEL
    match = LINEAR.fullmatch(word)
    return int(match[1]) if match else None


def _linear(label: str) -> tuple[int, str] | None:
    if label == "head":
        return WHOLE_MODEL, label
    match = LINEAR.fullmatch(label)
    return (int(match[1]), match[2]) if match else None


def _operator(label: str) -> str:
    match = LINEAR.fullmatch(label)
    return match[2] if match else label


def _category(label: str) -> PartCategory:
    return "linear" if LINEAR.fullmatch(label) else KINDS.get(label, "other")


def _enqueue(call: Any) -> Call:  # noqa: ANN401 - a launch
    """Return the launch of a kernel alone, without the one that it chains."""
    return call.alone if isinstance(call, ChainedLaunch) else call


def _is_wait(value: Any) -> bool:  # noqa: ANN401 - anything
    return value is not None and all(hasattr(value, name) for name in ("strategy", "mark", "wait"))


def _wait_of(call: Any) -> Any:  # noqa: ANN401 - a prepared call, and the hand-over that it waits for
    """Return the hand-over that a call waits for; None where it does something else."""
    owner = getattr(call, "__self__", None)
    if _is_wait(call):
        return call
    return owner if _is_wait(owner) and _name(call) == "wait" else None


def _waited_for(wait: Any) -> str:  # noqa: ANN401 - a hand-over
    """Return what a hand-over stands before, such as ``before qkv``."""
    group = wait.label.split(",")[0]
    return "end of pass" if group == "end" else f"before {group}"


def _name(call: Any) -> str:  # noqa: ANN401 - a prepared call
    return getattr(call, "__name__", "")

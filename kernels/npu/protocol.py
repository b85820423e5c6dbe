"""The protocol of an NPU backend.

A backend turns shards of linear layers into prepared graphs of standard lengths. It states its properties
(lengths, alignment, activation type, legal forms); callers never test its name. A graph states its inputs and
outputs by name (:class:`GraphTensors`), row-major, in place in memory that the caller owns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from heterollm.base import GraphError, format_bytes
from heterollm.kernels.formats import code_dtype
from heterollm.kernels.npu.shapes import GraphShape
from heterollm.kernels.npu.shards import ExpertsShard, GraphShard, SharedShard
from heterollm.kernels.npu.tensors import GraphTensors, NamedArrays
from heterollm.kernels.ops import COUNTED_ONCE, GraphMemory

TimeKind = Literal["real", "emulated", "simulated"]

GraphForm = Literal[
    "matmul_nbits",
    "matmul_nbits_int8",
    "activation_first",
    "weight_first",
    "conv_1x1",
    "token_tiles",
    "k_chunked",
    "k_chunked_int8",
    "integer",
    "static_int8",
    "ffn",
    "ffn_int8",
    "ffn_integer",
    "ffn_k_chunked",
    "ffn_k_chunked_int8",
    "ffn_weight_first",
    "scores",
    "attention",
]
"""Graph forms: equivalent graphs of one shard. Forms of a linear shard:

- ``matmul_nbits``, ``matmul_nbits_int8``: ``x·Wᵀ`` on packed codes, inputs float or rounded to int8.
- ``activation_first``, ``weight_first``: ``x·Wᵀ`` and ``(W·xᵀ)ᵀ`` on float weights.
- ``conv_1x1``: float weights as a 1x1 convolution over a row of tokens.
- ``token_tiles``: ``weight_first`` as one batched product over tiles of :data:`TILE_TOKENS` tokens.
- ``k_chunked``, ``k_chunked_int8``: a k-split, the sum of ``matmul_nbits``, ``matmul_nbits_int8`` or
  ``weight_first`` over ranges of at most :data:`K_SPLIT_COLUMNS` inputs.
- ``integer``: packed codes with stepped scales, or 8-bit codes with one scale for a tensor, and activations
  of 16 bits, on calibrated ranges; at multiples of 32 tokens. Input and output are uint16 codes
  (:class:`heterollm.kernels.formats.CodeGrid`).
- ``static_int8``: 8-bit codes with one scale for a tensor and activations of 8 bits, on calibrated static
  ranges; at multiples of 64 tokens. Input and output are uint8 codes.

Forms of an ffn shard:

- ``ffn``, ``ffn_int8``: all three linears as ``matmul_nbits``, ``matmul_nbits_int8`` or ``activation_first``.
- ``ffn_weight_first``: all three as ``weight_first``; the activations between them stay transposed.
- ``ffn_k_chunked``, ``ffn_k_chunked_int8``: ``ffn``, ``ffn_int8`` or, with float weights,
  ``ffn_weight_first``, with a k-split of the last linear.
- ``ffn_integer``: all three as ``integer``, SiLU between them in 16 bits, too.

Experts have the forms of an ffn but ``ffn_integer``, each expert in the same one.

The form of scores, ``scores``, has uint8 codes at its edges, that of attention, ``attention``, floats; both
exist at multiples of 32 tokens.
"""

TILE_OF_INTEGERS: Mapping[GraphForm, int] = MappingProxyType(
    {"integer": 32, "ffn_integer": 32, "static_int8": 64}
)
"""Forms with calibrated ranges, and the tokens of their tiles: Hexagon lays out 16-bit activations in tiles
of 32 tokens and 8-bit ones in tiles of 64, and other lengths take up to 8 times as long."""

INTEGER_FORMS: frozenset[GraphForm] = frozenset(TILE_OF_INTEGERS)
"""Forms that need stepped scales, or one for a tensor, and calibrated ranges."""

K_SPLIT_COLUMNS = 4096
"""Most inputs of one range of a k-split. By HeteroLLM's published operator latencies a Hexagon needs 3.5
times as long for each weight at 14336 inputs as at 4096, with 1 token and with 256. The emulator shows no
such limit; `heterollm profile --characterise` shows where a device has it. The cache key of a graph does not
contain it, so raise ``GRAPH_VERSION`` with it."""

TILE_TOKENS = 32
"""Tokens of a tile: llm.npu found 32x32 tokens 1.6 times faster than 1024x1 (section 4)."""

STANDARD_LENGTHS: tuple[int, ...] = (1, 32, 64, 128, 256, 512, 1024)
"""Sequence lengths for which NPU graphs exist (HeteroLLM, section 4.1)."""


class NpuGraph(Protocol):
    """The prepared graph of one shard at one length."""

    @property
    def tensors(self) -> GraphTensors:
        """Its inputs and outputs: ``x`` and ``y`` of a linear or an ffn."""

    def bind(self, inputs: NamedArrays, outputs: NamedArrays) -> Callable[[], None]:
        """Return a call that reads the inputs and writes the outputs in place, in the calling thread.

        The call releases the interpreter lock, creates no NumPy or ONNX Runtime object, and returns when
        the outputs are complete. The arrays must outlive it.

        Args:
            inputs: C-contiguous arrays of the shapes and types in :attr:`tensors`, in long-lived memory.
            outputs: The same for the outputs, none of which overlaps another array.

        Raises:
            GraphError: An array's name, shape, type or layout is not that of the graph, or would make the
                runtime copy it.
        """


class NpuBackend(Protocol):
    """An NPU: a real, emulated or simulated one, or ONNX Runtime's CPU provider."""

    @property
    def name(self) -> str:
        """Name of the backend in reports."""

    @property
    def time_kind(self) -> TimeKind:
        """Whether its time is real, emulated or simulated."""

    @property
    def standard_lengths(self) -> tuple[int, ...]:
        """The lengths that :meth:`prepare` accepts, ascending."""

    @property
    def row_alignment(self) -> int:
        """Multiple of rows at which a row split may lie."""

    @property
    def graphs_by_length(self) -> bool:
        """Whether each standard length of a shard is a graph of its own, which takes time to build."""

    @property
    def copies_by_length(self) -> bool:
        """Whether each standard length of a shard has its own copy of the weights."""

    @property
    def io_by_graph(self) -> bool:
        """Whether each graph reserves memory for its own input and output."""

    @property
    def reuses_io(self) -> bool:
        """Whether all lengths of a slice reserve memory for the longest one's input and output alone."""

    @property
    def unrolls_blocks(self) -> bool:
        """Whether its graphs hold 4-bit blocks apart, other weights in 16 bits: see ``GraphMemory``."""

    @property
    def addressable_bytes(self) -> int | None:
        """Most bytes that all its open graphs can take; None without a limit of its own."""

    @property
    def domain_bytes(self) -> int | None:
        """Most bytes of one of the parts in which it addresses them, of which a context needs one whole."""

    @property
    def graph_weight_bytes(self) -> int | None:
        """Most bytes of weights in one graph of experts; None without a limit."""

    @property
    def activation_dtype(self) -> np.dtype[Any]:
        """Element type of the input and output of graphs with float activations."""

    @property
    def compiled_count(self) -> int:
        """Graphs that this object has built; loaded ones do not count."""

    @property
    def loaded_count(self) -> int:
        """Graphs that this object has loaded from the cache."""

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the legal forms of a graph at a length, the default first; empty if there are none.

        Legal forms depend on the length. The profiler measures which one is fastest.

        Args:
            shape: Shape of the graph.
            length: Tokens of one run, standard or not.
        """

    def prepare(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, any_length: bool = False
    ) -> NpuGraph:
        """Build or load the graph of a shard at one length.

        Args:
            shard: The shard.
            length: Tokens of one run, a standard length; of each expert. For scores, any length that has a
                form.
            form: Graph form; the first legal one by default.
            any_length: Whether other lengths are legal too; only measurements need that.

        Raises:
            GraphError: The length is not a standard one, the form is not legal for the shard, or the graph
                does not compile or does not run on the NPU as a whole.
            CacheError: The cache folder cannot be written or locked.
        """

    def cpu_times_us(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, runs: int
    ) -> tuple[float, ...] | None:
        """Return the CPU time of each of several emulated runs of a shard; None if nothing is emulated.

        No graph or session is kept. The minimum repeats within about 5 percent, at any load of the machine.

        Args:
            shard: The shard to run.
            length: Tokens of one run, at least 1, standard or not.
            form: Graph form; the first legal one by default.
            runs: Runs to measure, at least 1, after one that is not.

        Raises:
            GraphError: As :meth:`prepare`, except for the length.
            OptionError: ``runs`` is not positive.
        """

    def release(self, shard: GraphShard) -> None:
        """Free the memory of a shard's graphs, which must not run afterwards."""

    def versions(self) -> dict[str, str]:
        """Return the versions of the backend's software, for keys and reports."""

    def close(self) -> None:
        """Free all sessions; graphs must not run afterwards. May be called twice."""


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """Result of :meth:`GraphKeeper.build`.

    Args:
        size_bytes: Size of the files of the graph, or of its context.
        compiled: Whether this call compiled it; otherwise the folder had it.
        refusal: Reason why this machine does not load it; empty if it does.
    """

    size_bytes: int
    compiled: bool
    refusal: str


class GraphKeeper(NpuBackend, Protocol):
    """An NPU that can keep the graphs of a model as files, so that a later load builds none."""

    def keep_graphs(self, weights_key: str, folder: Path) -> None:
        """Keep the graphs of some weights in a folder: :meth:`build` writes them there.

        From then on ``prepare`` opens them from there alone, and refuses one that is missing or damaged.

        Args:
            weights_key: Content hash of the weights.
            folder: Folder of the graphs.
        """

    def build(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> BuiltGraph:
        """Put a graph into its folder, with the others of its context, and keep no session.

        Raises:
            GraphError: As :meth:`NpuBackend.prepare`.
            CacheError: The folder cannot be written or locked.
        """

    def stored_bytes(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> int:
        """Return the bytes that a graph takes in its folder, damaged or not; 0 if it is missing.

        Raises:
            GraphError: As :meth:`NpuBackend.prepare`.
        """


class GraphFolders:
    """The folders of graphs that lie in none of the cache, by the weights of their model."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def add(self, weights_key: str, folder: Path) -> None:
        """Use a folder for the graphs of some weights."""
        self._folders[weights_key] = folder

    def of(self, shard: GraphShard) -> Path | None:
        """Return the folder of a shard's graphs; None for that of the cache."""
        if isinstance(shard, SharedShard):
            # They have no weights, and a draft has no attention on the NPU.
            return next(iter(self._folders.values()), None)
        return self._folders.get(shard.weights_key)

    def refuse(self, shard: GraphShard, label: str, problem: str) -> None:
        """Refuse to build a graph that a folder should hold.

        Raises:
            GraphError: The shard's graphs lie in a folder.
        """
        folder = self.of(shard)
        if folder is not None:
            fix = "Export the model again with `heterollm export`, by the versions that run it."
            if problem.startswith("not safe"):
                fix = f"Take that right away: `chmod -R go-w {folder}`."
            raise GraphError(f"The NPU graph of {label} in {folder} is {problem}.", fix=fix)


def edge_dtype(form: GraphForm, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the element type of a graph's inputs and outputs: that of codes, else ``dtype``."""
    if form in INTEGER_FORMS or form == "scores":
        return code_dtype(16 if form in ("integer", "ffn_integer") else 8)
    return dtype


def graph_memory(npu: NpuBackend | None) -> GraphMemory:
    """Return how the memory of a backend's graphs counts; without one each slice counts once."""
    if npu is None:
        return COUNTED_ONCE
    item_bytes = npu.activation_dtype.itemsize if npu.io_by_graph else 0
    return GraphMemory(npu.copies_by_length, item_bytes, npu.reuses_io, npu.unrolls_blocks)


def check_form(
    backend: NpuBackend, shard: GraphShard, length: int, form: GraphForm | None, *, any_length: bool = False
) -> GraphForm:
    """Return the graph form to build; the first legal one if ``form`` is None.

    Raises:
        GraphError: The length is not a standard one, or not positive with ``any_length``, or the form is not
            legal.
    """
    # Passes of attention have lengths of their own, and the queries of several heads follow one another.
    standard = any_length or isinstance(shard, SharedShard) or length in backend.standard_lengths
    if not standard:
        raise GraphError(
            f"{backend.name} has no graphs of length {length}.",
            fix=f"Pad to one of {', '.join(map(str, backend.standard_lengths))}.",
        )
    if length < 1:
        raise GraphError(f"A graph of {shard.label} needs at least one token, not {length}.")
    limit = backend.graph_weight_bytes
    if isinstance(shard, ExpertsShard) and limit is not None and shard.weight_bytes > limit:
        raise GraphError(
            f"{shard.label} have {format_bytes(shard.weight_bytes)} of weights; {backend.name} takes "
            f"{format_bytes(limit)} in one graph.",
            fix="Make smaller groups.",
        )
    forms = backend.forms(shard.shape, length)
    if not forms:
        raise GraphError(
            f"{backend.name} cannot compute {shard.label} with {shard.shape} at {length} tokens.",
            fix="Choose another precision or length.",
        )
    if form is not None and form not in forms:
        raise GraphError(
            f"{backend.name} cannot run {shard.label} ({shard.shape}) as {form} at {length} tokens.",
            fix=f"Legal forms: {', '.join(forms)}.",
        )
    return form or forms[0]

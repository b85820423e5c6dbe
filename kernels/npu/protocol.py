"""The protocol of an NPU: parts of a model's linear layers become prepared graphs of standard lengths.

A backend states its properties (lengths, alignment, activation type, legal forms); nothing above asks for
its name. Activations are row-major ``[m, k]`` in and ``[m, r]`` out, computed in place on memory that the
caller owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError
from heterollm.kernels.npu.parts import NpuBlock, NpuPart, NpuSlice
from heterollm.kernels.ops import Activation, WeightFormat

__all__ = [
    "CHUNK_COLUMNS",
    "STANDARD_LENGTHS",
    "TILE_TOKENS",
    "Form",
    "NpuBackend",
    "NpuBlock",
    "NpuGraph",
    "NpuPart",
    "NpuSlice",
    "TimeKind",
    "check_array",
    "check_form",
    "check_prepare",
    "standard_length",
]

TimeKind = Literal["real", "emulated", "simulated"]

Form = Literal[
    "matmul_nbits",
    "matmul_nbits_int8",
    "activation_first",
    "weight_first",
    "conv_1x1",
    "token_tiles",
    "k_chunked",
    "k_chunked_int8",
    "ffn",
    "ffn_int8",
    "ffn_k_chunked",
    "ffn_k_chunked_int8",
    "ffn_weight_first",
]
"""How a part is written as a graph; all forms of a part compute the same thing. Those of a slice:

- ``matmul_nbits``, ``matmul_nbits_int8``: ``x·Wᵀ`` on packed codes, inputs float or rounded to int8.
- ``activation_first``, ``weight_first``: ``x·Wᵀ`` and ``(W·xᵀ)ᵀ`` on float weights.
- ``conv_1x1``: float weights as a convolution with a kernel of 1x1 over a row of tokens.
- ``token_tiles``: ``weight_first`` on tiles of :data:`TILE_TOKENS` tokens, one batched product.
- ``k_chunked``, ``k_chunked_int8``: the sum over pieces of at most :data:`CHUNK_COLUMNS` inputs, each piece
  ``matmul_nbits``, ``matmul_nbits_int8`` or ``weight_first``.

Those of a feed-forward block, each linear of which is written as a slice would be:

- ``ffn``, ``ffn_int8``: all three linears as ``matmul_nbits``, ``matmul_nbits_int8`` or ``activation_first``.
- ``ffn_weight_first``: all three as ``weight_first``; the activations between them stay transposed.
- ``ffn_k_chunked``, ``ffn_k_chunked_int8``: ``ffn``, ``ffn_int8`` or, with float weights,
  ``ffn_weight_first``, with the last linear in pieces of at most :data:`CHUNK_COLUMNS` inputs.
"""

CHUNK_COLUMNS = 4096
"""Most inputs of a piece of a chunked form: by HeteroLLM's published operator latencies a Hexagon takes 3.5
times as long for each weight at 14336 inputs as at 4096, with 1 token and with 256 alike. The emulator shows
no such limit; `heterollm profile --characterise` shows where a device has it. The cache key of a graph lacks
it: a change raises ``GRAPH_VERSION``."""

TILE_TOKENS = 32
"""Tokens of a tile: llm.npu found 32x32 tokens 1.6 times faster than 1024x1 (section 4)."""

STANDARD_LENGTHS: tuple[int, ...] = (1, 32, 64, 128, 256, 512, 1024)
"""Sequence lengths for which NPU graphs exist (HeteroLLM, section 4.1)."""


class NpuGraph(Protocol):
    """One slice or part of a block, ready to run at one length."""

    @property
    def length(self) -> int:
        """Tokens of one run."""
        ...

    @property
    def rows(self) -> int:
        """Outputs ``r``."""
        ...

    @property
    def columns(self) -> int:
        """Inputs ``k``."""
        ...

    def bind(self, x: NDArray[Any], y: NDArray[Any]) -> Callable[[], None]:
        """Return a call that reads ``x`` and writes ``y`` in place, in the calling thread.

        It returns when ``y`` is complete, releases the interpreter lock meanwhile, and creates no NumPy or
        ONNX Runtime object. Both arrays must outlive the call object.

        Args:
            x: C-contiguous ``[length, k]`` in the backend's activation type, in long-lived memory.
            y: C-contiguous ``[length, r]`` in the same type, not overlapping ``x``.

        Raises:
            GraphError: An array's shape, type or layout would make the runtime copy it.
        """
        ...


class NpuBackend(Protocol):
    """An NPU part, or what stands for one."""

    @property
    def name(self) -> str:
        """What to call it in reports."""
        ...

    @property
    def time_kind(self) -> TimeKind:
        """Whether its time is real, emulated or simulated."""
        ...

    @property
    def standard_lengths(self) -> tuple[int, ...]:
        """The lengths that :meth:`prepare` accepts, ascending."""
        ...

    @property
    def row_alignment(self) -> int:
        """Row cuts must lie on multiples of this."""
        ...

    @property
    def copies_by_length(self) -> bool:
        """Whether each standard length of a part holds weights of its own; else one graph serves them all."""
        ...

    @property
    def activation_dtype(self) -> np.dtype[Any]:
        """Element type of every graph's input and output."""
        ...

    @property
    def compiled_count(self) -> int:
        """Graphs built so far by this object, as opposed to loaded from the cache."""
        ...

    @property
    def loaded_count(self) -> int:
        """Graphs opened so far from an existing cache file."""
        ...

    def forms(
        self, weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
    ) -> tuple[Form, ...]:
        """Return the forms in which such a slice can run at a length; empty if it cannot.

        The first is the one to take where nothing was measured. A form that is legal at one length need not
        be at another; which wins is for the profiler to find out.

        Args:
            weight: Number format of the slice's weight.
            columns: Inputs ``k`` of the slice.
            length: Tokens of one run, standard or not.
            integer_inputs: Whether the inputs must be rounded to int8 for each block of the weight.
        """
        ...

    def block_forms(
        self,
        weight: WeightFormat,
        *,
        width: int,
        columns: int,
        length: int,
        integer_inputs: bool,
        activation: Activation,
    ) -> tuple[Form, ...]:
        """Return the forms in which such a part of a feed-forward block can run, as :meth:`forms` does.

        Args:
            weight: Number format of its weights.
            width: The part ``c`` of the intermediate width.
            columns: Inputs ``h``.
            length: Tokens of one run, standard or not.
            integer_inputs: Whether the inputs of each linear must be rounded to int8 for each block of its
                weights.
            activation: Of the gate.
        """
        ...

    def prepare(self, part: NpuPart, length: int, form: Form | None = None) -> NpuGraph:
        """Return the graph of a part at one standard length, built or loaded; the first form by default.

        Raises:
            GraphError: The length is not a standard one, the form is not legal for the part's format, or
                the graph does not compile or does not land on the NPU as a whole.
            CacheError: The cache folder cannot be written or locked.
        """
        ...

    def prepare_any_length(self, part: NpuPart, length: int, form: Form | None = None) -> NpuGraph:
        """Return a part's graph as :meth:`prepare` does, at any length: for measurements, as no plan runs it.

        Raises:
            GraphError: As :meth:`prepare`, except for the length.
            CacheError: The cache folder cannot be written or locked.
        """
        ...

    def count_cycles(
        self, part: NpuPart, length: int, form: Form | None = None, *, runs: int
    ) -> tuple[int, ...] | None:
        """Return the cycles of each of several runs of a part, or None where the backend counts none.

        Unlike :meth:`prepare` it takes any length: a static graph exists for each, whether or not the runtime
        would use it. It keeps no graph and no session. What else the machine does adds to single counts; the
        smallest is what repeats.

        Args:
            part: What to run.
            length: Tokens of one run, at least 1.
            form: How to write it; the first legal form by default.
            runs: Runs to count, at least 1, after one that is not counted.

        Raises:
            GraphError: As :meth:`prepare`, except for the length; or the profile cannot be read.
            OptionError: ``runs`` is not positive.
        """
        ...

    def release(self, part: NpuPart) -> None:
        """Drop what is kept of a part in memory; its graphs must not run afterwards."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the versions of the software that computes, for keys and reports."""
        ...

    def close(self) -> None:
        """Free all sessions; graphs must not run afterwards. May be called twice."""
        ...


def standard_length(backend: NpuBackend, tokens: int) -> int:
    """Return the smallest standard length that holds ``tokens``.

    Raises:
        GraphError: There is none; a longer prompt must be run in chunks.
    """
    for length in backend.standard_lengths:
        if 0 < tokens <= length:
            return length
    raise GraphError(
        f"{backend.name} runs 1 to {backend.standard_lengths[-1]} tokens at a time, not {tokens}."
    )


def check_prepare(backend: NpuBackend, part: NpuPart, length: int, form: Form | None) -> Form:
    """Return the form to build, after checking that the backend takes the part at that length.

    Raises:
        GraphError: It does not.
    """
    if length not in backend.standard_lengths:
        raise GraphError(
            f"{backend.name} has no graphs of length {length}.",
            fix=f"Pad to one of {', '.join(map(str, backend.standard_lengths))}.",
        )
    return check_form(backend, part, length, form)


def check_form(backend: NpuBackend, part: NpuPart, length: int, form: Form | None) -> Form:
    """Return the form to build at any length, standard or not, after checking that it is legal.

    Raises:
        GraphError: It is not, or the length is not positive.
    """
    if length < 1:
        raise GraphError(f"A graph of {part.label} needs at least one token, not {length}.")
    forms = _forms(backend, part, length)
    if not forms:
        inputs = " and int8 activations" if part.integer_inputs else ""
        raise GraphError(
            f"{backend.name} cannot compute {part.label} with {part.format} weights{inputs}.",
            fix="Choose another precision or group size.",
        )
    if form is not None and form not in forms:
        raise GraphError(
            f"{backend.name} cannot run {part.label} ({part.format}) as {form} at {length} tokens.",
            fix=f"Legal forms: {', '.join(forms)}.",
        )
    return form or forms[0]


def _forms(backend: NpuBackend, part: NpuPart, length: int) -> tuple[Form, ...]:
    if isinstance(part, NpuBlock):
        return backend.block_forms(
            part.format,
            width=part.width,
            columns=part.columns,
            length=length,
            integer_inputs=part.integer_inputs,
            activation=part.activation,
        )
    return backend.forms(part.format, columns=part.columns, length=length, integer_inputs=part.integer_inputs)


def check_array(array: NDArray[Any], what: str, shape: tuple[int, int], dtype: np.dtype[Any]) -> None:
    """Refuse an array that ONNX Runtime would silently copy instead of using in place.

    Raises:
        GraphError: Its shape, type, layout or writability is wrong.
    """
    if array.shape != shape or array.dtype != dtype:
        raise GraphError(f"{what} must be {dtype} {list(shape)}, not {array.dtype} {list(array.shape)}.")
    if not array.flags.c_contiguous:
        raise GraphError(f"{what} is not contiguous (strides {array.strides}) and would be copied.")
    if not array.flags.writeable or not array.flags.aligned:
        raise GraphError(f"{what} is read-only or misaligned and cannot be computed on in place.")

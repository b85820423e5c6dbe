"""Launches of the glue operators: norms, gated activation, join and soft cap of the logits.

RoPE with the KV write and attention come from :mod:`heterollm.kernels.gpu.attention`. Each kernel that writes
a linear's input writes the type that both processors read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu.attention import GpuAttention
from heterollm.kernels.gpu.codes import NpuCodes
from heterollm.kernels.gpu.glue_kernels import Defines, Segments
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.rounding import RoundedInputs
from heterollm.kernels.gpu.work import GpuWork, pointwise_work
from heterollm.kernels.ops import Activation

ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu_tanh")
"""Activations in the order of their numbers in pointwise.cl."""

NORM_ONLY, NORM_ADD, NORM_ADD_HEAD = range(3)
"""Modes of rms_norm.cl."""

CODE_FILES: Final = ("codes.h", "npu_codes.cl")
VECTOR_COLUMNS: Final = 2048


class GpuGlue(GpuAttention):
    """Makes the launches of the glue operators; see :class:`GlueKernels`."""

    # -- norms ---------------------------------------------------------------------------------------

    def rms_norm(
        self,
        residual: DeviceMemory,
        weight: Argument,
        out: SharedArray,
        *,
        hidden: int,
        tokens: int,
        epsilon: float,
        delta: Segments | None = None,
        bias: Argument = None,
        post: Argument = None,
        rounded: RoundedInputs | NpuCodes | None = None,
        centered: bool = False,
    ) -> Launch:
        """Return the launch of ``residual += delta; out = residual / rms(residual) * weight``.

        The delta includes ``bias``; with ``post`` it is then normed: ``delta / rms(delta) * post``.

        Args:
            residual: float32 ``[tokens, hidden]``, updated in place if there is a delta.
            weight: float32 ``[hidden]``.
            out: ``[tokens, hidden]`` in the activation type.
            hidden: Width of the model.
            tokens: Rows.
            epsilon: Added to the mean square.
            delta: Output of the preceding linear, one member; None at the start of the model.
            bias: float32 ``[hidden]`` of that linear, or None.
            post: float32 ``[hidden]``, weight of the delta's norm, or None.
            rounded: Target of the codes of ``out``, int8 for a GPU, or those of an NPU; None for no codes.
            centered: Whether it is a LayerNorm: the mean is subtracted first, the second row of ``weight``,
                then ``[2, hidden]``, added at the end.
        """
        residual.require(tokens * hidden * 4, "norm residual")
        memory, mode = (residual, weight, out, residual), NORM_ONLY if delta is None else NORM_ADD
        return self._norm(
            mode, memory, (tokens, hidden), delta, (bias, post), epsilon, rounded, centered=centered
        )

    def final_norm(
        self,
        residual: DeviceMemory,
        weight: Argument,
        out: SharedArray,
        step: SharedArray,
        *,
        rows: int,
        epsilon: float,
        delta: Segments,
        bias: Argument = None,
        post: Argument = None,
        rounded: RoundedInputs | NpuCodes | None = None,
        centered: bool = False,
    ) -> Launch:
        """Return the launch of the norm before the head, of ``rows`` rows from the step's head row on.

        It differs from :meth:`rms_norm` in that the residual stays unchanged, so that it may run again for
        other rows of the pass. Output row i is residual row ``step[STEP_HEAD_ROW] + i``, which must exist.
        """
        memory, shape = (residual, weight, out, step), (rows, delta.rows[0])
        return self._norm(
            NORM_ADD_HEAD, memory, shape, delta, (bias, post), epsilon, rounded, centered=centered
        )

    def _norm(
        self,
        mode: int,
        memory: tuple[DeviceMemory, Argument, SharedArray, DeviceMemory],
        shape: tuple[int, int],
        delta: Segments | None,
        extras: tuple[Argument, Argument],
        epsilon: float,
        rounded: RoundedInputs | NpuCodes | None,
        *,
        centered: bool,
    ) -> Launch:
        (residual, weight, out, step), (rows, hidden) = memory, shape
        label = "final norm" if mode == NORM_ADD_HEAD else "norm"
        if delta is None:
            delta = Segments(out, out, (hidden,), (0,))
        elif delta.rows != (hidden,):
            raise KernelError(f"A norm over {hidden} columns cannot add members of {delta.rows} rows.")
        if centered and hidden % 8:
            raise KernelError(
                f"{label}: a mean over {hidden} columns, no multiple of 8, cannot be subtracted."
            )
        out.require(rows * hidden * self._item_bytes, f"{label} output")
        files = ("codes.h", "rms_norm.cl") if isinstance(rounded, NpuCodes) else ("rms_norm.cl",)
        widths = (hidden, delta.splits[0])
        defines: Defines = {"CENTERED": 1} if centered else {}
        kernel, _, items = self._kernel(
            files, "rms_norm", lambda _: defines, rounded=rounded, widths=widths, segments=delta
        )
        arguments = (
            *(residual, weight, out, delta.a, delta.b),
            # Absent memory is never read, but OpenCL needs a valid argument.
            *(weight if extra is None else extra for extra in extras),
            step,
            *map(np.int32, (delta.splits[0], hidden)),
            np.float32(epsilon),
            *map(np.int32, (mode, *(extra is not None for extra in extras))),
            *(rounded.arguments(rows, hidden, label) if rounded else ()),
        )
        item, block = self._item_bytes, rounded.block if isinstance(rounded, RoundedInputs) else 0
        read = 4 if mode == NORM_ONLY else 4 + item * delta.reads
        stored = item + 4 if mode == NORM_ADD else item
        stored += rounded.code_bytes if isinstance(rounded, NpuCodes) else 0
        work = functools.partial(pointwise_work, rows * hidden, 6, read, stored, block)
        return self._runtime.launch(kernel, arguments, (rows * items,), (items,), label, work=work)

    # -- elementwise ---------------------------------------------------------------------------------

    def gated_activation(
        self,
        gate_up: Segments,
        out: DeviceMemory,
        *,
        tokens: int,
        intermediate: int,
        activation: Activation = "silu",
        bias: Argument = None,
        rounded: RoundedInputs | None = None,
        label: str = "activation",
    ) -> Launch:
        """Return the launch of ``out = activation(gate) * up``.

        Args:
            gate_up: Output of the group, two members of ``intermediate`` rows.
            out: ``[tokens, intermediate]`` in the activation type.
            tokens: Rows.
            intermediate: Width of the feed-forward network.
            activation: Activation of the gate.
            bias: float32 of gate, then up, added first; or None.
            rounded: Target of the int8 codes of ``out``; None for no codes.
            label: Name for traces and errors.
        """
        if gate_up.rows != (intermediate, intermediate):
            raise KernelError(f"{label}: members of {gate_up.rows} rows are not two of {intermediate}.")
        out.require(tokens * intermediate * self._item_bytes, f"{label} output")
        memory = (gate_up.a, gate_up.b, out, gate_up.b if bias is None else bias)
        sizes = (ACTIVATIONS.index(activation), bias is not None, *gate_up.splits, intermediate)
        item, block = self._item_bytes, rounded.block if rounded else 0
        work = functools.partial(
            pointwise_work, tokens * intermediate, 10, 2 * item * gate_up.reads, item, block
        )
        return self._pointwise(
            "gated_activation", memory, sizes, tokens, label, work, rounded=rounded, segments=gate_up
        )

    def join_logits(self, head: Segments, out: SharedArray, *, rows: int, label: str = "join") -> Launch:
        """Return the launch that joins the head's segments as float32 ``[rows, vocabulary]``."""
        if len(head.rows) != 1:
            raise KernelError(f"{label}: the head is one member, not {len(head.rows)}.")
        out.require(rows * head.rows[0] * 4, f"{label} output")
        sizes = (head.splits[0], head.rows[0])
        work = functools.partial(pointwise_work, rows * head.rows[0], 1, self._item_bytes * head.reads, 4)
        memory = (head.a, head.b, out)
        return self._pointwise("join_logits", memory, sizes, rows, label, work, segments=head)

    def add_bias(
        self, logits: SharedArray, bias: Argument, *, rows: int, vocabulary: int, label: str = "head bias"
    ) -> Launch:
        """Return the launch of ``logits += bias``, in place.

        Args:
            logits: float32 ``[rows, vocabulary]``.
            bias: float32 ``[vocabulary]``.
            rows: Rows.
            vocabulary: Columns.
            label: Name for traces and errors.
        """
        logits.require(rows * vocabulary * 4, f"{label} logits")
        work = functools.partial(pointwise_work, rows * vocabulary, 1, 8, 4)
        return self._pointwise("add_bias", (logits, bias), (vocabulary,), rows, label, work)

    def soft_cap(
        self, logits: SharedArray, cap: float, *, rows: int, vocabulary: int, label: str = "soft cap"
    ) -> Launch:
        """Return the launch of ``logits = cap * tanh(logits / cap)``, in place.

        Args:
            logits: float32 ``[rows, vocabulary]``.
            cap: Upper bound of the magnitude.
            rows: Rows.
            vocabulary: Columns.
            label: Name for traces and errors.
        """
        logits.require(rows * vocabulary * 4, f"{label} logits")
        work = functools.partial(pointwise_work, rows * vocabulary, 10, 4, 4)
        return self._pointwise("soft_cap", (logits, np.float32(cap)), (vocabulary,), rows, label, work)

    # -- codes of NPU graphs -------------------------------------------------------------------------

    def write_codes(self, x: SharedArray, codes: NpuCodes, *, tokens: int, columns: int) -> Launch:
        """Return the launch that writes the codes of ``x [tokens, columns]``, in the activation type."""
        label = "writing of codes"
        x.require(tokens * columns * self._item_bytes, f"{label} input")
        arguments = (x, np.int32(columns), *codes.arguments(tokens, columns, label))
        kernel, _, items = self._kernel(CODE_FILES, "write_npu_codes", rounded=codes, widths=(columns,))
        work = functools.partial(pointwise_work, tokens * columns, 4, self._item_bytes, codes.code_bytes)
        return self._runtime.launch(kernel, arguments, (tokens * items,), (items,), label, work=work)

    def read_codes(
        self, codes: NpuCodes, out: DeviceMemory, *, tokens: int, member_rows: tuple[int, ...]
    ) -> Launch:
        """Return the launch that writes the values of output codes ``[tokens, rows]``, and counts them.

        Args:
            codes: The codes.
            out: ``[tokens, rows]`` in the activation type.
            tokens: Tokens.
            member_rows: Rows of each member, at most three members.
        """
        rows = sum(member_rows)
        label = "reading of codes"
        codes.outputs.require(tokens * rows * codes.code_bytes, f"{label} input")
        codes.require_factors(tokens, label)
        out.require(tokens * rows * self._item_bytes, f"{label} output")
        steps = codes.grid.member_steps
        kernel, style, items = self._kernel(
            CODE_FILES,
            "read_npu_codes",
            lambda _: {"MEMBER_STEPS": 1} if steps else {},
            rounded=codes,
            widths=(rows,),
        )
        span = VECTOR_COLUMNS if style == "vector" else 8
        arguments = (
            *(codes.outputs, codes.factors, out, codes.counts, np.int32(codes.place)),
            *(np.float32(codes.grid.output_step), np.int32(rows), np.int32(span)),
            *(_steps_of_members(steps, member_rows) if steps else ()),
        )
        work = functools.partial(pointwise_work, tokens * rows, 4, codes.code_bytes, self._item_bytes)
        size = round_up(-(-rows // span), items), tokens
        return self._runtime.launch(kernel, arguments, size, (items, 1), label, work=work)

    # -- helpers -------------------------------------------------------------------------------------

    def _pointwise(
        self,
        name: str,
        memory: tuple[Argument, ...],
        sizes: tuple[int, ...],
        rows: int,
        label: str,
        work: Callable[[], GpuWork],
        *,
        rounded: RoundedInputs | None = None,
        segments: Segments | None = None,
    ) -> Launch:
        columns = sizes[-1]
        # All sizes but flags are widths of segments and rows.
        widths = sizes[2:] if name == "gated_activation" else sizes
        kernel, style, items = self._kernel(
            ("pointwise.cl",), name, rounded=rounded, widths=widths, segments=segments
        )
        span = VECTOR_COLUMNS if style == "vector" else 8
        width = round_up(-(-columns // span), items)
        codes = rounded.arguments(rows, columns, label) if rounded else ()
        arguments = (*memory, *map(np.int32, sizes), np.int32(span), *codes)
        return self._runtime.launch(kernel, arguments, (width, rows), (items, 1), label, work=work)


def _steps_of_members(steps: tuple[float, ...], rows: tuple[int, ...]) -> Iterator[np.generic]:
    """Yield the first row of the second and third member, and the step of each of three."""
    ends = [sum(rows[: count + 1]) for count in range(len(rows))]
    yield from (np.int32(ends[min(place, len(ends) - 1)]) for place in (0, 1))
    yield from (np.float32(steps[min(place, len(steps) - 1)]) for place in (0, 1, 2))

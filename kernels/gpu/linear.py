"""Linear layers on the OpenCL device: launches for any split of a group, and look-ups of the embedding."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike

from heterollm.base import KernelError, round_up
from heterollm.kernels.formats import LinearWeight
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.packing import COLUMNS_MULTIPLE, array_bytes
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import RoundedInputs
from heterollm.kernels.gpu.self_test import try_linear
from heterollm.kernels.gpu.tiled_weights import (
    LinearRequest,
    RowRange,
    TiledWeights,
    packed_members,
    upload_pieces,
)
from heterollm.kernels.gpu.variants import Variant, variants_for
from heterollm.kernels.gpu.work import embedding_work

SIMT_EMBEDDING_SPAN: Final = 16
SIMT_EMBEDDING_ITEMS: Final = 64


class GpuLinear(TiledWeights):
    """The linear layers of one group, packed and uploaded; made by :meth:`pack`."""

    @classmethod
    def pack(
        cls,
        runtime: GpuRuntime,
        members: Sequence[LinearWeight],
        *,
        activation_dtype: DTypeLike,
        integer_inputs: bool = False,
    ) -> GpuLinear:
        """Pack the weights of a group and upload them.

        Args:
            runtime: The device.
            members: Weights ``[n, k]`` of one format and one ``k``.
            activation_dtype: float32 or float16, type of inputs and outputs.
            integer_inputs: Round the inputs of each block to int8 before multiplying, as ONNX Runtime's
                MatMulNBits does at accuracy level 4 (:func:`heterollm.kernels.formats.round_inputs`).

        Raises:
            KernelError: The kernels do not support a shape or format, or device memory is short.
        """
        number_format, columns, rows, arrays = packed_members(
            runtime, members, activation_dtype, integer_inputs=integer_inputs
        )
        pieces, size = upload_pieces(runtime, arrays), array_bytes(arrays)
        return cls(runtime, rows, columns, number_format, pieces, size, activation_dtype, integer_inputs)

    def launch(
        self,
        x: DeviceMemory,
        y: DeviceMemory,
        *,
        tokens: int,
        first_token: int = 0,
        kept: Sequence[RowRange] | None = None,
        in_place: bool = False,
        columns: tuple[int, int] | None = None,
        output_dtype: DTypeLike | None = None,
        rounded: RoundedInputs | None = None,
        style: KernelStyle | Variant | None = None,
        label: str,
    ) -> Launch:
        """Return the launch of ``y[t] = x[t] @ W[kept rows].T`` for ``tokens`` rows.

        Args:
            x: Slot of the activations, ``[first_token + tokens, k]`` in the activation type; with ``columns``
                its rows hold those inputs only.
            y: Slot of the output, ``[first_token + tokens, kept rows]``.
            tokens: Rows ``m`` to compute.
            first_token: First row to compute; both slots start at token 0.
            kept: Row range of each member, starting at multiples of 64; all rows by default. The
                output columns are the kept rows of the members in order.
            in_place: Whether ``y`` has all rows of the members instead, of which the kept ones are written.
            columns: Inputs ``[start, stop)``, for a partial sum: multiples of the scale block and of
                :data:`COLUMNS_MULTIPLE`; all inputs by default.
            output_dtype: float32 for a float32 output of float16 activations.
            rounded: Codes of ``x`` from the kernel that wrote ``x``, starting at ``first_token``; by default
                a launch before this one rounds ``x``. For integer inputs only.
            style: Kernel style or variant; by default the tuned one or the first that works.
            label: Name for traces and errors.

        Raises:
            KernelError: A range does not fit, a slot is too small, or the codes are for other weights.
        """
        if tokens < 1 or first_token < 0:
            raise KernelError(f"{label}: cannot compute {tokens} tokens from token {first_token}.")
        half_output = self._half and (output_dtype is None or np.dtype(output_dtype) == np.float16)
        ranges = tuple(kept) if kept is not None else tuple((0, rows) for rows in self.member_rows)
        taken = self._check_columns((0, self.columns) if columns is None else columns, label)
        request = LinearRequest(
            *(x, y, tokens, first_token, ranges, in_place, taken, half_output, rounded, label)
        )
        return self._checked(request, style)

    def embed_launch(
        self,
        tokens: SharedArray,
        y: DeviceMemory,
        *,
        count: int,
        scale: float = 1.0,
        style: KernelStyle | None = None,
        label: str = "embedding",
    ) -> Launch:
        """Return the launch of ``y[t] = scale * W[tokens[t]]`` for ``count`` tokens.

        The table is the only member, so that a tied head and the embedding share one copy.

        Args:
            tokens: Slot of int32 row ids; the kernel clamps them to the table.
            y: Slot of the float32 residual stream ``[count, k]``.
            count: Tokens to look up.
            scale: Factor on every element.
            style: Kernel style; by default the device's.
            label: Name for traces and errors.

        Raises:
            KernelError: There are several members, or a slot is too small.
        """
        if len(self.member_rows) != 1 or count < 1:
            raise KernelError(f"{label}: cannot look up {count} tokens in {len(self.member_rows)} tables.")
        tokens.require(count * 4, f"{label} token")
        y.require(count * self.columns * 4, f"{label} output")

        def build(variant: Variant) -> tuple[list[Any], KernelStyle]:
            defines = variant.defines | {"BITS": self.format.bits}
            if variant.style == "simt" and self.format.quantized:
                defines["BLOCK"] = self.format.block
            if self.format.minimum:
                defines["MINIMUMS"] = 1
            files = ("common.h", "linear.h", "embedding.cl")
            kernels = [self._runtime.kernel(files, "embedding", defines) for _ in self._pieces]
            return kernels, variant.style

        variants = variants_for(is_cpu=self._runtime.traits.is_cpu, style=style)
        kernels, chosen = self._runtime.variants.first(f"embedding {self.format}", variants, build)
        span, items = self.columns, 1
        if chosen == "simt":
            span, items = SIMT_EMBEDDING_SPAN, SIMT_EMBEDDING_ITEMS
        sizes = (np.int32(self.columns), np.int32(self.member_rows[0]))
        global_size = (round_up(self.columns // span, items), count)
        launch: Launch | None = None
        for piece, kernel in zip(self._pieces, kernels, strict=True):
            # A table in several buffers is read by as many launches, each of which skips the others' tokens.
            rows = (np.int32(piece.first_tile * 64), np.int32((piece.first_tile + piece.tiles) * 64))
            arguments: tuple[Argument, ...] = (*piece.buffers, tokens, y, *sizes, *rows, *self._parameters)
            arguments = (*arguments, np.int32(span), np.float32(scale))
            share = count if launch is None else 0
            work = functools.partial(embedding_work, self.format, self.columns, share)
            size = global_size, (items, 1)
            launch = self._runtime.launch(kernel, arguments, *size, label, launch, work=work)
        assert launch is not None  # a table has rows
        return launch

    def _test(self, variant: Variant) -> None:
        dtype = np.float16 if self._half else np.float32
        pack = functools.partial(
            GpuLinear.pack, self._runtime, activation_dtype=dtype, integer_inputs=self.integer_inputs
        )
        try_linear(pack, self._runtime, variant, self.format, dtype, integer_inputs=self.integer_inputs)

    def _check_columns(self, columns: tuple[int, int], label: str) -> tuple[int, int]:
        """Check a range of inputs."""
        (start, stop), unit = columns, max(self.format.block, COLUMNS_MULTIPLE)
        if not 0 <= start < stop <= self.columns or start % unit or stop % unit:
            raise KernelError(
                f"{label}: inputs [{start}, {stop}) of {self.columns}; a range starts and stops at multiples "
                f"of {unit}, inside, and is not empty."
            )
        return columns

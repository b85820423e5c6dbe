"""The common part of the operators' launches: segments of a split output, and the choice of a kernel.

Each kernel that reads a linear's output takes the two segments of a split (:class:`Segments`). Kernels read
the position, the length and the head's first row of a pass from the step buffer, so a launch serves every
pass of its length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu.cache_layout import KV_CODES, page_elements, position_bytes
from heterollm.kernels.gpu.codes import NpuCodes
from heterollm.kernels.gpu.heads import HeadShape, KvLayer
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import ROUNDING, RoundedInputs, rounding_launch
from heterollm.kernels.gpu.variants import Variant, variants_for, whole_eights
from heterollm.kernels.gpu.work import GpuWork
from heterollm.kernels.ops import Join

Defines: TypeAlias = dict[str, str | int]
"""Preprocessor definitions of a kernel."""

COMMON_FILES: Final = ("common.h", "rounding.h", "glue.h")
SIMT_ITEMS: Final = 64
VECTOR_COLUMNS: Final = 2048


@dataclass(frozen=True, slots=True)
class Segments:
    """The output of a linear group under a row split, or of an ffn under a split of its width.

    The first ``splits[j]`` rows of member ``j`` (output columns of the activation) lie in ``a``, the others
    in ``b``; each segment holds the members in order. An unused segment may be any memory. With the join
    ``sum`` all rows lie in ``b``, and those in ``a`` are added to them.

    Args:
        a: ``[m_padded, sum(splits)]`` in the activation type.
        b: ``[m, sum(rows) - sum(splits)]`` in the activation type; with ``sum`` ``[m, sum(rows)]``.
        rows: Output rows of each member.
        splits: Rows of each member in ``a``.
        join: How the segments combine.
    """

    a: DeviceMemory
    b: DeviceMemory
    rows: tuple[int, ...]
    splits: tuple[int, ...]
    join: Join = "concatenate"

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.splits) or not all(
            0 <= split <= rows for split, rows in zip(self.splits, self.rows, strict=True)
        ):
            raise KernelError(f"Splits {self.splits} do not lie inside members of {self.rows} rows.")

    @property
    def defines(self) -> dict[str, str | int]:
        """Defines of the kernels that read the segments."""
        return {"SUM": 1} if self.join == "sum" else {}

    @property
    def reads(self) -> float:
        """Values that a kernel reads for each row: a sum has two where the first segment has the row."""
        return 1 + sum(self.splits) / sum(self.rows) if self.join == "sum" else 1


class GlueKernels:
    """Builds the kernels of the operators between linears, and holds what their launches share.

    Args:
        runtime: The OpenCL device.
        activation_dtype: float32 or float16, type of the linears' inputs and outputs.
        kv_dtype: Type of the KV cache: float32, float16, or int8 with scales.
        style: Kernel style; by default the device's.

    Raises:
        KernelError: All methods: a type, shape or slot that the kernels do not support.
    """

    def __init__(
        self,
        runtime: GpuRuntime,
        activation_dtype: DTypeLike,
        kv_dtype: DTypeLike,
        *,
        style: KernelStyle | None = None,
    ) -> None:
        self.runtime = runtime
        self.item_bytes = _float_bytes(activation_dtype, "Activations")
        self.kv_dtype = np.dtype(kv_dtype)
        self.variants = variants_for(is_cpu=runtime.traits.is_cpu, style=style)
        self._defines: dict[str, str | int] = {"ACT_HALF": 1} if self.item_bytes == 2 else {}
        self._scratch: dict[int, Any] = {}
        self.cache_defines = _cache_defines(self.kv_dtype)
        """Defines of kernels that read or write keys and values."""

    def kernel(
        self,
        files: Sequence[str],
        name: str,
        defines: Callable[[KernelStyle], Defines] = lambda _: {},
        rounded: RoundedInputs | NpuCodes | None = None,
        rounds: Callable[[KernelStyle], bool] = lambda _: True,
        widths: Sequence[int] = (),
        segments: Segments | None = None,
        variants: Sequence[Variant] | None = None,
        test: Callable[[Variant], None] | None = None,
    ) -> tuple[Any, KernelStyle, int]:
        """Return a kernel of the first variant that builds, its style and its work-items per work-group.

        Args:
            files: Source files after the common ones; ``{style}`` stands for the style's family.
            name: Kernel function.
            defines: Returns the additional defines of a style.
            rounded: Target of the output's codes; None for no codes.
            rounds: Returns whether the kernel of a style writes those codes.
            widths: Elements of every row and segment; if all are whole eights, kernels for GPUs read eight
                elements at once and never a part of them.
            segments: The linear's output that the kernel reads, if it reads one.
            variants: Variants to try, best first; by default the device's.
            test: Raises :class:`BuildError` if a variant computes wrong numbers; called once for each.
        """

        def build(variant: Variant) -> tuple[Any, KernelStyle, int]:
            style = variant.style
            items = 1 if style == "vector" else SIMT_ITEMS
            family = "vector" if style == "vector" else "simt"
            named = tuple(file.replace("{style}", family) for file in files)
            own = self._defines | variant.defines | {"WG": items} | defines(style)
            own |= rounded.defines if rounded and rounds(style) else {}
            own |= segments.defines if segments else {}
            if family == "simt" and widths and not any(width % 8 for width in widths):
                own |= whole_eights(variant, has_half=self.runtime.traits.has_half)
            return self.runtime.kernel((*COMMON_FILES, *named), name, own), style, items

        what = name.replace("_", " ")
        if rounded:
            bits = rounded.grid.bits if isinstance(rounded, NpuCodes) else 0
            what += f" with uint{bits} codes" if bits else " with int8 codes"
        return self.runtime.variants.first(what, variants or self.variants, build, test)

    def pointwise(
        self,
        name: str,
        memory: tuple[Argument, ...],
        sizes: tuple[int, ...],
        rows: int,
        label: str,
        work: Callable[[], GpuWork],
        *,
        flags: int = 0,
        rounded: RoundedInputs | None = None,
        segments: Segments | None = None,
        file: str = "pointwise.cl",
        defines: Defines | None = None,
    ) -> Launch:
        """Return the launch of an elementwise kernel.

        Args:
            name: Kernel function.
            memory: Its memory.
            sizes: Its flags, then widths of segments and rows; the last is the width of the output.
            rows: Rows of the output.
            label: Name for traces and errors.
            work: Returns the work.
            flags: Number of flags among the sizes.
            rounded: Target of the int8 codes of the output; None for no codes.
            segments: The linear's output that the kernel reads, if it reads one.
            file: Source file after the common ones.
            defines: Additional defines.
        """
        columns = sizes[-1]
        kernel, style, items = self.kernel(
            (file,), name, lambda _: defines or {}, rounded, widths=sizes[flags:], segments=segments
        )
        span = self.span(style)
        width = round_up(-(-columns // span), items)
        codes = rounded.arguments(rows, columns, label) if rounded else ()
        arguments = (*memory, *map(np.int32, sizes), np.int32(span), *codes)
        return self.runtime.launch(kernel, arguments, (width, rows), (items, 1), label, work=work)

    @staticmethod
    def span(style: KernelStyle) -> int:
        """Return the columns that a work-item of an elementwise kernel computes."""
        return VECTOR_COLUMNS if style == "vector" else 8

    def round_output(self, out: SharedArray, rounded: RoundedInputs, tokens: int, columns: int) -> Launch:
        """Return the launch that rounds an output ``[tokens, columns]`` whose kernel cannot."""
        options: dict[str, Any] = {"columns": columns, "tokens": tokens, "half": self.item_bytes == 2}

        def build(variant: Variant) -> Launch:
            return rounding_launch(self.runtime, out, rounded, **options, variant=variant)

        return self.runtime.variants.first(ROUNDING, self.variants, build)

    def table(self, cache: KvLayer, shape: HeadShape) -> np.int32:
        """Return the argument of a kernel that says where the pages of a session are listed."""
        sizes = shape.kv_heads, shape.head_dim, self.kv_dtype
        page = page_elements(*sizes, shares_values=shape.shares_values)
        cache.memory.require(page * self.kv_dtype.itemsize, "KV cache")
        return np.int32(cache.table)

    def position_bytes(self, shape: HeadShape) -> int:
        """Return the bytes of the cache for one position of a head."""
        return position_bytes(shape.head_dim, self.kv_dtype)

    def scratch(self, size_bytes: int) -> Any:  # noqa: ANN401 - pyopencl is not typed
        """Return memory between two launches; the queue is in order, so all share one for each size."""
        if size_bytes not in self._scratch:
            self._scratch[size_bytes] = self.runtime.scratch(size_bytes)
        return self._scratch[size_bytes]


def _cache_defines(kv_dtype: np.dtype[Any]) -> Defines:
    if kv_dtype == KV_CODES:
        return {"KV_CODES": 1}
    return {"KV_HALF": 1} if _float_bytes(kv_dtype, "The KV cache without scales") == 2 else {}


def _float_bytes(dtype: DTypeLike, what: str) -> int:
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float16):
        raise KernelError(f"{what} must be float32 or float16, not {kind}.")
    return kind.itemsize

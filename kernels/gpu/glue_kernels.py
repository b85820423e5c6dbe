"""The common part of the glue operators' launches: segments of a split output, and the choice of a kernel.

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

from heterollm.base import KernelError
from heterollm.kernels.gpu.cache_layout import KV_CODES
from heterollm.kernels.gpu.codes import NpuCodes
from heterollm.kernels.gpu.memory import DeviceMemory
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.rounding import RoundedInputs
from heterollm.kernels.gpu.variants import Variant, variants_for, whole_eights
from heterollm.kernels.ops import Join

Defines: TypeAlias = dict[str, str | int]
"""Preprocessor definitions of a kernel."""

COMMON_FILES: Final = ("common.h", "rounding.h", "glue.h")
SIMT_ITEMS: Final = 64


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
    """Builds the kernels of the glue operators; subclasses make their launches.

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
        self._runtime = runtime
        self._item_bytes = _float_bytes(activation_dtype, "Activations")
        self._kv_dtype = np.dtype(kv_dtype)
        self._variants = variants_for(is_cpu=runtime.traits.is_cpu, style=style)
        self._defines: dict[str, str | int] = {"ACT_HALF": 1} if self._item_bytes == 2 else {}
        self._kv_defines = _cache_defines(self._kv_dtype)

    def _kernel(
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
                own |= whole_eights(variant, has_half=self._runtime.traits.has_half)
            return self._runtime.kernel((*COMMON_FILES, *named), name, own), style, items

        what = name.replace("_", " ")
        if rounded:
            bits = rounded.grid.bits if isinstance(rounded, NpuCodes) else 0
            what += f" with uint{bits} codes" if bits else " with int8 codes"
        return self._runtime.variants.first(what, variants or self._variants, build, test)


def _cache_defines(kv_dtype: np.dtype[Any]) -> Defines:
    if kv_dtype == KV_CODES:
        return {"KV_CODES": 1}
    return {"KV_HALF": 1} if _float_bytes(kv_dtype, "The KV cache without scales") == 2 else {}


def _float_bytes(dtype: DTypeLike, what: str) -> int:
    kind = np.dtype(dtype)
    if kind not in (np.float32, np.float16):
        raise KernelError(f"{what} must be float32 or float16, not {kind}.")
    return kind.itemsize

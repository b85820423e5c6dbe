"""An NPU backend without some forms of its graphs, to see what those bring."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from heterollm.kernels.npu.protocol import Form, NpuBackend
from heterollm.kernels.ops import Activation, WeightFormat

__all__ = ["FewerForms"]


class FewerForms:
    """Another backend in everything but the forms that it offers, and what its measurements are filed under.

    Args:
        npu: The other.
        left_out: Forms that it does not offer here.
    """

    def __init__(self, npu: NpuBackend, left_out: Collection[str]) -> None:
        self._npu = npu
        self._left_out = frozenset(left_out)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the other has
        return getattr(self._npu, name)

    def forms(
        self, weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
    ) -> tuple[Form, ...]:
        """Return the forms that are left; see :class:`heterollm.kernels.npu.NpuBackend`."""
        found = self._npu.forms(weight, columns=columns, length=length, integer_inputs=integer_inputs)
        return tuple(form for form in found if form not in self._left_out)

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
        """Return the forms of a block that are left; see :class:`heterollm.kernels.npu.NpuBackend`."""
        found = self._npu.block_forms(
            weight,
            width=width,
            columns=columns,
            length=length,
            integer_inputs=integer_inputs,
            activation=activation,
        )
        return tuple(form for form in found if form not in self._left_out)

    def versions(self) -> dict[str, str]:
        """Return what determines times: the other's, and the forms that are left out."""
        return {**self._npu.versions(), "left out": ", ".join(sorted(self._left_out))}

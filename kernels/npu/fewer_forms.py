"""An NPU backend without some of its graph forms, to measure their benefit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from heterollm.kernels.npu.protocol import GraphForm, NpuBackend
from heterollm.kernels.ops import Activation, WeightFormat

__all__ = ["FewerForms"]


class FewerForms:
    """A backend with fewer forms and its own versions; everything else is delegated.

    Args:
        npu: The backend to wrap.
        left_out: Forms to withhold.
    """

    def __init__(self, npu: NpuBackend, left_out: Collection[str]) -> None:
        self._npu = npu
        self._left_out = frozenset(left_out)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of the wrapped backend
        return getattr(self._npu, name)

    def forms(
        self, weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
    ) -> tuple[GraphForm, ...]:
        """Return the remaining forms; see :class:`heterollm.kernels.npu.NpuBackend`."""
        found = self._npu.forms(weight, columns=columns, length=length, integer_inputs=integer_inputs)
        return tuple(form for form in found if form not in self._left_out)

    def ffn_forms(
        self,
        weight: WeightFormat,
        *,
        width: int,
        columns: int,
        length: int,
        integer_inputs: bool,
        activation: Activation,
    ) -> tuple[GraphForm, ...]:
        """Return the remaining ffn forms; see :class:`heterollm.kernels.npu.NpuBackend`."""
        found = self._npu.ffn_forms(
            weight,
            width=width,
            columns=columns,
            length=length,
            integer_inputs=integer_inputs,
            activation=activation,
        )
        return tuple(form for form in found if form not in self._left_out)

    def versions(self) -> dict[str, str]:
        """Return the wrapped backend's versions and the withheld forms."""
        return {**self._npu.versions(), "left out": ", ".join(sorted(self._left_out))}

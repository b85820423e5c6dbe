"""An NPU backend without some of its graph forms, to measure their benefit."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from heterollm.kernels.npu.protocol import GraphForm, NpuBackend
from heterollm.kernels.npu.shapes import GraphShape


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

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the remaining forms; see :class:`heterollm.kernels.npu.NpuBackend`."""
        found = self._npu.forms(shape, length)
        return tuple(form for form in found if form not in self._left_out)

    def versions(self) -> dict[str, str]:
        """Return the wrapped backend's versions and the withheld forms."""
        return {**self._npu.versions(), "left out": ", ".join(sorted(self._left_out))}

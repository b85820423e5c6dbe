"""Kernel variants: a device uses the first equivalent kernel that builds and passes its test.

Drivers have refused valid programs and have computed wrong numbers. Every kernel therefore has variants, from
the best for the type of device to the plainest. Rejected variants are kept as notes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from heterollm.base import KernelError

if TYPE_CHECKING:
    from heterollm.kernels.gpu.parameters import KernelParameters, KernelStyle

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BuildError(KernelError):
    """A program does not build or computes wrong numbers; another variant may work."""


class Variant(NamedTuple):
    """One variant of a kernel.

    Args:
        style: Kernel style.
        plain: Whether it avoids all processor-specific and driver-specific features (``-DPLAIN`` in
            common.h).
        parameters: Tuning parameters of a linear kernel; None for the default.
    """

    style: KernelStyle
    plain: bool = False
    parameters: KernelParameters | None = None

    def __str__(self) -> str:
        if self.parameters is not None:
            return f"{self.parameters}"
        return f"plain {self.style}" if self.plain else self.style

    @property
    def defines(self) -> dict[str, str | int]:
        """Defines of the variant."""
        return {"PLAIN": 1} if self.plain else {}


def variants_for(*, is_cpu: bool, style: KernelStyle | Variant | None = None) -> tuple[Variant, ...]:
    """Return the variants to try, best first; only ``style`` if it is given."""
    if style is not None:
        return (style if isinstance(style, Variant) else Variant(style),)
    styles: tuple[KernelStyle, KernelStyle] = ("vector", "simt") if is_cpu else ("simt", "vector")
    best, other = styles
    return Variant(best), Variant(best, plain=True), Variant(other, plain=True)


def whole_eights(variant: Variant, *, has_half: bool) -> dict[str, str | int]:
    """Return the defines of a kernel for GPUs that reads aligned runs of eight elements (common.h)."""
    defines: dict[str, str | int] = {"WHOLE_EIGHTS": 1}
    if has_half and not variant.plain:
        defines["HAS_HALF"] = 1
    return defines


class VariantRecord:
    """The rejected and the tested variants of one opened device.

    Args:
        device: Name of the device, for the notes.

    Attributes:
        notes: One sentence for each rejected variant, and for other kernels that fail, with the reason.
    """

    def __init__(self, device: str) -> None:
        self.notes: list[str] = []
        self._device = device
        self._broken: dict[tuple[str, Variant], BuildError] = {}
        self._tested: set[tuple[str, Variant]] = set()

    def reject(self, what: str, variant: Variant, error: BuildError) -> None:
        """Record that a variant fails, and log the reason."""
        # The test of a variant comes through here as well, and has logged it already.
        if (what, variant) in self._broken:
            return
        self._broken[what, variant] = error
        reason = error.message.splitlines()[0]
        self.note(f"{self._device} cannot use the {variant} kernel for {what}: {reason}")

    def note(self, text: str) -> None:
        """Keep and log a note."""
        self.notes.append(text)
        logger.warning("%s", text)

    def first(
        self,
        what: str,
        variants: Sequence[Variant],
        build: Callable[[Variant], T],
        test: Callable[[Variant], None] | None = None,
    ) -> T:
        """Return the result of ``build`` for the first variant that works.

        Args:
            what: Name of the kernel; kernels with the same name share the record.
            variants: Variants to try, best first.
            build: Builds a variant; raises :class:`BuildError` if it fails.
            test: Raises :class:`BuildError` if a variant computes wrong numbers; called once per variant.

        Raises:
            BuildError: No variant works; the error is that of the last one.
        """
        failure: BuildError | None = None
        for variant in variants:
            key = what, variant
            failure = self._broken.get(key)
            if failure is not None:
                continue
            try:
                if test is not None and key not in self._tested:
                    test(variant)
                    self._tested.add(key)
                return build(variant)
            except BuildError as error:
                failure = error
                self.reject(what, variant, error)
        assert failure is not None
        raise failure

"""Which of several equivalent kernels a device gets: the first that builds and, if tried, computes rightly.

Drivers have refused programs that others build, and have computed wrongly what others compute rightly. Every
kernel therefore comes in variants, from the one that suits the kind of device best to the plainest, and what
was passed over is kept as a note for people.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from heterollm.base import KernelError

if TYPE_CHECKING:
    from heterollm.kernels.gpu.parameters import KernelParameters, KernelStyle

__all__ = ["BuildError", "KernelStyle", "Variant", "VariantRecord", "variants_for"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class BuildError(KernelError):
    """A program does not build, or what it computes is wrong; another variant may do."""


class Variant(NamedTuple):
    """One way to write a kernel.

    Args:
        style: How the work is divided.
        plain: Whether nothing is used that only some processors or drivers have (``-DPLAIN`` in common.h).
        parameters: How the work of one linear kernel is divided; None for its default.
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
        """What tells the sources."""
        return {"PLAIN": 1} if self.plain else {}


def variants_for(*, is_cpu: bool, style: KernelStyle | Variant | None = None) -> tuple[Variant, ...]:
    """Return the variants to try, best first; only the given one, if there is one."""
    if style is not None:
        return (style if isinstance(style, Variant) else Variant(style),)
    styles: tuple[KernelStyle, KernelStyle] = ("vector", "simt") if is_cpu else ("simt", "vector")
    best, other = styles
    return Variant(best), Variant(best, plain=True), Variant(other, plain=True)


class VariantRecord:
    """What a device was found to build and compute; one for each opened device.

    Args:
        device: Its name, for the notes.

    Attributes:
        notes: What was passed over and why, a sentence each.
    """

    def __init__(self, device: str) -> None:
        self.notes: list[str] = []
        self._device = device
        self._broken: dict[tuple[str, Variant], BuildError] = {}
        self._tested: set[tuple[str, Variant]] = set()

    def reject(self, what: str, variant: Variant, error: BuildError) -> None:
        """Never try a variant of a kernel again, and keep for people why."""
        # The test of a variant asks here for its kernels, and has said so already.
        if (what, variant) in self._broken:
            return
        self._broken[what, variant] = error
        reason = error.message.splitlines()[0]
        self.notes.append(f"{self._device} cannot use the {variant} kernel for {what}: {reason}")
        logger.warning("%s", self.notes[-1])

    def first(
        self,
        what: str,
        variants: Sequence[Variant],
        build: Callable[[Variant], T],
        test: Callable[[Variant], None] | None = None,
    ) -> T:
        """Return what ``build`` makes of the first variant that works.

        Args:
            what: What to call the kernel; equal names share what was found out.
            variants: Best first.
            build: Builds one; raises :class:`BuildError` where it cannot.
            test: Raises :class:`BuildError` where a variant computes wrongly; called once for each.

        Raises:
            BuildError: None is left; the error of the last one.
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
        assert failure is not None  # there is at least one variant
        raise failure

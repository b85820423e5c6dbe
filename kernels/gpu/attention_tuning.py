"""The kernel styles of attention on GPUs, and the choice that a tuning file keeps for a class of passes."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import DTypeLike

from heterollm.kernels.gpu.parameters import KernelStyle

KEY_RUN_BYTES: Final = 64
"""Bytes of every key that a work-group stages at a time in ``attention_simt.cl`` with COALESCED."""


class AttentionClass(Struct, frozen=True, forbid_unknown_fields=True):
    """A class of attention launches that share a kernel style.

    Args:
        head_dim: Elements of a head.
        group: Query heads that share a key head.
        half: Whether the KV cache is float16 rather than float32.
        tokens: One token, or several.
    """

    head_dim: int
    group: int
    half: bool
    tokens: Literal["one", "many"]

    @classmethod
    def of(cls, head_dim: int, group: int, kv_dtype: DTypeLike, tokens: int) -> AttentionClass:
        """Return the class of a launch of ``tokens`` tokens."""
        half = np.dtype(kv_dtype) == np.float16
        return cls(head_dim, group, half, "one" if tokens == 1 else "many")

    def __str__(self) -> str:
        kind = "float16" if self.half else "float32"
        heads = f"heads of {self.head_dim}, groups of {self.group}"
        return f"attention, {heads}, {kind}, {self.tokens} token{'s' * (self.tokens != 'one')}"


class TunedAttention(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a comparison of the styles for a class.

    Args:
        shape: The class.
        style: The style to use.
        simt_us: Median time of the style ``simt`` in microseconds; 0 if it was not measured.
        coalesced_us: That of ``coalesced``, measured in alternation.
        failure: Why ``coalesced`` cannot be used; empty if it can.
    """

    shape: AttentionClass
    style: KernelStyle
    simt_us: Annotated[float, Meta(ge=0, lt=1e12)] = 0.0
    coalesced_us: Annotated[float, Meta(ge=0, lt=1e12)] = 0.0
    failure: Annotated[str, Meta(max_length=4096)] = ""


def suits_coalesced(shape: AttentionClass) -> bool:
    """Return whether the style ``coalesced`` can read the keys of a class."""
    return shape.head_dim * (2 if shape.half else 4) % KEY_RUN_BYTES == 0

"""What a loaded model takes in memory, counted before it is loaded, and what the machine has.

A model that does not fit is refused with the sum: a machine that swaps its weights is slower by orders of
magnitude than one that says no.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil

from heterollm.base import PAGE_BYTES, DeviceError, format_bytes, round_up
from heterollm.kernels.ops import OpSpec
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.model import ModelConfig

__all__ = ["MemoryNeed", "available_bytes", "check_memory", "memory_need", "return_freed_memory"]

USABLE_FRACTION: Final = 0.95
"""Fraction of the memory at hand that a model may take; the rest is for the libraries and the system."""

CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a model takes while it is loaded.

    Args:
        gpu_weights: Packed weights of the GPU part, which holds every row, and the embedding.
        npu_weights: The NPU part's copies of the rows that the plan gives it.
        kv_cache: One session's keys and values.
        slots: What the parts exchange.
    """

    gpu_weights: int
    npu_weights: int
    kv_cache: int
    slots: int

    @property
    def total(self) -> int:
        """All together."""
        return self.gpu_weights + self.npu_weights + self.kv_cache + self.slots

    def __str__(self) -> str:
        named = {
            "weights on the GPU part": self.gpu_weights,
            "copies on the NPU part": self.npu_weights,
            "KV cache": self.kv_cache,
            "activations": self.slots,
        }
        return " + ".join(f"{format_bytes(size)} {name}" for name, size in named.items() if size)


def memory_need(
    config: ModelConfig,
    specs: Sequence[OpSpec],
    plan: Plan,
    context: int,
    slots: Mapping[str, int],
    cache_dtype: np.dtype[Any],
) -> MemoryNeed:
    """Count the bytes of a model under a plan.

    Args:
        config: The model.
        specs: Its groups.
        plan: Says which rows the NPU part holds too.
        context: Positions of a session.
        slots: Bytes of each slot.
        cache_dtype: Element type of the KV cache.
    """
    head = next(spec for spec in specs if spec.group == "head")
    # The embedding is packed like the head, and is the head where they are tied.
    embedding = 0 if config.tie_word_embeddings else head.weight_bytes()
    one_head = round_up(context * config.head_dim * cache_dtype.itemsize, PAGE_BYTES)
    return MemoryNeed(
        gpu_weights=sum(spec.weight_bytes() for spec in specs) + embedding,
        npu_weights=plan.npu_bytes(specs, copies_by_length=False),
        kv_cache=config.layers * 2 * config.kv_heads * one_head,
        slots=sum(slots.values()),
    )


def check_memory(need: MemoryNeed, available: int | None = None) -> None:
    """Refuse a model that the machine cannot hold.

    Args:
        need: What it takes.
        available: Bytes that are free; default what the system says. Nothing is refused where it is silent.

    Raises:
        DeviceError: The model takes more; the message has the sum.
    """
    free = available_bytes() if available is None else available
    if free is not None and need.total > USABLE_FRACTION * free:
        raise DeviceError(
            f"The model takes {format_bytes(need.total)} of memory ({need}), "
            f"and {format_bytes(free)} are available.",
            fix="Use a smaller context, a plan level with fewer copies (gpu), a smaller model, "
            "or close other programs.",
        )


def return_freed_memory() -> None:
    """Give memory that was freed back to the system, where the C library would keep it for later."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:
            return  # only glibc keeps so much, and only it has the function


def available_bytes() -> int | None:
    """Return the memory that this process can take without swapping; None where the system does not say."""
    try:
        available = psutil.virtual_memory().available
    except (OSError, psutil.Error):
        return None
    limit = _cgroup_available()
    return available if limit is None else min(available, limit)


def _cgroup_available() -> int | None:
    """Return what a container's limit leaves; its page cache counts as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(counts["inactive_file"]) + int(counts["active_file"])
    except (OSError, KeyError, ValueError):
        # No such limit: the root group has no file, an unlimited one says "max".
        return None

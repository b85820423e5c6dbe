"""Compares the memory that a model needs with the available memory before loading.

A model that does not fit is refused: swapping weights would be slower by orders of magnitude.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil

from heterollm.base import DeviceError, format_bytes
from heterollm.kernels.npu import graph_memory
from heterollm.kernels.ops import OpSpec
from heterollm.model import expert_specs
from heterollm.solver import Plan

if TYPE_CHECKING:
    from heterollm.kernels.npu import NpuBackend
    from heterollm.model import ModelConfig

USABLE_FRACTION: Final = 0.95
"""Fraction of the available memory that a model may take; the rest is for libraries and the system."""

NO_VALUES: Final[Mapping[str, Any]] = MappingProxyType({})

CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a loaded model needs.

    Args:
        gpu_weights: Packed weights of the GPU, which holds every row, and the embedding.
        npu_graphs: The NPU's graphs: copies of its shards, and inputs and outputs of their own.
        kv_cache: State of one session: keys and values, and recurrent state.
        slots: Buffers that the processors exchange.
        techniques: Memory of techniques, by words for it.
        draft: All of a draft model.
    """

    gpu_weights: int
    npu_graphs: int
    kv_cache: int
    slots: int
    techniques: Mapping[str, int] = field(default_factory=dict)
    draft: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        own = self.gpu_weights + self.npu_graphs + self.kv_cache
        return own + self.slots + sum(self.techniques.values()) + self.draft

    def __str__(self) -> str:
        named = {
            "weights on the GPU": self.gpu_weights,
            "graphs on the NPU": self.npu_graphs,
            "KV cache": self.kv_cache,
            "activations": self.slots,
            **self.techniques,
            "draft model": self.draft,
        }
        return " + ".join(f"{format_bytes(size)} {name}" for name, size in named.items() if size)


def memory_need(
    config: ModelConfig,
    specs: Sequence[OpSpec],
    plan: Plan,
    context: int,
    slots: Mapping[str, int],
    cache_dtype: np.dtype[Any],
    npu: NpuBackend | None = None,
    *,
    given: Mapping[str, Any] = NO_VALUES,
    item_bytes: int = 4,
    experts_bytes: int | None = None,
) -> MemoryNeed:
    """Return the bytes that a model needs.

    Args:
        config: The model.
        specs: Every group of it.
        plan: The plan.
        context: Positions of a session.
        slots: Bytes of the buffers that the processors exchange.
        cache_dtype: Element type of the KV cache.
        npu: The NPU, whose open graphs never take more than it can address; None counts each slice once.
        given: Calibrated values by technique: ``shadow`` has the channels of operators whose float weights
            stay in memory.
        item_bytes: Size of such a weight.
        experts_bytes: Memory budget of the experts on the GPU; None for all of them.
    """
    # A late import: without an OpenCL binding, opening the device has raised the error that says so.
    from heterollm.engine.slots import TECHNIQUES
    from heterollm.engine.techniques.slots import EngineSizes

    of = EngineSizes(config, specs, plan, item_bytes, context)
    head = next(spec for spec in specs if spec.group == "head")
    # The embedding, and the linear of layers' embeddings, are packed like the head; a tied one is the head.
    embedding = 0 if config.tie_word_embeddings else head.weight_bytes()
    if config.layer_vocabulary:
        embedding += head.weight.weight_bytes(config.layer_input_columns, config.hidden_size)
    experts = expert_specs(config, specs)
    graphs = plan.npu_bytes((*specs, *experts), graph_memory(npu))
    if npu is not None and npu.io_by_graph:
        graphs += sum(one.graph_bytes(of) for one in TECHNIQUES)
    if npu is not None and npu.addressable_bytes is not None:
        graphs = min(graphs, npu.addressable_bytes)
    if experts_bytes is None:
        experts_bytes = sum(spec.weight_bytes() for spec in experts)
    return MemoryNeed(
        gpu_weights=sum(spec.weight_bytes() for spec in specs) + embedding + experts_bytes,
        npu_graphs=graphs,
        kv_cache=config.state_bytes(context, plan.longest_flight, cache_dtype),
        slots=sum(size for slot, size in slots.items() if not any(slot in one.APART for one in TECHNIQUES)),
        techniques={
            title: size for one in TECHNIQUES for title, size in one.memory(of, slots, given).items()
        },
    )


def check_memory(need: MemoryNeed, available: int | None = None) -> None:
    """Refuse a model that the machine cannot hold.

    Args:
        need: The bytes that the model needs.
        available: Available bytes; by default the system's, and no check if the system does not report them.

    Raises:
        DeviceError: The model needs more; the message has the sum.
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
    """Return freed memory to the system, which the C library would keep."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except AttributeError:
            return  # only glibc keeps much, and only glibc has the function


def available_bytes() -> int | None:
    """Return the memory that this process can take without swapping; None if the system has no figure."""
    try:
        available = psutil.virtual_memory().available
    except (OSError, psutil.Error):
        return None
    limit = _cgroup_available()
    return available if limit is None else min(available, limit)


def _cgroup_available() -> int | None:
    """Return the bytes that a container's limit leaves; its page cache counts as free."""
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return limit - used + int(counts["inactive_file"]) + int(counts["active_file"])
    except (OSError, KeyError, ValueError):
        # No limit: the root group has no such file, and an unlimited group's file reads "max".
        return None

"""The state of a server for its page: the plan's shares, and the work of the last moment."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Final

from heterollm.trace import summarise_phases

if TYPE_CHECKING:
    from heterollm.engine import Step
    from heterollm.kernels.ops import Phase
    from heterollm.llm import LLM

SHARE_TOKENS: Final = 256
"""Tokens of the prompt whose shares the page shows, or the plan's chunk length if that is less."""

FRESH_S: Final = 0.5
"""Age at which the figures of the last moment are taken again."""


@dataclass(slots=True)
class Activity:
    """Work of the engine since the server's start.

    Args:
        prefill_s: Time of prompts.
        decode_s: Time of tokens, and of choosing them.
        prefill_tokens: Tokens of prompts.
        decode_tokens: Tokens of answers.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Status:
    """Reads the figures of the page.

    Args:
        llm: The model.
        activity: Its work so far.
        live: Whether the model records a trace.
    """

    def __init__(self, llm: LLM, activity: Activity, *, live: bool) -> None:
        self._llm = llm
        self._activity = activity
        self._live = live
        self._lock = threading.Lock()
        self._before = (time.monotonic(), llm.device.now_s(), astuple(activity))
        self._recent: dict[str, Any] = {"seconds": 0.0, "engine": None, "processors": None}
        tokens = min(SHARE_TOKENS, llm.plan.chunk_length, llm.context)
        self._fixed = {
            "device": llm.device.name,
            "time_kind": llm.device.time_kind,
            "plan": llm.plan.level,
            "precision": llm.plan.precision,
            "context": llm.context,
            "shares": {"prefill": _shares(llm, "prefill", tokens), "decode": _shares(llm, "decode", 1)},
        }

    def read(self) -> dict[str, Any]:
        """Return the figures; waits for the engine thread if the model records a trace."""
        with self._lock:
            if time.monotonic() - self._before[0] > FRESH_S:
                self._take()
            return {**self._fixed, "recent": self._recent, "failures": self._llm.failures}

    def _take(self) -> None:
        wall_s, device_s, counts = self._before
        self._before = (time.monotonic(), self._llm.device.now_s(), astuple(self._activity))
        # A modelled device has a clock of its own, which stands still while nothing runs.
        real = self._llm.device.time_kind == "real"
        seconds = self._before[0] - wall_s if real else self._before[1] - device_s
        prefill_s, decode_s, *tokens = (now - then for now, then in zip(self._before[2], counts, strict=True))
        engine = {"prefill": _of(prefill_s, seconds), "decode": _of(decode_s, seconds)}
        names = ("prefill_tokens", "decode_tokens")
        self._recent = {
            "seconds": round(seconds, 3),
            "engine": {**engine, **dict(zip(names, tokens, strict=True))},
            "processors": self._processors() if self._live else None,
        }

    def _processors(self) -> dict[str, Any]:
        """Return the busy shares of both processors in the passes of each phase since the last call."""
        return {
            phase: {
                "gpu": _of(summary.gpu_busy_us, summary.passes_us),
                "npu": _of(summary.npu_busy_us, summary.passes_us),
                "both": _of(summary.overlap_us, summary.passes_us),
                "passes": summary.passes,
            }
            for phase, summary in summarise_phases(self._llm.take_trace()).items()
        }


def _of(part: float, whole: float) -> float:
    return round(min(1.0, part / whole), 4) if whole > 0 else 0.0


def _shares(llm: LLM, phase: Phase, tokens: int) -> dict[str, Any]:
    """Return the NPU's share of the operations of linear layers, in all and by layer; the head is last."""
    flops: dict[str, dict[str, int]] = defaultdict(lambda: {"gpu": 0, "npu": 0})
    for step in _single(llm.steps(phase, tokens)):
        if step.work is not None and step.processor != "host":
            flops["head" if step.layer is None else str(step.layer)][step.processor] += step.work.flops
    gpu, npu = (sum(own[processor] for own in flops.values()) for processor in ("gpu", "npu"))
    layers = [
        {"layer": layer, "npu": _of(own["npu"], own["gpu"] + own["npu"])} for layer, own in flops.items()
    ]
    return {"tokens": tokens, "npu": _of(npu, gpu + npu), "layers": layers}


def _single(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield steps, and in place of a merged one those that it consists of."""
    for step in steps:
        yield from step.merged or (step,)

"""Bases of other engines: the account of a sample, and the test of an engine that holds one sequence."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import FoundFields, Ids
from heterollm.benchmarks.work import Work

UNKNOWN: Final = ("gpu_share", "padded_tokens", "predicted_ms", "ceilings")
REASON: Final = "Another engine; the profile is of heterollm's parts."


class ForeignEngine(ABC):
    """An engine of which only speed and answers are known."""

    modelled_j: float | None = None

    @abstractmethod
    def work(self, case: Case) -> Work:
        """Return what a sample computes and reads."""

    def account(self, case: Case) -> FoundFields:
        """Return what a sample does; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        work = self.work(case)
        reasons = dict.fromkeys(UNKNOWN, REASON)
        return {"read_bytes": work.read_bytes, "flops": work.flops, "reasons": reasons}

    def trace(
        self,
        case: Case,  # noqa: ARG002 - the protocol's
        ids: Ids,  # noqa: ARG002
        file: Path | None = None,  # noqa: ARG002
    ) -> FoundFields:
        """Return nothing, as others are not traced."""
        return {}


class SteppedEngine(ForeignEngine):
    """An engine that holds one sequence, to which tokens are appended; empty at first."""

    _seen = 0

    @abstractmethod
    def append(self, ids: Ids) -> NDArray[np.float32]:
        """Append tokens in one pass, and return the logits of the last."""

    @abstractmethod
    def cut(self, position: int) -> None:
        """Forget all tokens from a position on."""

    def sample_us(self, case: Case, ids: Ids) -> float:
        """Run a test once; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        self._truncate(case.n_depth)
        if self._seen < case.n_depth:
            self._feed(ids[self._seen : case.n_depth])
        begin = case.n_depth + case.n_prompt
        prompt, tokens = ids[case.n_depth : begin], ids[begin : case.end]
        before_ns = time.perf_counter_ns()
        if len(prompt):
            self._feed(prompt)
        for index in range(len(tokens)):
            self._feed(tokens[index : index + 1])
        taken_us = (time.perf_counter_ns() - before_ns) / 1e3
        self._truncate(case.n_depth)
        return taken_us

    def logits(self, ids: Ids, decoded: int) -> NDArray[np.float32]:
        """Return logits; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        self._truncate(0)
        first = len(ids) - decoded
        rows = [self._feed(ids[:first])]
        rows += [self._feed(ids[index : index + 1]) for index in range(first, len(ids))]
        self._truncate(0)
        return np.stack(rows)

    def _feed(self, ids: Ids) -> NDArray[np.float32]:
        logits = self.append(ids)
        self._seen += len(ids)
        return logits

    def _truncate(self, position: int) -> None:
        if position < self._seen:
            self.cut(position)
            self._seen = position

"""The loaded models of a bench, each in its own process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.children import Child, ChildDiedError
from heterollm.benchmarks.engine import Facts, FoundFields, Ids, Job


class WorkerPool:
    """One process for each loaded configuration.

    Models stay loaded. Before the pool loads another, it closes all of them if one more of the largest size
    so far would exceed the limit; the next use of a closed model loads it again.

    Args:
        start: Makes the process of a configuration.
        model: Folder of the checkpoint.
        ids: The token at every position of a session.
        memory_bytes: Limit for all models together.
        profile: A profile's file, in place of that of the device; the baseline on all cores has none.

    Attributes:
        facts: The engine's facts of each configuration.
        need_bytes: Memory of each configuration's model.
        in_turns: Whether the models did not fit into the limit.
    """

    def __init__(
        self,
        start: Callable[[Configuration], Child],
        model: Path,
        ids: Ids,
        memory_bytes: int,
        profile: Path | None = None,
    ) -> None:
        self._profile = profile
        self._start = start
        self._model = model
        self._ids = ids
        self.memory_bytes = memory_bytes
        self._workers: dict[Configuration, Child] = {}
        self._begun: dict[Configuration, Child] = {}
        self.facts: dict[Configuration, Facts] = {}
        self.need_bytes: dict[Configuration, int] = {}
        self.in_turns = False

    def begin(self, configuration: Configuration) -> None:
        """Start the process of a model that is loaded soon: it imports its libraries meanwhile."""
        if configuration not in self._begun and configuration not in self._workers:
            self._begun[configuration] = self._start(configuration)

    def use(self, configuration: Configuration) -> bool:
        """Load a model unless it is loaded; return whether it was.

        Raises:
            ChildDiedError: Its process ended.
            HeteroLLMError: The model cannot be loaded.
        """
        if configuration in self._workers:
            return True
        self.in_turns |= self._make_room()
        job = self._job(configuration)
        self.begin(configuration)
        worker = self._begun.pop(configuration)
        try:
            self.facts[configuration], need = worker.ask("load", job, self._ids)
        except BaseException:
            worker.close()
            raise
        self._workers[configuration] = worker
        self.need_bytes[configuration] = max(need, self.need_bytes.get(configuration, 0))
        return False

    def _job(self, configuration: Configuration, *, trace: bool = False) -> Job:
        profile = None if configuration.baseline else self._profile
        return Job(self._model, configuration, len(self._ids), trace, profile)

    def ask(self, configuration: Configuration, method: str, *arguments: object) -> Any:  # noqa: ANN401
        """Call a method in the process of a loaded model.

        Raises:
            ChildDiedError: The process ended.
            HeteroLLMError: The request failed.
        """
        try:
            return self._workers[configuration].ask(method, *arguments)
        except ChildDiedError:
            del self._workers[configuration]
            raise

    def trace(
        self, configuration: Configuration, cases: Sequence[Case], files: Sequence[Path | None]
    ) -> list[FoundFields]:
        """Load one more model with tracing, and return fields of traced runs.

        Args:
            configuration: Its configuration.
            cases: The tests.
            files: File for the trace of each test, if any.

        Raises:
            ChildDiedError: Its process ended.
            HeteroLLMError: The model cannot be loaded.
        """
        self._make_room()
        job = self._job(configuration, trace=True)
        found: list[FoundFields]
        if configuration in self._workers:
            found = self.ask(configuration, "trace", job, self._ids, cases, files)
        else:
            with contextlib.closing(self._start(configuration)) as worker:
                found = worker.ask("trace", job, self._ids, cases, files)
        return found

    def close(self) -> None:
        """End all processes."""
        for held in (self._workers, self._begun):
            while held:
                held.popitem()[1].close()

    def _make_room(self) -> bool:
        """Close all models if one more would not fit; return whether they were closed."""
        held = sum(self.need_bytes[one] for one in self._workers)
        full = bool(self._workers) and held + max(self.need_bytes.values()) > self.memory_bytes
        if full:
            self.close()
        return full

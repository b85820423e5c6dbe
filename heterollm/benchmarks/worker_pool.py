"""The loaded models of a bench, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.children import ChildDiedError, Worker
from heterollm.benchmarks.engine import Facts, FoundFields, Ids, Job

__all__ = ["Loading", "WorkerPool"]


@dataclass(frozen=True, slots=True)
class Loading:
    """How models are loaded.

    Args:
        model: Folder of the checkpoint.
        ids: The token at every position of a session.
        memory_bytes: Limit of all models together.
    """

    model: Path
    ids: Ids
    memory_bytes: int


class WorkerPool:
    """One process for each loaded configuration.

    Models stay loaded. Before the pool loads another, it closes all of them if one more, as large as the
    largest so far, would not fit into the limit; a closed model is loaded again when it is used again.

    Args:
        start: Makes the process of a configuration.
        loading: How models are loaded.

    Attributes:
        facts: The engine's facts of each configuration.
        need_bytes: Memory of each configuration's model.
        in_turns: Whether models did not fit together.
    """

    def __init__(self, start: Callable[[Configuration], Worker], loading: Loading) -> None:
        self._start = start
        self._loading = loading
        self._workers: dict[Configuration, Worker] = {}
        self.facts: dict[Configuration, Facts] = {}
        self.need_bytes: dict[Configuration, int] = {}
        self.in_turns = False

    def use(self, configuration: Configuration) -> bool:
        """Load a model unless it is loaded already; return whether it was.

        Raises:
            ChildDiedError: Its process ended.
            HeteroLLMError: It cannot be loaded.
        """
        if configuration in self._workers:
            return True
        self.in_turns |= self._make_room()
        worker, facts, need = self._load(configuration, trace=False)
        self._workers[configuration] = worker
        self.facts[configuration] = facts
        self.need_bytes[configuration] = max(need, self.need_bytes.get(configuration, 0))
        return False

    def ask(self, configuration: Configuration, method: str, *arguments: object) -> Any:  # noqa: ANN401
        """Ask the process of a loaded model.

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
        """Return fields of traced runs, from a model that is loaded for them alone.

        Args:
            configuration: Its configuration.
            cases: The tests.
            files: Where to write the trace of each, if anywhere.

        Raises:
            ChildDiedError: Its process ended.
            HeteroLLMError: It cannot be loaded.
        """
        self._make_room()
        worker, _, _ = self._load(configuration, trace=True)
        try:
            found: list[FoundFields] = worker.ask("trace", cases, files)
        finally:
            worker.close()
        return found

    def close(self) -> None:
        """End all processes."""
        while self._workers:
            self._workers.popitem()[1].close()

    def _load(self, configuration: Configuration, *, trace: bool) -> tuple[Worker, Facts, int]:
        worker = self._start(configuration)
        job = Job(self._loading.model, configuration, len(self._loading.ids), trace)
        try:
            facts, need = worker.ask("load", job, self._loading.ids)
        except BaseException:
            worker.close()
            raise
        return worker, facts, need

    def _make_room(self) -> bool:
        """Close all models if one more would not fit; return whether that was so."""
        held = sum(self.need_bytes[one] for one in self._workers)
        full = bool(self._workers) and held + max(self.need_bytes.values()) > self._loading.memory_bytes
        if full:
            self.close()
        return full

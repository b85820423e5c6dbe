"""The processes of a bench, and which models they hold: as many as fit into memory, loaded again in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from heterollm.base import HeteroLLMError
from heterollm.benchmarks.cases import Case, Configuration, Threads
from heterollm.benchmarks.children import ChildDiedError, Worker
from heterollm.benchmarks.engine import Facts, FoundFields

__all__ = ["Crew", "Loading", "Process"]

Process: TypeAlias = tuple[str, Threads | None]

FIRST_GUESS: Final = {"w4a16": 1.0, "w4a8": 1.0, "fp16": 2.5}
"""Memory of a model by the size of its checkpoint, before one was loaded: two copies and a KV cache of 4-bit
weights take about what the 16-bit checkpoint does; ``host`` holds unquantised weights as 32 bits."""

FLOAT_GUESS: Final = 4.0
"""The same of an engine that writes all weights out in float32, and holds them twice for a moment."""


@dataclass(frozen=True, slots=True)
class Loading:
    """How models are loaded.

    Args:
        model: Folder of the checkpoint.
        checkpoint_bytes: Its size, by which the first model's memory is guessed.
        context: Positions of a session.
        seed: Of the token ids.
        vocabulary: Token ids are below this.
        memory_bytes: What all models may take together.
    """

    model: Path
    checkpoint_bytes: int
    context: int
    seed: int
    vocabulary: int
    memory_bytes: int


class Crew:
    """The processes; each serves the configurations of one engine and one split of the cores.

    Args:
        start: Makes the process of a key.
        loading: How models are loaded.

    Attributes:
        facts: What each configuration's engine said of itself when it was loaded.
        need_bytes: What each takes, once known.
    """

    def __init__(self, start: Callable[[Process], Worker], loading: Loading) -> None:
        self._start = start
        self._loading = loading
        self._workers: dict[Process, Worker] = {}
        self._names: dict[Configuration, str] = {}
        # The least recently used comes first.
        self._resident: dict[Configuration, None] = {}
        self._held: dict[Process, int] = {}
        self.facts: dict[Configuration, Facts] = {}
        self.need_bytes: dict[Configuration, int] = {}

    @property
    def processes(self) -> int:
        """How many processes there are."""
        return len(self._workers)

    def is_resident(self, configuration: Configuration) -> bool:
        """Whether a configuration's model is loaded."""
        return configuration in self._resident

    def use(self, configuration: Configuration) -> bool:
        """Make sure that a model is loaded, and unload what there is no room for; return whether it was.

        Raises:
            ChildDiedError: Its process ended; every model that it held is gone.
            HeteroLLMError: It cannot be loaded.
        """
        if configuration in self._resident:
            self._resident[configuration] = self._resident.pop(configuration)
            return True
        self._make_room(self._guess(configuration))
        answer = self._ask(configuration, {"do": "load", **self._how(configuration)})
        facts = answer["facts"]
        self.facts[configuration] = Facts(**{**facts, "notes": tuple(facts["notes"])})
        self._resident[configuration] = None
        self._note_memory(configuration, answer["private_bytes"])
        return False

    def ask(self, configuration: Configuration, do: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Ask the process of a loaded configuration.

        Raises:
            ChildDiedError: The process ended; every model that it held is gone.
            HeteroLLMError: The request failed.
        """
        return self._ask(configuration, {"do": do, **arguments})

    def trace(
        self, configuration: Configuration, cases: Sequence[Case], files: Sequence[Path | None]
    ) -> list[FoundFields]:
        """Return what traces of some tests show, from a model that is loaded for them alone.

        Args:
            configuration: How they run.
            cases: The tests.
            files: Where the trace of each is written, if it is.

        Raises:
            ChildDiedError: The process ended; every model that it held is gone.
            HeteroLLMError: It cannot be loaded.
        """
        self._make_room(self._guess(configuration))
        request = {
            "do": "trace",
            "cases": [asdict(case) for case in cases],
            "files": [None if file is None else str(file) for file in files],
            **self._how(configuration),
        }
        found: list[FoundFields] = self._ask(configuration, request)["fields"]
        return found

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._resident.clear()
        self._held.clear()

    def _how(self, configuration: Configuration) -> dict[str, Any]:
        loading = self._loading
        return {
            "configuration": configuration.to_dict(),
            "model": str(loading.model),
            "context": loading.context,
            "seed": loading.seed,
            "vocabulary": loading.vocabulary,
        }

    def _ask(self, configuration: Configuration, request: dict[str, Any]) -> dict[str, Any]:
        process = configuration.process
        if process not in self._workers:
            self._workers[process] = self._start(process)
        name = self._names.setdefault(configuration, f"model {len(self._names)}")
        try:
            return self._workers[process].ask({**request, "name": name})
        except ChildDiedError:
            self._forget(process)
            raise

    def _forget(self, process: Process) -> None:
        del self._workers[process]
        self._held.pop(process, None)
        for other in [one for one in self._resident if one.process == process]:
            del self._resident[other]

    def _guess(self, configuration: Configuration) -> int:
        known = self.need_bytes.get(configuration)
        if known is not None:
            return known
        kind = configuration.engine, configuration.precision
        alike = [need for other, need in self.need_bytes.items() if (other.engine, other.precision) == kind]
        factor = (
            FLOAT_GUESS if configuration.engine == "transformers" else FIRST_GUESS[configuration.precision]
        )
        return max(alike, default=int(factor * self._loading.checkpoint_bytes))

    def _make_room(self, need: int) -> None:
        for other in list(self._resident):
            if sum(map(self._guess, self._resident)) + need <= self._loading.memory_bytes:
                return
            try:
                answer = self._ask(other, {"do": "unload"})
            except HeteroLLMError:
                continue  # it is gone with its process
            del self._resident[other]
            self._held[other.process] = answer["private_bytes"]

    def _note_memory(self, configuration: Configuration, private_bytes: int) -> None:
        """File what a model takes beyond what its process held before; compiled passes come on top."""
        before = self._held.get(configuration.process, 0)
        need = max(0, private_bytes - before)
        self.need_bytes[configuration] = max(need, self.need_bytes.get(configuration, 0))
        self._held[configuration.process] = private_bytes

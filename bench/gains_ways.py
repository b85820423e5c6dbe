"""What bench_gains.py does in processes of their own: samples in one of the ways, and tuning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heterollm.benchmarks.cases import Case, Configuration, Threads
from heterollm.benchmarks.children import environment

if TYPE_CHECKING:
    from heterollm.planning import Planner

ON: Final = "on"
APART, DEFAULTS, ENTRIES, FILE = "launches apart", "default parameters", "entries", "file"
GAINS: Final = {
    APART: "merged launches",
    DEFAULTS: "kernel tuning",
    ENTRIES: "re-solved lengths",
    FILE: "re-solved lengths and the profile's waits",
}
"""What each way lacks that ``on`` has."""

CONTEXT: Final = 1024
SEED: Final = 0


def serve(way: str) -> None:
    """Answer requests as the children of ``heterollm bench`` do, in one of the ways."""
    import heterollm.benchmarks.child
    import heterollm.llm
    from heterollm.kernels.opencl_runtime import OpenClRuntime
    from heterollm.kernels.tuning import IGNORE_VARIABLE

    if way == APART:
        OpenClRuntime.merges_launches = property(lambda _runtime: False)  # type: ignore[assignment,method-assign]
    elif way == DEFAULTS:
        os.environ[IGNORE_VARIABLE] = "off"
    elif way == ENTRIES:
        start = heterollm.llm.start_engine

        def with_entries(*given: Any, placements: Planner, **options: Any) -> Any:  # noqa: ANN401, ARG001
            return start(*given, **options)

        heterollm.llm.start_engine = with_entries
    sys.argv[1:] = []
    heterollm.benchmarks.child.main()


def tune_here(threads: Threads, budget_s: float) -> dict[str, Any]:
    """Tune the kernels of both precisions anew for this process's split, and return the report."""
    from heterollm.kernels.device import open_device
    from heterollm.profiler.tuning import default_jobs, tune

    gpu = open_device("host", gpu_threads=threads[0], npu_threads=threads[1]).gpu
    gpu.tuning.identity.path.unlink(missing_ok=True)
    return tune(gpu, default_jobs(half=False), budget_s=budget_s).to_dict()


def output_of(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that a process with a split of its own prints."""
    command = [sys.executable, *arguments]
    done = subprocess.run(  # noqa: S603 - our own interpreter
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment()
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def tuned(threads: Threads, budget_s: float) -> dict[str, Any]:
    """Tune the kernels of a split in a process of its own, and return the report."""
    return output_of([__file__, "tune", *map(str, threads), str(budget_s)])


class Process:
    """A process that holds models and takes samples in one of the ways."""

    def __init__(self, way: str) -> None:
        command = [sys.executable, __file__, "serve", way]
        self._child = subprocess.Popen(  # noqa: S603 - this script
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self._loaded: dict[str, dict[str, Any]] = {}

    def load(self, folder: Path, how: Configuration, vocabulary: int) -> tuple[str, dict[str, Any]]:
        """Load a model, if it is not, and return its name here and the device's description."""
        name = f"{folder} {how.label}"
        if name not in self._loaded:
            sizes = {"context": CONTEXT, "seed": SEED, "vocabulary": vocabulary}
            answer = self._ask(do="load", name=name, configuration=how.to_dict(), model=str(folder), **sizes)
            self._loaded[name] = answer["facts"]["description"]
        return name, self._loaded[name]

    def sample(self, name: str, case: Case) -> dict[str, Any]:
        """Take a sample with a model that is loaded."""
        sizes = {"n_prompt": case.n_prompt, "n_gen": case.n_gen, "n_depth": case.n_depth}
        return self._ask(do="sample", name=name, case=sizes)

    def close(self) -> None:
        """End it."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()

    def _ask(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401 - any request of the child
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        answer: dict[str, Any] = json.loads(self._child.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


if __name__ == "__main__":
    what, *given = sys.argv[1:]
    if what == "serve":
        serve(*given)
    else:
        print(json.dumps(tune_here((int(given[0]), int(given[1])), float(given[2]))))

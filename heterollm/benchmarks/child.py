"""A process that holds models and runs tests on request: one JSON line in, one out, until its input ends.

Started by :mod:`heterollm.benchmarks.children` as ``python -m heterollm.benchmarks.child``. With arguments it
runs that command of heterollm instead. Either way it ends with its parent, however that ends: an input that
ends while something is computed means that nobody waits for the result any more.
"""

from __future__ import annotations

import _thread
import base64
import json
import os
import queue
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np

from heterollm.base import HeteroLLMError, private_stdout, quiet_libraries
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.engine import BenchEngine, FoundFields, Ids, Job
from heterollm.benchmarks.engines import open_engine

__all__ = ["Requests", "decode_floats", "encode_floats", "main", "private_bytes", "random_ids", "serve"]

STATUS = Path("/proc/self/status")
PRIVATE = ("RssAnon", "RssShmem")
"""Memory that only swapping could take back; files that are mapped can be dropped at any time."""

READ_BYTES: Final = 1 << 16
ABANDONED: Final = 1
"""Exit code of a process whose parent is gone."""
GRACE_S: Final = 5.0
"""A profile keeps what it measured in that time."""


def random_ids(seed: int, vocabulary: int, count: int) -> Ids:
    """Return the token of every position: the same ones for every engine and every test of a run."""
    return np.random.default_rng(seed).integers(0, vocabulary, count).astype(np.int32)


def encode_floats(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return an array in a form that JSON can hold, to the last bit of a float32."""
    data = np.ascontiguousarray(values, np.float32)
    return {"shape": list(data.shape), "float32": base64.b64encode(data.tobytes()).decode("ascii")}


def decode_floats(value: dict[str, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what :func:`encode_floats` was given."""
    raw = base64.b64decode(value["float32"], validate=True)
    return np.frombuffer(raw, np.float32).reshape(value["shape"])


def private_bytes() -> int:
    """Return the memory that this process holds for itself; 0 where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
        return sum(int(lines[name].split()[0]) * 1024 for name in PRIVATE)
    except (OSError, KeyError, ValueError, IndexError):
        return 0


class _Models:
    """The models that are loaded, by the names that the parent gave them."""

    def __init__(self) -> None:
        self._engines: dict[str, BenchEngine] = {}
        self._ids: dict[str, Ids] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request["name"]
        match request["do"]:
            case "load":
                return self._load(name, request)
            case "unload":
                self._ids.pop(name, None)
                engine = self._engines.pop(name, None)
                if engine is not None:
                    engine.close()
                return {"private_bytes": private_bytes()}
            case "sample":
                case_ = Case(**request["case"])
                time_us = self._engines[name].sample_us(case_, self._ids[name])
                return {"us": time_us, "modelled_j": self._engines[name].modelled_j}
            case "logits":
                count, decoded = request["prompt"] + request["decoded"], request["decoded"]
                return {"logits": encode_floats(self._engines[name].logits(self._ids[name][:count], decoded))}
            case "trace":
                return {"fields": self._trace(request)}
            case "account":
                return {"fields": self._engines[name].account(Case(**request["case"]))}
        raise ValueError(f"there is no request {request['do']!r}")

    def _trace(self, request: dict[str, Any]) -> list[FoundFields]:
        """Load a model beside the others to be traced, run tests with it, and free it."""
        engine = open_engine(self._job(request, trace=True))
        ids = random_ids(request["seed"], request["vocabulary"], request["context"])
        try:
            found = []
            for case, file in zip(request["cases"], request["files"], strict=True):
                found.append(engine.trace(Case(**case), ids, None if file is None else Path(file)))
            return found
        finally:
            engine.close()

    def _job(self, request: dict[str, Any], *, trace: bool = False) -> Job:
        configuration = Configuration.from_dict(request["configuration"])
        return Job(Path(request["model"]), configuration, request["context"], trace)

    def _load(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        engine = open_engine(self._job(request))
        self._engines[name] = engine
        self._ids[name] = random_ids(request["seed"], request["vocabulary"], request["context"])
        return {"facts": asdict(engine.facts), "private_bytes": private_bytes()}

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()
        self._engines.clear()


class Requests(Iterable[str]):
    """The lines of a file descriptor, read on a thread of its own, which ends the process when nobody waits.

    When the input ends while a line is being worked on, the process is ended at once: whoever wrote it is
    gone, or wants no answer. When it ends in between, so do the lines.

    Args:
        descriptor: Where lines come from.
        busy: Whether something is being worked on from the beginning, so that any end of the input ends the
            process.
        grace_s: How long it may take to end as by Ctrl-C before it is ended.
    """

    def __init__(self, descriptor: int, *, busy: bool = False, grace_s: float = 0.0) -> None:
        self._descriptor = descriptor
        self._grace_s = grace_s
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Lines that were read and not yet answered.
        self._open = 1 if busy else 0
        threading.Thread(target=self._read, name="heterollm-requests", daemon=True).start()

    def __iter__(self) -> Iterator[str]:
        while (line := self._lines.get()) is not None:
            yield line
            with self._lock:
                self._open -= 1

    def _read(self) -> None:
        # Not through sys.stdin: its lock would be held by this thread when the interpreter ends.
        rest = b""
        while data := os.read(self._descriptor, READ_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            with self._lock:
                self._open += len(whole)
            for line in whole:
                self._lines.put(line.decode("utf-8"))
        with self._lock:
            if not self._open:
                self._lines.put(None)
                return
            if self._grace_s:
                _thread.interrupt_main()
                time.sleep(self._grace_s)
            os._exit(ABANDONED)


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Answer requests until there are no more.

    What goes wrong on purpose is answered with ``error`` and ``fix``; anything else ends the process, which
    the parent notes.
    """
    models = _Models()
    try:
        for line in requests:
            own_s = time.process_time()
            try:
                answer = models.answer(json.loads(line))
            except HeteroLLMError as error:
                answer = {"error": error.message, "fix": error.fix}
            answer["own_s"] = time.process_time() - own_s
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    finally:
        models.close()


def main() -> None:
    """Serve the standard streams, or run a command for as long as somebody holds the input."""
    if sys.argv[1:]:
        Requests(0, busy=True, grace_s=GRACE_S)
        runpy.run_module("heterollm", run_name="__main__", alter_sys=True)
    # Ctrl-C reaches the whole terminal; the parent decides what it means and closes the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with private_stdout(), quiet_libraries(lambda _text: None, debug=False):
        serve(Requests(0), sys.stdout)


if __name__ == "__main__":
    main()

"""A process that holds models and runs tests on request: one JSON line in, one out, until its input ends.

Started by :mod:`heterollm.benchmarks.children` as ``python -m heterollm.benchmarks.child``.
"""

from __future__ import annotations

import base64
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.engine import BenchEngine, Ids, Job, open_engine
from heterollm.errors import HeteroLLMError
from heterollm.terminal import private_stdout, quiet_libraries

__all__ = ["decode_floats", "encode_floats", "main", "private_bytes", "random_ids", "serve"]

STATUS = Path("/proc/self/status")
PRIVATE = ("RssAnon", "RssShmem")
"""Memory that only swapping could take back; files that are mapped can be dropped at any time."""


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
                return {"us": self._engines[name].sample_us(case_, self._ids[name])}
            case "logits":
                count, decoded = request["prompt"] + request["decoded"], request["decoded"]
                return {"logits": encode_floats(self._engines[name].logits(self._ids[name][:count], decoded))}
            case "trace":
                return {"fields": self._trace(request)}
            case "account":
                return {"fields": self._engines[name].account(Case(**request["case"]))}
        raise ValueError(f"there is no request {request['do']!r}")

    def _trace(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Load a model beside the others to be traced, run tests with it, and free it."""
        engine = open_engine(self._job(request, trace=True))
        ids = random_ids(request["seed"], request["vocabulary"], request["context"])
        try:
            return [engine.trace(Case(**case), ids) for case in request["cases"]]
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


def serve(requests: TextIO, answers: TextIO) -> None:
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
    """Serve the standard streams."""
    # Ctrl-C reaches the whole terminal; the parent decides what it means and closes the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with private_stdout(), quiet_libraries(lambda _text: None, debug=False):
        serve(sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()

"""Runs a function on untrusted data in a child process, under limits of time and memory.

The limits hold in native code too: one call of a template can fill the memory, one match can take for ever.
The child is kept for further calls; after a limit it is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any, Final

from heterollm.base.errors import EngineError, HeteroLLMError
from heterollm.base.units import MIB, format_bytes

POLL_S: Final = 0.05
"""Time between two looks at the child's memory, where the system sets no limit."""

WALL_FACTOR: Final = 12
"""Longest wait in limits of processor time: other programs may take most of the machine."""

START_S: Final = 120.0
"""Longest start of a child, which imports its libraries."""

SIZE_BYTES: Final = 8
"""Bytes of the length before each message."""


class LimitError(HeteroLLMError):
    """A call in a child took more time or memory than it may; the message has the limit."""


class CrashError(LimitError):
    """Native code ended the child, as it does on a stack that is too small."""


class OverdueError(LimitError):
    """The child took too long by the clock, which depends on other programs as well."""


class LimitedChild:
    """A child process that answers requests by one function; started at the first request.

    Args:
        function: ``module:function`` of this package. It takes and returns values of JSON.
        cpu_s: Most processor time of a request.
        memory_bytes: Most memory that requests may take beside the child's libraries.
        answer_bytes: Longest answer as JSON.
    """

    def __init__(
        self, function: str, *, cpu_s: int = 5, memory_bytes: int = 512 * MIB, answer_bytes: int = 64 * MIB
    ) -> None:
        self._function = function
        self._cpu_s, self._memory_bytes, self._answer_bytes = cpu_s, memory_bytes, answer_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._parent = os.getpid()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def ask(self, request: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return the function's answer.

        Raises:
            LimitError: It took too much time or memory, or crashed; the message says so without a subject.
            EngineError: The child cannot be started.
        """
        content = json.dumps(request).encode()
        with self._lock:
            try:
                process = self._started()
                answer = self._answer(process, content, self._cpu_s * WALL_FACTOR)
            except BaseException:  # Ctrl-C, too: what it answers belongs to no one
                self._stop()
                raise
        reply = json.loads(answer)
        if "limit" in reply:
            raise LimitError(f"takes more than {format_bytes(self._memory_bytes)} of memory")
        return reply["value"]

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._parent != os.getpid():  # a fork has no child of its own
            self._parent, self._process = os.getpid(), None
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        # -P: a folder named heterollm in the working directory must not be imported.
        command = [sys.executable, "-P", "-m", __name__, self._function]
        limits = map(str, (self._cpu_s, self._memory_bytes))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads,
                # Ctrl-C reaches all processes of a terminal; the parent decides.
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise EngineError(f"A child process cannot be started: {error}.") from error
        self._process, self._answers = process, queue.SimpleQueue()
        threading.Thread(
            target=_read_answers, args=(process.stdout, self._answers, self._answer_bytes), daemon=True
        ).start()
        try:
            self._answer(process, None, START_S)
        except LimitError as error:
            raise EngineError(f"A child process cannot be started: it {error.message}.") from error
        return process

    def _answer(self, process: subprocess.Popen[bytes], content: bytes | None, wall_s: float) -> bytes:
        """Send a request, and return the answer; without a request wait for the end of the start."""
        if content is not None:
            with contextlib.suppress(OSError):  # the answer's end says why
                _write(process.stdin, content)
        end_s, used_bytes = time.monotonic() + wall_s, 0
        while True:
            try:
                answer = self._answers.get(timeout=POLL_S)
                break
            except queue.Empty:
                used_bytes = used_bytes or _memory(process.pid)
                if time.monotonic() > end_s:
                    raise OverdueError(f"takes more than {wall_s:.0f} s") from None
                if content is not None and _memory(process.pid) > used_bytes + self._memory_bytes:
                    raise LimitError(
                        f"takes more than {format_bytes(self._memory_bytes)} of memory"
                    ) from None
        if answer is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            raise self._ending(process.poll())
        return answer

    def _ending(self, code: int | None) -> LimitError:
        import signal

        if code is None:
            return LimitError(f"gives more than {format_bytes(self._answer_bytes)}")
        if code in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
            return LimitError(f"takes more than {self._cpu_s} s of processor time")
        # Libraries abort where memory runs out.
        kind = CrashError if code < 0 and code != -signal.SIGABRT else LimitError
        return kind(f"takes too much memory, or ends the process ({code})")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        process.wait()


def _read_answers(pipe: IO[bytes], answers: queue.SimpleQueue[bytes | None], limit_bytes: int) -> None:
    """Put each answer into a queue, and None at the end; on a thread: Windows' pipes know no timeout."""
    with contextlib.suppress(OSError, ValueError):  # closed meanwhile
        while (answer := _read(pipe, limit_bytes)) is not None:
            answers.put(answer)
    answers.put(None)


def _read(pipe: IO[bytes], limit_bytes: int) -> bytes | None:
    size = int.from_bytes(pipe.read(SIZE_BYTES), "little")
    if not 0 < size <= limit_bytes:
        return None
    content = pipe.read(size)
    return content if len(content) == size else None


def _write(pipe: IO[bytes] | None, content: bytes) -> None:
    assert pipe is not None
    pipe.write(len(content).to_bytes(SIZE_BYTES, "little") + content)
    pipe.flush()


def _memory(process: int) -> int:
    """Return the memory that a process uses; 0 once it has ended."""
    import psutil

    try:
        used: int = psutil.Process(process).memory_info().rss
    except psutil.Error:
        return 0
    return used


# -- in the child ------------------------------------------------------------------------------------


def serve(function: Callable[[Any], object], cpu_s: int, memory_bytes: int) -> None:
    """Answer requests on stdin until it ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints would damage the answers
    _limit_memory(memory_bytes)
    _write(answers, b"{}")
    while (content := _read(requests, sys.maxsize)) is not None:
        _limit_time(cpu_s)
        try:
            reply = json.dumps({"value": function(json.loads(content))}).encode()
        except MemoryError:
            reply = b'{"limit": "memory"}'
        content = b""
        _write(answers, reply)


def _limit_time(cpu_s: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows: the parent's clock holds
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + cpu_s, most))


def _limit_memory(memory_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # the parent looks at the memory
        import resource

        import psutil

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = psutil.Process().memory_info().vms + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _main() -> None:
    name, cpu_s, memory_bytes = sys.argv[1:]
    module, _, function = name.partition(":")
    serve(getattr(importlib.import_module(module), function), int(cpu_s), int(memory_bytes))


if __name__ == "__main__":
    _main()

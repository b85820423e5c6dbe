"""Litmus test of the flag: whether a host that sees the flag also sees the data, in the memory of slots."""

from __future__ import annotations

import math
import time
from typing import Any, Final, NamedTuple

import numpy as np

from heterollm.base import DeviceError, KernelError
from heterollm.kernels.gpu import SOURCES, FlagWord, GpuRuntime, is_complete

LITMUS_ROUNDS: Final = 100_000
"""Rounds of ``doctor``: some seconds."""

LITMUS_QUICK_ROUNDS: Final = 500
"""Rounds before a device's flag is used or profiled."""

WORDS: Final = 4096
TIMEOUT_S: Final = 1.0
"""Longest wait for the flag of a kernel that has ended."""

GUARD_S: Final = 600.0
"""Longest wait for a kernel to end; a busy machine can delay one of some microseconds by seconds."""

MOST_UNSEEN: Final = 3
"""Lost flags after which the test ends early."""


class Litmus(NamedTuple):
    """Result of a litmus test.

    Attributes:
        rounds: Rounds run.
        stale: Rounds with a lost flag or stale data.
        stale_bytes: Bytes of stale data in the rounds with a flag.
    """

    rounds: int
    stale: int
    stale_bytes: int = 0


def flag_litmus(runtime: GpuRuntime, rounds: int = LITMUS_ROUNDS, *, limit_s: float = math.inf) -> Litmus:
    """Run kernels that write an array and then raise the flag; read the array when the host sees the flag.

    The host reads as behind a fence: mapped where memory is not coherent. In coherent memory it also writes
    the number of the round, which the next kernel reads, so that the test covers both directions.

    Args:
        runtime: The device.
        rounds: Rounds to run.
        limit_s: Seconds after which no round begins.

    Raises:
        DeviceError: The device has no memory for a flag.
    """
    flag = runtime.flag
    if flag is None:
        raise DeviceError(
            f"{runtime.traits.name!r} has no memory in which the host could see a flag.",
            fix="Use another sync strategy.",
        )
    local = min(64, runtime.traits.max_work_group)
    data, counter = runtime.shared((WORDS,), np.uint32), runtime.shared((1,), np.uint32)
    write = runtime.kernel(SOURCES, "write_round")
    count = runtime.kernel(SOURCES, "count_round")
    calls = (
        runtime.launch(write, (data, counter), (WORDS,), (local,), "litmus data"),
        runtime.launch(count, (counter,), (1,), (1,), "litmus round"),
    )
    # Some runtimes compile a kernel at its first launch.
    for call in (*calls, flag.send):
        call()
    runtime.finish()
    first = int(counter.read()[0])
    stale = stale_bytes = unseen = done = 0
    end_s = time.perf_counter() + limit_s
    while done < rounds and unseen < MOST_UNSEEN and time.perf_counter() < end_s:
        done += 1
        calls[0]()
        seen = _seen(flag, flag.send())
        data.acquire_to_read()
        if not seen:
            unseen += 1
            stale += 1
            runtime.finish()
            if not flag.reached(flag.sent):
                flag.resynchronise()
        elif not (fresh := data.array == first + done).all():
            stale += 1
            stale_bytes += data.array.itemsize * int(np.count_nonzero(~fresh))
        data.release()
        # The data's kernel reads this counter, so the increment comes last.
        if counter.coherent:
            counter.array[0] += 1
        else:
            calls[1]()
    runtime.finish()
    return Litmus(done, stale, stale_bytes)


def _seen(flag: FlagWord, event: Any) -> bool:  # noqa: ANN401 - an OpenCL event
    """Return whether the host sees the flag of the last kernel within the timeout after its end."""
    guard_s = time.perf_counter() + GUARD_S
    give_up_s, ended = time.perf_counter() + TIMEOUT_S, False
    while not flag.reached(flag.sent):
        if (now_s := time.perf_counter()) < give_up_s:
            continue
        if ended or now_s >= guard_s:
            return False
        ended, give_up_s = is_complete(event), now_s + TIMEOUT_S
    return True


def stale_memory(runtime: GpuRuntime) -> str:
    """Return why host and device cannot share memory without maps; an empty text if they can."""
    try:
        found = flag_litmus(runtime, LITMUS_QUICK_ROUNDS)
    except (DeviceError, KernelError) as error:
        return error.message
    if found.stale:
        return f"{found.stale} of {found.rounds} rounds of the litmus test were lost or saw stale data"
    return ""

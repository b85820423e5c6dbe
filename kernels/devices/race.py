"""A race of the GPU against the CPU's cores: ``auto`` takes a GPU that computes linear layers faster.

It runs in a child process: a driver may crash, and PoCL takes its threads once per process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import Struct
from msgspec.json import encode

from heterollm.base import (
    CacheError,
    DeviceError,
    HeteroLLMError,
    cache_name,
    decode,
    load_or_make,
    own_folder,
    parse_json,
    scratch_folder,
)
from heterollm.kernels.devices.choice import GPU_VARIABLES, find_gpus
from heterollm.kernels.devices.kind import Opening
from heterollm.kernels.threads import allowed_cores, split_threads

if TYPE_CHECKING:
    from heterollm.kernels.gpu import OpenClRuntime

SIDE: Final = 4096
"""Rows and inputs of the linear layer, as in models of 7 or 8 billion parameters."""

TOKENS: Final = (1, 256)
"""Tokens of decode and of a prompt."""

RUNS: Final = 10
MOST_S: Final = 0.5
"""Time after which no other run begins."""
TIMEOUT_S: Final = 60.0
BLOCK: Final = 32
VENDORS: Final = "/etc/OpenCL/vendors"
VENDORS_VARIABLE: Final = "OCL_ICD_VENDORS"


class Race(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a race.

    Args:
        gpu: Name of the GPU; empty if there is none that works.
        decode: Time of the cores over that of the GPU, of a linear layer of one token.
        prefill: The same for a prompt.
        problem: Why no GPU works.
    """

    gpu: str = ""
    decode: float = 0.0
    prefill: float = 0.0
    problem: str = ""

    @property
    def is_won(self) -> bool:
        """Whether the GPU is the faster one, in the geometric mean of both."""
        return bool(self.gpu) and self.decode * self.prefill > 1

    @property
    def is_lost(self) -> bool:
        """Whether there is a slower GPU."""
        return bool(self.gpu) and not self.is_won

    def __str__(self) -> str:
        return (
            f"{self.gpu} computes a linear layer {self.decode:.3g} times as fast in decode as all cores of "
            f"this machine, {self.prefill:.3g} times in prefill"
        )


def gpu_wins() -> str:
    """Return why the GPU is the better choice.

    Raises:
        DeviceError: There is no GPU, or it lost the race.
    """
    race = kept_race()
    if race.is_won:
        return str(race)
    raise DeviceError(f"{race}." if race.gpu else race.problem)


@functools.cache
def kept_race() -> Race:
    """Return the race that the cache keeps for these drivers and cores, or run it."""
    drivers = sorted(_drivers())
    if not drivers:
        return Race(problem="No driver of a GPU is installed.")
    chosen = [os.environ.get(name, "") for name in GPU_VARIABLES]
    key = json.dumps([drivers, len(allowed_cores()), platform.machine(), chosen]).encode()
    try:
        path = own_folder("races") / f"{cache_name('race', hashlib.sha256(key).hexdigest()[:16])}.json"
    except CacheError as error:
        return Race(problem=error.message)
    again = "racing again"
    return load_or_make(path, again, read=_read, make=_in_child, text=lambda race: encode(race).decode())


def _drivers() -> Iterator[tuple[str, int]]:
    """Yield names and times of the drivers that OpenCL's loader may find, without asking it."""
    if platform.system() != "Linux":
        # Their loaders ask the registry or the system.
        yield platform.platform(), 0
        return
    # The loader takes one file, too.
    place = Path(os.environ.get(VENDORS_VARIABLE) or VENDORS)
    for file in place.glob("*.icd") if place.is_dir() else (place,):
        if "pocl" not in file.name and file.is_file():
            yield file.name, file.stat().st_mtime_ns


def _read(content: bytes) -> Race:
    try:
        return decode(parse_json(content), Race, source="it is no race", error=CacheError)
    except ValueError as error:
        raise CacheError(f"it is not JSON: {error}") from error


def _in_child() -> Race:
    from heterollm.kernels.npu import run_child

    with scratch_folder("heterollm-race-") as folder:
        result = folder / "race.json"
        try:
            request = {"result": str(result)}
            run_child(__spec__.name, request, folder / "answer", "race", timeout_s=TIMEOUT_S)
            return _read(result.read_bytes())
        except HeteroLLMError as error:
            return Race(problem=error.message)


def run_race() -> Race:
    """Race the GPU that ``opencl`` opens against all cores, in this process.

    Raises:
        DeviceError: There is no GPU, or it computes wrongly.
    """
    from heterollm.kernels.devices import gpu

    cores = split_threads(len(allowed_cores()), 0)
    device, _ = find_gpus(cores)
    runtime = gpu.open_gpu(device, Opening())
    gpu.self_test(runtime)
    ours = linear_times_s(runtime)
    try:
        theirs = linear_times_s(gpu.open_cpu(cores, Opening()))
    except DeviceError:
        theirs = (math.inf, math.inf)  # no OpenCL for the CPU
    decode, prefill = (cpu / own for cpu, own in zip(theirs, ours, strict=True))
    return Race(runtime.traits.name, decode, prefill)


def linear_times_s(runtime: OpenClRuntime) -> tuple[float, ...]:
    """Return the shortest times of a linear layer with 4-bit weights in decode and in prefill."""
    from heterollm.kernels.formats import QuantizedTensor
    from heterollm.kernels.gpu import GpuLinear

    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (SIDE, SIDE // BLOCK, BLOCK // 2), np.uint8)
    scales = random.uniform(0.01, 0.02, (SIDE, SIDE // BLOCK)).astype(np.float16)
    weight = QuantizedTensor(codes, scales, None, 4, BLOCK)
    x, y = (runtime.shared((max(TOKENS), SIDE), np.float32) for _ in range(2))
    x.acquire()
    x.array[...] = random.standard_normal(x.array.shape)
    x.release()
    linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    times_s = []
    for tokens in TOKENS:
        launch = linear.launch(x, y, tokens=tokens, label="race")
        spent_s: list[float] = []
        ends_s = time.perf_counter() + MOST_S
        while len(spent_s) < RUNS and (not spent_s or time.perf_counter() < ends_s):
            begin_s = time.perf_counter()
            launch()
            runtime.finish()
            spent_s.append(time.perf_counter() - begin_s)
        times_s.append(min(spent_s))
    return tuple(times_s)


def _child(request: dict[str, Any]) -> None:
    Path(request["result"]).write_bytes(encode(run_race()))


if __name__ == "__main__":
    from heterollm.kernels.npu import answer_parent

    answer_parent(_child)

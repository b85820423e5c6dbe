"""A race of the GPU against the CPU's cores: ``auto`` takes a GPU that computes linear layers faster.

It runs in a child process: a driver may crash, and PoCL takes its threads once per process.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec.json import encode

from heterollm.base import (
    CacheError,
    DeviceError,
    HeteroLLMError,
    cache_name,
    decode,
    decode_json,
    load_or_make,
    own_folder,
    scratch_folder,
)
from heterollm.kernels.devices.choice import GPU_VARIABLES, find_gpus
from heterollm.kernels.devices.kind import Opening, Race, Seconds
from heterollm.kernels.threads import allowed_cores, split_threads, whole_cores

if TYPE_CHECKING:
    from heterollm.kernels.gpu import OpenClRuntime

logger = logging.getLogger(__name__)

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


@functools.cache
def kept_race() -> Race | None:
    """Return the race that the cache keeps for these drivers and cores, or run it; None if no GPU works.

    That no GPU works is not kept: another start may find one.
    """
    drivers = sorted(_drivers())
    if not drivers:
        return None
    chosen = [os.environ.get(name, "") for name in GPU_VARIABLES]
    key = json.dumps([drivers, len(allowed_cores()), platform.machine(), chosen]).encode()
    try:
        path = own_folder("races") / f"{cache_name('race', hashlib.sha256(key).hexdigest()[:16])}.json"
        return load_or_make(path, "racing again", read=_read, make=_in_child, text=_text)
    except HeteroLLMError as error:
        logger.info("No GPU takes part in a race: %s", error.message)
        return None


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
    source = "The race of GPU and cores"
    data = decode_json(content, source=source, error=CacheError)
    return decode(data, Race, source=f"{source} is damaged", error=CacheError)


def _text(race: Race) -> str:
    return encode(race).decode()


def _in_child() -> Race:
    from heterollm.kernels.npu import run_child

    with scratch_folder("heterollm-race-") as folder:
        result = folder / "race.json"
        request = {"result": str(result)}
        run_child(__spec__.name, request, folder / "answer", "race", timeout_s=TIMEOUT_S)
        return _read(result.read_bytes())


def run_race() -> Race:
    """Race the GPU that ``opencl`` opens against all cores, in this process.

    Raises:
        DeviceError: There is no GPU, or it computes wrongly.
    """
    from heterollm.kernels.devices import gpu

    cores = split_threads(len(whole_cores()), 0)
    device, _ = find_gpus(cores)
    runtime = gpu.open_gpu(device, Opening())
    gpu.self_test(runtime)
    gpu_s = linear_times_s(runtime)
    try:
        cpu = gpu.open_cpu(cores, Opening())
    except DeviceError:
        return Race(runtime.traits.name, gpu_s, None)
    return Race(runtime.traits.name, gpu_s, linear_times_s(cpu))


def linear_times_s(runtime: OpenClRuntime) -> Seconds:
    """Return the shortest times of a linear layer with 4-bit weights in decode and in prefill."""
    from heterollm.kernels.formats import QuantizedTensor
    from heterollm.kernels.gpu import GpuLinear

    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (SIDE, SIDE // BLOCK, BLOCK // 2), np.uint8)
    scales = random.uniform(0.01, 0.02, (SIDE, SIDE // BLOCK)).astype(np.float16)
    weight = QuantizedTensor(codes, scales, None, 4, BLOCK)
    x, y = (runtime.shared((max(TOKENS), SIDE), np.float32) for _ in range(2))
    x.write(random.standard_normal(x.array.shape))
    linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    decode_s, prefill_s = (
        _shortest_s(runtime, linear.launch(x, y, tokens=tokens, label="race")) for tokens in TOKENS
    )
    return decode_s, prefill_s


def _shortest_s(runtime: OpenClRuntime, launch: Callable[[], object]) -> float:
    spent_s: list[float] = []
    ends_s = time.perf_counter() + MOST_S
    while len(spent_s) < RUNS and (not spent_s or time.perf_counter() < ends_s):
        begin_s = time.perf_counter()
        launch()
        runtime.finish()
        spent_s.append(time.perf_counter() - begin_s)
    return min(spent_s)


def _child(request: dict[str, Any]) -> None:
    Path(request["result"]).write_bytes(encode(run_race()))


if __name__ == "__main__":
    from heterollm.kernels.npu import answer_parent

    answer_parent(_child)

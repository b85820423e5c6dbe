"""Self-test of contexts whose graphs share weights, in child processes, since loading one can crash.

One child compiles a shard at two lengths into one binary; another loads it, runs both graphs, closes it and
opens it again; this process compares the outputs with float64. The cache keeps the verdict for the versions
of software, driver and chip. On an x86 machine the binary is compiled and measured, and not loaded: QNN 2.51
crashes there (SIGSEGV).
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import (
    DeviceError,
    GraphError,
    HeteroLLMError,
    KeptResult,
    delete,
    format_bytes,
    scratch_folder,
)
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.npu.contexts import SharingVerdict
from heterollm.kernels.npu.graphs import GRAPH_VERSION, write_graph
from heterollm.kernels.npu.qnn_binaries import GRAPHS_FOLDER
from heterollm.kernels.npu.qnn_child import answer_parent, run_child
from heterollm.kernels.npu.qnn_compile import compile_shared
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_context, provider_metadata, qnn_versions
from heterollm.kernels.npu.shards import LinearShard
from heterollm.kernels.npu.small_shard import exact_product, small_shard
from heterollm.kernels.npu.tensors import INPUT

REUSED_IO_OPTION: Final = "htp_reused_io_limit_mb"
"""Memory for inputs and outputs that QNN counts for a context; without it, the sum over all of its graphs."""

TIMEOUT_S: Final = 120.0
"""Longest time of a child; its two graphs take less than a second to compile and to run on the emulator."""

LENGTHS: Final = (32, 64)
ROWS: Final = 256
COLUMNS: Final = 1024


def kept_verdict(target: QnnTarget, soc_model: str) -> SharingVerdict:
    """Return the verdict that the cache keeps for this machine; run the self-test if there is none."""
    return verdict_file(target, soc_model).load(lambda: run_sharing_test(target, loads=not target.emulator))


def verdict_file(target: QnnTarget, soc_model: str) -> KeptResult[SharingVerdict]:
    """Return where the cache keeps the verdict for this machine."""
    return KeptResult(GRAPHS_FOLDER, "shared contexts", machine_key(target, soc_model), SharingVerdict)


def run_sharing_test(target: QnnTarget, *, loads: bool, timeout_s: float = TIMEOUT_S) -> SharingVerdict:
    """Compile a context of two graphs with shared weights, and load and run it in a child.

    Args:
        target: The Hexagon or its emulator.
        loads: Whether to load it; without, it is only measured.
        timeout_s: Longest time to load and run.
    """
    shard = small_shard("sharing", ROWS, COLUMNS)
    try:
        with scratch_folder("heterollm-sharing-") as folder:
            models = _compiled(shard, target, folder)
            size_bytes = models[0].with_name(f"{models[0].stem}_qnn.bin").stat().st_size
            once = f"{len(LENGTHS)} graphs with {format_bytes(shard.weight_bytes)} of weights take "
            once += format_bytes(size_bytes)
            if size_bytes >= len(LENGTHS) * shard.weight_bytes:
                return SharingVerdict("fail", f"the compiler shares no weights: {once}")
            if not loads:
                return SharingVerdict("unverified", f"{once} in one context; only a Hexagon loads it")
            _run(models, shard, target, folder, timeout_s)
            try:
                reused = replace(target, session_options=target.session_options | {REUSED_IO_OPTION: "1"})
                _run(models, shard, reused, folder, timeout_s)
            except (GraphError, DeviceError) as error:
                return SharingVerdict("pass", f"{once} in one context", io_reason=error.message)
            return SharingVerdict("pass", f"{once} in one context", reuses_io=True)
    except HeteroLLMError as error:
        return SharingVerdict("fail", error.message)
    except OSError as error:
        return SharingVerdict("fail", f"cannot write into {tempfile.gettempdir()}: {error.strerror}")


def _compiled(shard: LinearShard, target: QnnTarget, folder: Path) -> list[Path]:
    sources, models = [], []
    for number, length in enumerate(LENGTHS):
        own = folder / str(number)
        own.mkdir()
        sources.append(write_graph(shard, "matmul_nbits", np.dtype(np.float16), own, length))
        models.append(folder / f"shared.{number}.onnx")
    compile_shared(sources, models, target, "the self-test of shared contexts")
    return models


def _run(
    models: Sequence[Path], shard: LinearShard, target: QnnTarget, folder: Path, timeout_s: float
) -> None:
    """Run all graphs in a child and check their outputs.

    Raises:
        GraphError: The child crashed, hung or failed, or a graph computes wrong numbers.
        DeviceError: The provider or its device is missing.
    """
    inputs = _inputs()
    for place in [(turn, number) for turn in (0, 1) for number in range(len(models))]:
        delete(_output_file(folder, *place))
    for number, x in enumerate(inputs):
        np.save(_input_file(folder, number), x)
    request = {
        "models": [str(model) for model in models],
        "emulator": target.emulator,
        "options": target.options,
        "session_options": target.session_options,
        "folder": str(folder),
    }
    task = "test of a context with shared weights"
    run_child(__spec__.name, request, folder / "answer", task, timeout_s=timeout_s)
    for turn in (0, 1):
        for number, x in enumerate(inputs):
            errors = linear_errors(np.load(_output_file(folder, turn, number)), exact_product(shard, x))
            if not errors.within("fp16"):
                raise GraphError(
                    f"A context with shared weights computes wrong numbers at {len(x)} tokens, opening "
                    f"{turn + 1}: NMSE {errors.nmse:.1e}."
                )


def _load_and_run(request: Mapping[str, Any]) -> None:
    """Open the context twice, run its graphs in turns, and store the outputs: the child's work."""
    target = QnnTarget(request["emulator"], request["options"], request["session_options"])
    models, folder = [Path(model) for model in request["models"]], Path(request["folder"])
    for turn in (0, 1):
        sessions = open_context(models, target, "the self-test of shared contexts")
        order = range(len(sessions)) if turn == 0 else reversed(range(len(sessions)))
        for number in order:
            x = np.load(_input_file(folder, number))
            (y,) = sessions[number].run(None, {INPUT: x[np.newaxis]})
            np.save(_output_file(folder, turn, number), y[0])
        while sessions:
            sessions.pop()


def _input_file(folder: Path, number: int) -> Path:
    return folder / f"x{number}.npy"


def _output_file(folder: Path, turn: int, number: int) -> Path:
    return folder / f"y{turn}-{number}.npy"


def _inputs() -> list[NDArray[np.float16]]:
    generator = np.random.default_rng(1)
    return [generator.standard_normal((length, COLUMNS)).astype(np.float16) for length in LENGTHS]


def machine_key(target: QnnTarget, soc_model: str) -> dict[str, Any]:
    """Return what the results of self-tests depend on: software, driver, machine and chip."""
    return {
        "versions": qnn_versions(),
        "driver": () if target.emulator else provider_metadata(),
        "machine": (platform.system(), platform.machine(), target.emulator),
        "soc": soc_model,
        "options": target.options,
        "graph_version": GRAPH_VERSION,
    }


if __name__ == "__main__":
    answer_parent(_load_and_run)

"""The NPU backend of the device ``intel``: OpenVINO on static graphs, with float16 activations.

Its graphs were compiled for Intel's NPUs, and checked for numbers on OpenVINO's CPU device; **none has run on
an NPU**. The cache keeps NPU graphs, since one takes seconds to compile; those of the CPU are compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np

from heterollm.base import DeviceError, GraphError, locked, see
from heterollm.kernels.npu.graphs import GRAPH_VERSION, graph_folder, graph_identity, write_graph
from heterollm.kernels.npu.protocol import (
    STANDARD_LENGTHS,
    BuiltGraph,
    GraphFolders,
    GraphForm,
    TimeKind,
    check_form,
)
from heterollm.kernels.npu.qnn_binaries import ContextBinary, temporary_graphs
from heterollm.kernels.npu.self_test import check_small_linear
from heterollm.kernels.npu.shapes import AttentionShape, ExpertsShape, GraphShape, LinearShape, ScoresShape
from heterollm.kernels.npu.shards import GraphShard, ShardKey
from heterollm.kernels.npu.tensors import NamedArrays, check_arrays, graph_tensors

NPU: Final = "NPU"
TELEMETRY: Final = "openvino_telemetry"
LONGEST: Final = 256
"""Tokens of the longest graph. Of 4096 x 4096 in blocks of 32 one compiles in 8 s, one of 512 in minutes."""
ADVICE: Final = (
    "Install Intel's NPU driver (on Linux, intel/linux-npu-driver, with your user in the group `render`), or "
    "try `--device intel:cpu`, which computes the same graphs on CPU cores. "
)


def find_openvino(processor: str = NPU) -> str:
    """Return the name of one of OpenVINO's devices and the version of OpenVINO, without opening the device.

    Raises:
        DeviceError: OpenVINO is missing or cannot be imported, or has no such device.
    """
    found = _core().available_devices
    if not any(name.split(".")[0] == processor for name in found):
        raise DeviceError(
            f"OpenVINO finds no {processor} (it finds {', '.join(found) or 'nothing'}).",
            fix=ADVICE + see("the-intel-npu-is-not-found"),
        )
    return f"{_asked(processor, 'FULL_DEVICE_NAME')} (openvino {version('openvino')})"


@functools.cache
def load_openvino() -> Any:  # noqa: ANN401 - its types are another package's
    """Import OpenVINO without its telemetry.

    Its import would write an identity into the home folder and send a message to Google Analytics; it does
    neither where the package ``openvino-telemetry`` is missing.

    Raises:
        DeviceError: It is missing, or cannot be imported.
    """
    hidden = TELEMETRY not in sys.modules
    if hidden:
        sys.modules[TELEMETRY] = None  # type: ignore[assignment]
    try:
        import openvino
    except ImportError as error:
        missing = error.name == "openvino"
        raise DeviceError(
            "openvino is not installed." if missing else f"openvino cannot be imported: {error}.",
            fix="Run `pip install 'heterollm[intel]'`.",
        ) from error
    finally:
        if hidden:
            del sys.modules[TELEMETRY]
    return openvino


@functools.cache
def _core() -> Any:  # noqa: ANN401
    """Return OpenVINO's registry of devices."""
    return load_openvino().Core()


def _asked(processor: str, name: str) -> str:
    """Return a property of a device."""
    try:
        return str(_core().get_property(processor, name))
    except RuntimeError as error:
        raise DeviceError(
            f"OpenVINO's {processor} does not tell its {name}: {_words(error)}.",
            fix=ADVICE + see("the-intel-npu-is-not-found"),
        ) from error


def _words(error: RuntimeError) -> str:
    """Return what an error of OpenVINO says behind the lines that name its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join([line for line in lines if line and "Exception from src" not in line])[:400].rstrip(".")


@contextlib.contextmanager
def _refusals(shard: GraphShard) -> Iterator[None]:
    """Turn OpenVINO's errors into those of a graph."""
    try:
        yield
    except RuntimeError as error:
        raise GraphError(f"OpenVINO refused the graph of {shard.label}: {_words(error)}.") from error


class OpenVinoNpu:
    """A device of OpenVINO behind the NPU protocol.

    Args:
        processor: OpenVINO's name of the device: ``NPU``, or ``CPU``, which stands in for it.
        threads: Threads of the CPU.

    Raises:
        DeviceError: As :func:`find_openvino`.
    """

    time_kind: TimeKind = "real"
    graphs_by_length = True
    copies_by_length = True
    io_by_graph = True
    reuses_io = False
    unrolls_blocks = True
    addressable_bytes = None
    domain_bytes = None
    graph_weight_bytes = None
    standard_lengths = tuple(length for length in STANDARD_LENGTHS if length <= LONGEST)
    row_alignment = 64
    activation_dtype: np.dtype[Any] = np.dtype(np.float16)

    def __init__(self, processor: str = NPU, threads: int = 1) -> None:
        self.name = find_openvino(processor)
        self.compiled_count = 0
        self.loaded_count = 0
        self._processor = processor
        # The CPU would round inputs to 8 bits, and compute in bfloat16 where it can.
        exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        self._options = {} if processor == NPU else exact | {"INFERENCE_NUM_THREADS": threads}
        self._in_cache = processor == NPU
        self._temporary: Path | None = None
        self._folders = GraphFolders()
        self._graphs: dict[tuple[ShardKey, GraphForm, int], Any] = {}

    def forms(self, shape: GraphShape, length: int) -> tuple[GraphForm, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`.

        OpenVINO computes MatMulNBits with float inputs only, and the NPU in float16 only. Whether its float16
        holds the squares of a norm is not known.
        """
        del length
        if isinstance(shape, ScoresShape | AttentionShape):
            return ()
        one = shape.one if isinstance(shape, ExpertsShape) else shape
        if one.normed or one.integer_inputs or one.weight.scales == "tensor" or one.weight.bits == 32:
            return ()
        if not isinstance(one, LinearShape):
            return ("ffn",)
        return ("matmul_nbits",) if one.weight.quantized else ("activation_first",)

    def prepare(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, any_length: bool = False
    ) -> OpenVinoGraph:
        """Load or build a static graph; see :class:`heterollm.kernels.npu.NpuBackend`."""
        chosen = check_form(self, shard, length, form, any_length=any_length)
        key = (shard.key, chosen, length)
        if key not in self._graphs:
            if self._in_cache or self._folder(shard) is not None:
                self._graphs[key] = self._kept(shard, chosen, length)
            else:
                self._graphs[key] = self._built(shard, chosen, length)
        return OpenVinoGraph(self._graphs[key], shard, length)

    def keep_graphs(self, weights_key: str, folder: Path) -> None:
        """Keep graphs in a folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        self._folders.add(weights_key, folder)

    def build(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> BuiltGraph:
        """Put a graph into its folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        chosen = check_form(self, shard, length, form)
        stored = self._stored(shard, chosen, length)
        compiled = self._put(stored, shard, chosen, length)
        return BuiltGraph(stored.size_bytes, compiled, "")

    def stored_bytes(self, shard: GraphShard, length: int, form: GraphForm | None = None) -> int:
        """Return the bytes of a graph in its folder; see :class:`heterollm.kernels.npu.GraphKeeper`."""
        return self._stored(shard, check_form(self, shard, length, form), length).size_bytes

    @contextlib.contextmanager
    def temporary_graphs(self) -> Iterator[None]:
        """Delete each graph that is built within this context when its shard is released, or at the end.

        The end also drops all graphs.

        Raises:
            CacheError: The cache folder cannot be written.
        """
        with temporary_graphs() as self._temporary:
            try:
                yield
            finally:
                self._temporary = None
                self.close()

    def cpu_times_us(
        self, shard: GraphShard, length: int, form: GraphForm | None = None, *, runs: int
    ) -> tuple[float, ...] | None:
        """Return None: this backend's time is real."""

    def self_test(self) -> None:
        """Run one small graph against float64.

        Raises:
            DeviceError: It does not compile or run, or computes wrong numbers.
        """
        kept, self._in_cache = self._in_cache, False
        try:
            check_small_linear(self, "openvino")
        except GraphError as error:
            raise DeviceError(
                f"{self.name} opens no graph: {error.message}", fix=ADVICE + see("the-intel-npu-is-not-found")
            ) from error
        finally:
            self._in_cache = kept
            self.close()

    def release(self, shard: GraphShard) -> None:
        """Drop the graphs of a shard; see :class:`heterollm.kernels.npu.NpuBackend`."""
        for key in [key for key in self._graphs if key[0] == shard.key]:
            del self._graphs[key]
            if self._temporary is not None:
                self._stored(shard, *key[1:]).remove()

    def versions(self) -> dict[str, str]:
        """Return the versions of OpenVINO, and of the NPU and its driver, which compiles the graphs."""
        asked = ("DEVICE_ARCHITECTURE", "NPU_DRIVER_VERSION") if self._processor == NPU else ()
        return {"openvino": version("openvino"), **{name.lower(): _asked(NPU, name) for name in asked}}

    def close(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()

    def _stored(self, shard: GraphShard, form: GraphForm, length: int) -> ContextBinary:
        """Return the files of a graph: its wrapper, and the compiled one."""
        identity = graph_identity(shard, form, length) | {"openvino": self._processor}
        made_by = {"graph_version": GRAPH_VERSION, **self.versions()}
        return ContextBinary(identity, made_by, self._folder(shard), ending=".bin")

    def _folder(self, shard: GraphShard) -> Path | None:
        """Return the folder of a shard's graphs; None for that of the cache."""
        return self._temporary or self._folders.of(shard)

    def _kept(self, shard: GraphShard, form: GraphForm, length: int) -> Any:  # noqa: ANN401
        """Load a graph from its folder; build it first if the cache has no sound one."""
        stored = self._stored(shard, form, length)
        problem = stored.problem(contents=stored.folder in (None, self._temporary))
        if problem is None:
            self.loaded_count += 1
        else:
            self._folders.refuse(shard, shard.label, problem)
            self._put(stored, shard, form, length)
        with _refusals(shard):
            return _core().import_model(stored.binary.read_bytes(), self._processor, self._options)

    def _built(self, shard: GraphShard, form: GraphForm, length: int) -> Any:  # noqa: ANN401
        """Compile a graph, and keep it in memory only."""
        with graph_folder(shard.label) as folder:
            return self._compile(shard, form, length, folder, "graph")

    def _put(self, stored: ContextBinary, shard: GraphShard, form: GraphForm, length: int) -> bool:
        """Compile a graph into its files, unless they are sound; return whether this call did."""

        def write(folder: Path, models: tuple[Path, ...]) -> None:
            compiled = self._compile(shard, form, length, folder, models[0].stem)
            models[0].with_suffix(".bin").write_bytes(compiled.export_model().getvalue())

        with locked(stored.model):
            if stored.problem() is None:
                return False
            stored.build(write)
            return True

    def _compile(self, shard: GraphShard, form: GraphForm, length: int, folder: Path, name: str) -> Any:  # noqa: ANN401
        model = write_graph(shard, form, self.activation_dtype, folder, length, name=name)
        with _refusals(shard):
            compiled = _core().compile_model(_core().read_model(model), self._processor, self._options)
        self.compiled_count += 1
        return compiled


class OpenVinoGraph:
    """A compiled graph of one shard at one length.

    Args:
        compiled: OpenVINO's graph.
        shard: The shard that it computes.
        length: Tokens of one run.
    """

    __slots__ = ("_compiled", "_shard_label", "tensors")

    def __init__(self, compiled: Any, shard: GraphShard, length: int) -> None:  # noqa: ANN401
        self._compiled = compiled
        self._shard_label = shard.label
        self.tensors = graph_tensors(shard, length, OpenVinoNpu.activation_dtype)

    def bind(self, inputs: NamedArrays, outputs: NamedArrays) -> Callable[[], None]:
        """Return a call that runs the graph in place; see :meth:`heterollm.kernels.npu.NpuGraph.bind`."""
        label, tensor = self._shard_label, load_openvino().Tensor
        check_arrays(inputs, outputs, self.tensors, label)
        request = self._compiled.create_infer_request()
        for name, array in (*inputs.items(), *outputs.items()):
            request.set_tensor(name, tensor(array[np.newaxis], shared_memory=True))
        start, wait = request.start_async, request.wait

        def call() -> None:
            try:
                start()
                wait()
            except RuntimeError as error:
                raise GraphError(f"The graph of {label} failed while running: {_words(error)}.") from error

        return call

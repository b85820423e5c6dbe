"""The NPU backend of ``snapdragon`` and ``emulator``: Qualcomm's HTP through onnxruntime-qnn, in float16.

Each shard has one static graph per length. The backend compiles it, closes the compiled session, which is
heavy, and loads the cached context binary, whose weights are mapped. Open graphs take no more memory than the
NPU can address: the backend closes those that it opened longest ago, and opens them again when they run. It
does not share weights between lengths and does not use the rpcmem allocator.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from heterollm.base import GIB, MIB, DeviceError, GraphError, OptionError, locked, see
from heterollm.kernels.formats import QuantizedTensor, linear_errors
from heterollm.kernels.npu.forms import integer_forms, k_split_ffn_forms, reshaped_forms
from heterollm.kernels.npu.graphs import GRAPH_VERSION, shard_digest, write_graph
from heterollm.kernels.npu.protocol import (
    INTEGER_FORMS,
    STANDARD_LENGTHS,
    GraphForm,
    TimeKind,
    check_form,
    edge_dtype,
)
from heterollm.kernels.npu.qnn_binaries import ContextBinary, temporary_graphs
from heterollm.kernels.npu.qnn_compile import compile_graph
from heterollm.kernels.npu.qnn_cpu_time import emulated_cpu_us
from heterollm.kernels.npu.qnn_power import SESSION_OPTIONS, QnnPower
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session, qnn_available, qnn_versions
from heterollm.kernels.npu.qnn_socs import SOCS, this_soc
from heterollm.kernels.npu.session import HeldSession, SessionGraph
from heterollm.kernels.npu.shards import FfnShard, LinearShard, NpuShard, ShardKey
from heterollm.kernels.ops import Activation, Power, WeightFormat

__all__ = ["BuiltGraph", "QnnNpu", "qnn_available"]

logger = logging.getLogger(__name__)

DEFAULT_SOC_MODEL = "57"
"""Snapdragon 8 Gen 3 (HTP v75), which the emulator plays."""

HEXAGON_BYTES = 7 * GIB // 2
"""Memory that one process domain of a Hexagon maps: 3.5 GiB by onnxruntime-qnn#606, up to 4 elsewhere."""

BLOCK_OPTION = {"enable_block_quant_weight_optimization": "1"}
"""Makes the compiler keep 4-bit blocks in integers; without it they become FP16, with nothing gained."""

CHILD_WEIGHT_BYTES = 16 * MIB
"""Larger shards are compiled in a child process by default."""


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """Result of :meth:`QnnNpu.build`.

    Args:
        size_bytes: Size of the graph's files in the cache.
        compiled: Whether this call compiled the graph; otherwise the cache had it.
        refusal: Reason why QNN does not load it on this machine; empty if it does.
    """

    size_bytes: int
    compiled: bool
    refusal: str


class QnnNpu:
    """Qualcomm's HTP, real or emulated, behind the NPU protocol.

    Args:
        emulator: Whether to use the emulator in the x86-64 Linux wheel instead of a real Hexagon.
        soc_model: Qualcomm's number of the SoC to emulate or to compile for; None for this machine's SoC.
        compile_in_child: Whether to compile in a child process; None does so for large shards.
        power: Clocks to ask for while there is work.

    Attributes:
        power: The switch of the clocks; None where nothing is asked for.

    Raises:
        DeviceError: The provider, the emulator or the NPU is missing.
    """

    standard_lengths = STANDARD_LENGTHS
    row_alignment = 256
    copies_by_length = True
    io_by_graph = True
    addressable_bytes: int | None = HEXAGON_BYTES
    activation_dtype: np.dtype[Any] = np.dtype(np.float16)

    def __init__(
        self,
        *,
        emulator: bool,
        soc_model: str | None = None,
        compile_in_child: bool | None = None,
        power: Power = "default",
    ) -> None:
        usable, reason, fix = qnn_available(emulator=emulator)
        if not usable:
            raise DeviceError(reason, fix=fix)
        if emulator and soc_model is None:
            soc_model = DEFAULT_SOC_MODEL
        options = {
            "backend_type": "htp",
            "enable_htp_fp16_precision": "1",
            "htp_graph_finalization_optimization_mode": "3",
        }
        # The cache key names the chip, not the machine: graphs compiled elsewhere for this chip are the same.
        self.soc_model = soc_model or this_soc()
        if self.soc_model in SOCS:  # QNN asks for it with float16; nobody has seen what it does without
            options["soc_model"] = self.soc_model
        soc = SOCS.get(self.soc_model)
        limit = f"; {soc.refusal}" if soc is not None and soc.refusal else ""
        self.name = f"Hexagon {'emulator' if emulator else 'NPU'} (QNN HTP{limit})"
        self.time_kind: TimeKind = "emulated" if emulator else "real"
        self.compiled_count = 0
        self.loaded_count = 0
        self._target = QnnTarget(emulator, options, SESSION_OPTIONS[power])
        self.power = None if power == "default" else QnnPower(self._target, power)
        self._compile_in_child = compile_in_child
        self._sessions: OrderedDict[tuple[ShardKey, GraphForm, int], HeldSession] = OrderedDict()
        self._sizes: dict[tuple[ShardKey, GraphForm, int], int] = {}
        self._temporary: Path | None = None
        self._removable: dict[tuple[ShardKey, GraphForm, int], ContextBinary] = {}

    def forms(
        self, weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
    ) -> tuple[GraphForm, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`.

        Weight first leads: at 5 to 32 tokens the compiler lays activation first out in 265 memory blocks and
        weight first in 41 (512 x 512). It takes up to 7.7 times as long to emulate, which says nothing of
        silicon.
        """
        # MatMulNBits on HTP has float activations only.
        soc = SOCS.get(self.soc_model)
        if weight.bits == 32 or integer_inputs or (soc is not None and not soc.takes_float16):
            return ()
        plain: tuple[GraphForm, ...] = ("weight_first", "activation_first")
        if weight.quantized:
            integer = integer_forms(weight, length=length)
            if soc is not None and not soc.takes_4_bits:
                return integer
            plain = ("matmul_nbits",)
            return plain + reshaped_forms(weight, columns=columns, length=length) + integer
        return plain + reshaped_forms(weight, columns=columns, length=length)

    def ffn_forms(
        self,
        weight: WeightFormat,
        *,
        width: int,
        columns: int,
        length: int,
        integer_inputs: bool,
        activation: Activation,
    ) -> tuple[GraphForm, ...]:
        """Return the legal ffn forms; see :class:`heterollm.kernels.npu.NpuBackend`.

        QNN fuses a sigmoid into an activation-first product before it, at NMSE 1.4e-5 (measured on the
        emulator), far past the gate. SiLU between float weights therefore has weight-first forms only.
        """
        if not self.forms(weight, columns=columns, length=length, integer_inputs=integer_inputs):
            return ()
        plain: tuple[GraphForm, ...] = ("ffn_weight_first",)
        if weight.quantized:
            integer = integer_forms(weight, length=length, activation=activation)
            if (soc := SOCS.get(self.soc_model)) is not None and not soc.takes_4_bits:
                return integer
            return ("ffn", *k_split_ffn_forms(weight, width=width), *integer)
        if activation != "silu":
            plain = ("ffn_weight_first", "ffn")
        return plain + k_split_ffn_forms(weight, width=width)

    def prepare(
        self, shard: NpuShard, length: int, form: GraphForm | None = None, *, any_length: bool = False
    ) -> SessionGraph:
        """Load or build a static graph; see :class:`heterollm.kernels.npu.NpuBackend`."""
        chosen = check_form(self, shard, length, form, any_length=any_length)
        key = (shard.key, chosen, length)
        if key not in self._sessions:
            if self._temporary is not None:
                self._removable[key] = self._binary(shard, chosen, length)
            self._sizes[key] = self._graph_bytes(shard, length)
            self._make_room(key)
            session = self._open(shard, chosen, length)
            self._sessions[key] = HeldSession(session, self._opener(key, shard, chosen))
        self._sessions.move_to_end(key)
        dtype = edge_dtype(chosen, self.activation_dtype)
        return SessionGraph(self._sessions[key], shard, length, dtype)

    @property
    def open_bytes(self) -> int:
        """Memory that the open graphs take, by their weights, inputs and outputs."""
        return sum(self._sizes[key] for key, held in self._sessions.items() if held.is_open)

    def stored_bytes(self, shard: NpuShard, length: int, form: GraphForm | None = None) -> int:
        """Return the bytes that a shard's graph takes in the cache, damaged or not; 0 if it is missing.

        Raises:
            GraphError: As :meth:`prepare`.
        """
        return self._binary(shard, check_form(self, shard, length, form), length).size_bytes

    def build(self, shard: NpuShard, length: int, form: GraphForm | None = None) -> BuiltGraph:
        """Put a graph into the cache, check whether it loads on this machine, and keep no session.

        A sound graph for a newer Hexagon than the emulated one does not load.

        Raises:
            GraphError: As :meth:`prepare`.
            CacheError: The cache folder cannot be written or locked.
        """
        chosen = check_form(self, shard, length, form)
        stored = self._binary(shard, chosen, length)
        label = f"{shard.label} ({chosen}, {length} tokens)"
        with locked(stored.model):
            compiled = stored.problem() is not None
            if compiled:
                self._build(stored, shard, chosen, length, label)
        _, problem = self._load(stored, label)
        return BuiltGraph(stored.size_bytes, compiled, problem)

    def cpu_times_us(
        self, shard: NpuShard, length: int, form: GraphForm | None = None, *, runs: int
    ) -> tuple[float, ...] | None:
        """Return the CPU time of each emulated run; see :class:`heterollm.kernels.npu.NpuBackend`.

        A real Hexagon returns None: its time is real.
        """
        if not self._target.emulator:
            return None
        if runs < 1:
            raise OptionError(f"CPU time is measured over at least one run, not {runs}.")
        chosen = check_form(self, shard, length, form, any_length=True)
        label = f"{shard.label} ({chosen}, {length} tokens)"
        stored = self._binary(shard, chosen, length)
        try:
            with tempfile.TemporaryDirectory(prefix="heterollm-emulate-", ignore_cleanup_errors=True) as name:
                folder, model = Path(name), stored.model
                if stored.problem() is not None:
                    model = folder / "compiled.onnx"
                    self._compile(shard, chosen, length, folder, model, label)
                dtype = edge_dtype(chosen, self.activation_dtype)
                return emulated_cpu_us(model, self._target, shard, length, dtype, runs)
        except OSError as error:
            raise GraphError(
                f"Cannot write the graph of {label} into {tempfile.gettempdir()}: {error.strerror or error}.",
                fix="Free some space there, or set TMPDIR to another folder.",
            ) from error

    def release(self, shard: NpuShard) -> None:
        """Drop the sessions of a shard; see :class:`heterollm.kernels.npu.NpuBackend`.

        Within :meth:`temporary_graphs` this deletes its graphs as well.
        """
        for key in [key for key in self._sessions if key[0] == shard.key]:
            del self._sessions[key]
        for key in [key for key in self._removable if key[0] == shard.key]:
            self._removable.pop(key).remove()

    @contextlib.contextmanager
    def temporary_graphs(self) -> Iterator[None]:
        """Delete each graph that is built within this context when its shard is released, or at the end.

        The end also drops all sessions; no graph may run afterwards. The random weights of a profiling run
        would otherwise take gigabytes of the cache.

        Raises:
            CacheError: The cache folder cannot be written.
        """
        with temporary_graphs() as folder:
            self._temporary = folder
            try:
                yield
            finally:
                self._temporary = None
                self._removable.clear()
                self._sessions.clear()  # they map the files

    def versions(self) -> dict[str, str]:
        """Return the versions of ONNX Runtime, the provider and its SDK, and the SoC compiled for."""
        return {
            **qnn_versions(),
            "soc": f"{self.soc_model} (emulated)" if self._target.emulator else self.soc_model,
        }

    def close(self) -> None:
        """Drop all sessions, and the vote for clocks."""
        if self.power is not None:
            self.power.close()
        self._sessions.clear()

    def self_test(self) -> None:
        """Run one small graph against float64.

        Raises:
            DeviceError: The graph does not compile or run, or computes wrong numbers, or the chip is too old.
        """
        soc = SOCS.get(self.soc_model)
        if soc is not None and soc.refusal:
            raise DeviceError(
                f"This NPU cannot be used: {soc.refusal}.",
                fix="Leave it out with `--npu-threads 0`. " + see("the-hexagon-takes-no-4-bit-weights"),
            )
        generator = np.random.default_rng(0)
        rows, columns, tokens, block = 64, 256, 32, 32
        weight = QuantizedTensor(
            generator.integers(0, 256, (rows, columns // block, block // 2), np.uint8),
            generator.uniform(0.01, 0.02, (rows, columns // block)).astype(np.float16),
            None,
            4,
            block,
        )
        shard = LinearShard(weight, 0, "self_test", ((0, rows),), "self_test")
        x = generator.standard_normal((tokens, columns)).astype(self.activation_dtype)
        y = np.zeros((tokens, rows), self.activation_dtype)
        self.prepare(shard, tokens).bind(x, y)()
        errors = linear_errors(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T)
        if not errors.within("fp16"):
            raise DeviceError(
                f"{self.name} computes wrong numbers: NMSE {errors.nmse:.1e} on the self-test.",
                fix=f"Update the NPU driver and onnxruntime-qnn. {see('a-part-computes-wrong-numbers')}",
            )

    def _graph_bytes(self, shard: NpuShard, length: int) -> int:
        elements = length * (shard.columns + shard.rows) if self.io_by_graph else 0
        return shard.weight_bytes + elements * self.activation_dtype.itemsize

    def _opener(
        self, key: tuple[ShardKey, GraphForm, int], shard: NpuShard, form: GraphForm
    ) -> Callable[[], Any]:
        """Return a call that opens a graph of the cache; it does not keep the shard with its weights."""
        model, label = self._binary(shard, form, key[2]).model, f"{shard.label} ({form}, {key[2]} tokens)"

        def open_again() -> Any:  # noqa: ANN401 - onnxruntime ships no types
            self._make_room(key)
            self._sessions.move_to_end(key)
            self.loaded_count += 1
            return open_session(model, self._target, label)

        return open_again

    def _make_room(self, key: tuple[ShardKey, GraphForm, int]) -> None:
        """Close the graphs that were opened longest ago, until one more can be addressed."""
        limit, used = self.addressable_bytes, self.open_bytes
        if limit is None:
            return
        for other, held in self._sessions.items():
            if used + self._sizes[key] <= limit:
                return
            if held.is_open and other != key:
                held.close()
                used -= self._sizes[other]

    def _open(self, shard: NpuShard, form: GraphForm, length: int) -> Any:  # noqa: ANN401 - onnxruntime ships no types
        """Load the graph from the cache; build it first if the cache has no sound one."""
        label = f"{shard.label} ({form}, {length} tokens)"
        stored = self._binary(shard, form, length)
        session, problem = self._load(stored, label)
        if session is not None:
            return session
        with locked(stored.model):
            # Another process may have built it while this one waited for the lock.
            session, problem = self._load(stored, label)
            if session is not None:
                return session
            if problem != "missing":
                logger.warning("The cached NPU graph of %s is %s; building it again.", label, problem)
            self._build(stored, shard, form, length, label)
        return open_session(stored.model, self._target, label)

    def _build(
        self, stored: ContextBinary, shard: NpuShard, form: GraphForm, length: int, label: str
    ) -> None:
        stored.build(lambda folder, model: self._compile(shard, form, length, folder, model, label))
        self.compiled_count += 1

    def _load(self, stored: ContextBinary, label: str) -> tuple[Any, str]:
        """Return the session of a sound file, or None and the fault."""
        problem = stored.problem()
        if problem is not None:
            return None, problem
        try:
            session = open_session(stored.model, self._target, label)
        except GraphError as error:
            return None, f"refused by QNN ({error.message})"
        self.loaded_count += 1
        return session, ""

    def _compile(
        self, shard: NpuShard, form: GraphForm, length: int, folder: Path, model: Path, label: str
    ) -> None:
        source = write_graph(shard, form, self.activation_dtype, folder, length)
        in_child = self._compile_in_child
        if in_child is None:
            in_child = shard.weight_bytes > CHILD_WEIGHT_BYTES
        compile_graph(source, model, self._compiler_target(form), label, in_child=in_child)

    def _compiler_target(self, form: GraphForm) -> QnnTarget:
        """Return the target that compiles a form: integer ones need an option that others may not have."""
        if form not in INTEGER_FORMS:
            return self._target
        return replace(self._target, options=self._target.options | BLOCK_OPTION)

    def _binary(self, shard: NpuShard, form: GraphForm, length: int) -> ContextBinary:
        identity: dict[str, Any] = {
            "weights": shard.weights_key,
            "content": shard_digest(shard),
            "layer": shard.layer,
            "group": shard.group,
            "row_ranges": shard.row_ranges,
            "columns": shard.columns,
            "format": str(shard.format),
            "form": form,
            "length": length,
            "dtype": str(self.activation_dtype),
            "soc": self.soc_model,
            "options": {
                name: value
                for name, value in self._compiler_target(form).options.items()
                if name != "soc_model"
            },
        }
        if isinstance(shard, FfnShard):
            identity |= {
                "activation": shard.activation,
                "outputs": shard.rows,
                "bias": shard.bias is not None,
            }
        versions = qnn_versions()
        made_by = {
            "graph_version": GRAPH_VERSION,
            "onnxruntime-qnn": versions["onnxruntime-qnn"],
            "qairt": versions["qairt"],
        }
        return ContextBinary(identity, made_by, self._temporary)

"""The NPU part of ``snapdragon`` and ``emulator``: Qualcomm's HTP through onnxruntime-qnn, in float16.

One static graph per part and length: compiled, closed, then loaded from its cached context binary, because
compiled sessions are heavy and loaded ones map their weights. Weights shared between lengths, the rpcmem
allocator and power modes are not used.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heterollm.base import MIB, DeviceError, GraphError, OptionError, locked, see
from heterollm.kernels.formats import QuantizedTensor, linear_errors
from heterollm.kernels.npu.forms import chunked_block_forms, reshaped_forms
from heterollm.kernels.npu.graphs import GRAPH_VERSION, slice_digest, write_graph
from heterollm.kernels.npu.parts import NpuBlock, NpuPart, NpuSlice, PartKey
from heterollm.kernels.npu.protocol import STANDARD_LENGTHS, Form, TimeKind, check_form, check_prepare
from heterollm.kernels.npu.qnn_binaries import ContextBinary, temporary_graphs
from heterollm.kernels.npu.qnn_compile import compile_graph
from heterollm.kernels.npu.qnn_cycles import profiled_cycles
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session, qnn_available, qnn_versions
from heterollm.kernels.npu.qnn_socs import this_soc
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.ops import Activation, WeightFormat

__all__ = ["BuiltGraph", "QnnNpu", "qnn_available"]

logger = logging.getLogger(__name__)

DEFAULT_SOC_MODEL = "57"
"""Snapdragon 8 Gen 3 (HTP v75), which the emulator plays."""

FLOAT_ONLY_SOCS = frozenset({"30"})
"""HTP v68 with FP16: it takes no MatMulNBits (QNN reports "expected >= 69")."""

INTEGER_ONLY_SOCS = frozenset({"37"})
"""HTP v68 without FP16 (8cx Gen 3): quantised activations only."""

CHILD_WEIGHT_BYTES = 16 * MIB
"""Slices of more weights are compiled in a child process by default."""


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    """A graph in the cache, as :meth:`QnnNpu.build` left it.

    Args:
        size_bytes: Of its files.
        compiled: Whether it was compiled now; else it was there.
        refusal: Why QNN does not load it on this machine; empty if it does.
    """

    size_bytes: int
    compiled: bool
    refusal: str


class QnnNpu:
    """Qualcomm's HTP, real or emulated, behind the NPU protocol.

    Args:
        emulator: Whether to use the emulator in the x86-64 Linux wheel instead of a real Hexagon.
        soc_model: Qualcomm's number of the SoC to emulate, or to compile for; None lets a real one say.
        compile_in_child: Whether to compile in a child process; None does so for large slices.

    Raises:
        DeviceError: The provider, the emulator or the NPU is not there.
    """

    standard_lengths = STANDARD_LENGTHS
    row_alignment = 256
    copies_by_length = True
    activation_dtype: np.dtype[Any] = np.dtype(np.float16)

    def __init__(
        self, *, emulator: bool, soc_model: str | None = None, compile_in_child: bool | None = None
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
        if soc_model is not None:
            options["soc_model"] = soc_model
        self.name = f"Hexagon {'emulator' if emulator else 'NPU'} (QNN HTP)"
        self.time_kind: TimeKind = "emulated" if emulator else "real"
        # Graphs are filed under the chip and not under where they were compiled: those that another machine
        # compiled for this chip are the same.
        self.soc_model = soc_model or this_soc()
        self.compiled_count = 0
        self.loaded_count = 0
        self._target = QnnTarget(emulator, options)
        self._compile_in_child = compile_in_child
        self._sessions: dict[tuple[PartKey, Form, int], Any] = {}
        self._temporary: Path | None = None
        self._removable: dict[tuple[PartKey, Form, int], ContextBinary] = {}

    def forms(
        self, weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
    ) -> tuple[Form, ...]:
        """Return the legal forms; see :class:`heterollm.kernels.npu.NpuBackend`.

        Weight first leads: by the emulator's cycle counts it is up to 7.7 times cheaper at 5 to 32 tokens.
        """
        # MatMulNBits on HTP has float activations only.
        if self.soc_model in INTEGER_ONLY_SOCS or weight.bits == 32 or integer_inputs:
            return ()
        plain: tuple[Form, ...] = ("weight_first", "activation_first")
        if weight.quantized:
            if self.soc_model in FLOAT_ONLY_SOCS:
                return ()
            plain = ("matmul_nbits",)
        return plain + reshaped_forms(weight, columns=columns, length=length)

    def block_forms(
        self,
        weight: WeightFormat,
        *,
        width: int,
        columns: int,
        length: int,
        integer_inputs: bool,
        activation: Activation,
    ) -> tuple[Form, ...]:
        """Return the legal forms of a block; see :class:`heterollm.kernels.npu.NpuBackend`.

        A sigmoid right behind a product activation first is computed within it, at NMSE 1.4e-5 of the block
        (measured on the emulator), far past the gate; so SiLU between float weights is weight first alone.
        """
        if not self.forms(weight, columns=columns, length=length, integer_inputs=integer_inputs):
            return ()
        plain: tuple[Form, ...] = ("ffn_weight_first",)
        if weight.quantized:
            plain = ("ffn",)
        elif activation != "silu":
            plain = ("ffn_weight_first", "ffn")
        return plain + chunked_block_forms(weight, width=width)

    def prepare(self, part: NpuPart, length: int, form: Form | None = None) -> SessionGraph:
        """Load or build a static graph; see :class:`heterollm.kernels.npu.NpuBackend`."""
        return self._prepare(part, length, check_prepare(self, part, length, form))

    def prepare_any_length(self, part: NpuPart, length: int, form: Form | None = None) -> SessionGraph:
        """Load or build a graph of any length; see :class:`heterollm.kernels.npu.NpuBackend`."""
        return self._prepare(part, length, check_form(self, part, length, form))

    def _prepare(self, part: NpuPart, length: int, chosen: Form) -> SessionGraph:
        key = (part.key, chosen, length)
        if key not in self._sessions:
            if self._temporary is not None:
                self._removable[key] = self._binary(part, chosen, length)
            self._sessions[key] = self._open(part, chosen, length)
        return SessionGraph(
            self._sessions[key], part.label, length, part.rows, part.columns, self.activation_dtype
        )

    def stored_bytes(self, part: NpuPart, length: int, form: Form | None = None) -> int:
        """Return what a part's graph takes in the cache, sound or not; 0 if it is not there.

        Raises:
            GraphError: As :meth:`prepare`.
        """
        return self._binary(part, check_prepare(self, part, length, form), length).size_bytes

    def build(self, part: NpuPart, length: int, form: Form | None = None) -> BuiltGraph:
        """Put a graph into the cache without keeping a session, and see whether it loads here.

        A graph for a newer Hexagon than the emulator plays is sound and does not load.

        Raises:
            GraphError: As :meth:`prepare`.
            CacheError: The cache folder cannot be written or locked.
        """
        chosen = check_prepare(self, part, length, form)
        stored = self._binary(part, chosen, length)
        label = f"{part.label} ({chosen}, {length} tokens)"
        with locked(stored.model):
            compiled = stored.problem() is not None
            if compiled:
                self._build(stored, part, chosen, length, label)
        _, problem = self._load(stored, label)
        return BuiltGraph(stored.size_bytes, compiled, problem)

    def count_cycles(
        self, part: NpuPart, length: int, form: Form | None = None, *, runs: int
    ) -> tuple[int, ...] | None:
        """Return the cycles of each run on the emulator; see :class:`heterollm.kernels.npu.NpuBackend`.

        None on a real Hexagon: its time is real, and whether it writes the same profile is not known.
        """
        if not self._target.emulator:
            return None
        if runs < 1:
            raise OptionError(f"Cycles are counted over at least one run, not {runs}.")
        chosen = check_form(self, part, length, form)
        label = f"{part.label} ({chosen}, {length} tokens)"
        stored = self._binary(part, chosen, length)
        try:
            with tempfile.TemporaryDirectory(prefix="heterollm-cycles-", ignore_cleanup_errors=True) as name:
                folder, model = Path(name), stored.model
                if stored.problem() is not None:
                    model = folder / "compiled.onnx"
                    self._compile(part, chosen, length, folder, model, label)
                dtype = self.activation_dtype
                return profiled_cycles(model, self._target, part, length, dtype, runs, folder)
        except OSError as error:
            raise GraphError(
                f"Cannot write the graph of {label} into {tempfile.gettempdir()}: {error.strerror or error}.",
                fix="Free some space there, or set TMPDIR to another folder.",
            ) from error

    def release(self, part: NpuPart) -> None:
        """Drop the sessions of a part; see :class:`heterollm.kernels.npu.NpuBackend`.

        Within :meth:`temporary_graphs` its graphs are deleted, too.
        """
        for key in [key for key in self._sessions if key[0] == part.key]:
            del self._sessions[key]
        for key in [key for key in self._removable if key[0] == part.key]:
            self._removable.pop(key).remove()

    @contextlib.contextmanager
    def temporary_graphs(self) -> Iterator[None]:
        """Keep none of the graphs that are made meanwhile: each is deleted with its release, or at the end.

        At the end all sessions are dropped; their graphs must not run afterwards. For weights that nobody
        needs again: the random ones of a profiling run would take gigabytes.

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
        """Drop all sessions."""
        self._sessions.clear()

    def self_test(self) -> None:
        """Run one small graph against float64.

        Raises:
            DeviceError: It does not compile, run, or give the right numbers.
        """
        generator = np.random.default_rng(0)
        rows, columns, tokens, block = 64, 256, 32, 32
        weight = QuantizedTensor(
            generator.integers(0, 256, (rows, columns // block, block // 2), np.uint8),
            generator.uniform(0.01, 0.02, (rows, columns // block)).astype(np.float16),
            None,
            4,
            block,
        )
        part = NpuSlice(weight, 0, "self_test", ((0, rows),), "self_test")
        x = generator.standard_normal((tokens, columns)).astype(self.activation_dtype)
        y = np.zeros((tokens, rows), self.activation_dtype)
        self.prepare(part, tokens).bind(x, y)()
        errors = linear_errors(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T)
        if not errors.within("fp16"):
            raise DeviceError(
                f"{self.name} computes wrong numbers: NMSE {errors.nmse:.1e} on the self-test.",
                fix=f"Update the NPU driver and onnxruntime-qnn. {see('a-part-computes-wrong-numbers')}",
            )

    def _open(self, part: NpuPart, form: Form, length: int) -> Any:  # noqa: ANN401 - onnxruntime ships no types
        """Load the graph from the cache, building it first where the cache has no sound one."""
        label = f"{part.label} ({form}, {length} tokens)"
        stored = self._binary(part, form, length)
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
            self._build(stored, part, form, length, label)
        return open_session(stored.model, self._target, label)

    def _build(self, stored: ContextBinary, part: NpuPart, form: Form, length: int, label: str) -> None:
        stored.build(lambda folder, model: self._compile(part, form, length, folder, model, label))
        self.compiled_count += 1

    def _load(self, stored: ContextBinary, label: str) -> tuple[Any, str]:
        """Return the session of a sound file, or None and what is wrong with it."""
        problem = stored.problem()
        if problem is not None:
            return None, problem
        try:
            session = open_session(stored.model, self._target, label)
        except GraphError as error:
            return None, f"refused by QNN ({error.message})"
        self.loaded_count += 1
        return session, ""

    def _compile(self, part: NpuPart, form: Form, length: int, folder: Path, model: Path, label: str) -> None:
        source = write_graph(part, form, self.activation_dtype, folder, length)
        in_child = self._compile_in_child
        if in_child is None:
            in_child = part.weight_bytes > CHILD_WEIGHT_BYTES
        compile_graph(source, model, self._target, label, in_child=in_child)

    def _binary(self, part: NpuPart, form: Form, length: int) -> ContextBinary:
        identity: dict[str, Any] = {
            "weights": part.weights_key,
            "content": slice_digest(part),
            "layer": part.layer,
            "group": part.group,
            "row_ranges": part.row_ranges,
            "columns": part.columns,
            "format": str(part.format),
            "form": form,
            "length": length,
            "dtype": str(self.activation_dtype),
            "soc": self.soc_model,
            "options": {name: value for name, value in self._target.options.items() if name != "soc_model"},
        }
        if isinstance(part, NpuBlock):
            identity |= {"activation": part.activation, "outputs": part.rows, "bias": part.bias is not None}
        versions = qnn_versions()
        made_by = {
            "graph_version": GRAPH_VERSION,
            "onnxruntime-qnn": versions["onnxruntime-qnn"],
            "qairt": versions["qairt"],
        }
        return ContextBinary(identity, made_by, self._temporary)

"""llama.cpp as one of the engines, through llama-cpp-python's bindings of its C functions.

It reads the same 4-bit weights, bit for bit, from a GGUF file of :mod:`heterollm_engines.gguf_file`. Its
inputs are rounded to 8 bits in blocks of 32, as ``w4a8`` rounds them, and its KV cache is FP16.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import DeviceError, EngineError, OptionError, cache_root
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import Facts, Ids, Job
from heterollm.benchmarks.work import Work, work_of
from heterollm.kernels.gpu.pocl.target import TARGETS, chosen_target
from heterollm.model import ModelConfig, op_specs
from heterollm_engines.common import SteppedEngine
from heterollm_engines.gguf_file import write_gguf

CHUNK: Final = 512
"""Tokens that llama.cpp computes at a time by default (``n_ubatch``)."""

TRIAL_TOKENS, TRIAL_DEPTH = 16, 512
"""Tokens that a trial of attention decodes, and those before them."""

GATE_DB: Final = 25.0
"""The logits' gate: inputs are rounded with a scale in half, and the KV cache is in half on top of that."""

FEATURES: Final = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512": "avx512f",
    "AVX_VNNI": "avx_vnni",
    "AVX512_VNNI": "avx512_vnni",
    "AMX_INT8": "amx_int8",
}
"""Names of instructions in llama.cpp's account of its build, as the processor's flags."""


def gguf_path(folder: Path) -> Path:
    """Return where the GGUF file of a checkpoint's folder is kept: in the cache."""
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache_root() / "gguf" / f"{name}.gguf"


def check_instructions(built_for: str) -> None:
    """Refuse to compare where heterollm is limited to an older processor and llama.cpp is not.

    Args:
        built_for: llama.cpp's account of its build.

    Raises:
        OptionError: They use different instructions.
    """
    chosen = chosen_target()
    if chosen is None:
        return
    may = dict(TARGETS)[chosen] & set(FEATURES.values())
    uses = {flag for name, flag in FEATURES.items() if re.search(rf"\b{name} = 1\b", built_for)}
    if uses != may:
        built, limits = (", ".join(sorted(flags)) or "none" for flags in (uses, may))
        raise OptionError(
            f"llama.cpp is built for {built}, and heterollm is limited to {chosen}, which has {limits}.",
            fix="Build llama-cpp-python for the same instructions with CMAKE_ARGS, or unset "
            "HETEROLLM_POCL_TARGET.",
        )


class LlamaCppEngine(SteppedEngine):
    """A model of llama.cpp on the processor.

    Args:
        job: What to load.

    Raises:
        DeviceError: llama-cpp-python or gguf is not installed.
        OptionError: The weights have another format than Q4_0, or heterollm is limited to other instructions.
        HeteroLLMError: The checkpoint is not usable, or llama.cpp refuses it.
    """

    def __init__(self, job: Job) -> None:
        asked = job.configuration
        if asked.precision == "fp16" or asked.group_size != 32:
            raise OptionError(
                f"llama.cpp has no format for {asked.precision} with blocks of {asked.group_size}.",
                fix="Compare at w4a16 or w4a8 with --group-size 32, which is its Q4_0.",
            )
        try:
            import gguf  # noqa: F401 - writes the weights
            import llama_cpp
        except (ImportError, OSError, RuntimeError) as error:
            raise DeviceError(
                f"Engine 'llama.cpp' is not installed: {error}.", fix="Run `pip install 'heterollm[bench]'`."
            ) from error
        self._lib: Any = llama_cpp
        # Kept, as C holds no reference.
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        check_instructions(llama_cpp.llama_print_system_info().decode("utf-8", "replace"))
        path = write_gguf(job.model, gguf_path(job.model))
        llama_cpp.llama_backend_init()
        self._threads = asked.n_threads or os.cpu_count() or 1
        model = llama_cpp.llama_model_load_from_file(
            os.fsencode(path), llama_cpp.llama_model_default_params()
        )
        if not model:
            raise EngineError(f"llama.cpp does not load {path}.", fix="Delete it, and try again.")
        self._model = model
        self._config = ModelConfig.from_folder(job.model)
        self._specs = op_specs(self._config, "w4a16", 32, True)
        # Its flash attention, which it chooses by itself, is the slower one with some compilers.
        self._has_flash = min((False, True), key=lambda flash: self._trial_s(job.context, flash=flash))
        self._open(job.context, flash=self._has_flash)

    def _open(self, positions: int, *, flash: bool) -> None:
        options = self._lib.llama_context_default_params()
        options.n_ctx = options.n_batch = positions
        options.n_threads = options.n_threads_batch = self._threads
        options.flash_attn_type = int(flash)
        self._context = self._lib.llama_init_from_model(self._model, options)
        if not self._context:
            raise EngineError(
                f"llama.cpp has no memory for {positions} positions.", fix="Compare with fewer tokens."
            )
        self._memory = self._lib.llama_get_memory(self._context)

    def _trial_s(self, positions: int, *, flash: bool) -> float:
        """Return the time of some tokens behind others."""
        self._open(positions, flash=flash)
        ids = np.arange(min(positions, TRIAL_DEPTH + TRIAL_TOKENS), dtype=np.int32) % self._config.vocab_size
        try:
            if len(ids) > TRIAL_TOKENS:
                self.append(ids[:-TRIAL_TOKENS])
            begin_s = time.perf_counter()
            for index in range(max(0, len(ids) - TRIAL_TOKENS), len(ids)):
                self.append(ids[index : index + 1])
            return time.perf_counter() - begin_s
        finally:
            self._lib.llama_free(self._context)

    @property
    def facts(self) -> Facts:
        """What was loaded."""
        lib = self._lib
        return Facts(
            engine_version=lib.__version__,
            plan_level="",
            device="CPU",
            time_kind="real",
            fingerprint="",
            model_type=f"{self._config.family} Q4_0, head Q8_0",
            model_size=int(lib.llama_model_size(self._model)),
            model_n_params=int(lib.llama_model_n_params(self._model)),
            description={
                "built_for": lib.llama_print_system_info().decode("utf-8", "replace"),
                "threads": self._threads,
                "kv_bits": 16,
                "flash_attention": self._has_flash,
            },
            gate_db=GATE_DB,
            notes=("rounds inputs to 8 bits in blocks of 32 and keeps the KV cache in FP16",),
        )

    def work(self, case: Case) -> Work:
        """Return what a sample computes and reads."""
        return work_of(self._config, self._specs, case, chunk=CHUNK, cache_dtype=np.dtype(np.float16))

    def close(self) -> None:
        """Free the model."""
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def append(self, ids: Ids) -> NDArray[np.float32]:
        """Append tokens in one call, and return the logits of the last."""
        tokens = (ctypes.c_int32 * len(ids))(*ids.tolist())
        if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids))):
            raise EngineError(f"llama.cpp refuses {len(ids)} tokens at position {self._seen}.")
        pointer = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._config.vocab_size,)).copy()

    def cut(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self._lib.llama_memory_seq_rm(self._memory, 0, position, -1)

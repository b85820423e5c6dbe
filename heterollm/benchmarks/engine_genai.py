"""onnxruntime-genai as one of the engines, on the same weights: see :mod:`heterollm.benchmarks.onnx_twin`."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import DeviceError, OptionError, cache_root
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import Facts, Ids, Job
from heterollm.benchmarks.foreign import SteppedEngine
from heterollm.benchmarks.onnx_twin import write_onnx
from heterollm.benchmarks.work import Work, work_of
from heterollm.model import ModelConfig, op_specs

__all__ = ["GenaiEngine"]


class GenaiEngine(SteppedEngine):
    """A model of onnxruntime-genai on the processor.

    Args:
        job: What to load.

    Raises:
        DeviceError: onnxruntime-genai is not installed.
        OptionError: The weights have another format than 4-bit blocks of 32.
        HeteroLLMError: The checkpoint is not usable.
    """

    def __init__(self, job: Job) -> None:
        asked = job.configuration
        if asked.precision == "fp16" or asked.group_size != 32:
            raise OptionError(
                f"onnxruntime-genai is compared with 4-bit blocks of 32, not {asked.precision} with "
                f"{asked.group_size}.",
                fix="Compare at w4a16 or w4a8 with --group-size 32.",
            )
        try:
            import onnxruntime_genai
        except (ImportError, OSError) as error:
            raise DeviceError(
                f"Engine 'onnxruntime-genai' is not installed: {error}.",
                fix="Run `pip install 'heterollm[bench]'`.",
            ) from error
        rounded = asked.precision == "w4a8"
        self._threads = asked.n_threads or os.cpu_count() or 1
        self._config = ModelConfig.from_folder(job.model)
        self._specs = op_specs(self._config, "w4a16", 32, True)
        folder = write_onnx(
            job.model,
            _folder(job.model, asked.precision),
            integer_inputs=rounded,
            context=job.context,
            threads=self._threads,
        )
        self._version: str = onnxruntime_genai.__version__
        self._model: Any = onnxruntime_genai.Model(str(folder))
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=job.context, do_sample=False)
        self._generator: Any = onnxruntime_genai.Generator(self._model, parameters)

    @property
    def facts(self) -> Facts:
        """What was loaded."""
        weights = sum(spec.rows * spec.columns for spec in self._specs)
        table = self._config.vocab_size * self._config.hidden_size
        layers = sum(spec.weight_bytes() for spec in self._specs if spec.group != "head")
        return Facts(
            engine_version=self._version,
            plan_level="",
            device="CPU",
            time_kind="real",
            fingerprint="",
            model_type=f"{self._config.family} MatMulNBits, head float32",
            model_size=layers + 8 * table,
            model_n_params=weights + table,
            description={"threads": self._threads},
            notes=("keeps embedding and head in float32, equal to heterollm's 8-bit values",),
        )

    def work(self, case: Case) -> Work:
        """Return what a sample computes and reads."""
        return work_of(self._config, self._specs, case, chunk=max(1, case.n_prompt), cache_itemsize=4)

    def close(self) -> None:
        """Free the model."""
        del self._generator, self._model

    def append(self, ids: Ids) -> NDArray[np.float32]:
        """Append tokens in one pass, and return the logits of the last."""
        self._generator.append_tokens(np.ascontiguousarray(ids, np.int32))
        found: NDArray[np.float32] = np.array(self._generator.get_logits()).reshape(
            -1, self._config.vocab_size
        )
        last: NDArray[np.float32] = found[-1].astype(np.float32)
        return last

    def cut(self, position: int) -> None:
        """Forget all tokens from a position on."""
        self._generator.rewind_to(position)


def _folder(model: Path, precision: str) -> Path:
    """Return where the ONNX files of a checkpoint are kept: in the cache."""
    name = hashlib.sha256(f"{model.resolve()} {precision}".encode()).hexdigest()[:16]
    return cache_root() / "genai" / name

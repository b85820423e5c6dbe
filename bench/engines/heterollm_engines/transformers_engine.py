"""transformers on PyTorch as one of the engines: float32, with the weights that heterollm computes with."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import DeviceError
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import Facts, Ids, Job
from heterollm.benchmarks.work import Work, work_of
from heterollm.model import Checkpoint, ModelConfig, load_weights
from heterollm_engines.common import ForeignEngine


class TransformersEngine(ForeignEngine):
    """A model of transformers with quantised weights written out in float32.

    Args:
        job: What to load.

    Raises:
        DeviceError: PyTorch or transformers is not installed.
        HeteroLLMError: The checkpoint is not usable.
    """

    def __init__(self, job: Job) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise DeviceError(
                f"Engine 'transformers' needs PyTorch: {error}.", fix="Run `pip install torch transformers`."
            ) from error
        asked = job.configuration
        self._torch = torch
        self._threads = asked.n_threads or torch.get_num_threads()
        torch.set_num_threads(self._threads)
        checkpoint = Checkpoint(job.model)
        self._config = ModelConfig.from_folder(checkpoint.folder)
        weights = load_weights(
            checkpoint, self._config, precision=asked.precision, group_size=asked.group_size, symmetric=True
        )
        self._specs = weights.specs
        config = transformers.AutoConfig.from_pretrained(checkpoint.folder)
        state = {name: torch.from_numpy(value.copy()) for name, value in weights.reference_state_dict()}
        self._parameters = sum(value.numel() for value in state.values())
        kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model = kind.from_pretrained(None, config=config, state_dict=state, dtype=torch.float32)
        self._model = model.eval()
        self._cache_type = transformers.DynamicCache
        self._caches: dict[int, Any] = {}
        self._version: str = transformers.__version__

    @property
    def facts(self) -> Facts:
        """What was loaded."""
        return Facts(
            engine_version=self._version,
            plan_level="",
            device="PyTorch CPU",
            time_kind="real",
            fingerprint="",
            model_type=f"{self._config.family} float32",
            model_size=4 * self._parameters,
            model_n_params=self._parameters,
            description={"torch": self._torch.__version__, "threads": self._threads},
            exact=True,
            notes=("computes with heterollm's quantised weights written out in float32",),
        )

    def sample_us(self, case: Case, ids: Ids) -> float:
        """Run a test once; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        cache = self._cache(case.n_depth, ids)
        begin = case.n_depth + case.n_prompt
        prompt = ids[case.n_depth : begin]
        tokens = ids[begin : case.end].tolist()
        before_ns = time.perf_counter_ns()
        if len(prompt):
            self._feed(cache, prompt)
        for token in tokens:
            self._feed(cache, [token])
        taken_us = (time.perf_counter_ns() - before_ns) / 1e3
        cache.crop(-case.tokens)
        return taken_us

    def logits(self, ids: Ids, decoded: int) -> NDArray[np.float32]:
        """Return logits; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        cache = self._cache_type()
        rows = [self._feed(cache, ids[: len(ids) - decoded])]
        rows += [self._feed(cache, [token]) for token in ids[len(ids) - decoded :].tolist()]
        return np.stack(rows)

    def work(self, case: Case) -> Work:
        """Return what a sample computes and reads."""
        chunk = max(1, case.n_prompt)
        return work_of(
            self._config, self._specs, case, chunk=chunk, cache_dtype=np.dtype(np.float32), weight_itemsize=4
        )

    def close(self) -> None:
        """Free the model."""
        self._caches.clear()
        del self._model

    def _cache(self, depth: int, ids: Ids) -> Any:  # noqa: ANN401 - transformers has no types
        if not depth:
            return self._cache_type()
        if depth not in self._caches:
            self._caches[depth] = self._cache_type()
            self._feed(self._caches[depth], ids[:depth])
        return self._caches[depth]

    def _feed(self, cache: Any, ids: Any) -> NDArray[np.float32]:  # noqa: ANN401
        torch = self._torch
        with torch.inference_mode():
            given = torch.tensor(np.asarray(ids, np.int64)[None])
            output = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
        found: NDArray[np.float32] = output.logits[0, -1].float().numpy()
        return found

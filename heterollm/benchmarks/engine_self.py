"""heterollm itself as one of the engines."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import heterollm
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.engine import Facts, FoundFields, Ids, Job
from heterollm.benchmarks.shares import predicted_us, shares_of
from heterollm.benchmarks.work import ceilings_of, work_of
from heterollm.engine import Session
from heterollm.llm import LLM
from heterollm.planning import LoadKeywords, LoadOptions, inputs_of_load
from heterollm.profiler.measure import simulated_meters
from heterollm.trace import save_trace, summarise

FILL_TOKENS: Final = 512
"""Tokens of each pass that fills a session to a depth."""

OPERATORS: Final = 12
"""Operators of a trace in a row, those with most time."""


class SelfEngine:
    """A model on a device, with one session for each depth.

    Args:
        job: Model and configuration.

    Raises:
        HeteroLLMError: The checkpoint, device, plan or an option is not usable.
    """

    def __init__(self, job: Job) -> None:
        asked = job.configuration
        self._asked = asked
        options: LoadKeywords = {**asked.load_keywords, "context": job.context, "trace": job.trace}
        options["profile"] = job.profile
        self._llm = llm = LLM.load(job.model, **options)
        self._inputs = inputs_of_load(LoadOptions(**options), llm.config, llm.context, llm.device)
        self._sessions: dict[int, Session] = {}
        device = self._llm.device
        self._meter = simulated_meters(device)[0] if device.is_simulated else None
        self.modelled_j: float | None = None

    @property
    def facts(self) -> Facts:
        """Facts of the loaded model."""
        llm, config = self._llm, self._llm.config
        device = llm.device
        embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        head = next(spec for spec in self._inputs.specs if spec.group == "head")
        size = sum(spec.weight_bytes() for spec in self._inputs.specs)
        return Facts(
            engine_version=heterollm.__version__,
            plan_level=llm.plan.level,
            device=device.name,
            time_kind=device.time_kind,
            fingerprint=device.fingerprint(),
            calibration=llm.plan.calibration,
            model_type=f"{config.family} {self._inputs.specs[0].weight}, head {head.weight}",
            model_size=size + (0 if config.tie_word_embeddings else head.weight_bytes()),
            model_n_params=sum(spec.rows * spec.columns for spec in self._inputs.specs) + embedding,
            computes=device.gpu.computes,
            description=device.description() | {"kv_bits": 8 * device.cache_dtype.itemsize},
            notes=llm.notes,
        )

    def sample_us(self, case: Case, ids: Ids) -> float:
        """Run a test once; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        session = self._session(case.n_depth, ids)
        begin = case.n_depth + case.n_prompt
        prompt = np.ascontiguousarray(ids[case.n_depth : begin])
        tokens = ids[begin : case.end].tolist()

        now_ns = self._llm.device.gpu.now_ns  # a simulated device has a clock of its own

        def timed() -> float:
            session.restore()
            used = None if self._meter is None else self._meter.clock.totals.copy()
            before_ns = now_ns()
            if len(prompt):
                session.prefill_in_place(prompt)
            for token in tokens:
                session.decode_in_place(token)
            taken_us = (now_ns() - before_ns) / 1e3
            if self._meter is not None and used is not None:
                self.modelled_j = self._meter.joules_since(used, self._meter.clock.now_us - taken_us)
            return taken_us

        try:
            return self._llm.on_engine_thread(timed)
        finally:
            session.truncate(min(case.n_depth, session.position))

    def logits(self, ids: Ids, decoded: int) -> NDArray[np.float32]:
        """Return logits; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        session = self._llm.session()
        prompt, tokens = ids[: len(ids) - decoded], ids[len(ids) - decoded :].tolist()
        return np.stack([session.prefill(prompt), *(session.decode(token) for token in tokens)])

    def account(self, case: Case) -> FoundFields:
        """Return fields of a row; see :class:`heterollm.benchmarks.engine.BenchEngine`."""
        llm, plan = self._llm, self._llm.plan
        chunk, model = plan.chunk_length, self._inputs.model
        shares = shares_of(plan, self._inputs.specs, case, chunk=chunk)
        work = work_of(llm.config, self._inputs.specs, case, chunk=chunk, cache_dtype=llm.device.cache_dtype)
        reasons: dict[str, str] = {}
        found: FoundFields = {
            "gpu_share": shares.gpu_share,
            "padded_tokens": shares.padded_tokens,
            "cut_groups": list(shares.split_groups),
            "read_bytes": work.read_bytes,
            "flops": work.flops,
            "reasons": reasons,
        }
        if model is None:
            split = "" if self._asked.threads is None else " with these threads"
            reason = f"The device {llm.device.name!r} has no profile{split}."
            reasons |= dict.fromkeys(("predicted_ms", "ceilings"), reason)
            return found
        predicted = predicted_us(model, plan, case)
        if predicted is None:
            reasons["predicted_ms"] = f"The profile has no times for {self._asked.precision} of this model."
        else:
            found["predicted_ms"] = predicted / 1e3
            if model.missing:
                reasons["predicted_ms"] = (
                    f"The prediction lacks what the profile lacks: {', '.join(sorted(model.missing))}."
                )
        ceilings = ceilings_of(
            model.profile, shares.processors, integer_inputs=self._asked.precision == "w4a8"
        )
        if ceilings is None:
            reasons["ceilings"] = "The profile lacks bandwidths or long linear layers at this precision."
        else:
            found["ceiling_gbps"], found["ceiling_gflops"] = ceilings.gbps, ceilings.gflops
        return found

    def trace(self, case: Case, ids: Ids, file: Path | None = None) -> FoundFields:
        """Run a test once, in a model loaded for tracing; see BenchEngine."""
        self.sample_us(case, ids)  # compiles
        self._llm.take_trace()
        self.sample_us(case, ids)
        trace = self._llm.take_trace()
        if file is not None:
            save_trace(trace, file)
        found = summarise(trace)
        return {
            "traced_ms": found.wall_us / 1e3,
            "gpu_busy_ms": found.gpu_busy_us / 1e3,
            "npu_busy_ms": found.npu_busy_us / 1e3,
            "overlap_ms": found.overlap_us / 1e3,
            "overlap_fraction": found.overlap_fraction,
            "hand_over_ms": found.hand_over_us / 1e3,
            "hand_overs": found.hand_overs,
            "operators": [
                {
                    "part": row.track,
                    "operator": row.operator,
                    "count": row.count,
                    "time_ms": row.time_us / 1e3,
                }
                | {"gbps": row.gbps, "gflops": row.gflops}
                for row in found.operators[:OPERATORS]
            ],
        }

    def close(self) -> None:
        """Free the model."""
        self._sessions.clear()
        self._llm.close()

    def _session(self, depth: int, ids: Ids) -> Session:
        if depth not in self._sessions:
            self._sessions[depth] = self._llm.session()
        session = self._sessions[depth]
        while session.position < depth:
            session.prefill(ids[session.position : min(depth, session.position + FILL_TOKENS)])
        return session

"""A stand-in for child processes, and rows without a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import HeteroLLMError
from heterollm.benchmarks import Configuration
from heterollm.benchmarks.assemble import BenchRun, Loaded, State, make_row
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.child import TimedRun
from heterollm.benchmarks.children import ChildDiedError
from heterollm.benchmarks.engine import Facts
from heterollm.benchmarks.rows import GROUPS, LogitsCheck, Sample, Setup

FACTS = Facts("1.0", "gpu", "host", "real", "f00d", "Llama int4", 1000, 2000, {"activation_dtype": "float32"})

PREFILL = Case(256, 0)


class FakeWorker:
    """Answers as a child does, from a table of times; logs each request, and fails as the pool says."""

    def __init__(self, pool, configuration):
        self.pool, self.configuration = pool, configuration
        self.closed = False
        pool.log.append(("start", configuration.label))

    def ask(self, method, *arguments):
        pool, label = self.pool, self.configuration.label
        case = arguments[0].name if method in ("sample", "account") else ""
        pool.log.append((method, label, case))
        trouble = pool.trouble.get((method, label, case)) or pool.trouble.get((method, label))
        if trouble:
            pool.trouble = {key: value for key, value in pool.trouble.items() if value is not trouble}
            raise trouble
        if method == "load":
            level = replace(FACTS, plan_level=self.configuration.plan_level, time_kind=pool.time_kind)
            return level, pool.need
        if method == "logits":
            noise = pool.noise.get(label, 0.0)
            values = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
            return values + noise * np.ones(50, np.float32)
        if method == "account":
            rates = {"read_bytes": 1e6, "flops": 1e6}
            return {"gpu_share": 1.0, "padded_tokens": 0, "reasons": {}, **rates}
        if method == "trace":
            assert arguments[0].trace
            cases, files = arguments[2:]
            pool.files += map(str, files)
            return [{"traced_ms": 1.0, "overlap_fraction": 0.5} for _ in cases]
        pool.taken += 1
        if pool.taken in pool.after:
            raise pool.after[pool.taken]
        return TimedRun(pool.times.get(label, 1000.0) + pool.taken % 3, 0.0, pool.modelled_j)

    def close(self):
        self.closed = True
        self.pool.log.append(("close", self.configuration.label))


class FakePool:
    """State of all fake workers: times and troubles by label, the memory of a model, and the log."""

    def __init__(self):
        self.log, self.trouble, self.times, self.noise = [], {}, {}, {}
        self.need, self.taken = 100, 0
        self.time_kind, self.modelled_j = "real", None
        # Raised instead of the answer of a sample, counted from 1, warm-ups included.
        self.after = {}
        self.workers, self.files = [], []

    def start(self, configuration):
        self.workers.append(FakeWorker(self, configuration))
        return self.workers[-1]

    def asked(self, method):
        return [entry[1:] for entry in self.log if entry[0] == method]


@pytest.fixture
def fake_pool():
    return FakePool()


@pytest.fixture
def died():
    return lambda: ChildDiedError("The process ended by signal 9.")


@pytest.fixture
def failed():
    return lambda text="It does not work.": HeteroLLMError(text, fix="Do something else.")


@pytest.fixture
def changed():
    """Return a row with other fields, named without the records that they are in."""

    def change(row, **fields):
        for name, value in fields.items():
            group = next((one for one, kind in GROUPS.items() if name in kind.__struct_fields__), None)
            if group is not None:
                value = structs.replace(getattr(row, group), **{name: value})
            row = structs.replace(row, **{group or name: value})
        return row

    return change


@pytest.fixture
def make_rows():
    """A factory of rows: ``make_rows(times_us, plan_level="tensor", threads=(1, 1), cut_groups=["qkv"])``."""

    def make(times_us, case=PREFILL, *, fields=None, facts=None, passed=True, error=None, **configuration):
        asked = Configuration(
            **{"threads": (1, 1), "device": "host", "length_policy": "auto", **configuration}
        )
        given = facts or replace(FACTS, plan_level=asked.plan_level)
        state = State([Sample(time, False) for time in times_us], dict(fields or {}), error, "now")
        quality = LogitsCheck(
            quality_reference="gpu",
            logits_sqnr_db=100.0 if passed else 3.0,
            quality_gate_db=90.0,
            top_1_agreement=1.0,
            quality_passed=passed,
        )
        setup = Setup(
            build_commit="abc",
            heterollm_version="1",
            cpu_info="a processor",
            model_filename="/a/model",
            versions={"numpy": "2"},
        )
        run, load = BenchRun(setup, 0, None), Loaded(1, 5, len(times_us), None)
        return make_row(asked, case, state, run, load, facts=given, quality=quality)

    return make

"""A stand-in for child processes, and rows without a run."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import HeteroLLMError
from heterollm.benchmarks import Configuration
from heterollm.benchmarks.assemble import Loaded, Run, State, make_row
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.child import encode_floats
from heterollm.benchmarks.children import ChildDiedError
from heterollm.benchmarks.engine import Facts
from heterollm.benchmarks.quality import Quality
from heterollm.benchmarks.rows import GROUPS, Sample, Setup

FACTS = Facts("1.0", "gpu", "host", "real", "f00d", "Llama int4", 1000, 2000, {"activation_dtype": "float32"})

PREFILL = Case(256, 0)


class FakeWorker:
    """Answers as a child does, from a table of times; says what it was asked, and dies when told to."""

    def __init__(self, crew, process):
        self.crew, self.process = crew, process
        self.closed = False
        self.loaded = {}
        crew.log.append(("start", process))

    def ask(self, request):
        crew, do, name = self.crew, request["do"], request["name"]
        if do in ("load", "trace"):
            self.loaded.setdefault(name, Configuration.from_dict(request["configuration"]))
        configuration = self.loaded.get(name)
        label = configuration.label if configuration else name
        case = Case(**request["case"]).name if "case" in request else ""
        crew.log.append((do, label, case))
        trouble = crew.trouble.get((do, label, case)) or crew.trouble.get((do, label))
        if trouble:
            crew.trouble = {key: value for key, value in crew.trouble.items() if value is not trouble}
            if isinstance(trouble, ChildDiedError):
                self.loaded.clear()
            raise trouble
        if do == "load":
            crew.held[self.process] = crew.held.get(self.process, 0) + crew.need
            level = replace(FACTS, plan_level=configuration.plan_level, time_kind=crew.time_kind)
            return {
                "facts": asdict(level),
                "private_bytes": self.held,
            }
        if do == "unload":
            self.loaded.pop(name)
            crew.held[self.process] -= crew.need
            return {"private_bytes": self.held}
        assert configuration is not None, "asked for a model that is not loaded"
        if do == "logits":
            noise = crew.noise.get(label, 0.0)
            values = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
            return {"logits": encode_floats(values + noise * np.ones(50, np.float32))}
        if do == "account":
            return {
                "fields": {
                    "gpu_share": 1.0,
                    "padded_tokens": 0,
                    "read_bytes": 1e6,
                    "flops": 1e6,
                    "reasons": {},
                }
            }
        if do == "trace":
            crew.files += request["files"]
            return {"fields": [{"traced_ms": 1.0, "overlap_fraction": 0.5} for _ in request["cases"]]}
        crew.taken += 1
        if crew.taken in crew.after:
            raise crew.after[crew.taken]
        time_us = crew.times.get(label, 1000.0) + crew.taken % 3
        return {"us": time_us, "modelled_j": crew.modelled_j, "own_s": 0.0}

    @property
    def held(self):
        return self.crew.held.get(self.process, 0)

    def close(self):
        self.closed = True
        self.crew.log.append(("close", self.process))


class FakeCrew:
    """What fake workers share: times and troubles by label, the memory of a model, and the log."""

    def __init__(self):
        self.log, self.trouble, self.times, self.noise, self.held = [], {}, {}, {}, {}
        self.need, self.taken = 100, 0
        self.time_kind, self.modelled_j = "real", None
        # What is raised instead of the answer of a sample, counted from 1, warm-ups included.
        self.after = {}
        self.workers, self.files = [], []

    def start(self, process):
        self.workers.append(FakeWorker(self, process))
        return self.workers[-1]

    def asked(self, do):
        return [entry[1:] for entry in self.log if entry[0] == do]


@pytest.fixture
def fake_crew():
    return FakeCrew()


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
        quality = Quality("gpu", 100.0 if passed else 3.0, 90.0, 1.0)
        setup = Setup(
            build_commit="abc",
            heterollm_version="1",
            cpu_info="a processor",
            model_filename="/a/model",
            versions={"numpy": "2"},
        )
        run, load = Run(setup, 0, None), Loaded(1, 5, len(times_us), None)
        return make_row(asked, case, state, run, load, facts=given, quality=quality)

    return make

"""The traced run of a bench: its file says what the row says, and is what Chrome and Perfetto read."""

import itertools
import json
from decimal import Decimal
from types import SimpleNamespace

import pytest

from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.child import random_ids
from heterollm.benchmarks.engine import Job
from heterollm.benchmarks.engine_self import SelfEngine
from heterollm.benchmarks.options import BenchOptions
from heterollm.benchmarks.run import run_bench
from heterollm.config import ModelConfig
from heterollm.demo import bundled_model
from heterollm.layout import op_specs
from heterollm.trace_file import load_trace
from heterollm.trace_summary import summarise

CASE = Case(20, 3, 4)


@pytest.fixture(scope="module")
def traced(tmp_path_factory, half_rows_plan):
    """What the bench says of a run in which every operator is cut, and the file of the same run."""
    folder = tmp_path_factory.mktemp("traces")
    specs = op_specs(ModelConfig.from_folder(bundled_model()), "w4a16", 32, True, float_bits=32)
    shape = SimpleNamespace(_weights=SimpleNamespace(specs=specs), plan=SimpleNamespace(precision="w4a16"))
    half_rows_plan(shape).save(folder / "plan.json")
    configuration = Configuration(plan_level=str(folder / "plan.json"), device="host", length_policy="auto")
    engine = SelfEngine(Job(bundled_model(), configuration, 64, trace=True))
    try:
        fields = engine.trace(CASE, random_ids(0, 2048, CASE.end), folder / "run.json")
    finally:
        engine.close()
    return fields, folder / "run.json"


@pytest.fixture(scope="module")
def events(traced):
    data = json.loads(traced[1].read_text(), parse_float=Decimal)
    assert data["displayTimeUnit"] in ("ms", "ns")
    return data["traceEvents"]


def named(events, tid):
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


def test_the_file_sums_up_to_what_the_bench_says(traced):
    fields, file = traced
    found = summarise(load_trace(file))
    assert fields["overlap_ms"] > 0
    assert fields["overlap_fraction"] == found.overlap_fraction
    for name in ("gpu_busy", "npu_busy", "overlap", "hand_over"):
        assert fields[f"{name}_ms"] == getattr(found, f"{name}_us") / 1e3
    assert (fields["traced_ms"], fields["hand_overs"]) == (found.wall_us / 1e3, found.hand_overs)
    assert found.passes == 1 + CASE.n_gen


def test_the_overlap_is_that_of_the_events(traced, events):
    """Counted anew from the file's events, as anybody would who reads the format alone."""
    windows = [(one["ts"], one["ts"] + one["dur"]) for one in named(events, 3) if one["cat"] == "pass"]

    def inside(tid):
        found = [(one["ts"], one["ts"] + one["dur"]) for one in named(events, tid)]
        return [
            (max(begin, low), min(end, high))
            for begin, end in found
            for low, high in windows
            if max(begin, low) < min(end, high)
        ]

    both = sum(
        max(Decimal(0), min(one[1], other[1]) - max(one[0], other[0]))
        for one, other in itertools.product(inside(1), inside(2))
    )
    assert float(both) / 1e3 == pytest.approx(traced[0]["overlap_ms"], rel=1e-9)


def test_events_are_of_the_documented_format(events):
    """Complete events and metadata alone, on named threads of a named process, nested within each thread."""
    assert {event["ph"] for event in events} == {"M", "X"}
    metadata = [event for event in events if event["ph"] == "M"]
    assert {event["name"] for event in metadata} == {"process_name", "thread_name", "thread_sort_index"}
    named_threads = {event["tid"] for event in metadata if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} == {1}
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        assert isinstance(event["name"], str)
        assert event["name"]
    for tid in sorted(named_threads):
        ends = []
        spans = sorted(named(events, tid), key=lambda event: (event["ts"], -event["dur"]))
        assert spans
        for event in spans:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"]
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            end = event["ts"] + event["dur"]
            assert not ends or end <= ends[-1], "an event that begins in another ends in it"
            ends.append(end)


def test_a_bench_names_a_file_for_each_traced_run(fake_crew, tmp_path):
    configurations = tuple(
        Configuration(plan_level=level, threads=(1, 1), device="host") for level in ("gpu", "a/plan.json")
    )
    options = BenchOptions(
        bundled_model(), configurations, (Case(16, 4), Case(0, 4, 256)), repetitions=1, traces=tmp_path
    )
    run_bench(options, start=fake_crew.start)
    assert fake_crew.files == [
        str(tmp_path / f"{name}.json")
        for name in (
            "pp16+tg4-gpu-w4a16-1+1", "tg4-d256-gpu-w4a16-1+1",
            "pp16+tg4-a-plan.json-w4a16-1+1", "tg4-d256-a-plan.json-w4a16-1+1",
        )
    ]  # fmt: skip

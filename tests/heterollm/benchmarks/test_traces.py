"""The traced runs of a bench, a file each; trace/test_tracing.py holds one against its row."""

import pytest

from heterollm.benchmarks import BenchOptions, Configuration, run_bench
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.child import random_ids
from heterollm.benchmarks.engine import Job
from heterollm.benchmarks.engine_self import SelfEngine
from heterollm.data import bundled_model


@pytest.mark.slow
def test_a_simulated_sample_has_modelled_energy():
    configuration = Configuration(plan_level="npu", device="sim:snapdragon-8gen3", length_policy="auto")
    engine = SelfEngine(Job(bundled_model(), configuration, 64))
    try:
        ids = random_ids(0, 2048, 64)
        found = []
        for case in (Case(32, 0), Case(32, 1)):
            engine.sample_us(case, ids)  # compiles
            time_us = engine.sample_us(case, ids)
            found.append(engine.modelled_j)
            # A phone's SoC draws watts.
            assert 0.1 < engine.modelled_j / (time_us / 1e6) < 20
        assert found[0] < found[1]
    finally:
        engine.close()


def test_a_bench_names_a_file_for_each_traced_run(fake_pool, tmp_path):
    configurations = tuple(
        Configuration(plan_level=level, threads=(1, 1), device="host") for level in ("gpu", "a/plan.json")
    )
    options = BenchOptions(
        bundled_model(), configurations, (Case(16, 4), Case(0, 4, 256)), repetitions=1, traces=tmp_path
    )
    run_bench(options, start=fake_pool.start)
    assert fake_pool.files == [
        str(tmp_path / f"{name}.json")
        for name in (
            "pp16+tg4-gpu-w4a16-1+1", "tg4-d256-gpu-w4a16-1+1",
            "pp16+tg4-a-plan.json-w4a16-1+1", "tg4-d256-a-plan.json-w4a16-1+1",
        )
    ]  # fmt: skip

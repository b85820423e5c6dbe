"""Grids: tests in llama-bench's words, and configurations without repetitions."""

import pytest

from heterollm.base import OptionError
from heterollm.benchmarks import Configuration, cases_of, expand, parse_threads, with_baseline
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.rows import asked_of
from heterollm.kernels.threads import allowed_cores
from heterollm.solver import PlanRequest

two_cores = pytest.mark.skipif(len(allowed_cores()) < 2, reason="needs two cores to split")


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(256, 0), "pp256"),
        (Case(0, 64), "tg64"),
        (Case(256, 64), "pp256+tg64"),
        (Case(512, 0, 128), "pp512 @ d128"),
    ],
)
def test_names_are_those_of_llama_bench(case, name):
    assert case.name == name
    assert case.end == case.n_depth + case.n_prompt + case.n_gen


def test_prompts_tokens_and_pairs_meet_every_depth():
    found = cases_of([256, 300], [64, 0], [(20, 4)], [0, 512])
    assert [case.name for case in found[:4]] == ["pp256", "pp300", "tg64", "pp20+tg4"]
    assert [case.n_depth for case in found] == [0] * 4 + [512] * 4


def test_equal_tests_come_once_and_none_is_an_error():
    assert len(cases_of([256, 256], [], [(256, 0)])) == 1
    with pytest.raises(OptionError, match="nothing to measure"):
        cases_of([0], [0])


def labels(*args, **kwargs):
    return [one.label for one in expand(*args, **kwargs)]


def test_length_policies_count_where_the_npu_has_whole_groups():
    found = labels(
        plan_level=["gpu", "npu", "layer", "tensor"], length_policy=["padding", "pipe"], threads=[(1, 1)]
    )
    assert found == [
        "gpu w4a16, 1+1",
        "npu padding w4a16, 1+1",
        "npu pipe w4a16, 1+1",
        "layer padding w4a16, 1+1",
        "layer pipe w4a16, 1+1",
        "tensor w4a16, 1+1",
    ]


def test_ways_to_wait_count_where_something_is_handed_over():
    found = labels(plan_level=["gpu", "tensor"], sync=["auto", "event", "operator"], threads=[(1, 1)])
    assert found == [
        "gpu w4a16, 1+1",
        "gpu sync operator w4a16, 1+1",
        "tensor w4a16, 1+1",
        "tensor sync event w4a16, 1+1",
        "tensor sync operator w4a16, 1+1",
    ]


def test_power_is_told_where_it_is_not_the_default():
    options = {"engine": ["self", "llama.cpp"], "plan_level": ["gpu"], "threads": [(1, 1)]}
    found = expand(Configuration(power="default"), **options)
    assert [one.label for one in found] == ["gpu power default w4a16, 1+1", "llama.cpp 4-bit, 2 threads"]
    assert [asked_of(one, Case(1, 0), seed=0, repetitions=1).power for one in found] == ["default", ""]
    assert [one.power for one in expand(**options)] == ["burst", ""]


def test_splits_without_an_npu_have_the_gpu_level_alone():
    assert labels(plan_level=["gpu", "npu", "tensor"], threads=[(2, 0)]) == ["gpu w4a16, 2+0"]
    with pytest.raises(OptionError, match="No configuration is left"):
        expand(plan_level=["npu"], threads=[(2, 0)])


def test_other_engines_come_once_for_each_number_of_threads():
    found = expand(
        engine=["self", "llama.cpp"],
        plan_level=["gpu"],
        precision=["w4a16", "w4a8"],
        threads=[(1, 1), (2, 0)],
    )
    foreign = [one for one in found if one.engine != "self"]
    assert [one.label for one in foreign] == ["llama.cpp 4-bit, 2 threads"]
    assert len(found) == 5


def test_passes_and_calibrations_count_where_the_npu_computes_in_integers():
    found = expand(
        Configuration(calibration="ranges.json"),
        plan_level=["gpu", "layer", "auto"],
        precision=["w8a8"],
        threads=[(1, 1)],
        technique=["none", "llm.npu"],
    )
    assert [one.label for one in found] == [
        "gpu w8a8, 1+1",
        "layer padding w8a8, 1+1",
        "auto w8a8, 1+1",
        "auto llm.npu w8a8, 1+1",
    ]
    assert [one.calibration for one in found] == ["", *["ranges.json"] * 3]
    assert found[-1].load_keywords["request"] == PlanRequest(techniques=("llm.npu",))
    [whole] = with_baseline(found[-1:])[1:]
    assert whole.label == "gpu w8a8, 2+0"
    assert not whole.calibration


def test_sparse_attention_runs_at_any_level_with_its_calibration():
    found = expand(
        Configuration(scales="stepped", calibration="heads.json"),
        plan_level=["gpu", "layer"],
        precision=["w4a16", "fp16"],
        threads=[(1, 1)],
        technique=["none", "shadowattn"],
    )
    assert [(one.label, one.calibration) for one in found if one.precision == "w4a16"] == [
        ("gpu w4a16 stepped, 1+1", ""),
        ("gpu shadowattn w4a16 stepped, 1+1", "heads.json"),
        ("layer padding w4a16 stepped, 1+1", "heads.json"),
        ("layer shadowattn padding w4a16 stepped, 1+1", "heads.json"),
    ]
    assert not any(one.technique or one.calibration for one in found if one.precision == "fp16")
    assert found[1].load_keywords["request"] == PlanRequest(techniques=("shadowattn",))


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"plan_level": ["layer"]}, "heterollm calibrate MODEL --precision w8a8"),
        ({"plan_level": ["auto"], "technique": ["llm.npu"]}, "--calibration FILE"),
        (
            {"plan_level": ["layer"], "technique": ["llm.npu"], "base": Configuration(calibration="c.json")},
            "--plan auto or tensor",
        ),
        ({"plan_level": ["auto"], "technique": ["shadowattn"]}, "--calibration FILE"),
    ],
)
def test_what_a_pass_lacks_is_told_before_anything_is_loaded(options, fix):
    with pytest.raises(OptionError) as told:
        expand(precision=["w8a8"], threads=[(1, 1)], **options)
    assert fix in told.value.fix


def test_a_grid_is_everything_with_everything():
    found = expand(
        plan_level=["npu", "layer"],
        length_policy=["padding", "pipe"],
        precision=["w4a16", "w4a8"],
        threads=[(1, 1)],
    )
    assert len(found) == len(set(found)) == 8


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("engine", "vllm"),
        ("plan_level", "fast"),
        ("length_policy", "none"),
        ("sync", "hope"),
        ("precision", "w2"),
        ("technique", "llm.gpu"),
        ("plan_level", "x" * 5000),
    ],
)
def test_unknown_values_are_refused_by_name(option, value):
    with pytest.raises(OptionError, match=value[:50]):
        expand(**{option: [value]})


def test_gpu_on_all_cores_stands_beside_every_split_of_host():
    split = Configuration(plan_level="tensor", length_policy="auto", threads=(1, 1), device="host")
    (_, added) = with_baseline([split])
    assert (added.plan_level, added.threads, added.baseline) == ("gpu", (2, 0), True)
    assert with_baseline([split, added]) == (split, added)


def test_each_precision_has_its_own_baseline_and_one_that_was_asked_for_counts():
    found = with_baseline(expand(plan_level=["gpu", "npu"], precision=["w4a16", "w4a8"], threads=[(1, 1)]))
    assert [one.label for one in found if one.baseline] == ["gpu w4a16, 2+0", "gpu w4a8, 2+0"]
    asked = with_baseline(expand(plan_level=["gpu", "npu"], threads=[(1, 1), (2, 0)]))
    assert not any(one.baseline for one in asked)


def test_devices_whose_parts_are_two_processors_need_no_baseline():
    alone = Configuration(plan_level="tensor", threads=None, device="snapdragon")
    assert with_baseline([alone]) == (alone,)


@two_cores
def test_threads_are_read_with_a_plus():
    assert parse_threads("1+1, 2+0") == [(1, 1), (2, 0)]


@pytest.mark.parametrize("text", ["2", "1+", "a+1", "1+1+1", "", "0+1", "1-1", "9999+1", "²+1"])
def test_threads_that_are_none_are_refused(text):
    with pytest.raises(OptionError):
        parse_threads(text)

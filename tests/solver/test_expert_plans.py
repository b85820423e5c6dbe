"""Experts in plans: read back as written, the first entry decides, and what cannot run is refused."""

import itertools
import json

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import OptionError, PlanError
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import GraphMemory
from heterollm.model import ModelConfig, expert_specs, op_specs
from heterollm.solver import (
    EXPERTS_ON_GPU,
    TECHNIQUES,
    ExpertGroup,
    ExpertsEntry,
    ExpertsPlacement,
    ExpertsRequest,
    Plan,
    PlannedExperts,
    PlanRequest,
    check_plan,
    level_plan,
    model_shape,
)

EXPERTS = 8
FIELDS = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}


def experts_in(plan):
    return plan.technique(PlannedExperts)


def specs_of(**changes):
    config = ModelConfig.from_dict({**FIELDS, **changes})
    specs = op_specs(config, "w4a16", 32, True)
    return (*specs, *expert_specs(config, specs))


SPECS = specs_of()
DENSE = tuple(spec for spec in SPECS if spec.experts is None)


@pytest.fixture(scope="module")
def npu():
    return open_device("sim:snapdragon-8gen3").npu


def entry(*groups, lengths=(65, 128), layers=(0, 1), **options):
    held = tuple(ExpertGroup(tuple(experts), capacity) for experts, capacity in groups)
    return ExpertsEntry(lengths, layers, ExpertsPlacement(held, **options))


def plan_of(*entries, **changes):
    plan = level_plan("gpu", DENSE, device="d", precision="w4a16", standard_lengths=(), chunk_length=128)
    plan = plan.with_technique(PlannedExperts(entries))
    return structs.replace(plan, shape=model_shape(SPECS), **changes)


def check(plan, npu, specs=SPECS):
    check_plan(plan, specs, npu, longest=512, head_rows=1)


def random_plan(seed):
    draw = np.random.default_rng(seed)
    entries = []
    for _ in range(draw.integers(1, 4)):
        experts = draw.permutation(EXPERTS)[: draw.integers(1, EXPERTS + 1)].tolist()
        cuts = sorted(draw.integers(0, len(experts) + 1, size=2))
        parts = [part for part in np.split(np.array(experts), cuts) if len(part)]
        groups = [(part.tolist(), int(draw.choice([32, 64, 128]))) for part in parts]
        low, high = sorted(int(length) for length in draw.integers(1, 129, size=2))
        first, last = sorted(int(layer) for layer in draw.integers(0, 2, size=2))
        overflow = str(draw.choice(["gpu", "drop", "pad"]))
        entries.append(entry(*groups, lengths=(low, high), layers=(first, last), overflow=overflow))
    return plan_of(*entries, request=PlanRequest(techniques=("npumoe",)))


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_is_read_as_it_was_written_and_passes(seed, npu):
    plan = random_plan(seed)
    assert Plan.from_json(plan.to_json()) == plan
    check(plan, npu)
    for tokens, layer in itertools.product((1, 31, 64, 128), (0, 1)):
        serving = [one.placement for one in experts_in(plan).entries if one.serves(tokens, layer)]
        assert experts_in(plan).of(tokens, layer) == (serving or [EXPERTS_ON_GPU])[0]


def test_experts_use_the_npu_and_go_with_it(npu):
    plan = plan_of(entry(([3, 1], 64)))
    assert plan.uses_npu
    assert plan.without_npu() == plan_of()
    assert not plan_of().uses_npu
    assert not plan_of(entry()).uses_npu
    with pytest.raises(PlanError, match="need an NPU, and the device was opened without one"):
        check(plan, None)
    check(plan_of(entry()), None)


def test_a_file_without_experts_leaves_them_to_the_gpu():
    data = json.loads(plan_of(request=PlanRequest()).to_json())
    assert "experts" not in data
    assert "experts" not in data["request"]
    read = Plan.from_json(json.dumps(data))
    assert experts_in(read).entries == ()
    assert experts_in(read).of(128, 0) == EXPERTS_ON_GPU


@pytest.mark.parametrize(
    "memory", [GraphMemory(), GraphMemory(True, 2), GraphMemory(True, 2, True), GraphMemory(False, 4)]
)
def test_graphs_count_by_group_and_capacity(memory):
    spec = SPECS[-1]
    sizes = [{64}, {32, 64}]
    plans = [plan_of(entry(([3, 1], 64))), plan_of(entry(([3, 1], 64)), entry(([3, 1], 32), lengths=(1, 64)))]
    for plan, capacities in zip(plans, sizes, strict=True):
        one = 2 * spec.graph_bytes(spec.member_rows, capacities, memory)
        assert plan.npu_bytes(SPECS, memory) == experts_in(plan).npu_bytes(SPECS, memory) == 2 * one  # layers
    other = plan_of(entry(([3, 1], 64)), entry(([1, 3], 64), lengths=(1, 64)))
    assert other.npu_bytes(SPECS, memory) == 2 * plans[0].npu_bytes(SPECS, memory)  # of another graph


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (([[1, 2], 64], [[2], 32]), "Expert 2 is given twice"),
        (([[1, 1], 64],), "Expert 1 is given twice"),
        (([[99], 64],), "Expert 99 is given twice, or is not among the 8 of the layer"),
        (([[], 64],), "A group of capacity 64 has no experts"),
        (([[1], 48],), "no graphs of 48 rows of each expert"),
    ],
)
def test_groups_that_cannot_be_are_refused(groups, message, npu):
    with pytest.raises(PlanError, match=message) as caught:
        check(Plan.from_json(plan_of(entry(*groups)).to_json()), npu)
    assert caught.value.fix
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 0}, "groups"),
        ({"capacity": -1}, "groups"),
        ({"experts": [-1]}, "groups"),
        ({"experts": ["1"]}, "groups"),
        ({"more": 1}, "more"),
    ],
)
def test_a_group_of_another_form_is_not_read(changes, message):
    data = json.loads(plan_of(entry(([1], 64))).to_json())
    data["experts"][0]["placement"]["groups"][0].update(changes)
    with pytest.raises(PlanError, match=message):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 2)}, "The experts of layers 0 to 2 are planned"),
        ({"form": "unheard"}, "does not run .* in form 'unheard'"),
        ({"lengths": (64, 32)}, "range 64..32 of experts is empty"),
        ({"layers": (1, 0)}, "range 1..0 of experts is empty"),
    ],
)
def test_entries_that_cannot_be_are_refused(changes, message, npu):
    with pytest.raises(PlanError, match=message):
        check(Plan.from_json(plan_of(entry(([1], 64), **changes)).to_json()), npu)


def test_experts_of_a_dense_model_are_refused(npu):
    with pytest.raises(PlanError, match="has experts in 0 layers"):
        check(plan_of(entry(([1], 64))), npu, DENSE)


def test_the_shape_names_the_mixture():
    shapes = {model_shape(SPECS), model_shape(DENSE)}
    for name, value in (("num_experts", 16), ("num_experts_per_tok", 4), ("moe_intermediate_size", 64)):
        shapes.add(model_shape(specs_of(**{name: value})))
    assert len(shapes) == 5
    assert "experts=2of8x128x128" in model_shape(SPECS)


@pytest.mark.parametrize("techniques", list(itertools.combinations(TECHNIQUES, 2)))
def test_one_technique_places_linears_and_one_attention(techniques):
    if set(techniques) not in ({"llm.npu", "npumoe"}, {"shadowattn", "npu-attention"}):
        PlanRequest(techniques=techniques)
    else:
        with pytest.raises(OptionError, match="do not combine"):
            PlanRequest(techniques=techniques)


def test_an_unknown_overflow_is_refused():
    with pytest.raises(OptionError, match="no overflow 'none'"):
        ExpertsRequest("none")

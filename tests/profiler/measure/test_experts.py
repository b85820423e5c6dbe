"""A mixture's experts are measured on the GPU, on request on the NPU, under the keys that were announced."""

from dataclasses import replace

import numpy as np
import pytest

from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import ExpertsShape, FfnShape
from heterollm.kernels.ops import GraphMemory
from heterollm.model import ModelConfig, model_shape
from heterollm.profiler.measure import expert_cases, expert_tasks
from heterollm.profiler.measure.expert_cases import ROWS
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record
from heterollm.solver import ProfileCosts


def mixture(experts=8, chosen=2, hidden=128, width=64, **options):
    config = ModelConfig.from_dict(
        {
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": hidden,
            "moe_intermediate_size": width,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_experts": experts,
            "num_experts_per_tok": chosen,
            "norm_topk_prob": True,
            "vocab_size": 128,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-6,
        }
    )
    return model_shape(config, "mixture", **options)


def profile_of(device, shape, **options):
    tasks = expert_tasks(device, [shape, shape], **options)
    records = [record for task in tasks for record in task.run()]
    assert [record.key for record in records] == [key for task in tasks for key in task.keys]
    assert len({record.key for record in records}) == len(records)
    assert not [record.error for record in records if record.failed]
    found = Profile.of(device)
    for record in records:
        found.add(record)
    for tokens in (1, 32):
        found.add(Record(LinearKey("gpu", LinearPoint.of(shape.layer[0], tokens), "code"), (10.0 * tokens,)))
    return found


def operators(profile):
    return {key.operator for key in profile.records if hasattr(key, "width")}


@pytest.fixture(scope="module")
def simulated():
    device = open_device("sim:snapdragon-8gen3")
    yield device
    device.close()


@pytest.mark.parametrize("precision", ["w4a16", "w4a8"])
def test_the_host_measures_every_operator(device, precision, tmp_path, monkeypatch):
    # Each further step of rows is another kernel to build.
    monkeypatch.setattr(expert_cases, "QUICK_ROWS", (1, 5))
    shape = mixture(precision=precision, float_bits=32)
    measured = profile_of(device, shape, quick=True, graphs=True)
    assert operators(measured) == {"moves", "products", "graph"}
    measured.save(tmp_path / "profile.json")
    again = Profile.load(tmp_path / "profile.json")
    assert again.records.keys() == measured.records.keys()
    costs = ProfileCosts(again, shape)
    assert not costs.missing
    assert costs.expert_prices(64, GraphMemory()).form == ("ffn" if precision == "w4a16" else "ffn_int8")


def test_a_model_without_experts_has_nothing_to_measure(simulated):
    shape = mixture()
    dense = replace(shape, kinds=tuple(replace(kind, experts=None) for kind in shape.kinds))
    assert not expert_tasks(simulated, [dense], graphs=True)


def test_times_in_between_are_those_of_the_model(simulated):
    """A graph and a launch that were not measured take the interpolated time, within a hundredth."""
    shape = mixture(64, 8, hidden=2048, width=1024)
    prices = ProfileCosts(profile_of(simulated, shape, graphs=True), shape).expert_prices(512, GraphMemory())
    one = FfnShape(shape.experts.weight, 2048, 1024, "silu")
    npu = simulated.npu
    assert prices.form in npu.forms(ExpertsShape(one, 3), 64)
    assert prices.most_weight_bytes == npu.graph_weight_bytes
    assert prices.capacities == (32, 64, 128, 256)
    one_us, three_us, five_us = (prices.npu_us(experts, 64) for experts in (1, 3, 5))
    assert five_us - three_us == pytest.approx(three_us - one_us, rel=1e-6)
    assert np.isinf(prices.npu_us(1, 512))
    assert len(prices.gpu_us) == 513
    assert prices.gpu_us[0] == 0
    assert (np.diff(prices.gpu_us) >= 0).all()


def test_a_quick_profile_prices_the_capacities_between(simulated):
    shape = mixture(64, 8, hidden=2048, width=1024)
    whole, quick = (
        ProfileCosts(profile_of(simulated, shape, quick=quick, graphs=True), shape).expert_prices(
            512, GraphMemory()
        )
        for quick in (False, True)
    )
    assert quick.capacities == whole.capacities
    assert quick.npu_us(4, 32) == pytest.approx(whole.npu_us(4, 32), rel=1e-6)
    assert quick.npu_us(4, 128) == pytest.approx(whole.npu_us(4, 128), rel=0.25)


def test_without_the_technique_there_are_no_graphs_and_no_prices(simulated):
    shape = mixture()
    measured = profile_of(simulated, shape)
    assert operators(measured) == {"moves", "products"}
    costs = ProfileCosts(measured, shape)
    assert not costs.missing
    assert costs.expert_prices(64, GraphMemory()) is None
    assert len(costs.mixture_us(64)) == 9  # the norm and eight kernels of the mixture
    rows = {key.tokens for key in measured.records if getattr(key, "operator", "") == "products"}
    assert rows == set(ROWS)


def test_experts_of_another_shape_are_missing(simulated):
    measured = profile_of(simulated, mixture())
    assert ProfileCosts(measured, mixture(experts=16)).missing == {"experts"}
    assert ProfileCosts(measured, mixture(width=192)).missing == {"experts"}

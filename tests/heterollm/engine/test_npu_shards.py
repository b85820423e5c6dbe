"""What is cut from a model's weights for the NPU."""

import numpy as np
import pytest

from heterollm.engine.npu_shards import npu_shard
from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.formats.reference import weight_values
from heterollm.kernels.npu import FfnShard, LinearShard
from heterollm.kernels.ops import ffn_specs
from heterollm.model import Checkpoint, ModelConfig, load_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_model):
    pytest.importorskip("transformers")
    return write_model(tmp_path_factory.mktemp("biased"), "llama", mlp_bias=True, intermediate_size=192)


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 32, "symmetric": True},
        {"group_size": 32, "symmetric": False},
        {"group_size": 32, "precision": "w4a8"},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_a_block_holds_the_leading_width_of_each_weight(folder, options):
    weights = load_weights(Checkpoint(folder), ModelConfig.from_folder(folder), **options)
    blocks = ffn_specs(weights.specs)
    assert len(blocks) == weights.config.layers
    for spec in blocks:
        gate, up = weights.linear(spec.layer, "gate_up")
        (down,) = weights.linear(spec.layer, "down")
        for width in (64, 128, 192):
            part = npu_shard(weights, spec, (width, width))
            assert isinstance(part, FfnShard)
            assert (part.cut, part.layer, part.activation) == ((0, width), spec.layer, "silu")
            assert part.integer_inputs == (options.get("precision") == "w4a8")
            assert part.weights_key == weights.content_key
            rows = [weight_values(member)[:width] for member in (gate, up)]
            np.testing.assert_array_equal(weight_values(part.gate_up), np.concatenate(rows))
            np.testing.assert_array_equal(weight_values(part.down), weight_values(down)[:, :width])
            biases = [bias[:width] for bias in weights.bias(spec.layer, "gate_up")]
            np.testing.assert_array_equal(part.bias, np.concatenate(biases))


def test_a_width_that_is_no_whole_block_is_refused(folder):
    weights = load_weights(Checkpoint(folder), ModelConfig.from_folder(folder), group_size=64)
    (spec, *_) = ffn_specs(weights.specs)
    assert isinstance(weights.linear(spec.layer, "down")[0], QuantizedTensor)
    with pytest.raises(ValueError, match="whole"):
        npu_shard(weights, spec, (96, 96))


def test_other_groups_are_slices(folder):
    weights = load_weights(Checkpoint(folder), ModelConfig.from_folder(folder), group_size=32)
    for spec in weights.specs:
        part = npu_shard(weights, spec, spec.member_rows)
        assert isinstance(part, LinearShard)
        values = np.concatenate([weight_values(member) for member in weights.linear(spec.layer, spec.group)])
        np.testing.assert_array_equal(weight_values(part.weight), values)

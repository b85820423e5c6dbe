import pytest

from heterollm.base import OptionError
from heterollm.kernels.ops import Member, WeightFormat
from heterollm.model import ModelConfig, op_specs
from heterollm.model.layout import (
    HEAD_LAYER,
    bias_names,
    embedding_name,
    expected_tensors,
    final_norm_name,
    layer_of,
    linear_names,
    norm_name,
)
from heterollm.model.operators import shortened_blocks


@pytest.fixture
def odd(model_fields):
    """A model whose heads are wider than its stream and whose feed-forward only blocks of 16 divide."""
    return ModelConfig.from_dict(model_fields(head_dim=32, intermediate_size=112))


def test_names(odd):
    assert linear_names(odd, 1) == {
        "qkv": {
            "q": "model.layers.1.self_attn.q_proj.weight",
            "k": "model.layers.1.self_attn.k_proj.weight",
            "v": "model.layers.1.self_attn.v_proj.weight",
        },
        "o": {"o": "model.layers.1.self_attn.o_proj.weight"},
        "gate_up": {"gate": "model.layers.1.mlp.gate_proj.weight", "up": "model.layers.1.mlp.up_proj.weight"},
        "down": {"down": "model.layers.1.mlp.down_proj.weight"},
    }
    assert linear_names(odd, HEAD_LAYER) == {"head": {"head": "lm_head.weight"}}
    assert bias_names(odd, 1) == {}
    assert embedding_name(odd) == "model.embed_tokens.weight"
    assert final_norm_name(odd) == "model.norm.weight"
    assert norm_name(odd, 0, "attention") == "model.layers.0.input_layernorm.weight"
    assert norm_name(odd, 0, "feed_forward") == "model.layers.0.post_attention_layernorm.weight"


def test_a_tied_head_has_the_embeddings_name(model_fields):
    config = ModelConfig.from_dict(model_fields(tie_word_embeddings=True))
    assert linear_names(config, HEAD_LAYER) == {"head": {"head": "model.embed_tokens.weight"}}
    assert "lm_head.weight" not in expected_tensors(config)


def test_biases_by_family(model_fields):
    qwen = ModelConfig.from_dict(model_fields("qwen2"))
    assert list(bias_names(qwen, 0)) == ["qkv"]
    assert bias_names(qwen, 0)["qkv"]["v"] == "model.layers.0.self_attn.v_proj.bias"
    llama = ModelConfig.from_dict(model_fields(attention_bias=True, mlp_bias=True))
    assert list(bias_names(llama, 0)) == ["qkv", "o", "gate_up", "down"]
    assert bias_names(llama, HEAD_LAYER) == {}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_expected_tensors_are_those_of_transformers(model_fields, family, tied):
    transformers = pytest.importorskip("transformers")
    fields = model_fields(family, tie_word_embeddings=tied, num_key_value_heads=1)
    if family == "llama":
        fields |= {"attention_bias": True, "mlp_bias": True, "head_dim": 24}
    config = ModelConfig.from_dict(fields)
    del fields["architectures"]
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert expected_tensors(config) == theirs


def test_layer_of(odd):
    assert layer_of(odd, "model.layers.12.mlp.up_proj.weight") == 12
    assert layer_of(odd, "model.layers.x.mlp.up_proj.weight") is None
    assert layer_of(odd, "model.norm.weight") is None


def test_groups_in_order_with_their_shapes(odd):
    specs = op_specs(odd, "w4a16", 64, True)
    assert [(spec.layer, spec.group) for spec in specs] == [
        *((layer, group) for layer in (0, 1) for group in ("qkv", "o", "gate_up", "down")),
        (HEAD_LAYER, "head"),
    ]
    qkv, o, gate_up, down = specs[:4]
    head = specs[-1]
    assert qkv.members == (Member("q", 128), Member("k", 64), Member("v", 64))
    assert gate_up.members == (Member("gate", 112), Member("up", 112))
    assert [spec.rows for spec in (o, down, head)] == [64, 64, 160]
    assert [spec.columns for spec in (qkv, o, gate_up, down, head)] == [64, 128, 64, 112, 64]
    assert [spec.weight for spec in (qkv, down)] == [WeightFormat(4, 64), WeightFormat(4, 16)]
    assert head.weight == WeightFormat(8, 64)
    assert (qkv.source, qkv.target) == ("linear_input", "qkv")
    assert (o.source, o.target) == ("attention_output", "attention_delta")
    assert (gate_up.source, gate_up.target) == ("linear_input", "gate_up")
    assert (down.source, down.target) == ("activated", "feed_forward_delta")
    assert (head.source, head.target) == ("head_input", "logits")
    assert all(spec.join == "concatenate" for spec in specs)


def test_zero_points_are_for_four_bits_only(odd):
    specs = op_specs(odd, "w4a16", 32, False)
    assert {spec.weight.symmetric for spec in specs[:-1]} == {False}
    assert specs[-1].weight == WeightFormat(8, 32, True)


def test_float_weights(odd):
    assert {spec.weight for spec in op_specs(odd, "fp16", 32, True)} == {WeightFormat(16)}
    assert {spec.weight for spec in op_specs(odd, "fp16", 32, True, float_bits=32)} == {WeightFormat(32)}


def test_shortened_blocks_are_said_once_a_width(odd):
    assert list(shortened_blocks(op_specs(odd, "w4a16", 16, True), 16)) == []
    said = list(shortened_blocks(op_specs(odd, "w4a16", 128, True), 128))
    assert said == [
        "Weights with 64 inputs (qkv) have blocks of 64: 128 does not divide 64.",
        "Weights with 112 inputs (down) have blocks of 16: 128 does not divide 112.",
    ]
    assert list(shortened_blocks(op_specs(odd, "fp16", 128, True), 128)) == []


def test_a_width_that_no_block_divides_is_refused(model_fields):
    config = ModelConfig.from_dict(model_fields(intermediate_size=100))
    with pytest.raises(OptionError, match="100 inputs"):
        op_specs(config, "w4a16", 32, True)
    assert op_specs(config, "fp16", 32, True)

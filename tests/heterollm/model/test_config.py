import json
from importlib import resources

import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model import ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_the_bundled_model():
    config = ModelConfig.from_folder(str(resources.files("heterollm.data.tiny_python_lm")))
    assert (config.model_type, config.family) == ("llama", "Llama")
    own = config.attention
    assert (config.layers, own.heads, own.kv_heads, own.head_dim) == (4, 8, 4, 32)
    assert (config.hidden_size, config.ffn.width, config.vocab_size) == (256, 768, 2048)
    assert (config.max_positions, config.rms_norm_eps) == (2048, 1e-5)
    assert config.tie_word_embeddings
    assert (config.attention.qkv_bias, config.attention.o_bias, config.ffn.biased) == (False, False, False)
    assert (config.bos_ids, config.eos_ids, config.pad_id) == ((0,), (0,), None)
    assert (config.rope.kind, config.rope.base) == ("default", 10000.0)


def test_defaults_of_fields_that_are_left_out(model_fields):
    fields = model_fields()
    for name in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "hidden_act"):
        del fields[name]
    config = ModelConfig.from_dict(fields)
    assert (config.attention.kv_heads, config.attention.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.tie_word_embeddings, config.rope.base) == (False, 10000.0)


def test_biases_follow_the_family(model_fields):
    plain = ModelConfig.from_dict(model_fields("llama"))
    assert (plain.attention.qkv_bias, plain.attention.o_bias, plain.ffn.biased) == (False, False, False)
    biased = ModelConfig.from_dict(model_fields("llama", attention_bias=True, mlp_bias=True))
    assert (biased.attention.qkv_bias, biased.attention.o_bias, biased.ffn.biased) == (True, True, True)
    qwen = ModelConfig.from_dict(model_fields("qwen2", attention_bias=False))
    assert (qwen.attention.qkv_bias, qwen.attention.o_bias, qwen.ffn.biased) == (True, False, False)


def test_head_dim_need_not_follow_from_the_width(model_fields):
    config = ModelConfig.from_dict(model_fields(head_dim=32))
    assert (config.hidden_size, config.attention.heads * config.attention.head_dim) == (64, 128)


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "expected"),
    [
        (2, None, (2,)),
        (2, 2, (2,)),
        (2, [5, 2, 7], (5, 2, 7)),
        ([3, 4], [5], (5,)),
        ([3, 4], None, (3, 4)),
        (None, [6], (6,)),
        (None, None, ()),
        (-1, None, ()),
    ],
)
def test_ends_of_a_text_are_those_of_the_generation_config_first(
    model_fields, config_ids, generation_ids, expected
):
    generation = {} if generation_ids is None else {"eos_token_id": generation_ids}
    assert ModelConfig.from_dict(model_fields(eos_token_id=config_ids), generation).eos_ids == expected


def test_token_ids_that_no_file_names_are_the_familys(model_fields):
    for family, bos_ids, eos_ids in (("llama", (1,), (2,)), ("qwen2", (), ())):
        fields = model_fields(family)
        del fields["bos_token_id"], fields["eos_token_id"]
        config = ModelConfig.from_dict(fields)
        assert (config.bos_ids, config.eos_ids) == (bos_ids, eos_ids)


def test_padding_may_lie_outside_the_vocabulary(model_fields):
    assert ModelConfig.from_dict(model_fields(pad_token_id=160)).pad_id is None
    assert ModelConfig.from_dict(model_fields(pad_token_id=0)).pad_id == 0


def test_generation_config_is_read_from_the_folder(tmp_path, model_fields):
    folder = tmp_path / "un modèle à moi"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model_fields()), encoding="utf-8")
    assert ModelConfig.from_folder(folder).eos_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 2]}', encoding="utf-8")
    assert ModelConfig.from_folder(str(folder)).eos_ids == (9, 2)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "cohere"}, "cohere"),
        ({"model_type": None}, "None"),
        ({"model_type": ["llama"]}, "llama"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"hidden_act": "mish"}, "mish"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "mrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "0.5"),
        ({"partial_rotary_factor": 0.25}, "0.25"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model_fields, changes, named):
    with pytest.raises(UnsupportedModelError, match=r"Supported model types: llama.*qwen2") as caught:
        ModelConfig.from_dict(model_fields(**changes))
    assert named in caught.value.message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 64.0}, "hidden_size is 64.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"intermediate_size": -3}, "intermediate_size is -3"),
        ({"vocab_size": [1]}, "vocab_size"),
        ({"max_position_embeddings": None}, "max_position_embeddings is missing"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "64 is not divisible by 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": 160}, "eos_token_id is 160"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"bos_token_id": [-2]}, "bos_token_id"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_theta": 1.0}, "a number above 1"),
        ({"rope_scaling": 4}, "rope_scaling is 4"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "beta_fast is 1"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate is 'no'"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8}}, "long_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "list of 8 numbers",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "more than low_freq_factor",
        ),
    ],
)
def test_fields_that_cannot_be_are_refused_by_name(model_fields, changes, named):
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_dict(model_fields(**changes))
    assert named in str(caught.value)
    assert not isinstance(caught.value, UnsupportedModelError)


def test_key_heads_that_are_left_out_are_those_of_transformers(model_fields):
    fields = model_fields("qwen2")
    del fields["num_key_value_heads"]
    with pytest.raises(CheckpointError, match="cannot share 32 key heads"):
        ModelConfig.from_dict(fields)


def test_both_spellings_of_rope_say_the_same(model_fields):
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20, "truncate": False}
    old = model_fields(rope_theta=5e5, rope_scaling={"type": "yarn", **yarn})
    middle = model_fields(rope_theta=5e5, rope_scaling={"rope_type": "yarn", **yarn})
    new = model_fields(rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **yarn})
    del new["rope_theta"]
    configs = [ModelConfig.from_dict(fields).rope for fields in (old, middle, new)]
    assert configs[0] == configs[1] == configs[2]
    rope = configs[0]
    assert (rope.kind, rope.base, rope.factor, rope.beta_fast, rope.beta_slow) == ("yarn", 5e5, 4.0, 20, 1)
    assert (rope.original_max_positions, rope.max_positions, rope.truncate) == (64, 256, False)


def test_original_positions_beside_the_section_win(model_fields):
    fields = model_fields(rope_scaling=dict(YARN), original_max_position_embeddings=32)
    assert ModelConfig.from_dict(fields).rope.original_max_positions == 32
    fields = model_fields(rope_scaling={"rope_type": "yarn", "factor": 2.0})
    assert ModelConfig.from_dict(fields).rope.original_max_positions == 256


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"text"', "\x00", "[" * 100_000, '{"a": 1e999'])
def test_a_file_that_is_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_file_that_is_no_text(tmp_path, model_fields):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model_fields()), encoding="utf-8")
    (tmp_path / "generation_config.json").write_text("nothing", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_folder_without_configuration(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_transformers_reads_its_own_configuration_alike(tmp_path, write_model, family):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "llama3", "rope_theta": 3e5, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    folder = write_model(
        tmp_path, family, rope_parameters=rope, num_key_value_heads=1, tie_word_embeddings=True
    )
    theirs = transformers.AutoConfig.from_pretrained(folder)
    config = ModelConfig.from_folder(folder)
    assert config.hidden_size == theirs.hidden_size
    assert config.attention.kv_heads == theirs.num_key_value_heads
    assert config.attention.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rope.base == theirs.rope_parameters["rope_theta"]
    assert config.rope.kind == theirs.rope_parameters["rope_type"]
    assert config.rope.original_max_positions == 32
    assert config.eos_ids == (2, 5)

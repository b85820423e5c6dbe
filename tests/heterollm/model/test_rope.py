import warnings
from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import CheckpointError, OptionError
from heterollm.model import ModelConfig, RopeConfig, rope_tables
from heterollm.model.rope import inverse_frequencies

POSITIONS = 512
PAIRS = 24

SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn with every option": {
        "rope_type": "yarn",
        "factor": 5.0,
        "original_max_position_embeddings": 96,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 1.3,
        "truncate": False,
    },
    "yarn with attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 0.7,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1 + 0.05 * pair for pair in range(PAIRS)],
        "long_factor": [2 + 0.3 * pair for pair in range(PAIRS)],
        "original_max_position_embeddings": 128,
    },
    "longrope with factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * PAIRS,
        "long_factor": [1.5] * PAIRS,
        "factor": 6.0,
        "original_max_position_embeddings": 128,
    },
    "longrope with attention factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * PAIRS,
        "long_factor": [1.5] * PAIRS,
        "attention_factor": 1.4,
        "original_max_position_embeddings": 128,
    },
}


def both(model_fields, scaling, base):
    """The configuration as transformers has it, and as we do."""
    transformers = pytest.importorskip("transformers")
    fields = model_fields(
        hidden_size=192, head_dim=2 * PAIRS, max_position_embeddings=POSITIONS, rope_theta=base
    )
    fields["rope_parameters"] = scaling | {"rope_theta": base}
    ours = ModelConfig.from_dict(fields)
    del fields["rope_theta"], fields["architectures"], fields["model_type"]
    return transformers.LlamaConfig(**fields), ours


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e37])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(model_fields, name, base):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs, ours = both(model_fields, SCALINGS[name], base)
    embedding = LlamaRotaryEmbedding(theirs)
    cosine, sine = embedding(torch.zeros(1), torch.arange(POSITIONS)[None])
    frequencies, _ = inverse_frequencies(ours.rope, ours.attention.head_dim, POSITIONS)
    np.testing.assert_allclose(frequencies, embedding.inv_freq.numpy(), rtol=1e-6)
    cos, sin = rope_tables(ours.rope, ours.attention.head_dim, POSITIONS)
    assert (cos.dtype, cos.shape, sin.dtype, sin.shape) == (np.float32, (POSITIONS, PAIRS)) * 2
    # Where torch's float32 power is a unit or two off, the phase is wrong by that much at every position.
    tolerance = 1e-6 + 2.0**-21 * np.arange(POSITIONS)[:, None] * frequencies
    assert (np.abs(cos - cosine[0, :, :PAIRS].numpy()) <= tolerance).all()
    assert (np.abs(sin - sine[0, :, :PAIRS].numpy()) <= tolerance).all()
    assert np.abs(cos - cosine[0, :, :PAIRS].numpy())[:32].max() <= 1e-6


@pytest.mark.parametrize(
    "name", [name for name, fields in SCALINGS.items() if fields["rope_type"] != "default"]
)
def test_frequencies_are_those_of_transformers_functions(model_fields, name):
    pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, ours = both(model_fields, SCALINGS[name], 70000.0)
    for length in (128, POSITIONS):
        expected, attention_factor = ROPE_INIT_FUNCTIONS[ours.rope.kind](theirs, "cpu", seq_len=length)
        frequencies, factor = inverse_frequencies(ours.rope, ours.attention.head_dim, length)
        np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-6)
        assert factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in SCALINGS if name not in ("default", "dynamic")])
def test_every_scaling_changes_something(model_fields, name):
    _, plain = both(model_fields, SCALINGS["default"], 10000.0)
    _, scaled = both(model_fields, SCALINGS[name], 10000.0)
    before, _ = inverse_frequencies(plain.rope, plain.attention.head_dim, POSITIONS)
    after, _ = inverse_frequencies(scaled.rope, scaled.attention.head_dim, POSITIONS)
    assert np.abs(after / before - 1).max() > 0.3


def test_the_first_pair_turns_one_radian_a_position():
    cos, sin = rope_tables(RopeConfig("default", 10000.0, 4096, 4096), 64, 4096)
    np.testing.assert_allclose(cos[:, 0], np.cos(np.arange(4096.0)), atol=1e-7)
    np.testing.assert_allclose(sin[:, 0], np.sin(np.arange(4096.0)), atol=1e-7)
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()


def test_longrope_is_settled_by_the_context():
    rope = RopeConfig("longrope", 1e4, 64, 32, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    short, long = (inverse_frequencies(rope, 8, context)[0] for context in (32, 33))
    np.testing.assert_array_equal(short, 2 * long)


def test_dynamic_scaling_ends_at_the_models_own_context():
    rope = RopeConfig("dynamic", 1e4, 128, 128, factor=2.0)
    plain = rope_tables(replace(rope, kind="default"), 32, 128)
    np.testing.assert_array_equal(rope_tables(rope, 32, 128), plain)
    with pytest.raises(OptionError, match="129 tokens is beyond the model's 128"):
        rope_tables(rope, 32, 129)


@pytest.mark.parametrize("context", [0, -1])
def test_a_context_without_tokens_is_refused(context):
    with pytest.raises(OptionError, match=str(context)):
        rope_tables(RopeConfig("default", 1e4, 128, 128), 32, context)


@pytest.mark.parametrize("base", [1e37, 1e39, 1e300, 1.7e308])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_largest_bases_are_computed_without_a_warning(model_fields, name, base):
    fields = model_fields(hidden_size=192, head_dim=2 * PAIRS, max_position_embeddings=POSITIONS)
    fields["rope_parameters"] = SCALINGS[name] | {"rope_theta": base}
    rope = ModelConfig.from_dict(fields).rope
    assert rope.base == base
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frequencies, factor = inverse_frequencies(rope, 2 * PAIRS, POSITIONS)
        cos, sin = rope_tables(rope, 2 * PAIRS, POSITIONS)
    assert (np.diff(frequencies) <= 0).all()
    assert frequencies[0] > 0
    if base > 1e300:
        # Its wavelength is beyond float32: the pair stands still.
        assert frequencies[-1] == 0
        np.testing.assert_array_equal(cos[:, -1], np.float32(factor))
        np.testing.assert_array_equal(sin[:, -1], 0)
    assert np.isfinite(cos).all()
    assert np.isfinite(sin).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "longrope", "long_factor": (1e-300,) * 4, "short_factor": (1.0,) * 4},
        {"kind": "longrope", "long_factor": (1.0,) * 4, "attention_factor": 1e300},
        {"kind": "yarn", "factor": 2.0, "mscale": 1e308, "mscale_all_dim": 1e-300},
        {"kind": "yarn", "factor": 2.0, "beta_fast": 1.7e308},
        {"kind": "linear", "factor": 2.0, "base": float("nan")},
    ],
    ids=str,
)
def test_tables_that_are_not_finite_are_refused(changes):
    rope = replace(RopeConfig("default", 1e4, 64, 32), **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CheckpointError, match=rf"type {rope.kind}.*not finite.*rope_parameters"):
            rope_tables(rope, 8, 64)

"""Models by name: their sizes add up to the parameters that their makers state."""

import json

import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model import KNOWN_MODELS, expert_specs, find_model, op_specs
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.blocks import ShortConvBlock

STATED_BILLIONS = {
    "llama-3-8b": 8.03,
    "llama-2-7b": 6.74,
    "tinyllama-1.1b": 1.10,
    "llama-3.2-3b": 3.21,
    "llama-3.2-1b": 1.24,
    "internlm2-1.8b": 1.89,
    "mistral-7b": 7.24,
    "gemma-2b": 2.51,
    "phi-2": 2.78,
    "phi-3-mini": 3.82,
    "qwen1.5-0.5b": 0.464,
    "qwen1.5-1.8b": 1.84,
    "qwen1.5-4b": 3.95,
    "qwen1.5-7b": 7.72,
    "qwen1.5-14b": 14.2,
    "qwen1.5-32b": 32.5,
    "qwen1.5-72b": 72.3,
    "qwen1.5-110b": 111.0,
    "qwen2-0.5b": 0.494,
    "qwen2-1.5b": 1.54,
    "qwen2-7b": 7.62,
    "qwen2-72b": 72.7,
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.8,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.5,
    "qwen3.5-0.8b": 0.752,
    "qwen3.5-2b": 1.88,
    "qwen3.5-4b": 4.21,
    "qwen3.5-9b": 8.95,
    "qwen3.5-27b": 26.9,
    "qwen1.5-moe-a2.7b": 14.3,
    "phi-tiny-moe": 3.76,
    "phi-3.5-moe": 41.9,
    "mixtral-8x7b": 46.7,
    "olmoe-1b-7b": 6.92,
    "llama-3.1-8b": 8.03,
    "lfm2-350m": 0.354,
    "lfm2-700m": 0.742,
    "lfm2-1.2b": 1.17,
    "lfm2-2.6b": 2.57,
    "gemma-2-2b": 2.61,
    "gemma-3-270m": 0.268,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.8,
    # Without the table of layers' embeddings, the linear beside it, those of streams, and Laurel's.
    "gemma-3n-e2b": 2.37,
    "gemma-3n-e4b": 4.43,
    "gemma-4-e2b": 2.27,
    "gemma-4-e4b": 4.62,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    # With gates of attention.
    "muse-glimmer-30b": 27.85,
    "phi-3.5-mini": 3.82,
    "phi-4-mini": 3.84,
    "smollm2-135m": 0.135,
    "smollm2-360m": 0.362,
    "smollm2-1.7b": 1.71,
    "smollm3-3b": 3.08,
    "granite-4.0-350m": 0.352,
    "granite-4.0-1b": 1.63,
    "granite-4.0-micro": 3.4,
    "granite-4.0-h-350m": 0.34,
    "granite-4.0-h-1b": 1.46,
    "granite-4.0-h-micro": 3.19,
    "granite-4.0-h-tiny": 6.94,
    "nemotron-nano-9b-v2": 8.89,
    "nemotron-3-nano-30b-a3b": 31.6,
    "minicpm5-1b": 1.081,
    "minicpm4-0.5b": 0.434,
    "minicpm4-8b": 8.19,
    "deepseek-r1-distill-qwen-1.5b": 1.78,
    "deepseek-r1-distill-qwen-7b": 7.62,
    "deepseek-r1-distill-llama-8b": 8.03,
    "mistral-nemo-12b": 12.2,
    "mistral-small-24b": 23.6,
    "falcon3-1b": 1.67,
    "falcon3-3b": 3.23,
    "falcon-h1-0.5b": 0.52,
    "falcon-h1-1.5b": 1.55,
    "falcon-h1-3b": 3.15,
    "falcon-h1-7b": 7.59,
    "ernie-4.5-0.3b": 0.361,
    "glm-4-9b": 9.4,
    "glm-4.5-air": 106.8,
    "phonelm-0.5b": 0.51,
    "phonelm-1.5b": 1.62,
    "stablelm-2-1.6b": 1.64,
    # Without the weights that make keys and values of latent vectors.
    "deepseek-v2-lite": 15.65,
    "glm-4.7-flash": 29.7,
    "phi-mini-moe": 7.65,
    "bitnet-2b4t": 2.41,
    "apertus-8b": 8.053,
    "internlm3-8b": 8.80,
    "lfm3-1.7b": 1.728,
    "pythia-160m": 0.162,
    "pythia-410m": 0.405,
    "pythia-1.4b": 1.415,
    "pythia-2.8b": 2.775,
    "gpt-oss-20b": 20.9,
}
"""Parameters of the text part, by model cards and the files' sizes; a tied head counts once."""


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_sizes_add_up(name):
    config = KNOWN_MODELS[name].config
    specs = op_specs(config, "w4a16", 128, True)
    weights = sum(spec.rows * spec.columns for spec in specs)
    for spec in expert_specs(config, specs):
        weights += spec.experts.experts * spec.columns * (spec.rows + spec.then.columns)
    if not config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size
    assert weights / 1e9 == pytest.approx(STATED_BILLIONS[name], rel=0.007)


def test_all_are_stated():
    assert STATED_BILLIONS.keys() == KNOWN_MODELS.keys()


def test_layers_with_windows_and_convolutions_are_those_of_the_model():
    gemma = KNOWN_MODELS["gemma-3-1b"].config
    windows = [block.window for block in gemma.blocks(AttentionBlock).values()]
    assert windows[:6] == [512] * 5 + [0]
    assert windows.count(0) == 4
    lfm2 = KNOWN_MODELS["lfm2-1.2b"].config
    assert [*lfm2.blocks(AttentionBlock)] == [2, 5, 8, 10, 12, 14]
    assert len(lfm2.blocks(ShortConvBlock)) == 10


def test_a_file_or_folder_serves_as_well(tmp_path):
    values = {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
    }
    path = tmp_path / "small" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(values))
    for given in (path, path.parent):
        found = find_model(given)
        assert (found.name, found.config.hidden_size, found.note) == ("small", 256, "")
    assert find_model("LLaMA-3-8B").name == "llama-3-8b"


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"model_type": "jetmoe", "num_local_experts": 8}, UnsupportedModelError, "mixture of experts"),
        ({"model_type": "minicpm3", "kv_lora_rank": 512}, UnsupportedModelError, "compressed keys"),
        ({"model_type": "gpt2"}, CheckpointError, "hidden_size is missing"),
        ({"model_type": "starcoder2", "hidden_size": "big"}, CheckpointError, "hidden_size"),
    ],
)
def test_what_is_close_to_no_llama_is_refused_in_words(more, error, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(more))
    with pytest.raises(error, match=said):
        find_model(path)

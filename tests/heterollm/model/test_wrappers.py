"""The text part of checkpoints with vision, against transformers and against the model of text alone."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import UnsupportedModelError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import ModelConfig
from heterollm.model.tensor_file import TensorFile
from heterollm.model.wrappers import WRAPPERS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import muse_model  # noqa: E402

muse_model.register()

Make = Callable[[str], tuple[Path, Any]]
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 2048,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
EYE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            **TEXT,
            "query_pre_attn_scalar": 20,
            "sliding_window": 20,
            "sliding_window_pattern": 2,
        },
        "vision_config": {**EYE, "intermediate_size": 32},
        "mm_tokens_per_image": 4,
        "image_token_index": 7,
        "boi_token_index": 8,
        "eoi_token_index": 9,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**EYE, "model_type": "pixtral", "intermediate_size": 32},
        "image_token_index": 7,
    },
    "mistral3 of Ministral 3": {
        "text_config": {
            **TEXT,
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
        "vision_config": {**EYE, "model_type": "pixtral", "intermediate_size": 32},
        "image_token_index": 7,
    },
    "muse_glimmer": {
        "text_config": {**TEXT, "sliding_window": 20, "bos_token_id": 1, "eos_token_id": 2},
        "vision_config": {**EYE, "intermediate_size": 32, "pos_emb_height": 4, "pos_emb_width": 4},
        "image_token_id": 7,
        "video_token_id": 8,
    },
    "qwen3_5": {
        "text_config": {
            **TEXT,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
        },
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_start_token_id": 9,
        "vision_end_token_id": 10,
    },
    "qwen3_5_moe": {
        "text_config": {
            **TEXT,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
        },
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_start_token_id": 9,
        "vision_end_token_id": 10,
    },
    # Experts with inputs first, in the last of two layers, which has no positions.
    "llama4": {
        "text_config": {
            **TEXT,
            "intermediate_size": 96,
            "intermediate_size_mlp": 176,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
            "floor_scale": 12,
        },
        "vision_config": {
            **EYE,
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
        "boi_token_index": 8,
        "eoi_token_index": 9,
        "image_token_index": 7,
    },
    # Positions on three axes, which are equal for text; norms in a row of the tower feed the first layers.
    "qwen3_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 128,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": 7,
        "video_token_id": 8,
        "vision_start_token_id": 9,
        "vision_end_token_id": 10,
    },
}
PROMPT = [int(one) for one in np.random.default_rng(3).integers(11, 2000, 44)]


@pytest.fixture(scope="module")
def wrapped(
    tmp_path_factory: pytest.TempPathFactory, bundled_model: Path
) -> Callable[[str], tuple[Path, Any]]:
    """Return a function that writes a random checkpoint with vision, and returns it with its model."""

    def make(kind: str) -> tuple[Path, Any]:
        wrapper = kind.partition(" ")[0]
        config = transformers.AutoConfig.for_model(wrapper, **json.loads(json.dumps(CONFIGS[kind])))
        torch.manual_seed(5)
        model = getattr(transformers, WRAPPERS[wrapper].architecture)(config).float().eval()
        with torch.no_grad():
            for name, values in model.named_parameters():
                values.uniform_(0.5, 1.5) if "norm" in name else values.normal_(std=0.08)
        folder = tmp_path_factory.mktemp(wrapper)
        model.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(bundled_model / name, folder / name)
        return folder, model

    return make


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_text_part_is_that_of_transformers(
    kind: str,
    wrapped: Make,
    host_llm: Callable[..., LLM],
    bundled_model: Path,
    tmp_path: Path,
) -> None:
    folder, model = wrapped(kind)
    llm = host_llm(folder, plan="gpu", precision="fp16")
    assert any("tensors of vision are not read" in note for note in llm.notes)
    # Llama 4's text part is a whole model, whose outputs the wrapper of this version cannot take.
    whole = getattr(model, "language_model", None)
    with torch.no_grad():
        expected = (whole or model)(input_ids=torch.tensor([PROMPT])).logits[0].numpy()
    logits = llm.session().prefill(PROMPT, all_logits=True)
    assert sqnr_db(logits, expected) >= 90

    # The same weights as a model of text, which has no axes.
    config = ModelConfig.from_folder(folder)
    fields = {name: value for name, value in CONFIGS[kind]["text_config"].items() if name != "model_type"}
    if "mrope_section" in fields.get("rope_parameters", ()):
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope.base}
    fields["tie_word_embeddings"] = config.tie_word_embeddings
    text = transformers.AutoConfig.for_model(config.model_type, **fields)
    own = transformers.AutoModelForCausalLM.from_config(text).float()
    if whole is None:
        parts = model.model.language_model.state_dict()
        state = {f"model.{name}": value for name, value in parts.items()}
        state["lm_head.weight"] = model.lm_head.weight
    own.load_state_dict(state if whole is None else whole.state_dict())
    own.save_pretrained(tmp_path / "text")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_model / name, tmp_path / "text" / name)
    alone = host_llm(tmp_path / "text", plan="gpu", precision="fp16")
    np.testing.assert_array_equal(alone.session().prefill(PROMPT, all_logits=True), logits)


def test_names_of_the_newer_spelling(wrapped: Make, host_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """transformers 4.52 wrote ``model.language_model.``, others write ``language_model.model.``."""
    from safetensors.numpy import load_file, save_file

    folder, _ = wrapped("mistral3")
    renamed = shutil.copytree(folder, tmp_path / "renamed")
    pairs = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))
    tensors = load_file(folder / "model.safetensors")
    for old, new in pairs:
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    assert set(tensors) != set(TensorFile.open(folder / "model.safetensors").entries)
    save_file(tensors, renamed / "model.safetensors")
    one, other = (host_llm(path, plan="gpu").session().prefill(PROMPT[:9]) for path in (folder, renamed))
    np.testing.assert_array_equal(one, other)


def test_sizes_that_a_published_gemma_3_leaves_out() -> None:
    """google/gemma-3-4b-it states only what differs from the class."""
    published = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    config = ModelConfig.from_dict(published)
    assert (config.vocab_size, config.max_positions, config.eos_ids) == (262_208, 131_072, (1, 106))
    own = config.attention
    assert (own.heads, own.kv_heads, own.head_dim, own.window) == (8, 4, 256, 1024)
    assert config.tie_word_embeddings
    assert config.rope.factor == 8.0


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "gemma3"}, "without text_config"),
        ({"model_type": "gemma3", "text_config": {"model_type": "cohere"}}, "'cohere' in 'gemma3'"),
        ({"model_type": "qwen2_vl", "text_config": {}}, "Model type 'qwen2_vl'"),
        (
            {
                **CONFIGS["gemma3"],
                "model_type": "gemma3",
                "architectures": ["Gemma3ForSequenceClassification"],
            }
            | {"text_config": {**TEXT, "model_type": "gemma3_text"}},
            "Gemma3ForSequenceClassification",
        ),
    ],
)
def test_other_parts_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        ModelConfig.from_dict(values)
    assert named in caught.value.message

"""Checkpoints of the families whose code transformers does not have, from models of the same equations."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from own_code import OWN_CODE
from safetensors.torch import save_file

State = dict[str, Any]
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 208,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def as_internlm2(state: State) -> State:
    """Return a Llama's weights with InternLM2's names, and q, k and v by groups of heads."""
    names = (
        *(("model.embed_tokens", "model.tok_embeddings"), ("lm_head", "output")),
        *(("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")),
        *(("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1")),
        *(("mlp.up_proj", "feed_forward.w3"), ("mlp.down_proj", "feed_forward.w2")),
    )
    found: State = {}
    for name, value in state.items():
        if "self_attn.q_proj" in name:
            q, k, v = (state[name.replace("q_proj", f"{one}_proj")] for one in "qkv")
            groups = [
                torch.cat([part.reshape(2, -1, *part.shape[1:])[group] for part in (q, k, v)])
                for group in range(2)
            ]
            found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups)
        elif not any(f"self_attn.{one}_proj" in name for one in "kv"):
            for old, new in names:
                name = name.replace(old, new)
            found[name] = value
    return found


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], Callable[[State], State]]] = {
    # Family: transformers' type, its fields, the family's fields, its weights from those of transformers.
    "internlm2": (
        "llama",
        {"attention_bias": True, "rope_theta": 1000.0},
        {"bias": True, "rope_theta": 1000.0, "rope_scaling": None, "attn_implementation": "eager"},
        as_internlm2,
    ),
    "phonelm": ("llama", {"hidden_act": "relu"}, {"hidden_act": "relu"}, dict),
    "minicpm": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 192 / 64,
            "attention_multiplier": 32**-0.5,
            "tie_word_embeddings": True,
        },
        {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 64, "tie_word_embeddings": True},
        dict,
    ),
}


def write_own_code(folder: Path, family: str, bundled: Path) -> Any:
    """Write a random checkpoint in its published layout; return transformers' model of the same weights."""
    kind, theirs, fields, renamed = CASES[family]
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(kind, **SIZES, **theirs)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            values.uniform_(0.5, 1.5) if "norm" in name else values.normal_(std=0.1)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(renamed(state), folder / "model.safetensors")
    code = f"modeling_{family}.{OWN_CODE[family]}ForCausalLM"
    stated = {
        **SIZES,
        **fields,
        "model_type": family,
        "architectures": [f"{OWN_CODE[family]}ForCausalLM"],
        "auto_map": {"AutoConfig": f"configuration_{family}.X", "AutoModelForCausalLM": code},
    }
    (folder / "config.json").write_text(json.dumps(stated))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder / name)
    return model

"""A small mixture of experts in Qwen3-MoE's architecture, for tests that simulate."""

from typing import Any, Final

SMALL_MIXTURE: Final[dict[str, Any]] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 2048,
    "max_position_embeddings": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
"""Fields of its ``config.json``."""

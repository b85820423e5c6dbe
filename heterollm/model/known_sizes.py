"""Sizes of well-known models, as their published ``config.json`` files state them.

The files of :data:`DEVICE_ROWS` were not read again for this table: tests compare the sums of parameters with
the published counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Row = tuple[Any, ...]


def _windows(window: int, layers: int, period: int) -> Mapping[str, Any]:
    """Return the fields of layers of which all but every ``period``-th have a window."""
    kinds = ["sliding_attention" if at % period else "full_attention" for at in range(1, layers + 1)]
    return {"sliding_window": window, "layer_types": kinds}


def _convolutions(layers: int, *attention: int) -> Mapping[str, Any]:
    """Return the fields of an LFM2 whose other layers are convolutions."""
    kinds = ["full_attention" if at in attention else "conv" for at in range(layers)]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False, "conv_L_cache": 3}


def _spaces(layers: int, heads: int, head_dim: int, *attention: int, **more: int) -> Mapping[str, Any]:
    """Return the fields of a Granite 4-H whose other layers are state spaces."""
    kinds = ["attention" if at in attention else "mamba" for at in range(layers)]
    space = {"mamba_n_heads": heads, "mamba_d_head": head_dim, "mamba_d_state": 128}
    return {"layer_types": kinds, **space, **more}


def _falcon(heads: int, head_dim: int, state: int) -> Mapping[str, Any]:
    """Return the fields of a Falcon-H1's state spaces; its factors take no time."""
    space = {"mamba_n_heads": heads, "mamba_d_head": head_dim, "mamba_d_ssm": heads * head_dim}
    return {**space, "mamba_d_state": state, "mamba_n_groups": 1}


NEMOTRON_3: Final[Mapping[str, Any]] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
NEMOTRON_2: Final[Mapping[str, Any]] = {
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
}
DEEPSEEK_V2: Final[Mapping[str, Any]] = {
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
}
LFM2: Final = _convolutions(16, 2, 5, 8, 10, 12, 14)
GRANITE_H: Final = (5, 15, 25, 35)

LARGE_GEMMA4: Final = {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
"""Fields of the Gemmas 4 without embeddings of each layer."""

# fmt: off
# Name, model_type, repository, and the numbers of ModelSize: hidden, intermediate, layers, heads, kv_heads,
# vocabulary, tied, head_dim, positions; of a mixture the experts of a layer and of a token as well, and
# the width of the shared network.
ROWS: Final[tuple[Row, ...]] = (
    ("llama-3-8b", "llama", "meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 32, 8, 128256, False, 128, 8192),
    ("llama-2-7b", "llama", "meta-llama/Llama-2-7b-hf", 4096, 11008, 32, 32, 32, 32000, False, 128, 4096),
    ("tinyllama-1.1b", "llama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
     2048, 5632, 22, 32, 4, 32000, False, 64, 2048),
    ("llama-3.2-3b", "llama", "meta-llama/Llama-3.2-3B", 3072, 8192, 28, 24, 8, 128256, True, 128, 131072),
    ("llama-3.2-1b", "llama", "meta-llama/Llama-3.2-1B", 2048, 8192, 16, 32, 8, 128256, True, 64, 131072),
    ("internlm2-1.8b", "internlm2", "internlm/internlm2-1_8b",
     2048, 8192, 24, 16, 8, 92544, False, 128, 32768),
    ("mistral-7b", "mistral", "mistralai/Mistral-7B-v0.1", 4096, 14336, 32, 32, 8, 32000, False, 128, 32768),
    ("gemma-2b", "gemma", "google/gemma-2b", 2048, 16384, 18, 8, 1, 256000, True, 256, 8192),
    ("phi-2", "phi", "microsoft/phi-2", 2560, 10240, 32, 32, 32, 51200, False, 80, 2048),
    ("phi-3-mini", "phi3", "microsoft/Phi-3-mini-4k-instruct",
     3072, 8192, 32, 32, 32, 32064, False, 96, 4096),
    ("qwen1.5-0.5b", "qwen2", "Qwen/Qwen1.5-0.5B", 1024, 2816, 24, 16, 16, 151936, True, 64, 32768),
    ("qwen1.5-1.8b", "qwen2", "Qwen/Qwen1.5-1.8B", 2048, 5504, 24, 16, 16, 151936, False, 128, 32768),
    ("qwen1.5-4b", "qwen2", "Qwen/Qwen1.5-4B", 2560, 6912, 40, 20, 20, 151936, False, 128, 32768),
    ("qwen1.5-7b", "qwen2", "Qwen/Qwen1.5-7B", 4096, 11008, 32, 32, 32, 151936, False, 128, 32768),
    ("qwen1.5-14b", "qwen2", "Qwen/Qwen1.5-14B", 5120, 13696, 40, 40, 40, 152064, False, 128, 32768),
    ("qwen1.5-32b", "qwen2", "Qwen/Qwen1.5-32B", 5120, 27392, 64, 40, 8, 152064, False, 128, 32768),
    ("qwen1.5-72b", "qwen2", "Qwen/Qwen1.5-72B", 8192, 24576, 80, 64, 64, 152064, False, 128, 32768),
    ("qwen1.5-110b", "qwen2", "Qwen/Qwen1.5-110B", 8192, 49152, 80, 64, 8, 152064, False, 128, 32768),
    ("qwen2-0.5b", "qwen2", "Qwen/Qwen2-0.5B", 896, 4864, 24, 14, 2, 151936, True, 64, 131072),
    ("qwen2-1.5b", "qwen2", "Qwen/Qwen2-1.5B", 1536, 8960, 28, 12, 2, 151936, True, 128, 131072),
    ("qwen2-7b", "qwen2", "Qwen/Qwen2-7B", 3584, 18944, 28, 28, 4, 152064, False, 128, 131072),
    ("qwen2-72b", "qwen2", "Qwen/Qwen2-72B", 8192, 29568, 80, 64, 8, 152064, False, 128, 131072),
    ("qwen2.5-0.5b", "qwen2", "Qwen/Qwen2.5-0.5B", 896, 4864, 24, 14, 2, 151936, True, 64, 32768),
    ("qwen2.5-1.5b", "qwen2", "Qwen/Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, 151936, True, 128, 131072),
    ("qwen2.5-3b", "qwen2", "Qwen/Qwen2.5-3B", 2048, 11008, 36, 16, 2, 151936, True, 128, 32768),
    ("qwen2.5-7b", "qwen2", "Qwen/Qwen2.5-7B", 3584, 18944, 28, 28, 4, 152064, False, 128, 131072),
    ("qwen2.5-14b", "qwen2", "Qwen/Qwen2.5-14B", 5120, 13824, 48, 40, 8, 152064, False, 128, 131072),
    ("qwen2.5-32b", "qwen2", "Qwen/Qwen2.5-32B", 5120, 27648, 64, 40, 8, 152064, False, 128, 131072),
    ("qwen2.5-72b", "qwen2", "Qwen/Qwen2.5-72B", 8192, 29568, 80, 64, 8, 152064, False, 128, 131072),
    ("qwen3-0.6b", "qwen3", "Qwen/Qwen3-0.6B", 1024, 3072, 28, 16, 8, 151936, True, 128, 40960),
    ("qwen3-1.7b", "qwen3", "Qwen/Qwen3-1.7B", 2048, 6144, 28, 16, 8, 151936, True, 128, 40960),
    ("qwen3-4b", "qwen3", "Qwen/Qwen3-4B", 2560, 9728, 36, 32, 8, 151936, True, 128, 40960),
    ("qwen3-8b", "qwen3", "Qwen/Qwen3-8B", 4096, 12288, 36, 32, 8, 151936, False, 128, 40960),
    ("qwen3-14b", "qwen3", "Qwen/Qwen3-14B", 5120, 17408, 40, 40, 8, 151936, False, 128, 40960),
    ("qwen3-32b", "qwen3", "Qwen/Qwen3-32B", 5120, 25600, 64, 64, 8, 151936, False, 128, 40960),
    ("qwen3-30b-a3b", "qwen3_moe", "Qwen/Qwen3-30B-A3B",
     2048, 768, 48, 32, 4, 151936, False, 128, 40960, 128, 8),
    ("qwen1.5-moe-a2.7b", "qwen2_moe", "Qwen/Qwen1.5-MoE-A2.7B",
     2048, 1408, 24, 16, 16, 151936, False, 128, 8192, 60, 4, 5632),
    ("phi-tiny-moe", "phimoe", "microsoft/Phi-tiny-MoE-instruct",
     4096, 448, 32, 16, 4, 32064, False, 128, 4096, 16, 2),
    ("phi-3.5-moe", "phimoe", "microsoft/Phi-3.5-MoE-instruct",
     4096, 6400, 32, 32, 8, 32064, False, 128, 131072, 16, 2),
    ("mixtral-8x7b", "mixtral", "mistralai/Mixtral-8x7B-v0.1",
     4096, 14336, 32, 32, 8, 32000, False, 128, 32768, 8, 2),
    ("olmoe-1b-7b", "olmoe", "allenai/OLMoE-1B-7B-0924",
     2048, 1024, 16, 16, 16, 50304, False, 128, 4096, 64, 8),
)

DEVICE_ROWS: Final[tuple[Row, ...]] = (
    ("llama-3.1-8b", "llama", "meta-llama/Llama-3.1-8B", 4096, 14336, 32, 32, 8, 128256, False, 128, 131072),
    ("qwen3.5-0.8b", "qwen3_5_text", "Qwen/Qwen3.5-0.8B", 1024, 3584, 24, 8, 2, 248320, True, 256, 262144),
    ("qwen3.5-2b", "qwen3_5_text", "Qwen/Qwen3.5-2B", 2048, 6144, 24, 8, 2, 248320, True, 256, 262144),
    ("qwen3.5-4b", "qwen3_5_text", "Qwen/Qwen3.5-4B", 2560, 9216, 32, 16, 4, 248320, True, 256, 262144),
    ("qwen3.5-9b", "qwen3_5_text", "Qwen/Qwen3.5-9B", 4096, 12288, 32, 16, 4, 248320, False, 256, 262144),
    ("qwen3.5-27b", "qwen3_5_text", "Qwen/Qwen3.5-27B", 5120, 17408, 64, 24, 4, 248320, False, 256, 262144),
    ("lfm2-350m", "lfm2", "LiquidAI/LFM2-350M", 1024, 4608, 16, 16, 8, 65536, True, 64, 128000, LFM2),
    ("lfm2-700m", "lfm2", "LiquidAI/LFM2-700M", 1536, 6912, 16, 24, 8, 65536, True, 64, 128000, LFM2),
    ("lfm2-1.2b", "lfm2", "LiquidAI/LFM2-1.2B", 2048, 8192, 16, 32, 8, 65536, True, 64, 128000, LFM2),
    ("lfm2-2.6b", "lfm2", "LiquidAI/LFM2-2.6B", 2048, 10752, 30, 32, 8, 65536, True, 64, 128000,
     _convolutions(30, 2, 5, 9, 13, 17, 21, 24, 27)),
    ("gemma-2-2b", "gemma2", "google/gemma-2-2b", 2304, 9216, 26, 8, 4, 256000, True, 256, 8192,
     _windows(4096, 26, 2)),
    ("gemma-3-270m", "gemma3_text", "google/gemma-3-270m", 640, 2048, 18, 4, 1, 262144, True, 256, 32768,
     _windows(512, 18, 6)),
    ("gemma-3-1b", "gemma3_text", "google/gemma-3-1b-pt", 1152, 6912, 26, 4, 1, 262144, True, 256, 32768,
     _windows(512, 26, 6)),
    ("gemma-3-4b", "gemma3_text", "google/gemma-3-4b-pt", 2560, 10240, 34, 8, 4, 262208, True, 256, 131072,
     _windows(1024, 34, 6)),
    ("gemma-3-12b", "gemma3_text", "google/gemma-3-12b-pt", 3840, 15360, 48, 16, 8, 262208, True, 256, 131072,
     _windows(1024, 48, 6)),
    ("gemma-3n-e2b", "gemma3n_text", "google/gemma-3n-E2B", 2048, 8192, 30, 8, 2, 262400, True, 256, 32768,
     {**_windows(512, 30, 5), "num_kv_shared_layers": 10}),
    ("gemma-3n-e4b", "gemma3n_text", "google/gemma-3n-E4B", 2048, 16384, 35, 8, 2, 262400, True, 256, 32768,
     _windows(512, 35, 5)),
    ("gemma-4-e2b", "gemma4_text", "google/gemma-4-E2B", 1536, 6144, 35, 8, 1, 262144, True, 256, 131072,
     {**_windows(512, 35, 5), "num_kv_shared_layers": 20, "use_double_wide_mlp": True}),
    ("gemma-4-e4b", "gemma4_text", "google/gemma-4-E4B", 2560, 10240, 42, 8, 2, 262144, True, 256, 131072,
     {**_windows(512, 42, 6), "num_kv_shared_layers": 18}),
    ("gemma-4-26b-a4b", "gemma4_text", "google/gemma-4-26B-A4B",
     2816, 2112, 30, 16, 8, 262144, True, 256, 262144,
     {**_windows(1024, 30, 6), **LARGE_GEMMA4, "num_global_key_value_heads": 2, "enable_moe_block": True,
      "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}),
    ("gemma-4-31b", "gemma4_text", "google/gemma-4-31B", 5376, 21504, 60, 32, 16, 262144, True, 256, 262144,
     {**_windows(1024, 60, 6), **LARGE_GEMMA4, "num_global_key_value_heads": 4}),
    ("phi-3.5-mini", "phi3", "microsoft/Phi-3.5-mini-instruct",
     3072, 8192, 32, 32, 32, 32064, False, 96, 131072),
    ("phi-4-mini", "phi3", "microsoft/Phi-4-mini-instruct",
     3072, 8192, 32, 24, 8, 200064, True, 128, 131072, {"partial_rotary_factor": 0.75}),
    ("smollm2-135m", "llama", "HuggingFaceTB/SmolLM2-135M", 576, 1536, 30, 9, 3, 49152, True, 64, 8192),
    ("smollm2-360m", "llama", "HuggingFaceTB/SmolLM2-360M", 960, 2560, 32, 15, 5, 49152, True, 64, 8192),
    ("smollm2-1.7b", "llama", "HuggingFaceTB/SmolLM2-1.7B", 2048, 8192, 24, 32, 32, 49152, True, 64, 8192),
    ("smollm3-3b", "smollm3", "HuggingFaceTB/SmolLM3-3B",
     2048, 11008, 36, 16, 4, 128256, True, 128, 65536),
    ("granite-4.0-350m", "granite", "ibm-granite/granite-4.0-350m",
     1024, 2048, 28, 16, 4, 100352, True, 64, 32768),
    ("granite-4.0-1b", "granite", "ibm-granite/granite-4.0-1b",
     2048, 4096, 40, 16, 4, 100352, True, 128, 131072),
    ("granite-4.0-micro", "granite", "ibm-granite/granite-4.0-micro",
     2560, 8192, 40, 40, 8, 100352, True, 64, 131072),
    ("granite-4.0-h-350m", "granitemoehybrid", "ibm-granite/granite-4.0-h-350m",
     768, 2048, 32, 12, 4, 100352, True, 64, 32768,
     _spaces(32, 48, 32, 10, 13, 17, 27, num_local_experts=0, shared_intermediate_size=2048)),
    ("granite-4.0-h-1b", "granitemoehybrid", "ibm-granite/granite-4.0-h-1b",
     1536, 4096, 40, 12, 4, 100352, True, 128, 131072,
     _spaces(40, 48, 64, *GRANITE_H, num_local_experts=0, shared_intermediate_size=4096)),
    ("granite-4.0-h-micro", "granitemoehybrid", "ibm-granite/granite-4.0-h-micro",
     2048, 8192, 40, 32, 8, 100352, True, 64, 131072,
     _spaces(40, 64, 64, *GRANITE_H, num_local_experts=0, shared_intermediate_size=8192)),
    ("granite-4.0-h-tiny", "granitemoehybrid", "ibm-granite/granite-4.0-h-tiny",
     1536, 512, 40, 12, 4, 100352, True, 128, 131072, 64, 6,
     _spaces(40, 48, 64, *GRANITE_H, shared_intermediate_size=1024)),
    ("nemotron-nano-9b-v2", "nemotron_h", "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
     4480, 15680, 56, 40, 8, 131072, False, 128, 131072, NEMOTRON_2),
    ("nemotron-3-nano-30b-a3b", "nemotron_h", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
     2688, 1856, 52, 32, 2, 131072, False, 128, 262144, NEMOTRON_3),
    ("minicpm5-1b", "llama", "openbmb/MiniCPM5-1B", 1536, 4608, 24, 16, 2, 130560, False, 128, 131072),
    ("minicpm4-0.5b", "minicpm", "openbmb/MiniCPM4-0.5B", 1024, 4096, 24, 16, 2, 73448, True, 64, 32768),
    ("minicpm4-8b", "minicpm", "openbmb/MiniCPM4-8B", 4096, 16384, 32, 32, 2, 73448, False, 128, 32768),
    ("deepseek-r1-distill-qwen-1.5b", "qwen2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
     1536, 8960, 28, 12, 2, 151936, False, 128, 131072),
    ("deepseek-r1-distill-qwen-7b", "qwen2", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
     3584, 18944, 28, 28, 4, 152064, False, 128, 131072),
    ("deepseek-r1-distill-llama-8b", "llama", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
     4096, 14336, 32, 32, 8, 128256, False, 128, 131072),
    ("mistral-nemo-12b", "mistral", "mistralai/Mistral-Nemo-Instruct-2407",
     5120, 14336, 40, 32, 8, 131072, False, 128, 131072),
    ("mistral-small-24b", "mistral", "mistralai/Mistral-Small-24B-Instruct-2501",
     5120, 32768, 40, 32, 8, 131072, False, 128, 32768),
    ("falcon3-1b", "llama", "tiiuae/Falcon3-1B-Base", 2048, 8192, 18, 8, 4, 131072, False, 256, 4096),
    ("falcon3-3b", "llama", "tiiuae/Falcon3-3B-Base", 3072, 9216, 22, 12, 4, 131072, False, 256, 8192),
    ("falcon-h1-0.5b", "falcon_h1", "tiiuae/Falcon-H1-0.5B-Base",
     1024, 2048, 36, 8, 2, 32784, False, 64, 16384, _falcon(24, 64, 128)),
    ("falcon-h1-1.5b", "falcon_h1", "tiiuae/Falcon-H1-1.5B-Base",
     2048, 4608, 24, 8, 2, 65537, False, 128, 131072, _falcon(48, 64, 256)),
    ("falcon-h1-3b", "falcon_h1", "tiiuae/Falcon-H1-3B-Base",
     2560, 6144, 32, 10, 2, 65536, False, 128, 131072, _falcon(32, 128, 256)),
    ("falcon-h1-7b", "falcon_h1", "tiiuae/Falcon-H1-7B-Base",
     3072, 12288, 44, 12, 2, 130048, False, 128, 262144, _falcon(24, 128, 256)),
    ("ernie-4.5-0.3b", "ernie4_5", "baidu/ERNIE-4.5-0.3B-PT",
     1024, 3072, 18, 16, 2, 103424, True, 128, 131072),
    ("glm-4-9b", "glm4", "zai-org/GLM-4-9B-0414", 4096, 13696, 40, 32, 2, 151552, False, 128, 32768),
    ("glm-4.5-air", "glm4_moe", "zai-org/GLM-4.5-Air", 4096, 10944, 46, 96, 8, 151552, False, 128, 131072,
     {"attention_bias": True}),
    ("phonelm-0.5b", "phonelm", "mllmTeam/PhoneLM-0.5B", 1024, 4864, 24, 16, 16, 49152, True, 64, 2048),
    ("phonelm-1.5b", "phonelm", "mllmTeam/PhoneLM-1.5B", 2560, 6816, 19, 16, 16, 49152, True, 160, 2048),
    ("stablelm-2-1.6b", "stablelm", "stabilityai/stablelm-2-1_6b",
     2048, 5632, 24, 32, 32, 100352, False, 64, 4096),
    ("bitnet-2b4t", "bitnet", "microsoft/bitnet-b1.58-2B-4T",
     2560, 6912, 30, 20, 5, 128256, True, 128, 4096),
    ("apertus-8b", "apertus", "swiss-ai/Apertus-8B-2509", 4096, 21504, 32, 32, 8, 131072, False, 128, 65536),
    ("internlm3-8b", "internlm3", "internlm/internlm3-8b-instruct",
     4096, 10240, 48, 32, 2, 128512, False, 128, 32768),
    ("lfm3-1.7b", "lfm3", "LiquidAI/LFM3-1.7B", 2048, 7680, 24, 16, 4, 128000, True, 128, 128000,
     {"sliding_window": 256}),
    ("pythia-160m", "gpt_neox", "EleutherAI/pythia-160m", 768, 3072, 12, 12, 12, 50304, False, 64, 2048),
    ("pythia-410m", "gpt_neox", "EleutherAI/pythia-410m", 1024, 4096, 24, 16, 16, 50304, False, 64, 2048),
    ("pythia-1.4b", "gpt_neox", "EleutherAI/pythia-1.4b", 2048, 8192, 24, 16, 16, 50304, False, 128, 2048),
    ("pythia-2.8b", "gpt_neox", "EleutherAI/pythia-2.8b", 2560, 10240, 32, 32, 32, 50304, False, 80, 2048),
    ("gpt-oss-20b", "gpt_oss", "openai/gpt-oss-20b",
     2880, 2880, 24, 64, 8, 201088, False, 64, 131072, 32, 4, _windows(128, 24, 2)),
    ("deepseek-v2-lite", "deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite",
     2048, 10944, 27, 16, 16, 102400, False, 192, 163840, DEEPSEEK_V2),
    ("glm-4.7-flash", "glm4_moe_lite", "zai-org/GLM-4.7-Flash",
     2048, 10240, 47, 20, 20, 154880, False, 256, 202752, {"qk_nope_head_dim": 192}),
    ("muse-glimmer-30b", "muse_glimmer_text", "meta-models/Muse-Glimmer-30B",
     6656, 19968, 52, 32, 2, 202048, False, 128, 131072, {"sliding_window": 2048}),
    ("phi-mini-moe", "phimoe", "microsoft/Phi-mini-MoE-instruct",
     4096, 960, 32, 32, 8, 32064, False, 128, 4096, 16, 2),
)
"""Models of families that people run on phones and laptops; a row may end in further fields of its type."""
# fmt: on

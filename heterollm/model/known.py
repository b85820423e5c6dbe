"""Sizes of well-known models by name, from their published ``config.json`` files.

A file of an unsupported family is approximated by the closest Llama, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.data import BUNDLED_NAME
from heterollm.kernels.ops import Precision, Scales
from heterollm.model.checkpoint import checkpoint_folder
from heterollm.model.closest import closest_config
from heterollm.model.config import ModelConfig
from heterollm.model.hub_names import is_hub_name
from heterollm.model.json_fields import read_json_object
from heterollm.model.shape import ModelShape, model_shape, read_config
from heterollm.model.stored import foreign_format, gguf_folder, is_gguf

ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "gemma": "GemmaForCausalLM",
        "phi": "PhiForCausalLM",
        "internlm2": "InternLM2ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "phimoe": "PhimoeForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
    }
)


class ModelSize(NamedTuple):
    """The numbers of a configuration that determine its time, named as in :class:`ModelConfig`.

    In a mixture ``intermediate`` is the width of an expert, each token chooses ``chosen`` of ``experts``, and
    ``shared`` is the width of the network that computes every token.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_dim: int
    positions: int
    experts: int = 0
    chosen: int = 0
    shared: int = 0

    def config(self, kind: str = "llama") -> ModelConfig:
        """Return the configuration of a model of this size with ``model_type`` ``kind``."""
        mixture = {
            **({"moe_intermediate_size": self.intermediate} if kind in ("qwen2_moe", "qwen3_moe") else {}),
            **({"shared_expert_intermediate_size": self.shared} if self.shared else {}),
            ("num_local_experts" if kind in ("mixtral", "phimoe") else "num_experts"): self.experts,
            "num_experts_per_tok": self.chosen,
            "norm_topk_prob": kind == "qwen3_moe",
        }
        return ModelConfig.from_dict(
            {
                "model_type": kind,
                "architectures": [ARCHITECTURES[kind]],
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocabulary,
                "max_position_embeddings": self.positions,
                "tie_word_embeddings": self.tied,
                "rms_norm_eps": 1e-5,
                "hidden_act": {"gemma": "gelu_pytorch_tanh", "phi": "gelu_new"}.get(kind, "silu"),
                # The windows are as long as the context, and no answer is generated.
                "sliding_window": None,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **(mixture if self.experts else {}),
                **({"attention_bias": True, "lm_head_bias": True} if kind == "phimoe" else {}),
                **({"partial_rotary_factor": 0.4} if kind == "phi" else {}),
                # All sizes have values as wide as queries, in heads of 128.
                **(
                    {"linear_num_value_heads": self.heads * self.head_dim // 128}
                    if kind == "qwen3_5_text"
                    else {}
                ),
            }
        )

    def shape(
        self,
        name: str,
        precision: Precision = "w4a16",
        *,
        group_size: int = 32,
        float_bits: Literal[16, 32] = 16,
    ) -> ModelShape:
        """Return the shape of a Llama of this size; see :func:`heterollm.model.shape.model_shape`."""
        return model_shape(
            self.config(), name, precision=precision, group_size=group_size, float_bits=float_bits
        )


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that the program knows by name.

    Args:
        kind: The ``model_type``.
        size: The numbers.
        source: The repository on https://huggingface.co that publishes them.
    """

    kind: str
    size: ModelSize
    source: str

    @property
    def config(self) -> ModelConfig:
        """The configuration."""
        return self.size.config(self.kind)


# Name, model_type, repository, and the numbers of ModelSize: hidden, intermediate, layers, heads, kv_heads,
# vocabulary, tied, head_dim, positions; of a mixture the experts of a layer and of a token as well, and
# the width of the shared network.
# fmt: off
_ROWS = (
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
    ("qwen3.5-0.8b", "qwen3_5_text", "Qwen/Qwen3.5-0.8B", 1024, 3584, 24, 8, 2, 248320, True, 256, 262144),
    ("qwen3.5-2b", "qwen3_5_text", "Qwen/Qwen3.5-2B", 2048, 6144, 24, 8, 2, 248320, True, 256, 262144),
    ("qwen3.5-4b", "qwen3_5_text", "Qwen/Qwen3.5-4B", 2560, 9216, 32, 16, 4, 248320, True, 256, 262144),
    ("qwen3.5-9b", "qwen3_5_text", "Qwen/Qwen3.5-9B", 4096, 12288, 32, 16, 4, 248320, False, 256, 262144),
    ("qwen3.5-27b", "qwen3_5_text", "Qwen/Qwen3.5-27B", 5120, 17408, 64, 24, 4, 248320, False, 256, 262144),
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
# fmt: on

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {
        name: KnownModel(kind, ModelSize._make((*numbers, 0, 0, 0)[: len(ModelSize._fields)]), source)
        for name, kind, source, *numbers in _ROWS
    }
)
"""Models by name."""

DEFAULT_MODELS: Final = (
    ("TinyLlama-1.1B", "tinyllama-1.1b"),
    ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
    ("Llama-3.2-3B", "llama-3.2-3b"),
)
"""Models to measure by default, smallest first: narrow and wide layers, few and many rows in the head, and
inputs of 896 that the larger blocks do not divide evenly into tiles."""


def default_shapes(
    precision: Precision = "w4a16",
    *,
    group_size: int = 32,
    float_bits: Literal[16, 32] = 16,
    scales: Scales = "free",
) -> tuple[ModelShape, ...]:
    """Return the shapes of :data:`DEFAULT_MODELS`; the arguments are those of :func:`model_shape`."""
    return tuple(
        model_shape(
            KNOWN_MODELS[key].config,
            name,
            precision=precision,
            group_size=group_size,
            float_bits=float_bits,
            scales=scales,
        )
        for name, key in DEFAULT_MODELS
    )


class FoundModel(NamedTuple):
    """A model's name, configuration and approximation, which is empty without one."""

    name: str
    config: ModelConfig
    note: str


def find_model(name_or_path: str | Path, *, closest: bool = True) -> FoundModel:
    """Return the configuration of a known model, a folder, a ``config.json``, the bundled or a hub's model.

    Args:
        name_or_path: A name in :data:`KNOWN_MODELS`, in any case; a folder with a ``config.json``; such a
            file; a GGUF file; the name of the bundled model; or a hub name with its owner, of which only the
            configuration is fetched.
        closest: Whether the closest Llama may approximate a model of an unsupported family, for uses in
            which only shapes count.

    Raises:
        CheckpointError: There is no such model, or the file is not sound.
        UnsupportedModelError: The family is not supported, and no Llama approximates it.
    """
    known = KNOWN_MODELS.get(str(name_or_path).lower())
    if known is not None:
        return FoundModel(str(name_or_path).lower(), known.config, "")
    try:
        path = Path(name_or_path).expanduser()
        if is_gguf(path):
            path = gguf_folder(path)
        text = str(name_or_path)
        by_name = not path.exists() and (text == BUNDLED_NAME or ("/" in text and is_hub_name(text)))
        if by_name:
            path = checkpoint_folder(name_or_path, weights=False)
        if path.exists() and not (path / "config.json").is_file() and (other := foreign_format(path)):
            raise other
        if path.is_dir():
            name = text if by_name else path.resolve().name
            file = path / "config.json"
        elif path.is_file():
            name, file = path.resolve().parent.name or path.stem, path
        else:
            raise CheckpointError(
                f"There is no folder {str(name_or_path)!r:.200}.",
                fix=f"Name the folder that holds config.json, or a known model: {', '.join(KNOWN_MODELS)}.",
            )
        try:
            config = read_config(path) if path.is_dir() else ModelConfig.from_dict(read_json_object(file))
        except UnsupportedModelError:
            if not closest:
                raise
            return FoundModel(name, *closest_config(read_json_object(file)))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"Cannot read {str(name_or_path)!r:.200}: {error}.") from error
    return FoundModel(name, config, "")

"""Shapes of well-known models by name, for a device that needs no weights.

The numbers are those of the published ``config.json`` files, whose addresses stand beside them. A family that
the engine cannot run is here as the Llama-shaped layer that comes closest; what is approximated is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import Precision
from heterollm.model.checkpoint import checkpoint_folder, is_hub_name, other_format
from heterollm.model.config import ModelConfig
from heterollm.model.families import unsupported
from heterollm.model.json_fields import read_json_object
from heterollm.model.shape import ModelShape, model_shape, read_config

__all__ = ["KNOWN_MODELS", "KnownModel", "Size", "default_shapes", "find_model"]

ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
    }
)


class Size(NamedTuple):
    """The numbers of a configuration that its time depends on.

    Attributes:
        hidden: Width of the residual stream.
        intermediate: Width of the feed-forward network.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads.
        vocabulary: Rows of the head.
        tied: Whether the head is the embedding.
        head_dim: Size of a head.
        positions: Longest context.
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

    def config(self, kind: str = "llama") -> ModelConfig:
        """Return the configuration of a model of this size.

        Args:
            kind: Its ``model_type``.
        """
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
                "hidden_act": "silu",
                # Windows as long as the context change nothing, and what ends an answer is not asked here.
                "sliding_window": None,
                "bos_token_id": 1,
                "eos_token_id": 2,
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
    """A model that is known by name.

    Args:
        kind: Its ``model_type``, or that of the family it is taken for.
        size: Its numbers.
        source: Where they were published: the repository on https://huggingface.co whose config.json it is.
        note: What is approximated; empty where nothing is.
    """

    kind: str
    size: Size
    source: str
    note: str = ""

    @property
    def config(self) -> ModelConfig:
        """The configuration."""
        return self.size.config(self.kind)


def _qwen(kind: str, repository: str, size: Size) -> KnownModel:
    return KnownModel(kind, size, f"Qwen/{repository}")


GEMMA_NOTE: Final = (
    "Taken for a Llama of the same sizes: GELU and the scaled embedding, which cost nothing beside the "
    "linear layers, are left out."
)
PHI_2_NOTE: Final = (
    "Its layer has no gate and computes attention and feed-forward side by side: taken for a Llama whose "
    "gated network has about as many weights (6784 wide for 10240 without a gate, 0.6 % fewer), one after "
    "the other."
)
INTERNLM_NOTE: Final = "Taken for a Llama of the same sizes, which it is but for the names of its tensors."

KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {
        "llama-3-8b": KnownModel(
            "llama",
            Size(4096, 14336, 32, 32, 8, 128256, False, 128, 8192),
            "meta-llama/Meta-Llama-3-8B",
        ),
        "llama-2-7b": KnownModel(
            "llama", Size(4096, 11008, 32, 32, 32, 32000, False, 128, 4096), "meta-llama/Llama-2-7b-hf"
        ),
        "tinyllama-1.1b": KnownModel(
            "llama", Size(2048, 5632, 22, 32, 4, 32000, False, 64, 2048), "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
        ),
        "llama-3.2-3b": KnownModel(
            "llama", Size(3072, 8192, 28, 24, 8, 128256, True, 128, 131072), "meta-llama/Llama-3.2-3B"
        ),
        "llama-3.2-1b": KnownModel(
            "llama", Size(2048, 8192, 16, 32, 8, 128256, True, 64, 131072), "meta-llama/Llama-3.2-1B"
        ),
        "internlm2-1.8b": KnownModel(
            "llama",
            Size(2048, 8192, 24, 16, 8, 92544, False, 128, 32768),
            "internlm/internlm2-1_8b",
            INTERNLM_NOTE,
        ),
        "mistral-7b": KnownModel(
            "mistral", Size(4096, 14336, 32, 32, 8, 32000, False, 128, 32768), "mistralai/Mistral-7B-v0.1"
        ),
        "gemma-2b": KnownModel(
            "llama", Size(2048, 16384, 18, 8, 1, 256000, True, 256, 8192), "google/gemma-2b", GEMMA_NOTE
        ),
        "phi-2": KnownModel(
            "llama", Size(2560, 6784, 32, 32, 32, 51200, False, 80, 2048), "microsoft/phi-2", PHI_2_NOTE
        ),
        "phi-3-mini": KnownModel(
            "phi3", Size(3072, 8192, 32, 32, 32, 32064, False, 96, 4096), "microsoft/Phi-3-mini-4k-instruct"
        ),
        "qwen1.5-0.5b": _qwen("qwen2", "Qwen1.5-0.5B", Size(1024, 2816, 24, 16, 16, 151936, True, 64, 32768)),
        "qwen1.5-1.8b": _qwen(
            "qwen2", "Qwen1.5-1.8B", Size(2048, 5504, 24, 16, 16, 151936, False, 128, 32768)
        ),
        "qwen1.5-4b": _qwen("qwen2", "Qwen1.5-4B", Size(2560, 6912, 40, 20, 20, 151936, False, 128, 32768)),
        "qwen1.5-7b": _qwen("qwen2", "Qwen1.5-7B", Size(4096, 11008, 32, 32, 32, 151936, False, 128, 32768)),
        "qwen1.5-14b": _qwen(
            "qwen2", "Qwen1.5-14B", Size(5120, 13696, 40, 40, 40, 152064, False, 128, 32768)
        ),
        "qwen1.5-32b": _qwen("qwen2", "Qwen1.5-32B", Size(5120, 27392, 64, 40, 8, 152064, False, 128, 32768)),
        "qwen1.5-72b": _qwen(
            "qwen2", "Qwen1.5-72B", Size(8192, 24576, 80, 64, 64, 152064, False, 128, 32768)
        ),
        "qwen1.5-110b": _qwen(
            "qwen2", "Qwen1.5-110B", Size(8192, 49152, 80, 64, 8, 152064, False, 128, 32768)
        ),
        "qwen2-0.5b": _qwen("qwen2", "Qwen2-0.5B", Size(896, 4864, 24, 14, 2, 151936, True, 64, 131072)),
        "qwen2-1.5b": _qwen("qwen2", "Qwen2-1.5B", Size(1536, 8960, 28, 12, 2, 151936, True, 128, 131072)),
        "qwen2-7b": _qwen("qwen2", "Qwen2-7B", Size(3584, 18944, 28, 28, 4, 152064, False, 128, 131072)),
        "qwen2-72b": _qwen("qwen2", "Qwen2-72B", Size(8192, 29568, 80, 64, 8, 152064, False, 128, 131072)),
        "qwen2.5-0.5b": _qwen("qwen2", "Qwen2.5-0.5B", Size(896, 4864, 24, 14, 2, 151936, True, 64, 32768)),
        "qwen2.5-1.5b": _qwen(
            "qwen2", "Qwen2.5-1.5B", Size(1536, 8960, 28, 12, 2, 151936, True, 128, 131072)
        ),
        "qwen2.5-3b": _qwen("qwen2", "Qwen2.5-3B", Size(2048, 11008, 36, 16, 2, 151936, True, 128, 32768)),
        "qwen2.5-7b": _qwen("qwen2", "Qwen2.5-7B", Size(3584, 18944, 28, 28, 4, 152064, False, 128, 131072)),
        "qwen2.5-14b": _qwen(
            "qwen2", "Qwen2.5-14B", Size(5120, 13824, 48, 40, 8, 152064, False, 128, 131072)
        ),
        "qwen2.5-32b": _qwen(
            "qwen2", "Qwen2.5-32B", Size(5120, 27648, 64, 40, 8, 152064, False, 128, 131072)
        ),
        "qwen2.5-72b": _qwen(
            "qwen2", "Qwen2.5-72B", Size(8192, 29568, 80, 64, 8, 152064, False, 128, 131072)
        ),
        "qwen3-0.6b": _qwen("qwen3", "Qwen3-0.6B", Size(1024, 3072, 28, 16, 8, 151936, True, 128, 40960)),
        "qwen3-1.7b": _qwen("qwen3", "Qwen3-1.7B", Size(2048, 6144, 28, 16, 8, 151936, True, 128, 40960)),
        "qwen3-4b": _qwen("qwen3", "Qwen3-4B", Size(2560, 9728, 36, 32, 8, 151936, True, 128, 40960)),
        "qwen3-8b": _qwen("qwen3", "Qwen3-8B", Size(4096, 12288, 36, 32, 8, 151936, False, 128, 40960)),
        "qwen3-14b": _qwen("qwen3", "Qwen3-14B", Size(5120, 17408, 40, 40, 8, 151936, False, 128, 40960)),
        "qwen3-32b": _qwen("qwen3", "Qwen3-32B", Size(5120, 25600, 64, 64, 8, 151936, False, 128, 40960)),
    }
)
"""Models by name; mixtures of experts are left out."""

DEFAULT_MODELS: Final = (
    ("TinyLlama-1.1B", "tinyllama-1.1b"),
    ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
    ("Llama-3.2-3B", "llama-3.2-3b"),
)
"""Measured where no model is named, smallest claims on a device first: narrow and wide layers, few and many
rows in the head, inputs of 896 that the larger blocks do not divide evenly into tiles."""


def default_shapes(
    precision: Precision = "w4a16", *, group_size: int = 32, float_bits: Literal[16, 32] = 16
) -> tuple[ModelShape, ...]:
    """Return the shapes of :data:`DEFAULT_MODELS`; the arguments are those of :func:`model_shape`."""
    return tuple(
        model_shape(
            KNOWN_MODELS[key].config, name, precision=precision, group_size=group_size, float_bits=float_bits
        )
        for name, key in DEFAULT_MODELS
    )


KEPT: Final = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "sliding_window",
)
"""What the closest Llama takes from a configuration of another family."""

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
COMPRESSED_KEYS: Final = ("kv_lora_rank", "q_lora_rank")
"""Fields of layers that no Llama is close to."""

UNGATED: Final = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
"""Model types whose feed-forward network has two linear layers."""

WIDTH_STEP: Final = 128


class FoundModel(NamedTuple):
    """A model's configuration.

    Attributes:
        name: What to call it.
        config: The configuration.
        note: What is approximated.
    """

    name: str
    config: ModelConfig
    note: str


def find_model(name_or_path: str | Path, *, closest: bool = True) -> FoundModel:
    """Return the configuration of a known model, of a folder, of a hub name, or of a ``config.json``.

    Args:
        name_or_path: One of :data:`KNOWN_MODELS`, in any case; a folder with a ``config.json``; such a file;
            or a hub name with its owner, of which only the configuration is fetched.
        closest: Whether a file of a family that the engine cannot run is taken for the closest Llama, as it
            is where nothing but shapes counts.

    Raises:
        CheckpointError: It is none of these, or the file is not sound.
        UnsupportedModelError: The model is of no supported kind, and no Llama is close to it.
    """
    known = KNOWN_MODELS.get(str(name_or_path).lower())
    if known is not None:
        return FoundModel(str(name_or_path).lower(), known.config, known.note)
    try:
        path = Path(name_or_path).expanduser()
        on_hub = not path.exists() and "/" in str(name_or_path) and is_hub_name(name_or_path)
        if on_hub:
            path = checkpoint_folder(name_or_path, weights=False)
        if path.exists() and not (path / "config.json").is_file() and (other := other_format(path)):
            raise other
        if path.is_dir():
            name = str(name_or_path) if on_hub else path.resolve().name
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
            closest_config, note = _closest(read_json_object(file))
            return FoundModel(name, closest_config, note)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"Cannot read {str(name_or_path)!r:.200}: {error}.") from error
    return FoundModel(name, config, "")


def _closest(values: Mapping[str, Any]) -> tuple[ModelConfig, str]:
    """Return the Llama that comes closest to a model of another family, and what is approximated.

    Raises:
        CheckpointError: A size is missing or is none.
        UnsupportedModelError: No Llama is close.
    """
    kind = values.get("model_type")
    for what, names in (
        ("A mixture of experts", EXPERTS),
        ("Attention with compressed keys", COMPRESSED_KEYS),
    ):
        if (name := next((name for name in names if values.get(name)), None)) is not None:
            raise unsupported(f"{what} ({name}) in model type {kind!r:.80}")
    kept = {name: values[name] for name in KEPT if values.get(name) is not None}
    note = f"Model type {kind!r:.80} is taken for a Llama of the same sizes; all else of it is left out."
    width = kept.get("intermediate_size")
    if kind in UNGATED and type(width) is int:
        # A gated network of two thirds of the width has as many weights.
        kept["intermediate_size"] = max(WIDTH_STEP, width * 2 // 3 // WIDTH_STEP * WIDTH_STEP)
        note += f" Its network has no gate: a gated one, {kept['intermediate_size']} wide, stands for it."
    family = "mistral" if "sliding_window" in kept else "llama"
    config = ModelConfig.from_dict({"model_type": family, "architectures": [ARCHITECTURES[family]], **kept})
    return config, note

"""The metadata of a GGUF file as ``config.json`` and ``generation_config.json``.

What llama.cpp reads and assumes is in :data:`heterollm.model.fields.GGUF_FIELDS`, with its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec import structs

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import WeightFormat
from heterollm.model.fields import GGUF_FIELDS
from heterollm.model.stored.gguf_blocks import BlockType, block_type
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.model.stored.gguf_names import GROUPS, LAYER_TENSOR, LONE_EXPERT
from heterollm.model.stored.gguf_rope import rope_scaling


class Architecture(NamedTuple):
    """A value of ``general.architecture``.

    Args:
        model_type: That of ``config.json``.
        class_name: The class in transformers.
        permuted: Whether the rows of q and k stand in the order of rotated pairs.
        norm_offset: What the converter added to the weights of norms.
        optional_biases: Fields of ``config.json`` for biases, each with a tensor of files that have them.
    """

    model_type: str
    class_name: str
    permuted: bool = False
    norm_offset: float = 0.0
    optional_biases: tuple[tuple[str, str], ...] = ()


LARGEST_BLOCK: Final = 128
"""Most inputs that share a scale in a canonical tensor."""

ATTENTION_BIAS: Final = ("attention_bias", "blk.0.attn_q.bias")
BIASES: Final = (ATTENTION_BIAS, ("mlp_bias", "blk.0.ffn_down.bias"))
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture("llama", "LlamaForCausalLM", permuted=True, optional_biases=BIASES),
        "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True, optional_biases=BIASES),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", optional_biases=(ATTENTION_BIAS,)),
        "phi3": Architecture("phi3", "Phi3ForCausalLM"),
        "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", norm_offset=1.0),
        "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0),
    }
)
MIXTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture("mixtral", "MixtralForCausalLM", permuted=True),
        "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", optional_biases=(ATTENTION_BIAS,)),
        "olmoe": Architecture("olmoe", "OlmoeForCausalLM"),
    }
)
"""The architectures of files with experts."""
GEMMA: Final = ("gemma2", "gemma3")

GEMMA2_WINDOW: Final = 4096
GEMMA2_SOFT_CAPS: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
ROPE_BASE: Final = 10000.0
MOST_LAYERS: Final = 10_000
"""Limit of a list over layers; the check of ``config.json`` refuses more."""
LARGEST_GEMMA_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest Gemmas, whose attention llama.cpp scales by the share of a head in the width."""

SAMPLING: Final = {
    "temp": ("temperature", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
    "penalty_repeat": ("repetition_penalty", 1.0),
}
"""Fields of ``generation_config.json`` by those of ``general.sampling``, with llama.cpp's defaults."""


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file.

    Raises:
        UnsupportedModelError: It is not supported.
    """
    stated = file.metadata.get("general.architecture")
    experts = isinstance(stated, str) and bool(file.own("expert_count"))
    known = MIXTURES if experts else ARCHITECTURES
    found = known.get(stated) if isinstance(stated, str) else None
    if found is None:
        said = " with experts" if experts else ""
        raise UnsupportedModelError(
            f"{file.path}: GGUF files of architecture {stated!r:.40}{said} are not supported.",
            fix=f"Supported{said} are {', '.join(known)}. Or take the Hugging Face checkpoint.",
        )
    return found


def check_metadata(file: GgufFile) -> tuple[str, ...]:
    """Refuse a file with metadata that would be computed wrongly; return notes about ignored fields.

    Raises:
        UnsupportedModelError: The architecture is not supported, or the table refuses a field.
    """
    kind = {name: file.metadata[name] for name in ("general.type",) if name in file.metadata}
    GGUF_FIELDS.check(kind, file.path.name)  # before the architecture, which other kinds of files lack
    architecture_of(file)
    stated = str(file.metadata["general.architecture"])
    spaces = (stated, "general", "split", "tokenizer")
    harmless = _repeated(file)
    values = {
        name: value
        for name, value in file.metadata.items()
        if name not in harmless
        and (name.partition(".")[0] in spaces or GGUF_FIELDS.find(name, stated) is not None)
    }
    notes = GGUF_FIELDS.check(values, file.path.name, stated)
    known = {f"general.sampling.{name}" for name in SAMPLING}
    other = sorted(name for name in values if name.startswith("general.sampling.") and name not in known)
    if other:
        notes += (f"{file.path.name} recommends {', '.join(other)}, which heterollm does not have.",)
    return notes


def _repeated(file: GgufFile) -> set[str]:
    """Return the names of fields with the value that layers have without them."""
    heads = file.own("attention.head_count")
    width = file.own("embedding_length")
    head_dim = width // heads if type(width) is type(heads) is int and heads else None
    defaults = {
        "attention.key_length_swa": file.own("attention.key_length", head_dim),
        "attention.value_length_swa": file.own("attention.value_length", head_dim),
        "rope.dimension_count_swa": file.own("rope.dimension_count", head_dim),
        "rope.freq_base_swa": file.own("rope.freq_base", ROPE_BASE),
        "embedding_length_out": width,
    }
    stated = str(file.metadata["general.architecture"])
    found = {
        f"{stated}.{name}"
        for name, value in defaults.items()
        if value is not None and file.own(name) == value
    }
    window, context = file.own("attention.sliding_window"), file.own("context_length")
    if type(window) is type(context) is int and window >= context:
        found.add(f"{stated}.attention.sliding_window")
    return found


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of ``config.json``, with the number formats that hold the file's weights.

    Raises:
        CheckpointError: The metadata lacks a number, or one is not possible.
        UnsupportedModelError: The file has features that would be computed wrongly.
    """
    architecture = architecture_of(file)
    stated = str(file.metadata["general.architecture"])
    hidden, heads = file.count("embedding_length"), file.count("attention.head_count")
    head_dim = file.count("attention.key_length", default=hidden // heads)
    if file.count("attention.value_length", default=hidden // heads) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: values of another width (attention.value_length) than keys are not supported."
        )
    rotated = file.count("rope.dimension_count", default=head_dim)
    if rotated > head_dim:
        raise CheckpointError(f"{file.path}: RoPE rotates {rotated} elements of a head's {head_dim}.")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_size": hidden,
        "intermediate_size": file.count("feed_forward_length", "expert_feed_forward_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", "attention.head_count"),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.own("rope.freq_base", ROPE_BASE),
        "tie_word_embeddings": not {"output.weight", "token_embd.weight"} <= file.entries.keys(),
        "sliding_window": None,
        **rope_scaling(file),
        **{field: tensor in file.entries for field, tensor in architecture.optional_biases},
    }
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if stated in GEMMA or stated == "phi3":
        window = GEMMA2_WINDOW if stated == "gemma2" else None
        config["sliding_window"] = file.own("attention.sliding_window", window) or None
    if stated in GEMMA:
        config |= _gemma(file, stated, head_dim)
    if file.own("expert_count"):
        config |= _mixture(file, architecture)
    formats = _formats(file)
    return {**config, **({"quantization_config": formats} if formats else {})}


def gguf_generation(file: GgufFile) -> dict[str, Any]:
    """Return the sampling that the file recommends, as ``generation_config.json``; empty if there is none."""
    if not any(f"general.sampling.{own}" in file.metadata for own in SAMPLING):
        return {}
    found = {
        name: file.metadata.get(f"general.sampling.{own}", default)
        for own, (name, default) in SAMPLING.items()
    }
    return found | {"do_sample": found["temperature"] != 0}


def _gemma(file: GgufFile, stated: str, head_dim: int) -> dict[str, Any]:
    """Return the fields of a Gemma: scale of scores, soft caps, and layers with a window."""
    hidden, heads = file.count("embedding_length"), file.count("attention.head_count")
    largest = file.count("block_count") == LARGEST_GEMMA_LAYERS[stated]
    found: dict[str, Any] = {"query_pre_attn_scalar": hidden // heads if largest else head_dim}
    if stated == "gemma2":
        found |= {name: file.own(name, cap) or None for name, cap in GEMMA2_SOFT_CAPS.items()}
    else:
        found["final_logit_softcapping"] = file.own("final_logit_softcapping") or None
        found["rope_local_base_freq"] = file.own("rope.freq_base_swa", ROPE_BASE)
    pattern = file.own("attention.sliding_window_pattern")
    if stated == "gemma3" and not file.own("attention.sliding_window"):
        pattern = None  # all layers see all positions
    if pattern is not None and not isinstance(pattern, list):
        period = file.count("attention.sliding_window_pattern")
        pattern = [at % period != period - 1 for at in range(min(file.count("block_count"), MOST_LAYERS))]
    if pattern is not None:
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    return found


def _mixture(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of a mixture, whose router llama.cpp scores by softmax."""
    count = "num_local_experts" if architecture.model_type == "mixtral" else "num_experts"
    used = file.count("expert_used_count")
    found: dict[str, Any] = {count: file.count("expert_count"), "num_experts_per_tok": used}
    if architecture.model_type == "qwen3_moe":
        whole = file.own("feed_forward_length")
        width = whole // used if type(whole) is int else None
        found |= {
            "moe_intermediate_size": file.count("expert_feed_forward_length", default=width),
            "norm_topk_prob": True,
            "use_sliding_window": False,
        }
    return found


def _vocabulary(file: GgufFile) -> int:
    entry = file.entries.get("token_embd.weight", file.entries.get("output.weight"))
    if entry is None or len(entry.shape) != 2:
        raise CheckpointError(f"{file.path} has no token embedding.", fix="Download it again.")
    return entry.shape[0]


def _formats(file: GgufFile) -> dict[str, Any] | None:
    """Return the number formats of the layers' groups and of the head; None if no layer is quantised."""
    groups: dict[str, list[BlockType]] = {group: [] for group in dict.fromkeys(GROUPS.values())}
    heads = []
    for name, entry in file.entries.items():
        match = LAYER_TENSOR.fullmatch(name)
        if match and match[2] in GROUPS and match[3] == "weight":
            groups[GROUPS[match[2]]].append(block_type(entry.kind))
        elif LONE_EXPERT.fullmatch(name):
            groups["experts"].append(block_type(entry.kind))
        elif name in ("token_embd.weight", "output.weight"):
            heads.append(block_type(entry.kind))
    if all(kind.dtype is not None for kinds in groups.values() for kind in kinds):
        return None
    formats = {group: smallest_format(kinds) for group, kinds in groups.items()}
    formats["head"] = structs.replace(smallest_format(heads), bits=8)
    stated = {
        group: {"bits": weight.bits, "block": weight.block, "minimum": weight.minimum}
        for group, weight in formats.items()
    }
    return {"quant_method": "gguf", "head": stated.pop("head"), "layers": stated}


def smallest_format(kinds: Sequence[BlockType]) -> WeightFormat:
    """Return the smallest canonical format that holds all blocks of some types, and floats in 8 bits."""
    four = all(0 < kind.bits <= 4 for kind in kinds)
    block = min((kind.scale_block for kind in kinds if kind.dtype is None), default=32)
    minimum = any(kind.minimum for kind in kinds)
    return WeightFormat(4 if four else 8, min(block, LARGEST_BLOCK), symmetric=not minimum, minimum=minimum)

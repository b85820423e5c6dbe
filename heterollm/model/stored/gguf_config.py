"""The metadata of a GGUF file as ``config.json`` and ``generation_config.json``.

What llama.cpp reads and assumes is in :data:`heterollm.model.fields.GGUF_FIELDS`, with its source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from msgspec import structs

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import WeightFormat
from heterollm.model.fields import GGUF_FIELDS
from heterollm.model.stored.gguf_architecture import Architecture, key_heads
from heterollm.model.stored.gguf_architectures import ARCHITECTURES, MIXTURES
from heterollm.model.stored.gguf_blocks import BlockType, block_type
from heterollm.model.stored.gguf_delta import DECAY
from heterollm.model.stored.gguf_family_fields import ROPE_BASE
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.model.stored.gguf_names import GROUPS, LATENT_GROUPS, LONE_EXPERT, SPACE_GROUPS
from heterollm.model.stored.gguf_rope import rope_scaling

LARGEST_BLOCK: Final = 128
"""Most inputs that share a scale in a canonical tensor."""

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
    key_dim = file.own("attention.key_length_swa", file.own("attention.key_length", head_dim))
    whole = file.own("rope.dimension_count", head_dim) == file.own("attention.key_length", head_dim)
    defaults = {
        "attention.key_length_swa": file.own("attention.key_length", head_dim),
        "attention.value_length_swa": key_dim,
        "rope.dimension_count_swa": key_dim if whole else file.own("rope.dimension_count"),
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
    hidden, heads = file.count("embedding_length"), file.count("attention.head_count")
    head_dim = file.count("attention.key_length", default=hidden // heads)
    widths_differ = file.count("attention.value_length", default=hidden // heads) != head_dim
    if widths_differ and not architecture.is_latent:
        raise UnsupportedModelError(
            f"{file.path}: values of another width (attention.value_length) than keys are not supported."
        )
    rotated = file.count("rope.dimension_count", default=head_dim)
    if rotated > head_dim:
        raise CheckpointError(f"{file.path}: RoPE rotates {rotated} elements of a head's {head_dim}.")
    epsilon, own_epsilon = architecture.epsilon
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_size": hidden,
        "intermediate_size": file.count(
            "feed_forward_length", "expert_feed_forward_length", lists=architecture.lists
        ),
        "num_hidden_layers": file.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads(file, architecture),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": file.count("context_length"),
        epsilon: file.number(own_epsilon),
        "rope_theta": file.own("rope.freq_base", ROPE_BASE),
        "partial_rotary_factor": rotated_part(rotated, head_dim),
        "tie_word_embeddings": not {"output.weight", "token_embd.weight"} <= file.entries.keys(),
        "sliding_window": None,
        **rope_scaling(file),
        **{field: bool({*tensors} & file.entries.keys()) for field, tensors in architecture.biases},
    }
    if file.own("expert_count"):
        config[architecture.experts_field] = file.count("expert_count")
        config["num_experts_per_tok"] = file.count("expert_used_count")
    config |= architecture.fields(file, config)
    formats = _formats(file, architecture)
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


def rotated_part(rotated: int, head_dim: int) -> float:
    """Return the part of a head that rotates, whose product with ``head_dim`` is not below the number."""
    part = rotated / head_dim
    return part if head_dim * part >= rotated else math.nextafter(part, 1.0)


def _vocabulary(file: GgufFile) -> int:
    entry = file.entries.get("token_embd.weight", file.entries.get("output.weight"))
    if entry is None or len(entry.shape) != 2:
        raise CheckpointError(f"{file.path} has no token embedding.", fix="Download it again.")
    return entry.shape[0]


def _formats(file: GgufFile, architecture: Architecture) -> dict[str, Any] | None:
    """Return the number formats of the layers' groups and of the head; None if no layer is quantised."""
    names = {**GROUPS, **(SPACE_GROUPS if architecture.has_spaces else {})}
    names |= LATENT_GROUPS if architecture.is_latent else {}
    groups: dict[str, list[BlockType]] = {group: [] for group in dict.fromkeys(names.values())}
    for own, layer, below in file.layer_tensors():
        module, kind = below.removesuffix(".weight"), block_type(file.entries[own].kind)
        if module == "attn_qkv" and f"blk.{layer}.{DECAY}" in file.entries:
            groups["delta_in"].append(kind)
        elif module in names and module != below:
            groups[names[module]].append(kind)
        elif LONE_EXPERT.fullmatch(own):
            groups["experts"].append(kind)
    tables = ("token_embd.weight", "output.weight")
    heads = [block_type(file.entries[own].kind) for own in tables if own in file.entries]
    if all(kind.dtype is not None for kinds in groups.values() for kind in kinds):
        return None
    formats = {group: smallest_format(kinds) for group, kinds in groups.items() if kinds}
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

"""The text part of checkpoints with vision: its configuration, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from heterollm.model.families import FAMILIES, unsupported
from heterollm.model.fields import AXES


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model type whose text part is a model of a supported family.

    Args:
        architecture: The class in transformers.
        families: The family for each model type of the text part.
    """

    architecture: str
    families: Mapping[str, str]


WRAPPERS: Final[Mapping[str, Wrapper]] = MappingProxyType(
    {
        "gemma3": Wrapper("Gemma3ForConditionalGeneration", {"gemma3_text": "gemma3_text"}),
        "gemma3n": Wrapper("Gemma3nForConditionalGeneration", {"gemma3n_text": "gemma3n_text"}),
        "gemma4": Wrapper("Gemma4ForConditionalGeneration", {"gemma4_text": "gemma4_text"}),
        "gemma4_unified": Wrapper(
            "Gemma4UnifiedForConditionalGeneration", {"gemma4_unified_text": "gemma4_unified_text"}
        ),
        "llama4": Wrapper("Llama4ForConditionalGeneration", {"llama4_text": "llama4_text"}),
        "mistral3": Wrapper(
            "Mistral3ForConditionalGeneration", {"mistral": "mistral", "ministral3": "ministral3"}
        ),
        "muse_glimmer": Wrapper(
            "MuseGlimmerForConditionalGeneration", {"muse_glimmer_text": "muse_glimmer_text"}
        ),
        "qwen3_5_moe": Wrapper(
            "Qwen3_5MoeForConditionalGeneration", {"qwen3_5_moe_text": "qwen3_5_moe_text"}
        ),
        "qwen3_5": Wrapper("Qwen3_5ForConditionalGeneration", {"qwen3_5_text": "qwen3_5_text"}),
        "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", {"qwen3_vl_text": "qwen3"}),
    }
)
"""Model types with vision, by the value of ``model_type``."""

OUTER_FIELDS: Final = (
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"),
    *("dtype", "torch_dtype"),
)
"""Fields that count where the wrapper states them, else where its text part does."""

PREFIXES: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
"""Beginnings of names of tensors of the text part, old spelling and new, and those of a model of text."""


def is_wrapped(values: Mapping[str, Any]) -> bool:
    """Return whether the content of a ``config.json`` has a text part beside others."""
    return isinstance(values.get("model_type"), str) and values["model_type"] in WRAPPERS


def family_name(values: Mapping[str, Any]) -> str:
    """Return the family of the content of a ``config.json``, or of its text part; "" if that is of none."""
    if not is_wrapped(values):
        return str(values.get("model_type"))
    part = values.get("text_config")
    kind = part.get("model_type") if isinstance(part, Mapping) else None
    return WRAPPERS[values["model_type"]].families.get(str(kind), "")


def text_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a ``config.json``, or of its text part if it has others.

    Raises:
        UnsupportedModelError: The text part is no model of a supported family.
    """
    if not is_wrapped(values):
        return values
    wrapper, part = WRAPPERS[values["model_type"]], values.get("text_config")
    if not isinstance(part, Mapping):
        raise unsupported(f"Model type {values['model_type']!r} without text_config")
    family = family_name(values)
    if family not in FAMILIES:
        raise unsupported(f"Text of model type {part.get('model_type')!r} in {values['model_type']!r}")
    architectures = values.get("architectures")
    if architectures and architectures != [wrapper.architecture]:
        raise unsupported(f"Architecture {architectures!r}")
    found = {name: value for name, value in part.items() if name != "architectures"}
    found |= {name: values[name] for name in OUTER_FIELDS if values.get(name) is not None}
    # For text the positions of all axes are equal.
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(section := found.get(name), Mapping):
            found[name] = {key: value for key, value in section.items() if key not in AXES}
    return {**found, "model_type": family}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of the text part's tensors as in a model of text, by those of the file."""
    found = {}
    for name in names:
        for prefix, own in PREFIXES:
            if name.startswith(prefix):
                found[name] = f"{own}{name.removeprefix(prefix)}"
                break
    return found

"""The repositories that the names of known models stand for where weights are needed.

A name of a family stands for the version that answers instructions, as in Ollama's library; the sizes of
:mod:`heterollm.model.known_sizes` are those of its base model, which has the same shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.model.known_sizes import DEVICE_ROWS, ROWS

TRAINED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
        "llama-2-7b": "meta-llama/Llama-2-7b-chat-hf",
        "internlm2-1.8b": "internlm/internlm2-chat-1_8b",
        "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.1",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924-Instruct",
    }
)
"""Repositories of versions that answer instructions, whose names follow no rule."""

ENDINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Qwen/Qwen1.5-": "-Chat",
        "Qwen/Qwen2-": "-Instruct",
        "Qwen/Qwen2.5-": "-Instruct",
        "google/gemma-": "-it",
        "meta-llama/Llama-3.": "-Instruct",
        "HuggingFaceTB/SmolLM2-": "-Instruct",
    }
)
"""Endings of such versions by the beginning of a base model's repository."""

KNOWN_REPOSITORIES: Final[Mapping[str, str]] = MappingProxyType(
    {name: source for name, _, source, *_ in (*ROWS, *DEVICE_ROWS)}
)
"""Repositories of the published sizes by the name of a model."""


def known_repository(name: str) -> str | None:
    """Return the repository of a known model, of the version that answers instructions if there is one.

    Args:
        name: The name, in any case; other names have None.
    """
    name = name.lower()
    base = KNOWN_REPOSITORIES.get(name)
    if base is None or name in TRAINED:
        return TRAINED.get(name)
    ending = next((ending for begin, ending in ENDINGS.items() if base.startswith(begin)), "")
    return base.removesuffix("-pt") + ending

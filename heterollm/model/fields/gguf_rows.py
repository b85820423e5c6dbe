"""Rows of the table of GGUF metadata, and the places in llama.cpp that define them.

In https://github.com/ggml-org/llama.cpp ``src/llama-arch.cpp`` has the names, ``src/llama-model.cpp`` and
``src/models`` read them for each architecture, ``src/llama-context.cpp`` scales RoPE, ``src/llama-vocab.cpp``
reads the tokenizer; ``gguf-py/gguf/constants.py`` has names that the converter alone writes.
"""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.table import Effect, Field

MODEL: Final = "llama-model.cpp: load_hparams"
ARCHITECTURE: Final = "models/*.cpp: load_arch_hparams"
CONTEXT: Final = "llama-context.cpp: llama_context"
VOCABULARY: Final = "llama-vocab.cpp: load"
NAMES: Final = "llama-arch.cpp: LLM_KV_NAMES"
PACKAGE: Final = "gguf/constants.py: Keys"

OFF: Final = (0, 0.0, False)
ONE: Final = (*OFF, 1, 1.0)
"""Values that change nothing in fields of numbers and flags."""


def rows(
    effect: Effect,
    meaning: str,
    source: str,
    *names: str,
    neutral: tuple[object, ...] = (),
    only: frozenset[str] = frozenset(),
) -> tuple[Field, ...]:
    """Return a row for each name; one that begins with a dot belongs to the architecture."""
    full = (f"{{arch}}{name}" if name.startswith(".") else name for name in names)
    return tuple(Field(name, effect, meaning, source, neutral, only) for name in full)


def read(name: str, meaning: str, source: str = MODEL, only: frozenset[str] = frozenset()) -> Field:
    """Return the row of a field that is read."""
    return rows("read", meaning, source, name, only=only)[0]


# Architectures that have some fields in common.
GEMMA4: Final = frozenset({"gemma4"})
GEMMA3N: Final = frozenset({"gemma3n"})
LAYERED: Final = GEMMA4 | GEMMA3N
GEMMAS: Final = LAYERED | {"gemma2", "gemma3"}
PATTERNED: Final = GEMMAS | {"gpt-oss", "mellum", "cohere2", "olmo2", "exaone4", "exaone-moe"}
WINDOWED: Final = PATTERNED | {"phi3", "phimoe"}
CENTERED: Final = frozenset({"gptneox", "phi2", "stablelm", "starcoder2", "nemotron", "cohere2"})
GRANITES: Final = frozenset({"granite", "granitemoe"})
GRANITE_HYBRID: Final = frozenset({"granitehybrid"})
SCALED: Final = GRANITES | GRANITE_HYBRID | {"minicpm"}
QWEN35: Final = frozenset({"qwen35", "qwen35moe"})
DELTA: Final = QWEN35 | {"qwen3next"}
NEMOTRON_H: Final = frozenset({"nemotron_h", "nemotron_h_moe"})
SPACES: Final = GRANITE_HYBRID | NEMOTRON_H | {"falcon-h1"}
VISION: Final = QWEN35 | {"qwen3vl"}
LATENT_SOURCE: Final = "models/deepseek2.cpp"
MISTRAL3: Final = frozenset({"mistral3"})

"""The table of docs/families.md: the 40 families, what of them runs, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from heterollm.model.families import FAMILIES
from heterollm.model.missing import MISSING
from heterollm.model.stored.gguf_architectures import ARCHITECTURES, MIXTURES
from tables.table import Lines, rows_of, table


class ListedFamily(NamedTuple):
    """A family of models that people run on phones and laptops.

    Args:
        models: The models, with their sizes on such devices.
        types: Values of ``model_type`` with spaces between them, of the text part if there are others.
        lacks: What is missing for models that share a type with others.
    """

    models: str
    types: str
    lacks: str = ""

    @property
    def names(self) -> list[str]:
        """The model types."""
        return self.types.split()


LISTED: Final = (
    ListedFamily("Qwen3.5, 3.6 and 3.8 (0.8 to 27B)", "qwen3_5_text"),
    ListedFamily("Gemma 4 E2B, E4B, 12B", "gemma4_text gemma4_unified_text"),
    ListedFamily("Qwen3 (0.6 to 14B)", "qwen3"),
    ListedFamily("Llama 3.1 and 3.2 (1, 3, 8B)", "llama"),
    ListedFamily("LFM2, LFM2.5 (230M to 2.6B)", "lfm2"),
    ListedFamily("Gemma 3 (270M to 12B)", "gemma3_text"),
    ListedFamily("Phi-3.5-mini, Phi-4-mini", "phi3"),
    ListedFamily("Qwen3.5 and 3.6 35B-A3B", "qwen3_5_moe_text"),
    ListedFamily("gpt-oss-20b", "gpt_oss"),
    ListedFamily("Qwen2.5 (0.5 to 14B)", "qwen2"),
    ListedFamily("Qwen3-30B-A3B", "qwen3_moe"),
    ListedFamily("Gemma 4 26B-A4B", "gemma4_text"),
    ListedFamily("Ministral 3 (3, 8, 14B)", "ministral3"),
    ListedFamily("LFM3-1.7B", "lfm3"),
    ListedFamily("LFM2-8B-A1B, 24B-A2B", "lfm2_moe"),
    ListedFamily("SmolLM2, SmolLM3", "llama smollm3"),
    ListedFamily("Gemma 3n E2B, E4B", "gemma3n_text"),
    ListedFamily("Granite 4 micro, 350M, 1B", "granite granitemoehybrid"),
    ListedFamily("Nemotron 3 Nano 30B-A3B, Nano 4B and 9B", "nemotron_h"),
    ListedFamily("MiniCPM5 (1, 2B)", "llama"),
    ListedFamily("GLM-4.7-Flash (30B-A3B)", "glm4_moe_lite"),
    ListedFamily("DeepSeek-R1 distills (1.5, 7, 8B)", "qwen2 llama qwen3"),
    ListedFamily("Mistral 7B, Nemo, Small", "mistral"),
    ListedFamily("Bonsai (1.7 to 27B)", "qwen3 qwen3_5_text"),
    ListedFamily("Granite 4-H (350M to 7B-A1B)", "granitemoehybrid"),
    ListedFamily("EXAONE 4 1.2B", "exaone4"),
    ListedFamily("Falcon 3; Falcon-H1", "llama falcon_h1"),
    ListedFamily("Qwen3-Next-80B", "qwen3_next"),
    ListedFamily("MiniCPM 4 (0.5, 8B)", "minicpm"),
    ListedFamily("Hunyuan dense (0.5 to 7B)", "hunyuan_v1_dense"),
    ListedFamily("ERNIE 4.5 0.3B, 21B-A3B", "ernie4_5 ernie4_5_moe"),
    ListedFamily("OLMo 2 and 3; OLMoE", "olmo2 olmo3 olmoe"),
    ListedFamily("Muse Glimmer 30B", "muse_glimmer_text"),
    ListedFamily("GLM-4 9B; GLM-4.5-Air", "glm4 glm4_moe"),
    ListedFamily("Llama 4 Scout", "llama4_text"),
    ListedFamily("Phi-3.5-MoE, Phi-mini-MoE", "phimoe"),
    ListedFamily("Gemma 1, Gemma 2", "gemma gemma2"),
    ListedFamily("InternLM2 and 2.5 (1.8, 7B); InternLM3", "internlm2 internlm3"),
    ListedFamily("Phi-2; PhoneLM; StableLM 2", "phi phonelm stablelm"),
    ListedFamily("BitNet 2B4T; Apertus 8B; DeepSeek-V2-Lite", "bitnet apertus deepseek_v2"),
)
LEVELS: Final = ("gpu", "layer")
FILES: Final = {
    "mistral": "llama",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "qwen3_next": "qwen3next",
    "gemma4_unified_text": "gemma4",
    **dict.fromkeys(("deepseek_v2", "glm4_moe_lite"), "deepseek2"),
    "internlm2": "internlm2",
    "internlm3": "llama",
    "minicpm": "minicpm",
}
"""Architectures of GGUF files that are read as another type, or as several."""


def architecture(kind: str) -> str:
    """Return the architecture of a type's GGUF files, or "" if none is read."""
    every = [*ARCHITECTURES.items(), *MIXTURES.items()]
    return FILES.get(kind) or next((stated for stated, one in every if one.model_type == kind), "")


def reasons(family: ListedFamily) -> Iterator[str]:
    """Yield what a family needs that is missing, each with the types that need it."""
    found: dict[str, list[str]] = {}
    for kind in family.names:
        if kind not in FAMILIES:
            found.setdefault(MISSING[kind], []).append(f"`{kind}`")
    for what, kinds in found.items():
        yield f"{what} ({', '.join(kinds)})"
    if family.lacks:
        yield family.lacks


@table(
    "families",
    "families",
    "# | families | model types | runs | dB at `gpu` | dB at `layer` | GGUF | missing",
    "rlllrrll",
    tight=True,
)
def families() -> Lines:
    """Yield a line for each family."""
    measured = {(row["family"], row["level"]): row["sqnr_db"] for row in rows_of("families")}
    for number, family in enumerate(LISTED, 1):
        own = [kind for kind in family.names if kind in FAMILIES]
        lacking = "; ".join(reasons(family))
        runs = "no" if not own else "in part" if lacking else "yes"
        found = [[measured.get((kind, level)) for kind in own] for level in LEVELS]
        cells = (
            f"{min(filter(None, values)):.0f}" if values and None not in values else "" for values in found
        )
        files = ", ".join(f"`{one}`" for one in dict.fromkeys(map(architecture, own)) if one)
        types = ", ".join(f"`{kind}`" for kind in family.names)
        yield str(number), family.models, types, runs, *cells, files, lacking

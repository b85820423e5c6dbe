"""Well-known model types that are not supported, by what they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TYPES: Final[Mapping[str, str]] = {
    "layers of a gated delta net": "olmo_hybrid kimi_linear",
    "layers of Mamba-2": "bamba mamba2 zamba2",
    "layers of Mamba": "mamba jamba falcon_mamba",
    "latent attention (MLA) of another form": "minicpm3 youtu longcat_flash",
    "bases of rotary embedding by layer, and experts": "granitemoe_swa",
    "routers by sigmoid": "afmoe bailing_moe",
    "numbers of experts by layer": "hunyuan_v1_moe",
    "heads and norms by fields of its own": "falcon",
    "linears whose weights are stored transposed": "gpt2",
    "norms of heads that subtract the mean": "cohere persimmon",
}
MISSING: Final[Mapping[str, str]] = {name: what for what, names in _TYPES.items() for name in names.split()}
"""The first feature that a model type needs and heterollm lacks."""

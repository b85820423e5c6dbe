"""The RoPE scaling of a GGUF file, as llama.cpp computes it from metadata and tensors."""

from __future__ import annotations

import math
from typing import Any, Final

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.stored.gguf_file import GgufFile

FREQUENCIES: Final = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS: Final = (FREQUENCIES, LONG, SHORT)
"""Divisors of the frequencies: those that Llama 3 computes, and longrope's."""
DIVIDED: Final = ("llama", "arcee", "granite", "granitemoe", "minicpm", "mistral3", "exaone", "exaone4")
LONGROPES: Final = ("llama", "phi3", "phimoe", "granite", "granitemoe", "minicpm")
"""Architectures that read either kind."""
PART: Final = ("gemma4",)
"""Architectures whose divisors stop elements of a head from turning in layers without a window."""
STOPPED: Final = 1e29
"""A divisor from which on nothing turns."""
KINDS: Final = ("none", "linear", "yarn", "longrope")


def rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Return ``rope_scaling``, and the original context of models that state it; empty without scaling.

    Raises:
        CheckpointError: A tensor of factors has another type or length than RoPE needs.
        UnsupportedModelError: The combination of type, tensors and factors is none that llama.cpp computes.
    """
    kind = file.own("rope.scaling.type", "linear")
    stated = str(file.metadata["general.architecture"])
    if kind not in KINDS:
        raise UnsupportedModelError(
            f"{file.path}: RoPE scaling {kind!r:.40} of a GGUF file is not supported.",
            fix=f"llama.cpp knows {', '.join(KINDS)}.",
        )
    older = file.number("rope.scale_linear", 0.0)
    factor = file.number("rope.scaling.factor", older) or 1.0
    if kind == "none":
        factor = 1.0
    attention = file.number("rope.scaling.attn_factor", 1.0)
    original = file.own("rope.scaling.original_context_length")
    tensors = [name for name in ROPE_TENSORS if name in file.entries]
    if tensors and stated not in PART:
        short, long = _divisors(file, stated, kind, tensors)
        scaling = {
            "rope_type": "longrope",
            "short_factor": [factor * one for one in short],
            "long_factor": [factor * one for one in long],
            "factor": 1.0,
            "attention_factor": attention,
        }
        context = file.own("context_length")
        return {
            "rope_scaling": scaling,
            "original_max_position_embeddings": context if FREQUENCIES in tensors else original or context,
        }
    if kind == "yarn" and stated not in ("phi3", "phimoe"):
        return {"rope_scaling": _yarn(file, factor, attention, original)}
    if kind in ("yarn", "longrope") or attention != 1:
        raise UnsupportedModelError(
            f"{file.path}: RoPE scaling {kind!r} with rope.scaling.attn_factor = {attention:g}, without "
            f"{LONG} and {SHORT}, is not supported in architecture {stated}."
        )
    return {} if factor == 1 else {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def turning_part(file: GgufFile) -> float:
    """Return the part of a head's elements that turn, the others of which the divisors stop.

    Raises:
        CheckpointError: The tensor has another type than F32.
        UnsupportedModelError: It divides a frequency.
    """
    divisors = _floats(file, FREQUENCIES) if FREQUENCIES in file.entries else [1.0]
    turning = sum(one < STOPPED for one in divisors)
    if divisors[:turning] != [1.0] * turning:
        raise UnsupportedModelError(f"{file.path}: {FREQUENCIES} that divide frequencies are not supported.")
    return turning / len(divisors)


def _yarn(file: GgufFile, factor: float, attention: float, original: int | None) -> dict[str, Any]:
    whole = _magnitude(factor, file.number("rope.scaling.yarn_log_multiplier", 0.0))
    own = file.number("rope.scaling.yarn_attn_factor", _magnitude(factor, 1.0) / whole)
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": own * attention,
        "original_max_position_embeddings": original,
    }
    betas = {beta: file.own(f"rope.scaling.yarn_{beta}") for beta in ("beta_fast", "beta_slow")}
    return scaling | {beta: value for beta, value in betas.items() if value is not None}


def _magnitude(factor: float, multiplier: float) -> float:
    """Return YaRN's factor of attention; 1 without a multiplier of the factor's logarithm."""
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0


def _divisors(
    file: GgufFile, architecture: str, kind: str, tensors: list[str]
) -> tuple[list[float], list[float]]:
    """Return the divisors of the frequencies up to the original context, and beyond it."""
    phi = architecture in ("phi3", "phimoe")  # whose files name no kind
    expected, readers = ([LONG, SHORT], LONGROPES) if phi or kind == "longrope" else ([FREQUENCIES], DIVIDED)
    if architecture not in readers or tensors != expected or kind == "yarn":
        raise UnsupportedModelError(
            f"{file.path}: {' and '.join(tensors)} with RoPE scaling {kind!r} are not supported in "
            f"architecture {architecture}."
        )
    found = [_floats(file, name) for name in expected]
    return found[-1], found[0]


def _floats(file: GgufFile, name: str) -> list[float]:
    if file.entries[name].kind != "F32":
        raise CheckpointError(f"{file.path}: tensor {name} has type {file.entries[name].kind}, not F32.")
    return [float(value) for value in file.bits(name).view("<f4").ravel()]

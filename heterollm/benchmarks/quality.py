"""Compares logits with a reference, so that no engine is fast by wrong results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.benchmarks.cases import Configuration
from heterollm.benchmarks.engine import Facts
from heterollm.benchmarks.rows import LogitsCheck
from heterollm.text import top_1_agreement

PROMPT_TOKENS: Final = 64
DECODED_TOKENS: Final = 8

EXACT_DB: Final = 90.0
HALF_CACHE_DB: Final = 50.0
HALF_DB: Final = 45.0
ROUNDED_DB: Final = 28.0
STATIC_DB: Final = 20.0
"""Gates for logits: float32, float32 with a KV cache of 16 bits, half, inputs rounded to int8 for each block,
and on one static grid. With 16 bits the bundled model has 74 dB or more, SmolLM2 72, a random one 53."""


def sqnr_db(reference: NDArray[Any], values: NDArray[Any]) -> float:
    """Return the signal to noise ratio against a reference, in decibels; 0 if some values are not finite."""
    exact = reference.astype(np.float64)
    noise = float(np.sum((values.astype(np.float64) - exact) ** 2))
    if not math.isfinite(noise):
        return 0.0
    return math.inf if noise == 0.0 else 10.0 * math.log10(float(np.sum(exact**2)) / noise)


def judge(
    logits: Mapping[Configuration, NDArray[Any]], facts: Mapping[Configuration, Facts]
) -> dict[Configuration, LogitsCheck]:
    """Compare the logits of configurations that compute with the same weights.

    The reference for each set of weights is an exact engine if there is one, else the first ``gpu`` without
    rounded inputs, else the first such level, else the first configuration.

    Args:
        logits: Logits ``[positions, vocab]`` of each.
        facts: Facts of each one's engine.
    """
    found: dict[Configuration, LogitsCheck] = {}
    for weights in dict.fromkeys(map(_weights, logits)):
        alike = [one for one in logits if _weights(one) == weights]
        reference = min(alike, key=lambda one: (_rank(one, facts[one]), alike.index(one)))
        exact = logits[reference]
        for one in alike:
            values = logits[one]
            ratio_db, gate_db = sqnr_db(exact, values), _gate_db(one, facts[one])
            found[one] = LogitsCheck(
                quality_reference=reference.label,
                logits_sqnr_db=ratio_db if math.isfinite(ratio_db) else None,
                quality_gate_db=gate_db,
                top_1_agreement=top_1_agreement(values, exact),
                quality_passed=ratio_db >= gate_db,
            )
    return found


def _weights(configuration: Configuration) -> tuple[str, int, str]:
    if configuration.precision == "fp16":
        return "fp16", 0, ""
    if configuration.precision == "w8a8":
        return "w8", configuration.group_size, ""
    return "w4", configuration.group_size, configuration.scales


def _rank(configuration: Configuration, facts: Facts) -> int:
    if facts.exact:
        return 0
    if configuration.engine != "self":
        return 4
    if configuration.precision == "w4a8":
        return 3
    return 1 if configuration.plan_level == "gpu" else 2


def _gate_db(configuration: Configuration, facts: Facts) -> float:
    if facts.gate_db is not None:
        return facts.gate_db
    if configuration.precision == "w4a8":
        return ROUNDED_DB
    if configuration.precision == "w8a8" and configuration.plan_level != "gpu":
        return STATIC_DB
    if facts.description.get("activation_dtype") == "float16":
        return HALF_DB
    return HALF_CACHE_DB if facts.description.get("kv_bits") == 16 else EXACT_DB

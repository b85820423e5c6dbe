"""The rotary position embedding: its configuration, and its tables of cosine and sine for each scaling.

Follows transformers' ``modeling_rope_utils.py``. Sources: yarn (https://arxiv.org/abs/2309.00071), longrope
(https://arxiv.org/abs/2402.13753), linear and dynamic NTK
(https://huggingface.co/docs/transformers/main/internal/rope_utils); llama3 is Meta's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, OptionError

Frequencies = NDArray[np.float32]

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]

ROPE_KINDS: Final[tuple[RopeKind, ...]] = get_args(RopeKind)
"""The supported RoPE scalings."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factors of queries by position: ``1 + beta * log(1 + (first + position) // original_max_positions)``.

    Args:
        beta: The growth for each e-fold of the original context.
        original_max_positions: Positions before the context was extended, whose queries keep their size.
        first: Number of the first position.
    """

    beta: float
    original_max_positions: int
    first: int = 0

    def factors(self, context: int) -> NDArray[np.float32]:
        """Return the factors of the first positions, ``[context]``."""
        spans = np.arange(self.first, self.first + context) // self.original_max_positions
        return (1 + self.beta * np.log1p(spans)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base and the scaling of a rotary position embedding; fields of other scalings keep their defaults.

    Args:
        kind: The scaling.
        base: ``rope_theta``.
        max_positions: The model's ``max_position_embeddings``.
        original_max_positions: Positions before the context was extended.
        factor: Factor of the extension; None derives it from the positions (yarn, longrope).
        attention_factor: Factor of cosine and sine; None derives it (yarn, longrope).
        beta_fast: Rotations over the original context above which yarn keeps a frequency.
        beta_slow: Rotations below which yarn interpolates a frequency fully.
        mscale: Numerator of yarn's attention factor.
        mscale_all_dim: Denominator of yarn's attention factor.
        truncate: Whether yarn rounds its range of dimensions to whole numbers.
        low_frequency_factor: llama3 divides frequencies with wavelengths above ``original / this``.
        high_frequency_factor: llama3 keeps frequencies with wavelengths below ``original / this``.
        short_factor: longrope: divisor of each frequency up to the original context.
        long_factor: longrope: divisor of each frequency beyond it.
        short_attention_factor: longrope: attention factor up to the original context, in place of the other.
        long_attention_factor: longrope: attention factor beyond it.
        turning: proportional: part of the pairs that rotate, those of the highest frequencies.
    """

    kind: RopeKind
    base: float
    max_positions: int
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_attention_factor: float | None = None
    long_attention_factor: float | None = None
    turning: float = 1.0


def rope_tables(
    rope: RopeConfig, rotary_dim: int, context: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosine and sine, each float32 ``[context, rotary_dim/2]``, with the attention factor in both.

    Frequencies and phases are rounded to float32 at the same places as in transformers, with which models are
    trained: at position 4000 exact phases differ by 1e-4. Their cosine and sine are computed in float64.

    ``context`` stands for the text length in scalings that depend on it: longrope uses its long factors for
    any context beyond the original one.

    Raises:
        OptionError: ``context`` is not positive, or beyond ``max_positions`` with dynamic scaling, which
            would change the frequencies of keys that are already cached.
        CheckpointError: The configuration's numbers, each of them legal, give infinite ones together.
    """
    if context < 1:
        raise OptionError(f"A context of {context} tokens is not possible.", fix="Use at least 1.")
    if rope.kind == "dynamic" and context > rope.max_positions:
        raise OptionError(
            f"A context of {context} tokens is beyond the model's {rope.max_positions}: dynamic RoPE scaling "
            "would change the keys that are already cached with every token.",
            fix=f"Use a context of at most {rope.max_positions}.",
        )
    try:
        frequencies, attention_factor = inverse_frequencies(rope, rotary_dim, context)
    except (ValueError, OverflowError) as error:  # math raises where NumPy returns infinity
        raise _not_finite(rope) from error
    with np.errstate(over="ignore", invalid="ignore"):
        phases = np.multiply.outer(np.arange(context, dtype=np.float32), frequencies).astype(np.float64)
        cos = (np.cos(phases) * attention_factor).astype(np.float32)
        sin = (np.sin(phases) * attention_factor).astype(np.float32)
    if not (np.isfinite(cos).all() and np.isfinite(sin).all()):
        raise _not_finite(rope)
    return cos, sin


def _not_finite(rope: RopeConfig) -> CheckpointError:
    return CheckpointError(
        f"The rotary embedding of config.json (type {rope.kind}, rope_theta {rope.base:g}) gives "
        "numbers that are not finite.",
        fix="Correct rope_theta or rope_parameters there, or download the checkpoint again.",
    )


# A wavelength beyond float32 is infinite: its pair does not rotate.
@np.errstate(over="ignore", divide="ignore", invalid="ignore")
def inverse_frequencies(rope: RopeConfig, rotary_dim: int, context: int) -> tuple[Frequencies, float]:
    """Return the radians per position of each pair, float32 ``[rotary_dim/2]``, and the attention factor."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    # The power in float64, rounded once: NumPy's own float32 power is up to 2 units off.
    wavelengths = (rope.base ** exponents.astype(np.float64)).astype(np.float32)
    return _SCALINGS[rope.kind](rope, wavelengths, context)


def _default(_rope: RopeConfig, wavelengths: Frequencies, _context: int) -> tuple[Frequencies, float]:
    return np.reciprocal(wavelengths), 1.0


def _linear(rope: RopeConfig, wavelengths: Frequencies, _context: int) -> tuple[Frequencies, float]:
    frequencies: Frequencies = np.reciprocal(wavelengths)
    frequencies /= np.float32(_factor(rope))
    return frequencies, 1.0


def _proportional(rope: RopeConfig, wavelengths: Frequencies, context: int) -> tuple[Frequencies, float]:
    frequencies, attention_factor = _linear(rope, wavelengths, context)
    frequencies[int(rope.turning * 2 * len(frequencies)) // 2 :] = 0
    return frequencies, attention_factor


def _yarn(rope: RopeConfig, wavelengths: Frequencies, _context: int) -> tuple[Frequencies, float]:
    factor, pairs = _factor(rope), len(wavelengths)
    low, high = (_rotation_dimension(rope, beta, 2 * pairs) for beta in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(pairs, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, 0, 1)
    interpolated = np.reciprocal(np.float32(factor) * wavelengths)
    frequencies = interpolated * (np.float32(1) - kept) + np.reciprocal(wavelengths) * kept
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return frequencies, _yarn_scale(factor, rope.mscale) / _yarn_scale(factor, rope.mscale_all_dim)
    return frequencies, _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rotation_dimension(rope: RopeConfig, rotations: float, head_dim: int) -> float:
    """Return the dimension that rotates ``rotations`` times over the original context."""
    turns = rope.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.base))


def _llama3(rope: RopeConfig, wavelengths: Frequencies, _context: int) -> tuple[Frequencies, float]:
    factor, original = np.float32(_factor(rope)), rope.original_max_positions
    low, high = np.float32(rope.low_frequency_factor), np.float32(rope.high_frequency_factor)
    frequencies = np.reciprocal(wavelengths)
    periods = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(original) / periods - low) / (high - low)
    scaled = (np.float32(1) - smooth) * frequencies / factor + smooth * frequencies
    longest, shortest = (np.float32(original / part) for part in (low, high))
    result = np.where(periods > longest, frequencies / factor, scaled)
    result = np.where(periods < shortest, frequencies, result)
    return result, 1.0


def _longrope(rope: RopeConfig, wavelengths: Frequencies, context: int) -> tuple[Frequencies, float]:
    divisors, own_factor = rope.short_factor, rope.short_attention_factor
    if context > rope.original_max_positions:
        divisors, own_factor = rope.long_factor, rope.long_attention_factor
    frequencies = np.reciprocal(np.array(divisors, np.float32) * wavelengths)
    if own_factor is not None:
        return frequencies, own_factor
    if rope.attention_factor is not None:
        return frequencies, rope.attention_factor
    factor = _factor(rope)
    if factor <= 1:
        return frequencies, 1.0
    return frequencies, math.sqrt(1 + math.log(factor) / math.log(rope.original_max_positions))


def _factor(rope: RopeConfig) -> float:
    if rope.kind == "proportional":
        return 1.0 if rope.factor is None else rope.factor
    return rope.max_positions / rope.original_max_positions if rope.factor is None else rope.factor


_SCALINGS: dict[RopeKind, Callable[[RopeConfig, Frequencies, int], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    # Dynamic scaling changes nothing up to the model's own context, which is the limit here.
    "dynamic": _default,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "proportional": _proportional,
}

"""The options of sampling, and the bounds in which every logit stays finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from heterollm.base import OptionError

RANGES: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "temperature": (0, 100),
        "top_p": (0, 1),
        "min_p": (0, 1),
        "repetition_penalty": (0.01, 100),
        "presence_penalty": (-2, 2),
        "frequency_penalty": (-2, 2),
    }
)
MOST_BIAS: Final = 100


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters; the default is greedy.

    Args:
        temperature: Divisor of the logits, up to 100; 0 chooses the likeliest token and ignores the filters.
        top_k: Keep this many of the likeliest tokens; 0 keeps all.
        top_p: Keep the fewest tokens that reach this probability together, in [0, 1], at least one.
        min_p: Drop tokens less likely than this fraction of the likeliest one, in [0, 1].
        repetition_penalty: Divides positive logits of earlier tokens, prompt included, and multiplies
            negative ones; in [0.01, 100], 1 for none.
        presence_penalty: Subtracted from the logits of the answer's earlier tokens, in [-2, 2].
        frequency_penalty: Subtracted as many times as the answer has the token, in [-2, 2].
        logit_bias: Added to the logits of tokens, by id, in [-100, 100].
        seed: Equal seeds give equal tokens; None for a random one.

    Raises:
        OptionError: A value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            _check(name, getattr(self, name), low, high)
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if not (name == "seed" and value is None) and (type(value) is not int or value < 0):
                raise OptionError(f"{name} is {value!r:.80}, but must be a whole number of at least 0.")
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias is {self.logit_bias!r:.80}, but must be an object of token ids.")
        for token, value in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise OptionError(f"logit_bias has the key {token!r:.80}, which is no token id.")
            _check(f"logit_bias of token {token}", value, -MOST_BIAS, MOST_BIAS)

    @property
    def is_penalized(self) -> bool:
        """Whether earlier tokens change the choice."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _check(name: str, value: object, low: float, high: float) -> None:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:
        raise OptionError(f"{name} is {value!r:.80}, but must be a number from {low:g} to {high:g}.")

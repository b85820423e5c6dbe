"""Times of a layer's other operators: a fixed cost plus a cost for what they read, compute and write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import numpy as np
from msgspec import structs

from heterollm.base import ProfileError
from heterollm.profiler.measure import Measurement
from heterollm.profiler.predict.json_values import mapping, numbers, positive, sequence, word
from heterollm.profiler.predict.monotone import nonnegative_fit
from heterollm.profiler.predict.time_model import KNOWN_FACTOR, UNKNOWN_FACTOR, Prediction
from heterollm.profiler.predict.validation import HIGH, LOW, percentile
from heterollm.profiler.records import LayerKey, Record

__all__ = ["LayerPredictor", "OperatorModel"]

SIZES: Final = ("tokens", "context", "hidden", "heads", "kv_heads", "head_dim")
TERMS: Final = 4


@dataclass(frozen=True, slots=True)
class OperatorModel:
    """The times of one operator.

    Args:
        costs_us: Of a pass, of a value of each row, of a query's value for each position, of a cached value.
        low: Smallest tokens, positions and row sizes measured.
        high: Largest ones.
        spread: Tenth and ninetieth percentile of measured over fitted time.
    """

    costs_us: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    spread: tuple[float, ...]

    @classmethod
    def fit(cls, keys: Sequence[LayerKey], times_us: Sequence[float]) -> OperatorModel:
        """Fit the costs; those that no measurement depends on are none."""
        terms = np.array([_terms(key) for key in keys], np.float64)
        used = terms.any(axis=0)
        costs = np.zeros(TERMS)
        costs[used] = nonnegative_fit(terms[:, used], np.array(times_us, np.float64))
        sizes = list(zip(*(_sizes(key) for key in keys), strict=True))
        low, high = tuple(map(min, sizes)), tuple(map(max, sizes))
        fitted = cls(tuple(map(float, costs)), low, high, (1.0, 1.0))
        ratios = [time_us / fitted.estimate_us(key) for key, time_us in zip(keys, times_us, strict=True)]
        return cls(fitted.costs_us, low, high, (percentile(ratios, LOW), percentile(ratios, HIGH)))

    def estimate_us(self, key: LayerKey) -> float:
        """Return the sum of the costs."""
        total = 0.0
        for cost, term in zip(self.costs_us, _terms(key), strict=True):
            total += cost * term
        return total

    def near(self, key: LayerKey) -> bool:
        """Whether sizes are within what was measured, or beyond by no more than the stated factor."""
        sizes = zip(_sizes(key), self.low, self.high, strict=True)
        return all(low / KNOWN_FACTOR <= size <= high * KNOWN_FACTOR for size, low, high in sizes)


@dataclass(frozen=True, slots=True)
class LayerPredictor:
    """The times of all operators of a layer but the linear ones.

    Args:
        operators: The fitted models by the operators' names.
        measured: What was measured.
    """

    operators: Mapping[str, OperatorModel]
    measured: Mapping[LayerKey, Prediction]

    @classmethod
    def fit(cls, records: Mapping[LayerKey, Record]) -> LayerPredictor:
        """Fit every operator; of kernels of several versions, those measured last count.

        Raises:
            ProfileError: There is no record with times.
        """
        timed = {key: record for key, record in records.items() if record.samples_us}
        by_operator: dict[str, list[LayerKey]] = defaultdict(list)
        newest: dict[str, str] = {}
        for key in sorted(timed, key=lambda key: (timed[key].taken_s, key)):
            newest[key.operator] = key.code
        for key in sorted(timed):
            if key.code == newest[key.operator]:
                by_operator[key.operator].append(key)
        if not by_operator:
            raise ProfileError("The profile has no operator's times.", fix="Run `heterollm profile`.")
        operators = {
            name: OperatorModel.fit(keys, [timed[key].median_us for key in keys])
            for name, keys in by_operator.items()
        }
        measured = {}
        for key, record in timed.items():
            low, high = Measurement(record.samples_us).quartiles_us
            measured[key] = Prediction(record.median_us, low, high, True, "measured")
        return cls(operators, measured)

    def predict(self, key: LayerKey) -> Prediction:
        """Return the measured time of an operator, or the predicted one.

        Raises:
            ProfileError: No size of the operator was measured.
        """
        if key in self.measured:
            return self.measured[key]
        model = self.operators.get(key.operator)
        if model is None:
            raise ProfileError(
                f"The profile has no measurement of {key.operator}, only of {', '.join(self.operators)}.",
                fix="Run `heterollm profile --update`.",
            )
        us, known = model.estimate_us(key), model.near(key)
        wider = 1.0 if known else UNKNOWN_FACTOR
        low, high = min(model.spread[0], 1.0) / wider, max(model.spread[1], 1.0) * wider
        return Prediction(us, us * low, us * high, known, "layer_linear")

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        operators = {
            name: {item: list(value) for item, value in asdict(model).items()}
            for name, model in self.operators.items()
        }
        measured = [
            {"key": structs.asdict(key), "times_us": [prediction.us, prediction.low_us, prediction.high_us]}
            for key, prediction in sorted(self.measured.items(), key=lambda item: item[0])
        ]
        return {"operators": operators, "measured": measured}

    @classmethod
    def from_dict(cls, data: object) -> LayerPredictor:
        """Return the predictor of a JSON form.

        Raises:
            ProfileError: It is not one.
        """
        named = mapping(data, {"operators", "measured"}, "layers")
        if not isinstance(named["operators"], dict) or not named["operators"]:
            raise ProfileError(f"layers has the operators {named['operators']!r:.80}.")
        operators = {name: _read_operator(entry) for name, entry in named["operators"].items()}
        measured = {}
        for entry in sequence(named["measured"], "measured"):
            item = mapping(entry, {"key", "times_us"}, "A measured operator")
            us, low_us, high_us = numbers(item["times_us"], "times_us", 3)
            measured[_read_key(item["key"])] = Prediction(us, low_us, high_us, True, "measured")
        return cls(operators, measured)


def _terms(key: LayerKey) -> tuple[float, ...]:
    """Return what the costs are multiplied with: decode reads the cache once, however many heads share it.

    A token attends to those before it, so that the first of a pass sees fewer positions than the last one.
    """
    seen = max(0.0, key.tokens * key.context - key.tokens * (key.tokens - 1) / 2)
    return (
        1.0,
        float(key.tokens * _row(key)),
        float(seen * key.heads * key.head_dim),
        float(key.context * key.kv_heads * key.head_dim),
    )


def _row(key: LayerKey) -> int:
    return max(key.hidden, (key.heads + 2 * key.kv_heads) * key.head_dim, 1)


def _sizes(key: LayerKey) -> tuple[float, ...]:
    return float(key.tokens), float(key.context), float(_row(key))


def _read_operator(data: object) -> OperatorModel:
    named = mapping(data, {item.name for item in fields(OperatorModel)}, "An operator")
    costs = numbers(named["costs_us"], "costs_us", TERMS, or_zero=True)
    low, high = (numbers(named[name], name, 3, or_zero=True) for name in ("low", "high"))
    spread = numbers(named["spread"], "spread", 2)
    positive(sum(costs), "The sum of the costs")
    return OperatorModel(tuple(costs), tuple(low), tuple(high), tuple(spread))


def _read_key(data: object) -> LayerKey:
    named = mapping(data, set(LayerKey.__struct_fields__), "An operator's key")
    sizes = [named[name] for name in SIZES]
    if not all(type(size) is int and 0 <= size < 2**53 for size in sizes):
        raise ProfileError(f"An operator's sizes are {sizes!r:.160}.")
    for name in ("operator", "code"):
        word(named[name], name)
    return LayerKey(**named)

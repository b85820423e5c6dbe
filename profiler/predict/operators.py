"""Times of a layer's other operators: a fixed cost plus costs of reading, computing and writing.

Operators of sparse attention have costs of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from heterollm.base import Amount, PositiveNumber, ProfileError
from heterollm.profiler.predict.curves import nonnegative_fit
from heterollm.profiler.predict.time_model import (
    Hull,
    Prediction,
    Sizes,
    measured_time,
    undisturbed,
    with_interval,
)
from heterollm.profiler.predict.validation import HIGH, LOW, percentile
from heterollm.profiler.records import LayerKey, Record, SparseKey

K = TypeVar("K", LayerKey, SparseKey)


class OperatorModel(Struct, frozen=True, forbid_unknown_fields=True):
    """The times of one operator.

    Args:
        costs_us: Costs of a pass, of a value of a row, of a query's value at a position, of a cached value.
            Those of sparse attention: of a launch, of a value of a row, of a value of a pair of query
            and key, and of a key head.
        hull: Tokens, positions and row sizes that were measured.
        spread: Tenth and ninetieth percentile of measured over fitted time.
    """

    costs_us: tuple[Amount, Amount, Amount, Amount]
    hull: Hull
    spread: tuple[PositiveNumber, PositiveNumber]

    @classmethod
    def fit(cls, records: Mapping[K, Record]) -> OperatorModel:
        """Fit the costs; those that no measurement depends on are zero."""
        times_us = [record.median_us for record in records.values()]
        terms = np.array([_terms(key) for key in records], np.float64)
        used = [bool(column.any()) for column in terms.T]
        found = iter(nonnegative_fit(terms[:, used], np.array(times_us, np.float64)))
        once, value, seen, cached = (next(found) if use else 0.0 for use in used)
        fitted = cls((once, value, seen, cached), Hull.of(map(_sizes, records)), (1.0, 1.0))
        ratios = [time_us / fitted.estimate_us(key) for key, time_us in zip(records, times_us, strict=True)]
        return replace(fitted, spread=(percentile(ratios, LOW), percentile(ratios, HIGH)))

    def estimate_us(self, key: LayerKey | SparseKey) -> float:
        """Return the sum of the costs."""
        total = 0.0
        for cost, term in zip(self.costs_us, _terms(key), strict=True):
            total += cost * term
        return total


@dataclass(frozen=True, slots=True)
class LayerPredictor(Generic[K]):
    """The times of all operators of a layer but the linear ones, or of those of sparse attention.

    Args:
        operators: The fitted models by the operators' names.
        measured: The measured times.
    """

    operators: Mapping[str, OperatorModel]
    measured: Mapping[K, Prediction]

    @classmethod
    def of(
        cls, records: Mapping[K, Record], fitted: Mapping[str, OperatorModel] | None = None
    ) -> LayerPredictor[K] | None:
        """Return the predictor of some records; None if none has times.

        Of several versions of a kernel, the one measured last counts. Disturbed measurements do not.

        Args:
            records: The measurements.
            fitted: The models, if they were fitted to these records before.
        """
        timed = {key: records[key] for key in sorted(records) if records[key].samples_us}
        newest = {key.operator: key.code for key in sorted(timed, key=lambda key: (timed[key].taken_s, key))}
        by_operator: dict[str, dict[K, Record]] = defaultdict(dict)
        for key, record in timed.items():
            if key.code == newest[key.operator]:
                by_operator[key.operator][key] = record
        operators = dict(fitted or {})
        for name, own in by_operator.items():
            sound = undisturbed(own)
            for key in own.keys() - sound.keys():
                del timed[key]
            if fitted is None:
                operators[name] = OperatorModel.fit(sound)
        measured = {key: measured_time(record) for key, record in timed.items()}
        return cls(operators, measured) if measured else None

    def predict(self, key: K) -> Prediction:
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
        known = model.hull.near(_sizes(key))
        return with_interval(model.estimate_us(key), model.spread, known=known, source="layer_linear")


def _terms(key: LayerKey | SparseKey) -> tuple[float, ...]:
    """Return the factors of the costs.

    Decode reads the cache once, however many heads share it. A token attends to the tokens before it, so that
    the first one of a pass sees fewer positions than the last one. Without heads the context counts channels,
    each with a row of weights.
    """
    if isinstance(key, SparseKey):
        return _sparse_terms(key)
    if not key.heads:
        weights = float(key.context * key.hidden)
        return 1.0, float(key.tokens * _row(key)), key.tokens * weights, weights
    seen = _seen(key.tokens, key.context)
    return (
        1.0,
        float(key.tokens * _row(key)),
        float(seen * key.heads * key.head_dim),
        float(key.context * key.kv_heads * key.head_dim),
    )


def _sparse_terms(key: SparseKey) -> tuple[float, ...]:
    rows, heads = key.heads * key.group * key.tokens, key.heads
    values = float(rows * key.head_dim)
    seen = heads * key.group * _seen(key.tokens, key.keys)
    match key.operator:
        case "score_codes":
            return 1.0, values + heads * key.keys * key.head_dim, 0.0, float(heads)
        case "selection":
            return 1.0, 0.0, seen, float(heads)
        case "sparse_attention":
            return 1.0, values, key.keep * seen * key.head_dim, float(heads)
        case "attention_graph":
            return 1.0, values + heads * key.keys * key.head_dim, values * key.keys, float(heads)
        case _:  # no mask spares an estimate anything
            return 1.0, 0.0, values * key.keys, float(heads)


def _seen(tokens: int, positions: int) -> float:
    """Return the pairs of a token and a position that it sees."""
    return max(0.0, tokens * positions - tokens * (tokens - 1) / 2)


def _row(key: LayerKey | SparseKey) -> int:
    if isinstance(key, SparseKey):
        return key.heads * key.group * key.head_dim
    return max(key.hidden, (key.heads + 2 * key.kv_heads) * key.head_dim, 1)


def _sizes(key: LayerKey | SparseKey) -> Sizes:
    positions = key.keys if isinstance(key, SparseKey) else key.context
    return float(key.tokens), float(positions), float(_row(key))

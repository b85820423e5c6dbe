"""Records of attention heads: magnitudes for integer scores, and how many keys hold how much attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from heterollm.base import Amount, Count, Number
from heterollm.calibration.int8_records import Share

MASSES: Final = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
"""Shares of a query's attention for which the records say how many keys hold them."""


class HeadCalibration(Struct, frozen=True, forbid_unknown_fields=True):
    """Magnitudes and attention of a layer's heads after RoPE.

    Args:
        layer: Decoder layer.
        queries: Largest magnitude of each query head.
        keys: Largest magnitude of each key head.
        scores: Largest magnitude of the products of queries and visible keys, unscaled, of each query head.
        mean_queries: Mean over windows of each window's largest magnitude.
        mean_keys: The same of the keys.
        mean_scores: The same of the products.
        needed: For each query head, the shares of the visible keys that hold each of :data:`MASSES`, the
            most attended ones first: means over blocks of queries, whose attention is summed.
        importance: Rise of the loss without each query head, in nats a token; those measured so far.
        layer_importance: Rise of the loss without the layer; None as long as it was not measured.
    """

    layer: Count
    queries: tuple[Amount, ...]
    keys: tuple[Amount, ...]
    scores: tuple[Amount, ...]
    mean_queries: tuple[Amount, ...]
    mean_keys: tuple[Amount, ...]
    mean_scores: tuple[Amount, ...]
    needed: tuple[tuple[Share, ...], ...]
    importance: tuple[Number, ...] = ()
    layer_importance: Number | None = None

    @property
    def ranked(self) -> bool:
        """Whether the importance of the layer and of all of its heads is known."""
        return self.layer_importance is not None and len(self.importance) == len(self.queries)


def head_mistakes(heads: Sequence[HeadCalibration]) -> Iterator[str]:
    """Yield mistakes in records beyond their types, each with the path of the field."""
    for place, one in enumerate(heads):
        where = f"heads[{place}]"
        if one.layer != place:
            yield f"{where}.layer: {one.layer}, not {place}"
        sizes = (len(heads[0].queries), len(heads[0].keys))
        queries, keys = sizes
        if not keys or queries % keys:
            yield f"{where}.keys: {queries} query heads cannot share {keys} key heads"
        for name, values, size in (
            ("queries", one.queries, queries),
            ("keys", one.keys, keys),
            ("scores", one.scores, queries),
            ("mean_queries", one.mean_queries, queries),
            ("mean_keys", one.mean_keys, keys),
            ("mean_scores", one.mean_scores, queries),
            ("needed", one.needed, queries),
        ):
            if len(values) != size:
                yield f"{where}.{name}: {len(values)} heads, not {size}"
        if len(one.importance) > queries:
            yield f"{where}.importance: {len(one.importance)} heads of {queries}"
        for shares in one.needed:
            if len(shares) != len(MASSES) or list(shares) != sorted(shares):
                yield f"{where}.needed: {shares} are not {len(MASSES)} shares that rise"

"""Times of sparse attention on a profiled device, for the solver to compare with dense attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, get_args

from heterollm.model import ModelShape
from heterollm.profiler.measure import FUSED_HEADS, NPU_OPERATORS, SPARSE_KEEPS, sparse_key
from heterollm.profiler.predict import Predictor
from heterollm.profiler.records import SparseOperator

GPU_OPERATORS: Final = frozenset(get_args(SparseOperator)) - set(NPU_OPERATORS)


@dataclass(frozen=True, slots=True)
class SparseTimes:
    """Times of a layer's sparse attention in one pass, in a busy queue and without syncs.

    Args:
        quantise_us: The GPU's time to write the codes of all heads.
        scores_us: The NPU's time of a launch by its number of key heads; empty if it has no such graphs.
        estimate_us: The GPU's time to estimate the scores of one key head in its place.
        select_us: The GPU's time to select keys for the query heads of one key head.
        attend_us: The GPU's time of attention of these query heads: a constant, and the time to attend to all
            positions beyond that.
    """

    quantise_us: float
    scores_us: Mapping[int, float]
    estimate_us: float
    select_us: float
    attend_us: tuple[float, float]

    def attention_us(self, keep: float) -> float:
        """Return the GPU's time of attention of the query heads of one key head.

        Args:
            keep: Mean share of the positions that these heads keep.
        """
        constant_us, whole_us = self.attend_us
        return constant_us + keep * whole_us


def sparse_times(predictor: Predictor, shape: ModelShape, tokens: int, keys: int) -> SparseTimes | None:
    """Return the times of a pass; None if the profile has no measurement of sparse attention.

    Args:
        predictor: The predictor of the profile.
        shape: The model.
        tokens: Tokens of the pass, padded to whole tiles.
        keys: Keys that are estimated, those of the pass included.
    """
    sparse = predictor.sparse
    if sparse is None or not sparse.operators.keys() >= GPU_OPERATORS:
        return None

    def time_us(operator: SparseOperator, heads: int = 1, keep: float = 0.0) -> float:
        return sparse.predict(sparse_key(shape, operator, tokens, keys, heads, keep)).us

    low, high = SPARSE_KEEPS
    low_us, high_us = (time_us("sparse_attention", keep=keep) for keep in (low, high))
    whole_us = max(0.0, high_us - low_us) / (high - low)
    fused = [heads for heads in FUSED_HEADS if heads <= shape.kv_heads and "scores" in sparse.operators]
    return SparseTimes(
        quantise_us=time_us("score_codes", shape.kv_heads),
        scores_us={heads: time_us("scores", heads) for heads in fused},
        estimate_us=time_us("score_estimate"),
        select_us=time_us("selection", keep=low),
        attend_us=(max(0.0, low_us - low * whole_us), whole_us),
    )


def attention_graph_us(predictor: Predictor, shape: ModelShape, tokens: int, keys: int) -> float | None:
    """Return the time of a layer's attention in an NPU graph; None if the profile has no measurement of any.

    Args:
        predictor: The predictor of the profile.
        shape: The model.
        tokens: Tokens of the graph.
        keys: Its keys.
    """
    sparse = predictor.sparse
    if sparse is None or "attention_graph" not in sparse.operators:
        return None
    return sparse.predict(sparse_key(shape, "attention_graph", tokens, keys, shape.kv_heads)).us

"""The operators of sparse attention that the profiler measures: their names, keys and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from heterollm.model import ModelShape
from heterollm.profiler.measure.linears import code_of
from heterollm.profiler.records import SparseKey, SparseOperator

NPU_OPERATORS: Final = ("scores", "attention_graph")
FUSED_HEADS: Final = (1, 2, 4)
"""Key heads that one graph estimates (shadowAttn, section 3.4)."""

SPARSE_KEEPS: Final = (0.2, 0.5)
"""Shares of positions that measured attention keeps: its time is linear in them."""

SIZES: Final = ((256, 1024), (1024, 1024), (256, 2048), (256, 4096), (1024, 4096))
QUICK_SIZES: Final = ((256, 1024), (256, 4096), (1024, 4096))
ESSENTIAL_SIZES: Final = QUICK_SIZES[:2]
"""Predictions need these; the others are much of the work, and make predictions of long passes better."""


@dataclass(frozen=True, slots=True)
class SparseOperatorCase:
    """One operator of a model at one size."""

    shape: ModelShape
    operator: SparseOperator
    tokens: int
    keys: int
    heads: int = 1
    keep: float = 0.0

    @property
    def key(self) -> SparseKey:
        """Key of the measurement."""
        return sparse_key(self.shape, self.operator, self.tokens, self.keys, self.heads, self.keep)


def sparse_key(
    shape: ModelShape, operator: SparseOperator, tokens: int, keys: int, heads: int = 1, keep: float = 0.0
) -> SparseKey:
    """Return the key of an operator in a model.

    Args:
        shape: The model.
        operator: Its name.
        tokens: Tokens of the pass.
        keys: Keys that are estimated, those of the pass included.
        heads: Key heads of the launch.
        keep: Share of the positions that is kept, for ``selection`` and ``sparse_attention``.
    """
    group = shape.heads // shape.kv_heads
    code = code_of("npu" if operator in NPU_OPERATORS else "gpu")
    return SparseKey(operator, tokens, keys, heads, group, shape.head_dim, keep, code)


def sparse_cases(shape: ModelShape, *, quick: bool) -> Iterator[SparseOperatorCase]:
    """Yield every operator of a model at the sizes to measure.

    Args:
        shape: The model.
        quick: Whether to yield as few sizes as predictions need.
    """
    for tokens, keys in sparse_sizes(quick=quick):
        yield SparseOperatorCase(shape, "score_codes", tokens, keys, shape.kv_heads)
        yield SparseOperatorCase(shape, "score_estimate", tokens, keys)
        for heads in FUSED_HEADS:
            if heads <= shape.kv_heads:
                yield SparseOperatorCase(shape, "scores", tokens, keys, heads)
        yield SparseOperatorCase(shape, "selection", tokens, keys, keep=SPARSE_KEEPS[0])
        for keep in SPARSE_KEEPS:
            yield SparseOperatorCase(shape, "sparse_attention", tokens, keys, keep=keep)


def sparse_sizes(*, quick: bool) -> tuple[tuple[int, int], ...]:
    """Return the measured tokens of a pass, and keys that the last of them sees."""
    return QUICK_SIZES if quick else SIZES

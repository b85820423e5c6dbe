"""Sparse attention with keys by estimated scores, emulated in torch inside a transformers model.

A block of 32 queries keeps the keys with the largest sums of softmaxed estimates, and always the first 4 and
the last 64. What its queries see of them is computed in float32. Estimates are exact scores, or 8-bit codes
with calibrated steps, as the runtime's graphs make them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache

from heterollm.calibration.head_records import HeadCalibration
from heterollm.kernels.formats.score_scales import ScoreScale, buckets, score_scales

BLOCK = 32
FIRST = 4
LAST = 64
ROWS = 256
"""Queries whose scores are in memory at once."""

LEAST, MOST = -128, 127


def scales_of(heads: Sequence[HeadCalibration], count: int) -> list[list[ScoreScale]]:
    """Return the steps of each layer and key head: of largest values, or of means if there are buckets."""
    found = []
    for one in heads:
        parts = (one.queries, one.keys, one.scores)
        if count > 1:
            parts = (one.mean_queries, one.mean_keys, one.mean_scores)
        queries, keys, scores = parts
        group = len(queries) // len(keys)
        members = [slice(place * group, (place + 1) * group) for place in range(len(keys))]
        pairs = zip(members, keys, strict=True)
        found.append([score_scales(queries[own], largest, scores[own]) for own, largest in pairs])
    return found


@dataclass
class Agreement:
    """Positions and attention that selections share with those of exact scores.

    Args:
        recall: By layer, the share of the exactly selected positions of each head; always kept ones do not
            count.
        mass: By layer, the share of dense attention that lies on the selected positions, of each head.
    """

    recall: dict[int, list[Tensor]] = field(default_factory=dict)
    mass: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass
class Sparse:
    """A way to select keys.

    Args:
        keep: Ratios ``[layers, heads]``.
        bucket_count: Buckets of the scales; 0 for exact scores.
        scales: Steps of each layer and key head; unused with exact scores.
        agreement: Collects what exact scores would have selected; None for nothing.
    """

    keep: Tensor
    bucket_count: int = 0
    scales: Sequence[Sequence[ScoreScale]] = ()
    agreement: Agreement | None = None


class Emulation:
    """A model whose attention is dense, or sparse.

    Args:
        folder: The checkpoint.

    Attributes:
        sparse: The way to select keys; None for dense attention.
        reader: Called with a layer, its queries ``[heads, m, d]`` and keys ``[kv_heads, m, d]``; or None.
        removed: Layer and head whose output is left out; None for none.
    """

    def __init__(self, folder: Path) -> None:
        AttentionInterface.register("emulated", self._attend)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="emulated"
        ).eval()
        self.sparse: Sparse | None = None
        self.reader: Callable[[int, Tensor, Tensor], None] | None = None
        self.removed: tuple[int, int] | None = None
        self._prefixes: dict[tuple[int, ...], DynamicCache] = {}

    @torch.no_grad()
    def logits(
        self, ids: Sequence[int], last: int, sparse: Sparse | None = None, *, dense: int = 0
    ) -> Tensor:
        """Return the logits of the last tokens of a text.

        Args:
            ids: The text.
            last: Number of tokens.
            sparse: The way to select keys; None for dense attention.
            dense: First tokens whose attention is dense; they are computed once for each text.
        """
        cache = self._prefix(tuple(ids[:dense])) if dense else None
        self.sparse = sparse
        given = torch.tensor([list(ids[dense:])])
        found = self.model(given, past_key_values=cache, use_cache=bool(dense), logits_to_keep=last)
        if cache is not None:
            cache.crop(dense - len(ids))
        return found.logits[0]

    def _prefix(self, ids: tuple[int, ...]) -> DynamicCache:
        if ids not in self._prefixes:
            self.sparse = None
            made = self._prefixes[ids] = DynamicCache(config=self.model.config)
            self.model(torch.tensor([list(ids)]), past_key_values=made, use_cache=True, logits_to_keep=1)
        return self._prefixes[ids]

    def _attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _: object, scaling: float, **__: object
    ) -> tuple[Tensor, None]:
        layer, group = int(module.layer_idx), q.shape[1] // k.shape[1]
        if self.reader is not None:
            self.reader(layer, q[0], k[0])
        if self.sparse is None:
            visible = None
            if q.shape[2] != k.shape[2]:
                visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            out = nn.functional.scaled_dot_product_attention(
                *(q, k, v, visible), is_causal=visible is None, scale=scaling, enable_gqa=group > 1
            )
        else:
            out = self._sparse(layer, q[0], k[0], v[0], scaling, self.sparse)[None]
        if self.removed is not None and self.removed[0] == layer:
            out[:, self.removed[1]] = 0
        return out.transpose(1, 2).contiguous(), None

    def _sparse(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, how: Sparse) -> Tensor:
        group, tokens = len(q) // len(k), q.shape[1]
        out = torch.empty_like(q)
        estimate = _exact if not how.bucket_count else _Codes(q, k, how.scales[layer], how.bucket_count)
        before = k.shape[1] - tokens
        for row in range(0, tokens, ROWS):
            rows = slice(row, min(tokens, row + ROWS))
            first, end = before + row, before + rows.stop
            visible = torch.arange(first, end)[:, None] >= torch.arange(end)
            keys, values = (part[:, :end].repeat_interleave(group, 0) for part in (k, v))
            raw = _exact(q[:, rows], keys) * scaling
            scores = raw if estimate is _exact else estimate(q[:, rows], keys) * scaling
            kept = _selected(scores, visible, first, how.keep[layer])
            if how.agreement is not None:
                exact = _selected(raw, visible, first, how.keep[layer])
                _compare(how.agreement, layer, kept, exact, raw, visible, first)
            seen = kept.repeat_interleave(BLOCK, 1)[:, : end - first] & visible
            out[:, rows] = torch.softmax(raw.masked_fill(~seen, -torch.inf), -1) @ values
        return out


def _exact(q: Tensor, keys: Tensor) -> Tensor:
    """Return the products of queries and keys ``[heads, rows, end]``."""
    return q @ keys.transpose(1, 2)


class _Codes:
    """Products of queries and keys in 8-bit codes, with the buckets that fit a pass best."""

    def __init__(self, q: Tensor, k: Tensor, scales: Sequence[ScoreScale], count: int) -> None:
        group = len(q) // len(k)
        query_steps = torch.tensor([step for one in scales for step in one.query_steps])
        key_steps = torch.tensor([one.key_step for one in scales])
        score_steps = torch.tensor([step for one in scales for step in one.score_steps])
        # The largest codes are compared with those of the buckets, as on the GPU.
        queries = (q.abs().amax((1, 2)) / query_steps).view(-1, group).amax(1)
        keys = k.abs().amax((1, 2)) / key_steps
        factors = torch.tensor(buckets(count))  # type: ignore[arg-type]
        wrong = (queries - MOST * factors[:, :1]).square() + (keys - MOST * factors[:, 1:]).square()
        chosen = factors[wrong.argmin(0)].repeat_interleave(group, 0)
        self._query_steps = (query_steps * chosen[:, 0])[:, None, None]
        self._key_steps = (key_steps.repeat_interleave(group) * chosen[:, 1])[:, None, None]
        self._score_steps = (score_steps * chosen.prod(1))[:, None, None]
        exponents = torch.tensor([float(one.exponent) for one in scales]).repeat_interleave(group)
        self._multipliers = torch.exp2(-exponents)[:, None, None]

    def __call__(self, q: Tensor, keys: Tensor) -> Tensor:
        """Return the products that the codes stand for."""
        left = _codes(q / self._query_steps)
        right = _codes(keys / self._key_steps)
        return _codes(left @ right.transpose(1, 2) * self._multipliers) * self._score_steps


def _codes(values: Tensor) -> Tensor:
    return values.round().clamp(LEAST, MOST)


def _selected(scores: Tensor, visible: Tensor, first: int, keep: Tensor) -> Tensor:
    """Return which positions the blocks of queries keep ``[heads, blocks, positions]``."""
    mass = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
    rows, positions = scores.shape[1:]
    blocks = -(-rows // BLOCK)
    mass = nn.functional.pad(mass, (0, 0, 0, blocks * BLOCK - rows))
    mass = mass.view(len(mass), blocks, BLOCK, positions).sum(2)
    ends = (first + BLOCK * torch.arange(1, blocks + 1)).clamp(max=first + rows)[:, None]
    places = torch.arange(positions)
    always = (places < FIRST) | (places >= ends - LAST)
    mass = mass.masked_fill(always, torch.inf).masked_fill(places >= ends, -1)
    # Exactly representable ratios times lengths are whole numbers, which must not be rounded up.
    counts = torch.ceil(keep.double()[:, None] * ends[:, 0] - 1e-9)
    counts = torch.maximum(counts, (always & (places < ends)).sum(1).double())
    order = mass.argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(mass, dtype=torch.bool)
    kept.scatter_(-1, order, torch.arange(positions) < counts[..., None])
    return kept & (places < ends)


def _compare(
    found: Agreement, layer: int, kept: Tensor, exact: Tensor, raw: Tensor, visible: Tensor, first: int
) -> None:
    rows, positions = raw.shape[1:]
    ends = (first + BLOCK * torch.arange(1, kept.shape[1] + 1)).clamp(max=first + rows)[:, None]
    places = torch.arange(positions)
    chosen = exact & (places >= FIRST) & (places < ends - LAST)
    counts = chosen.sum(-1)
    recall = torch.where(counts > 0, (kept & chosen).sum(-1) / counts.clamp(min=1), torch.nan)
    weights = torch.softmax(raw.masked_fill(~visible, -torch.inf), -1)
    held = (weights * kept.repeat_interleave(BLOCK, 1)[:, :rows]).sum(-1)
    found.recall.setdefault(layer, []).append(recall)
    found.mass.setdefault(layer, []).append(held)


def by_head(parts: dict[int, list[Tensor]]) -> np.ndarray:
    """Return the means of each head ``[layers, heads]``."""
    return np.stack([torch.nanmean(torch.cat(one, 1), 1).numpy() for _, one in sorted(parts.items())])

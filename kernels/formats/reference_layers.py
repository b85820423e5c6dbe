"""Glue operators in float64: oracles of the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def split_members(
    value: NDArray[Any], rows: Sequence[int], splits: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Divide ``[m, sum(rows)]`` into the two segments of a row split."""
    members = np.split(value, np.cumsum(rows)[:-1], axis=1)
    pairs = list(zip(members, splits, strict=True))
    first = np.concatenate([member[:, :split] for member, split in pairs], axis=1)
    second = np.concatenate([member[:, split:] for member, split in pairs], axis=1)
    return first, second


def join_members(
    a: NDArray[Any], b: NDArray[Any], rows: Sequence[int], splits: Sequence[int]
) -> list[NDArray[np.float64]]:
    """Join the two segments of a row split: one ``[m, rows]`` per member; ``a`` may be padded."""
    a_parts = np.split(a[: len(b)].astype(np.float64), np.cumsum(splits)[:-1], axis=1)
    b_rows = [row - split for row, split in zip(rows, splits, strict=True)]
    b_parts = np.split(b.astype(np.float64), np.cumsum(b_rows)[:-1], axis=1)
    return [np.concatenate(pair, axis=1) for pair in zip(a_parts, b_parts, strict=True)]


def rms_norm(x: NDArray[Any], weight: NDArray[Any], epsilon: float) -> NDArray[np.float64]:
    """Return ``x [m, hidden]`` over its root mean square, times the weight."""
    exact = x.astype(np.float64)
    mean = np.square(exact).mean(axis=1, keepdims=True)
    normed: NDArray[np.float64] = exact / np.sqrt(mean + epsilon) * weight.astype(np.float64)
    return normed


def layer_norm(
    x: NDArray[Any], weight: NDArray[Any], shift: NDArray[Any], epsilon: float
) -> NDArray[np.float64]:
    """Return ``x [m, hidden]`` less its mean, over its deviation, times the weight, plus the shift."""
    exact = x.astype(np.float64)
    return rms_norm(exact - exact.mean(axis=1, keepdims=True), weight, epsilon) + shift.astype(np.float64)


def rotate(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any]) -> NDArray[np.float64]:
    """Rotate the first ``r`` elements of every head of ``x [m, heads, head_dim]``.

    ``cos`` and ``sin`` are ``[m, r / 2]``.
    Element i pairs with element ``i + r / 2``, as in ``rotate_half`` of transformers.
    """
    half = cos.shape[1]
    exact = x.astype(np.float64)
    low, high, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    c, s = cos.astype(np.float64)[:, None], sin.astype(np.float64)[:, None]
    return np.concatenate([low * c - high * s, high * c + low * s, rest], axis=2)


def attention(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    position: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> NDArray[np.float64]:
    """Return causal attention ``[m, heads, head_dim]``.

    Args:
        q: ``[m, heads, head_dim]``; row t is at ``position + t``.
        keys: ``[kv_heads, at least position + m, head_dim]``.
        values: Array of the same shape.
        position: Position of the first row.
        scale: Factor on the scores.
        window: Positions visible to a row, its own included; 0 for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
    """
    rows, heads, _ = q.shape
    length = position + rows
    group = heads // keys.shape[0]
    k = np.repeat(keys[:, :length].astype(np.float64), group, axis=0)
    v = np.repeat(values[:, :length].astype(np.float64), group, axis=0)
    scores = np.einsum("mhd,hkd->hmk", q.astype(np.float64), k) * scale
    if soft_cap:
        scores = capped(scores, soft_cap)
    row, key = np.arange(position, length)[:, None], np.arange(length)[None, :]
    hidden = key > row
    if window > 0:
        hidden |= key <= row - window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    output: NDArray[np.float64] = np.einsum("hmk,hkd->mhd", weights, v)
    return output


def capped(x: NDArray[Any], cap: float) -> NDArray[np.float64]:
    """Return ``cap * tanh(x / cap)``."""
    result: NDArray[np.float64] = cap * np.tanh(x.astype(np.float64) / cap)
    return result


def gated_activation(gate: NDArray[Any], up: NDArray[Any], activation: str = "silu") -> NDArray[np.float64]:
    """Return ``activation(gate) * up``; the activation is ``silu`` or ``gelu_tanh``."""
    exact = gate.astype(np.float64)
    if activation == "gelu_tanh":
        gated = 0.5 * exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    else:
        # exp of minus the magnitude cannot overflow.
        small = np.exp(-np.abs(exact))
        gated = exact * np.where(exact >= 0, 1.0, small) / (1.0 + small)
    product: NDArray[np.float64] = gated * up.astype(np.float64)
    return product

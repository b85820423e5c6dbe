"""The doctor's checks of the GPU's kernels of sparse attention, each on random data of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.doctor.case import SEED, DoctorCase, Seen
from heterollm.doctor.scores import SCORES, code_differences
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, HeadShape, Scores, SparseShape
from heterollm.kernels.operators import Numbers, SparseCase, SparsePass, kept_positions

CODES: Final = "codes of queries and keys"
SELECTION: Final = "selection of keys"
ATTENTION: Final = "attention, selected keys"

HEADS: Final = HeadShape(heads=4, kv_heads=2, head_dim=64, capacity=304)
PASS: Final = SparsePass(
    SparseShape(HEADS, tokens=96, keys=304),
    position=201,
    length=70,
    scores=Scores(HEADS.head_dim**-0.5),
    order=(1, 0),
    keep=(0.1, 0.3, 0.5, 0.2),
)
TOKENS: Final = f"{PASS.length} tokens at {PASS.position}"

LOST_FRACTION: Final = 1e-3
"""Estimated attention of a block of queries that rounded exponentials may lose where positions are near."""

FIX: Final = "Leave out the technique shadowattn, which alone runs this kernel, or update the OpenCL driver."


def sparse_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield codes, estimated scores, the selection of keys, and attention to some keys and to all."""
    kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)

    def made(own: SparsePass = PASS) -> SparseCase:
        return SparseCase(device.gpu, kernels, device.activation_dtype, own, np.random.default_rng(SEED))

    yield DoctorCase("GPU", CODES, f"{TOKENS}, 1 bucket", lambda: _codes(made()))
    yield DoctorCase("GPU", CODES, f"{TOKENS}, 9 buckets", lambda: _codes(made(replace(PASS, buckets=9))))
    yield DoctorCase("GPU", SCORES, f"2 heads, {PASS.shape.tokens} tokens", lambda: _estimates(made()))
    yield DoctorCase("GPU", SELECTION, TOKENS, lambda: _selection(made()))
    yield DoctorCase("GPU", ATTENTION, TOKENS, lambda: _attention(made()))
    everything = replace(PASS, keep=(1.0,) * HEADS.heads)
    yield DoctorCase("GPU", ATTENTION, f"{TOKENS}, all keys", lambda: _dense(made(everything)))


def _codes(made: SparseCase) -> Seen:
    (*codes, steps), (*exact_codes, exact_steps) = made.quantise()
    if not np.allclose(steps, exact_steps, rtol=1e-5):
        return Seen(False, "The kernel chose other scales than the nearest bucket.", FIX)
    found, exact = (np.concatenate([part.ravel() for part in parts]) for parts in (codes, exact_codes))
    return code_differences(found, exact, fix=FIX)


def _estimates(made: SparseCase) -> Seen:
    return code_differences(*made.estimate((0, HEADS.kv_heads)), fix=FIX)


def _selection(made: SparseCase) -> Seen:
    """Compare the estimated attention on the selected positions with that on the best ones."""
    codes, steps = _random_scores(made)
    lost = 0.0
    for head, blocks in enumerate(made.select()):
        for block, kept in enumerate(blocks):
            weights = made.block_weights(codes, steps, head, block)
            where = f"Query head {head} and block {block}"
            if weights is None:  # a block of padding
                if len(kept):
                    return Seen(False, f"{where} keep positions, and have no queries.", FIX)
                continue
            best = kept_positions(weights, PASS.keep[head])
            if len(kept) != len(best):
                return Seen(False, f"{where} keep {len(kept)} positions instead of {len(best)}.", FIX)
            if (weights[kept] < 0).any() or (np.diff(kept) <= 0).any():
                return Seen(False, f"{where} keep a position twice, or one that no query sees.", FIX)
            lost = max(lost, 1 - float(weights[kept].sum() / weights[best].sum()))
    return Seen(lost <= LOST_FRACTION, f"at most {lost:.1e} of a block's estimated attention is lost", FIX)


def _attention(made: SparseCase) -> Numbers:
    _random_scores(made)
    return made.attend(made.select())


def _dense(made: SparseCase) -> Numbers:
    """Attend to all keys; the oracle is dense attention, whatever the kernel has selected."""
    _random_scores(made)
    made.select()
    every = np.arange(PASS.position + PASS.length, dtype=np.int32)
    return made.attend([[every] * PASS.shape.blocks] * HEADS.heads)


def _random_scores(made: SparseCase) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    codes = made.generator.integers(0, 256, made.memory.scores.array.shape, np.uint8)
    steps = np.full(HEADS.heads, 0.03, np.float32)
    made.put_scores(codes, steps)
    return codes, steps

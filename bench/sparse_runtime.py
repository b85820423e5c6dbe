"""Loss of a model with sparse attention in heterollm itself, on ``host``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from heterollm.calibration import calibrate, load_calibration
from heterollm.llm import LLM
from heterollm.planning import calibrated_scales
from heterollm.solver import Plan, keep_ratios
from heterollm.solver.sparse.attention import AttentionEntry, SparseAttention

KEEP = 0.2


def runtime_rows(folder: Path, windows: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """Yield the rise of the loss of the last quarter of windows, which are sparse from their first token on.

    Args:
        folder: The checkpoint, whose built-in text calibrates it.
        windows: Token ids of equal length.
    """
    tokens = len(windows[0])
    options: dict[str, Any] = {"device": "host", "scales": "stepped", "context": tokens}
    with tempfile.TemporaryDirectory() as made:
        file = Path(made) / "calibration.json"
        calibrate(folder, output=file, windows=4, window_tokens=tokens, gpu_threads=1)
        with LLM.load(folder, plan="gpu", **options) as llm:
            plain = _losses(llm, windows)
            base = llm.plan
        for rule, estimator in (("mass", "npu"), ("mass", "gpu"), ("uniform", "npu")):
            plan = _sparse(base, file, tokens, rule, estimator)
            with LLM.load(folder, plan=plan, calibration=file, **options) as llm:
                pairs = list(zip(_losses(llm, windows), plain, strict=True))
            rise = torch.cat([own[0] - before[0] for own, before in pairs])
            agreed = torch.cat([(own[1] == before[1]).double() for own, before in pairs])
            yield {
                "kind": "runtime",
                "rule": rule,
                "keep": KEEP,
                "estimator": estimator,
                "windows": len(windows),
                "rise_nats": float(rise.mean()),
                "standard_error_nats": float(rise.std() / len(rise) ** 0.5),
                "top_1_agreement": float(agreed.mean()),
                "emulated": False,
            }


def _sparse(base: Plan, file: Path, tokens: int, rule: Any, estimator: Any) -> Plan:  # noqa: ANN401
    found = load_calibration(file)
    ratios = keep_ratios(found.head_needs(), KEEP, rule)
    entries = []
    for layer, scales in calibrated_scales(file, 1).items():
        units = tuple((head,) for head in range(len(scales)))
        exponents = tuple(one.exponent for one in scales)
        placement = SparseAttention(ratios[layer], units, exponents, estimator=estimator)
        entries.append(AttentionEntry((1, tokens), (1, tokens), (layer, layer), placement))
    return structs.replace(base, chunk_length=tokens, attention=tuple(entries), calibration=found.key)


def _losses(llm: LLM, windows: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the loss and the likeliest token at each of the last quarter of each window."""
    session, found = llm.session(), []
    for ids in windows:
        session.reset()
        last = len(ids) // 4
        logits = torch.from_numpy(session.prefill(list(ids), all_logits=True)[-last:-1].copy())
        target = torch.tensor(list(ids)[1 - last :])
        found.append((nn.functional.cross_entropy(logits, target, reduction="none"), logits.argmax(1)))
    return found

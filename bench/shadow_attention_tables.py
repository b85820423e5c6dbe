"""Tables of docs/shadow-attention.md from simulated rows: attention's share by length, and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]
Find = Callable[..., Row]

PROMPTS: Final = (1024, 2048, 4096, 8192)
MODELS: Final = ("qwen2-0.5b", "qwen2-1.5b", "qwen1.5-1.8b")
SLOW: Final = {"gpu.attention_tflops": 0.02}
"""The GPU's arithmetic of attention at a tenth: little of the processor is left, as in the paper."""

CASES: Final[tuple[tuple[str, Mapping[str, float]], ...]] = (
    ("GPU as modelled", {}),
    ("a tenth of the GPU", SLOW),
)
STEPS: Final = (
    ("dense", None, ""),
    ("sparse, the GPU estimates", "gpu", "ordered"),
    ("the NPU estimates, a head a launch", "npu", "heads"),
    ("fused heads", "npu", "fused"),
    ("fused as far as it pays, in order", "npu", "ordered"),
)

HEADS: Final[Mapping[str, tuple[str, str]]] = {
    "lengths": (
        "simulated prefill, s (attention's share; J) | "
        + " | ".join(f"{prompt}: dense | `shadowattn`" for prompt in PROMPTS),
        "l" + "r" * 2 * len(PROMPTS),
    ),
    "steps": (
        "simulated, 4096 tokens, a tenth of the GPU | prefill, s | attention, s | J | NPU idle",
        "lrrrr",
    ),
}
"""Heads of the tables with the alignment of their columns."""


def _row(
    find: Find,
    rows: Sequence[Row],
    model: str,
    prompt: int,
    what_if: Mapping[str, float],
    estimator: str | None,
    pipeline: str = "ordered",
) -> Row:
    asked: dict[str, Any] = {"passes": [], "attention": None}
    if estimator is not None:
        attention = {"keep": 0.2, "keep_by": "mass", "buckets": 1}
        attention |= {"estimator": estimator, "pipeline": pipeline}
        asked = {"passes": ["shadowattn"], "attention": attention}
    return find(rows, model=model, prompt_tokens=prompt, what_if=dict(what_if), **asked)


def _cell(row: Row) -> str:
    seconds, share = row["prefill_ms"] / 1e3, row["prefill"]["attention_ms"] / row["prefill_ms"]
    return f"{seconds:.2f} ({share:.0%}; {row['prefill_joules']:.1f})"


def lengths(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table of lengths."""
    lines = []
    for words, what_if in CASES:
        for model in MODELS:
            cells = [f"{model}, {words}"]
            for prompt in PROMPTS:
                dense, sparse = (
                    _row(find, rows, model, prompt, what_if, chosen) for chosen in (None, "auto")
                )
                cells += [_cell(dense), _cell(sparse)]
            lines.append(cells)
    return lines


def steps(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table of steps."""
    lines = []
    for model in MODELS[1:]:
        for words, estimator, pipeline in STEPS:
            row = _row(find, rows, model, 4096, SLOW, estimator, pipeline)
            phase = row["prefill"]
            lines.append(
                [
                    f"{model}: {words}",
                    f"{row['prefill_ms'] / 1e3:.2f}",
                    f"{phase['attention_ms'] / 1e3:.2f}",
                    f"{row['prefill_joules']:.1f}",
                    f"{phase['npu_idle_fraction']:.0%}",
                ]
            )
    return lines

"""Tables of docs/llm-npu.md from simulated rows: steps of the pass, lengths, splits, the paper's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from what_if import NO_LIMITS

Row = Mapping[str, Any]
Find = Callable[..., Row]

MODELS: Final = ("qwen1.5-1.8b", "gemma-2b", "phi-2", "llama-2-7b", "mistral-7b")
SOCS: Final = {"snapdragon-8gen3-paper": "paper", "snapdragon-8gen3": "own path"}
STEPS: Final = ("llm.npu:naive", "llm.npu:chunks", "llm.npu:shadow", "llm.npu")
PROMPTS: Final = (64, 256, 512, 1024, 1500)

HEADS: Final[Mapping[str, tuple[str, str]]] = {
    "steps": (
        "simulated, 1024 tokens, tokens/s (NPU idle; J) | `layer`, W4A16 | naive | chunks | with shadows "
        "| out of order",
        "lrrrrr",
    ),
    "lengths": (
        f"simulated, llm.npu, tokens/s (J) | {' | '.join(map(str, PROMPTS))}",
        "l" + "r" * len(PROMPTS),
    ),
    "splits": (
        "simulated, tokens/s | 256: `tensor`, W4A16 | llm.npu | `tensor` and llm.npu "
        "| 1024: `tensor`, W4A16 | llm.npu | `tensor` and llm.npu",
        "lrrrrrr",
    ),
    "published": ("what | published | simulated, paper | simulated, own path", "lrrr"),
}
"""Heads of the tables with the alignment of their columns."""


def _row(find: Find, rows: Sequence[Row], model: str, soc: str, prompt: int, **asked: object) -> Row:
    """Return the row of a case; without limits of memory if the phone refuses it."""
    wanted = {"plan_level": "layer", "pruned": 0.85, "passes": []} | asked
    wanted |= {"model": model, "soc": soc, "prompt_tokens": prompt}
    row = find(rows, **wanted, what_if={})
    return find(rows, **wanted, what_if=NO_LIMITS) if row["error"] else row


def _rate(row: Row) -> str:
    return f"{row['prefill_tokens_per_second']:.0f}{'†' if dict(row['what_if']) == NO_LIMITS else ''}"


def steps(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table of steps."""
    lines = []
    for model, (soc, words) in product(MODELS, SOCS.items()):
        cells = [f"{model}, {words}"]
        for passes in ([], *([name] for name in STEPS)):
            row = _row(find, rows, model, soc, 1024, passes=passes)
            idle = row["prefill"]["npu_idle_fraction"]
            cells.append(f"{_rate(row)} ({idle:.0%}; {row['prefill_joules']:.1f})")
        lines.append(cells)
    return lines


def lengths(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table of lengths."""
    lines = []
    for model, (soc, words) in product(MODELS, SOCS.items()):
        found = [_row(find, rows, model, soc, prompt, passes=["llm.npu"]) for prompt in PROMPTS]
        cells = [f"{_rate(row)} ({row['prefill_joules']:.2f})" for row in found]
        lines.append([f"{model}, {words}", *cells])
    return lines


def splits(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table of splits."""
    lines = []
    for model, (soc, words) in product(MODELS, SOCS.items()):
        cells = [f"{model}, {words}"]
        for prompt in (256, 1024):
            tensor = _row(find, rows, model, soc, prompt, plan_level="tensor")
            alone = _row(find, rows, model, soc, prompt, passes=["llm.npu"])
            both = _row(find, rows, model, soc, prompt, plan_level="tensor", passes=["llm.npu"])
            cells += [_rate(row) for row in (tensor, alone, both)]
        lines.append(cells)
    return lines


def published(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table of the paper's numbers."""

    def qwen(soc: str, prompt: int, step: str, **asked: object) -> Row:
        return _row(find, rows, "qwen1.5-1.8b", soc, prompt, passes=[step], **asked)

    def npu_ms(soc: str) -> str:
        phase = qwen(soc, 256, "llm.npu:shadow")["prefill"]
        return f"{phase['busy_fraction']['npu'] * phase['milliseconds']:.0f} ms"

    def build_s(soc: str) -> str:
        naive, chunks = (
            _row(find, rows, "gemma-2b", soc, 256, passes=[step])["prefill_ms"]
            for step in ("llm.npu:naive", "llm.npu:chunks")
        )
        return f"{(naive - chunks) / 1e3:.1f} s"

    def idle(soc: str, step: str) -> str:
        return f"{qwen(soc, 1024, step)['prefill']['npu_idle_fraction']:.0%}"

    def shadow(soc: str, field: str) -> str:
        every, none = qwen(soc, 256, "llm.npu:shadow", pruned=0.0), qwen(soc, 256, "llm.npu:chunks")
        return f"{1 - none[field] / every[field]:.1%}"

    def best(soc: str) -> str:
        return f"{max(qwen(soc, prompt, 'llm.npu')['prefill_tokens_per_second'] for prompt in PROMPTS):.0f}"

    kinds: tuple[tuple[str, str, Callable[[str], str]], ...] = (
        ("Qwen1.5-1.8B, tokens/s at the best length", "more than 1000", best),
        ("Qwen1.5-1.8B, 256 tokens, NPU's time", "315 ms", npu_ms),
        ("NPU idle in order (Qwen1.5-1.8B, 1024 tokens)", "37 %", lambda soc: idle(soc, "llm.npu:shadow")),
        ("the same out of order", "not stated", lambda soc: idle(soc, "llm.npu")),
        (
            "Qwen1.5-1.8B, share of the time that shadows without pruning take",
            "29.7 % to synchronise",
            lambda soc: shadow(soc, "prefill_ms"),
        ),
        ("the same, of the energy", "20.1 %", lambda soc: shadow(soc, "prefill_joules")),
        ("Gemma-2B, building graphs for a prompt", "11.9 s", build_s),
    )
    return [[what, stated, *(value(soc) for soc in SOCS)] for what, stated, value in kinds]

"""Tables of simulated mixtures of experts in docs/simulation.md, step by step of the pass npumoe."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["HEAD", "RIGHT", "expert_lines"]

Row = Mapping[str, Any]
Find = Callable[..., Row]

MODELS: Final = ("qwen3-30b-a3b", "olmoe-1b-7b", "phi-3.5-moe", "mixtral-8x7b")
STEPS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("all on the GPU", "gpu", ()),
    ("linear layers split", "tensor", ()),
    ("experts on the NPU, a graph each", "tensor", ("npumoe:each",)),
    ("tiers of capacity", "tensor", ("npumoe:tiers",)),
    ("groups", "tensor", ("npumoe:groups",)),
    ("the solver's choice", "tensor", ("npumoe",)),
)
PHONE: Final[Mapping[str, float]] = {}
UNLIMITED: Final = {"memory.available_gib": 0.0, "npu.address_space_gib": 0.0}
"""What the SoC is asked: as it is, or with memory for everything."""

HEAD: Final = (
    "simulated, assumed loads | prefill, s | J | decode, tokens/s | experts' graphs, GiB | graphs a layer | "
    "padding | overflow | pairs on the NPU | hand-overs"
)
RIGHT: Final = "lrrrrrrrrr"
NUMBER: Final = re.compile(r"\d+\.\d+")


def expert_lines(find: Find, rows: Sequence[Row], prompt: int, *, unlimited: bool) -> list[list[str]]:
    """Return the lines of a table.

    Args:
        find: Returns the last of some rows with given values.
        rows: The rows.
        prompt: Tokens of the prompt.
        unlimited: Whether the phone and its NPU have memory for everything.
    """
    what_if = UNLIMITED if unlimited else PHONE
    lines = []
    for model in MODELS:
        for words, level, passes in STEPS:
            row = find(
                *(rows,),
                model=model,
                prompt_tokens=prompt,
                plan_level=level,
                passes=list(passes),
                what_if=what_if,
            )
            lines.append([f"{model}: {words}", *_cells(row)])
            if row["error"] is not None and not passes and level == "gpu":
                break  # nothing of this model fits
    return lines


def _cells(row: Row) -> list[str]:
    """Return the cells of a row; a case that does not fit has the sum in place of a time."""
    if row["error"] is not None:
        return [f"does not fit: {_sum(row['error'])}", *[""] * (RIGHT.count("r") - 1)]
    experts = row["experts"]
    cells = [
        f"{row['prefill_ms'] / 1e3:.2f}",
        f"{row['prefill_joules']:.1f}",
        f"{row['decode_tokens_per_second']:.1f}",
    ]
    if not experts["npu_rows"]:
        return [*cells, *[""] * (RIGHT.count("r") - len(cells))]
    return [
        *cells,
        f"{experts['npu_gib']:.1f}",
        f"{experts['graphs_per_layer']:.1f}",
        f"{experts['padding_share']:.0%}",
        f"{experts['overflow_share']:.1%}",
        f"{experts['npu_pairs'] / experts['pairs']:.0%}",
        f"{experts['hand_overs']}",
    ]


def _sum(error: str) -> str:
    """Return the sum of a refusal: what is needed, and what there is."""
    said = error.partition("memory:" if "memory:" in error else "needs")[2]
    *needed, limit = NUMBER.findall(said)[: 4 if "memory:" in error else 2]
    return f"{' + '.join(needed)} > {limit} GiB"

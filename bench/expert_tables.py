r"""Tables of simulated mixtures of experts in docs/mixture-of-experts.md, step by step of npumoe.

The rows come from these commands, with ``-o bench/results/simulated_experts.jsonl`` and ``--decode 8
--plan-for prompt``. A case that does not fit is a row with the reason::

    MODELS=qwen3-30b-a3b,olmoe-1b-7b,phi-3.5-moe,mixtral-8x7b
    STEPS=npumoe:each,npumoe:tiers,npumoe:groups,npumoe
    MORE='--what-if memory.available_gib=0'
    heterollm simulate $MODELS --prompt 64,256,1024 --plan gpu,tensor
    heterollm simulate $MODELS --prompt 64,256,1024 --plan tensor --technique $STEPS
    heterollm simulate $MODELS --prompt 64,256,1024 --plan gpu,tensor $MORE --what-if npu.address_space_gib=0
    heterollm simulate $MODELS --prompt 64,256,1024 --plan tensor --technique $STEPS $MORE \
        --what-if npu.address_space_gib=0
    heterollm simulate phi-3.5-moe,mixtral-8x7b --prompt 64,256,1024 --plan tensor \
        --technique none,npumoe $MORE
    heterollm simulate qwen3-30b-a3b,olmoe-1b-7b --prompt 1024 --plan tensor --technique none,npumoe \
        --imbalance 1.3    # and 2.7, 4
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]
Find = Callable[..., Row]

PROMPTS: Final = (64, 256, 1024)
STEPS: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("all on the GPU", "gpu", ()),
    ("linear layers split", "tensor", ()),
    ("experts on the NPU, a graph each", "tensor", ("npumoe:each",)),
    ("tiers of capacity", "tensor", ("npumoe:tiers",)),
    ("groups", "tensor", ("npumoe:groups",)),
    ("the solver's choice", "tensor", ("npumoe",)),
)
FIT: Final = ("qwen3-30b-a3b", "olmoe-1b-7b")
TOO_LARGE: Final = ("phi-3.5-moe", "mixtral-8x7b")
"""Mixtures whose weights exceed the phone's memory."""

PHONE: Final[Mapping[str, float]] = {}
MORE_MEMORY: Final = {"memory.available_gib": 0.0}
UNLIMITED: Final = MORE_MEMORY | {"npu.address_space_gib": 0.0}
"""The SoC of the rows: as it is, with memory for all weights, or also with an NPU that addresses all."""

IMBALANCES: Final = (1.3, None, 2.7, 4.0)
"""None is the default."""

STEP_HEAD: Final = (
    f"simulated, assumed loads | prefill of {PROMPTS[0]}, tokens/s | {' | '.join(map(str, PROMPTS[1:]))} | "
    f"{PROMPTS[-1]} tokens: J | graphs of experts, GiB | graphs a layer | padding | overflow | "
    "choices on the NPU | decode, tokens/s"
)
HEADS: Final[Mapping[str, tuple[str, str]]] = {
    "phone": (STEP_HEAD, "lrrrrrrrrrr"),
    "unlimited": (STEP_HEAD, "lrrrrrrrrrr"),
    "imbalances": (
        "simulated, 1024 tokens, tokens/s with the pass (without it; choices on the NPU) | "
        + " | ".join("2, the default" if own is None else f"{own:g}" for own in IMBALANCES),
        "lrrrr",
    ),
}
"""Heads of the tables with the alignment of their columns."""

NUMBER: Final = re.compile(r"\d+\.\d+")


def phone(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the steps on the phone; those of mixtures that it cannot hold, with more memory."""
    lines = [_line(find, rows, model, step, PHONE) for model in FIT for step in STEPS]
    for model in TOO_LARGE:
        lines.append(_line(find, rows, model, STEPS[0], PHONE))
        more = [_line(find, rows, model, step, MORE_MEMORY) for step in (STEPS[1], STEPS[-1])]
        lines += [[f"{name}, with more memory", *cells] for name, *cells in more]
    return lines


def unlimited(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the steps with memory, and an NPU's address space, for everything."""
    return [_line(find, rows, model, step, UNLIMITED) for model in (*FIT, *TOO_LARGE) for step in STEPS]


def imbalances(find: Find, rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of rates by imbalance."""
    lines = []
    for model in FIT:
        cells = [model]
        for imbalance in IMBALANCES:
            without, found = (
                find(
                    rows,
                    model=model,
                    prompt_tokens=PROMPTS[-1],
                    plan_level="tensor",
                    passes=passes,
                    what_if=PHONE,
                    imbalance=imbalance,
                )
                for passes in ([], ["npumoe"])
            )
            share = f"{found['experts']['npu_pairs'] / found['experts']['pairs']:.0%}"
            cells.append(f"{_rate(found)} ({_rate(without)}; {share})")
        lines.append(cells)
    return lines


def _line(
    find: Find,
    rows: Sequence[Row],
    model: str,
    step: tuple[str, str, tuple[str, ...]],
    what_if: Mapping[str, float],
) -> list[str]:
    """Return a line; a length that does not fit has the sum in place of its rate."""
    words, level, passes = step
    asked = {"plan_level": level, "passes": list(passes), "what_if": what_if, "imbalance": None}
    found = [find(rows, model=model, prompt_tokens=prompt, **asked) for prompt in PROMPTS]
    last = found[-1]
    cells = [f"{model}: {words}", *map(_rate, found)]
    if last["error"] is not None:
        return [*cells, *[""] * 7]
    experts = last["experts"]
    shares = [""] * 5
    if experts["npu_rows"]:
        shares = [
            f"{experts['npu_gib']:.1f}",
            f"{experts['graphs_per_layer']:.1f}",
            f"{experts['padding_share']:.0%}",
            f"{experts['overflow_share']:.1%}",
            f"{experts['npu_pairs'] / experts['pairs']:.0%}",
        ]
    return [*cells, f"{last['prefill_joules']:.1f}", *shares, f"{last['decode_tokens_per_second']:.1f}"]


def _rate(row: Row) -> str:
    return f"{row['prefill_tokens_per_second']:.1f}" if row["error"] is None else _sum(row["error"])


def _sum(error: str) -> str:
    """Return the sum of a refusal: what is needed, and what there is."""
    mark, count = ("memory:", 4) if "memory:" in error else ("needs", 2)
    *needed, limit = NUMBER.findall(error.partition(mark)[2])[:count]
    return f"{' + '.join(needed)} > {limit} GiB"

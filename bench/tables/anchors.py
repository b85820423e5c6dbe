"""Tables of the public speeds beside the model, and of the forecast beside the best of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tables.table import Lines, Row, having, last, rows_of, table

FLOATS: Final = "AI Hub, float activations"
KINDS: Final[dict[str, Callable[[Row], bool]]] = {
    "NPU, AI Hub's integer graphs": lambda row: row["engine"] == "AI Hub",
    "NPU, AI Hub's float graphs": lambda row: row["engine"] == FLOATS,
    "NPU, other engines": lambda row: not (row["engine"].startswith("AI Hub") or "GPU" in row["engine"]),
    "GPU, 4 bits": lambda row: "GPU" in row["engine"] and _bits(row) == 4,
    "GPU, 8 and 16 bits, reads": lambda row: "GPU" in row["engine"] and _bits(row) != 4,
}
"""Kinds of anchors by their rows."""


def _bits(row: Row) -> int:
    named = any(words in row["engine"] for words in ("F16", "8 bits", "reads"))
    return 16 if named else 4


def number(speed: float) -> str:
    """Return a speed with as many digits as a forecast deserves."""
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"


def ratio(row: Row) -> float:
    """Return the modelled speed over the measured one."""
    return float(row["simulated"] / row["measured"])


def _spread(rows: Sequence[Row]) -> str:
    found = sorted(map(ratio, rows))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})" if found else ""


@table(
    "simulation",
    "anchors by kind",
    "simulated over measured: median (least to most) | speeds used | prefill, predicted | decode, predicted",
)
def kinds() -> Lines:
    """Yield how far the model agrees with the speeds that it was not fitted to."""
    for name, own in KINDS.items():
        rows = [row for row in rows_of("anchors") if own(row)]
        predicted = [[row for row in rows if row["phase"] == phase and not row["used"]] for phase in PHASES]
        yield name, str(sum(row["used"] for row in rows)), *map(_spread, predicted)


PHASES: Final = ("prefill", "decode")


@table(
    "simulation-tables",
    "anchors",
    "anchor | engine, model | prefill: measured | simulated | ratio | decode: measured | simulated | ratio "
    "| source",
    "llrrrrrrl",
    tight=True,
)
def anchors() -> Lines:
    """Yield every public speed beside the model's; in bold those that the fit used."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows_of("anchors"):
        place = tuple(row[name] for name in ("chip", "anchor", "engine", "model", "source"))
        lines.setdefault(place, {})[row["phase"]] = row
    for (chip, name, engine, model, source), found in lines.items():
        cells = (cell for phase in PHASES for cell in _cells(found.get(phase)))
        yield f"{name}, {chip}", f"{engine}, {model}", *cells, source


def _cells(row: Row | None) -> Iterator[str]:
    if row is None:
        yield from ("", "", "")
        return
    shown = f"{ratio(row):.2f}"
    yield from (f"{row['measured']:g}", number(row["simulated"]), f"**{shown}**" if row["used"] else shown)


# -- the forecast ----------------------------------------------------------------------------------------

MODELS: Final = {
    "llama-3.1-8b": "Llama 3.1 8B",
    "llama-3.2-3b": "Llama 3.2 3B",
    "llama-3.2-1b": "Llama 3.2 1B",
    "qwen3-4b": "Qwen3 4B",
    "gemma-4-e2b": "Gemma 4 E2B",
}
LEVELS: Final = {
    "`gpu`": ("gpu", False),
    "`npu`": ("npu", False),
    "`npu`, integers": ("npu", True),
    "`tensor`": ("tensor", False),
    "`tensor`, integers": ("tensor", True),
    "`block`": ("block", False),
}
SPLIT: Final = ("block", True)
SAME_SPEEDS: Final = {"X2 Elite Extreme": "X2 Elite"}
"""Chips that share their public speeds with another."""

CPU_DECODE: Final = {"llama-3.1-8b": "16", "llama-3.2-1b": "60", "qwen3-4b": "22.9"}
"""Decode of an X Elite's CPU: model cards of GGUF files (the 8B's from 17 of a 7B), GenieX's documents."""


def forecast(chip: str, model: str, level: tuple[str, bool], prompt: int = 512, change: str = "") -> Row:
    """Return a row of the forecast."""
    asked = {"chip": chip, "model": model, "prompt": prompt, "change": change}
    return last("forecast", **asked, level=level[0], integer=level[1])


def _speed(row: Row) -> str:
    if "error" in row:
        return "refused"
    decode = f" / {number(row['decode'])}" if "decode" in row else ""
    return number(row["prefill"]) + decode


def _layer(prompts: Row, decode: Row) -> str:
    """Return the speeds of ``layer``, which has the prompts of one level and the decode of another."""
    return "refused" if "error" in prompts else f"{number(prompts['prefill'])} / {number(decode['decode'])}"


def public(chip: str, model: str) -> tuple[float, float] | None:
    """Return the speeds of the public engine with the fastest prompt."""
    chip = SAME_SPEEDS.get(chip, chip)
    rows = [row for row in rows_of("anchors") if (row["chip"], row["model"]) == (chip, model)]
    prompts = [row for row in rows if row["phase"] == "prefill"]
    if not prompts:
        return None
    best = max(prompts, key=lambda row: row["measured"])
    decode = [row for row in rows if row["phase"] == "decode" and row["engine"] == best["engine"]]
    return best["measured"], max(row["measured"] for row in decode)


def _pairs(prompt: int) -> list[tuple[str, str]]:
    """Return models and chips that have rows of a prompt, by model."""
    rows = having("forecast", level=SPLIT[0], integer=True, prompt=prompt, change="")
    return [(model, row["chip"]) for model in MODELS for row in rows if row["model"] == model]


@table(
    "simulation",
    "forecast",
    " | ".join(
        (
            "simulated, prompt of 512 / decode",
            "best public engine, measured",
            *LEVELS,
            "`layer`, integers",
            "`block`, integers",
            "over the public one",
            "runs a token",
        )
    ),
)
def forecasts() -> Lines:
    """Yield the own path at every level beside the best public engine."""
    for model, chip in _pairs(512):
        row, best = forecast(chip, model, SPLIT), public(chip, model)
        cpu = f"; CPU {CPU_DECODE[model]}" if chip == "X Elite" and model in CPU_DECODE else ""
        yield (
            f"{MODELS[model]}, {chip}",
            "" if best is None else f"{best[0]:g} / {best[1]:g}{cpu}",
            *(_speed(forecast(chip, model, level)) for level in LEVELS.values()),
            _layer(forecast(chip, model, ("npu", True)), forecast(chip, model, ("gpu", False))),
            _speed(row),
            "" if best is None else f"{row['prefill'] / best[0]:.2f} / {row['decode'] / best[1]:.2f}",
            f"{row['decode_runs']:.0f}",
        )


CHANGES: Final = {
    "": "as above",
    "low": "low end of the ranges",
    "high": "high end",
    "free starts": "0.03 ms a run",
    "as filed": "one process domain",
}


@table(
    "simulation-tables",
    "forecast changes",
    " | ".join(("simulated, Llama 3.1 8B, `block`, integers", *CHANGES.values())),
)
def changes() -> Lines:
    """Yield what the guesses, the cost of a run, and the NPU's memory are worth."""
    for model, chip in _pairs(512):
        if model == "llama-3.1-8b":
            yield chip, *(_speed(forecast(chip, model, SPLIT, change=change)) for change in CHANGES)


LENGTHS: Final = (128, 512, 4096)


@table(
    "simulation-tables",
    "forecast lengths",
    " | ".join(
        (
            "simulated prefill, tokens/s",
            *(f"{n}: {name}" for n in LENGTHS for name in ("`gpu`", "`block`, integers")),
        )
    ),
)
def lengths() -> Lines:
    """Yield prompts of other lengths."""
    for model, chip in _pairs(LENGTHS[-1]):
        rows = (forecast(chip, model, level, n) for n in LENGTHS for level in (("gpu", False), SPLIT))
        cells = ("refused" if "error" in row else number(row["prefill"]) for row in rows)
        yield f"{MODELS[model]}, {chip}", *cells


@table(
    "simulation-tables",
    "slow floats",
    "simulated, Llama 3.1 8B, `block` | floats as HeteroLLM has them | as slow as llm.npu's Table 3 "
    "| integers beside HeteroLLM's floats | beside slow floats",
)
def slow_floats() -> Lines:
    """Yield what plans do where float products on the NPU are as slow as one paper has them."""
    for chip in dict.fromkeys(row["chip"] for row in having("forecast", change="slow floats")):
        found = (
            forecast(chip, "llama-3.1-8b", ("block", integer), change=change)
            for integer in (False, True)
            for change in ("", "slow floats")
        )
        yield chip, *(f"{_speed(row)}, {row['graphs']} graphs" for row in found)


@table(
    "README",
    "three rows",
    "Llama-3.1-8B, tokens/s | X Elite: prompt of 512 | decode | 8 Gen 3: prompt of 512 | decode",
)
def three_rows() -> Lines:
    """Yield GPU, NPU and both on this program's own path, below what others measured."""
    chips = ("X Elite", "8 Gen 3")
    speeds = [speed for chip in chips for speed in public(chip, "llama-3.1-8b") or ()]
    yield "*measured by others*: the NPU alone (AI Hub; PowerServe)", *(f"{speed:g}" for speed in speeds)
    names = {
        "GPU alone (`gpu`)": ("gpu", False),
        "NPU alone (`npu`)": ("npu", True),
        "both at once (`block`)": SPLIT,
    }
    for name, level in names.items():
        rows = [forecast(chip, "llama-3.1-8b", level) for chip in chips]
        cells = (cell for row in rows for cell in (f"{row['prefill']:.0f}", f"{row['decode']:.1f}"))
        yield f"*simulated*: {name}", *cells

"""Published numbers with the simulated ones: the source of each, and its use in the model.

The numbers are HeteroLLM's (arXiv 2501.14794): all of section 5, and two of section 1. Its GPU-only engine is
PPL-OpenCL; the simulated level ``gpu`` is compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from paper_cases import (
    DECODE_AFTER,
    DRIVER,
    GPU,
    LAYER,
    LENGTHS,
    LOADS,
    ODD_LENGTHS,
    ONLINE,
    PADDING,
    PIPE,
    TENSOR,
    PaperRows,
    ratio,
)
from simulated_rows import Simulated

Use: TypeAlias = Literal["fitted", "input", "chose a parameter", "power only", "predicted", "not simulated"]
"""Use of a number in the model: its parameters were fitted to it (``fitted``), it is a parameter (``input``),
it chose an assumption, the power splits were made to meet it, or none."""

OFF: Final = 0.15
"""A simulated number further than this from the published one counts as wrong."""

PUBLISHED_TABLE: Final = """
# 5.2.1, fitted
prefill 1024, tensor level, 8B | 247.9 tok/s | prefill 8B 1024 tensor
# 5.2.1, predicted
prefill 256, tensor level, InternLM-1.8B | 1092 tok/s | prefill 1.8B 256 tensor | section 1: more than 1000
layer level over GPU, prefill 256, 8B | 2.99 x | faster 8B 256 layer gpu
tensor over layer level, 8B, mean | 1.302 x | faster 8B mean tensor layer |
    of 64, 256 and 1024 tokens; the fit has the one of 256
tensor over layer level, most | 1.408 x | most_over_layer |
    published of 32 tokens, which are not simulated; models and lengths here
tensor level over GPU, 3B, mean | 3.51 x | faster 3B mean tensor gpu | of 64, 256 and 1024 tokens
# 5.2.1, not simulated
layer level, prefill 256, 8B, over MNN-OpenCL | 5.85 x
layer level, prefill 256, 8B, over llama.cpp | 24.9 x
layer level, prefill 256, 8B, over MLC | 5.64 x
layer level, prefill 64, 8B, over others, least | 3.67 x
layer level, prefill 64, 8B, over others, most | 14.36 x
layer level, prefill 1024, 8B, over others, least | 3.17 x
layer level, prefill 1024, 8B, over others, most | 25.12 x
tensor level, prefill 1024, 8B, over llama.cpp | 34.5 x
tensor level, prefill 1024, 8B, over MLC | 9.99 x
tensor level, prefill 1024, 8B, over MNN-OpenCL | 4.36 x
tensor level, prefill, 7B, mean, over MNN-OpenCL | 6.05 x
tensor level, prefill, 7B, mean, over MLC | 6.63 x
tensor level, prefill, 3B, mean, over MNN-OpenCL | 10.2 x
MLLM-npu, prefill 256, 1.8B | 564 tok/s
# 5.2.2, predicted
online-prepare over tensor level, 525 tokens, 8B | 2.24 x | waits 525 online
padding over tensor level, 525 tokens, 8B | 2.21 x | waits 525 padding | 2.12 in section 1
pipe over tensor level, 525 tokens, 8B | 1.35 x | waits 525 pipe
padding over tensor level, just past a graph, 8B, mean | 1.91 x | waits past padding |
    of 135, 300, 525 and 600 tokens here
pipe over tensor level, least | 1.1520737 x | waits least pipe | published as 13.2 % less latency
pipe over tensor level, most | 1.4306152 x | waits most pipe | published as 30.1 % less latency
share of building in online-prepare, 135 tokens, 8B | 34.6 % | build_share
# 5.2.2, input
building graphs, 135 tokens | 408.4 ms
building graphs, 1000 tokens | 2050 ms
# 5.3, fitted
decode after 256, tensor level, 8B | 14.01 tok/s | decode 8B tensor
tensor level over GPU, decode, 8B | 1.234 x | decodes 8B tensor gpu |
    the fit took 1.227, the mean of this and of 1.22 in version 2
GPU alone in decode, 8B | 43.3 GB/s | decode_gbps gpu
both processors in decode, 8B | 59.1 GB/s | decode_gbps tensor |
    the fit took 59.5 for a moment at which both read; simulated is the mean of a token
# 5.3, predicted
decode after 256, tensor level, 3B | 29.9 tok/s | decode 3B tensor
decode after 256, tensor level, InternLM-1.8B | 51.12 tok/s | decode 1.8B tensor
tensor level over GPU, decode, 3B | 1.0852 x | decodes 3B tensor gpu
tensor level over GPU, decode, InternLM-1.8B | 1.1338 x | decodes 1.8B tensor gpu
# 5.3, not simulated
tensor level, decode, 8B, over MNN-OpenCL | 1.5 x
tensor level, decode, 8B, over llama.cpp | 2.53 x
tensor level, decode, 8B, over MLC | 1.52 x
tensor level, decode, InternLM-1.8B, over MNN-OpenCL | 1.94 x
tensor level, decode, InternLM-1.8B, over MLC | 2.62 x
# 5.4, fitted
prefill 256, tensor level, 8B | 236.92 tok/s | prefill 8B 256 tensor
prefill 256, tensor level, 8B, driver's synchronisation | 196.44 tok/s | prefill 8B 256 driver |
    the fit used the ratio of the two
# 5.4, chose a parameter
fast over driver's synchronisation, decode, 8B | 4.01 x | decodes 8B tensor driver |
    in no fit, but npu.spill_dram_fraction was chosen by it
# 5.4, predicted
fast over driver's synchronisation, prefill, 8B, mean | 1.243 x | faster 8B mean tensor driver |
    of 64, 256 and 1024 tokens; the fit has the one of 256
fast over driver's synchronisation, prefill, 7B, mean | 1.49 x | faster 7B mean tensor driver
fast over driver's synchronisation, prefill, InternLM-1.8B, mean | 1.345 x | faster 1.8B mean tensor driver
fast over driver's synchronisation, decode, 7B | 2.2 x | decodes 7B tensor driver |
    published once for all models but 8B
fast over driver's synchronisation, decode, 3B | 2.2 x | decodes 3B tensor driver |
    published once for all models but 8B
fast over driver's synchronisation, decode, InternLM-1.8B | 2.2 x | decodes 1.8B tensor driver |
    published once for all models but 8B
# 5.4, not simulated
the same at layer level, prefill, 8B, mean | 1.158 x
the same at layer level, prefill, 7B, mean | 1.317 x
the same at layer level, prefill, InternLM-1.8B, mean | 1.267 x
# 5.5, predicted
prefill 256 with a game over alone, layer level | 0.9043 | kept layer | a game of 3 ms a frame here
prefill 256 with a game over alone, tensor level | 0.9274 | kept tensor | the same
the second over the first | 1.0255446 x | kept_over_layer | so at 1 and 6 ms a frame, too
tensor level with a game over layer level alone | 1.153 x | game_over_layer
frames in time, layer level | 100 % | frames layer | published as a steady 60 a second
frames in time, tensor level | 100 % | frames tensor | published as a steady 60 a second
frames in time, GPU | 0 % | frames gpu | published as dropping to zero
# 5.6, fitted
tensor over layer level, prefill 256, 8B | 1.244 x | faster 8B 256 tensor layer
# 5.6, predicted
tensor level over GPU, prefill 256, 8B | 3.72 x | faster 8B 256 tensor gpu | published as 2.72 times faster
power, tensor over layer level | 1.232 x | more_watts tensor layer | the middle of three assumptions
power, tensor level over GPU | 0.633 x | more_watts tensor gpu | the middle of three assumptions
energy, tensor over layer level | 1.033 x | more_joules tensor layer | the middle of three assumptions
# 5.6, power only
power, layer level | 2.23 W | watts layer | the middle of three assumptions
energy, GPU over tensor level | 5.87 x | more_joules gpu tensor |
    the splits meet it with a slower GPU than the modelled one
"""
"""All numbers of section 5, in its order: name, value, formula and remark, under section and use."""

MODELS: Final = {"8B": "llama-3-8b", "7B": "llama-2-7b", "3B": "llama-3.2-3b", "1.8B": "internlm2-1.8b"}
WAYS: Final = dict(
    zip(
        ("gpu", "layer", "tensor", "driver", "online", "padding", "pipe"),
        (GPU, LAYER, TENSOR, DRIVER, ONLINE, PADDING, PIPE),
        strict=True,
    )
)
JUST_PAST: Final = (135, 300, 525, 600)
"""Lengths that slightly exceed a standard one."""

GAME: Final = LOADS[1]
BUILD_MS: Final = 408.4


@dataclass(frozen=True, slots=True)
class Published:
    """A published number and its counterpart among the rows.

    Args:
        name: Name of the quantity.
        value: Published value.
        unit: Unit of the value.
        source: Section that publishes it.
        use: Use of the number in the model.
        formula: A function of this module without its underscore, and its words, which finds the simulated
            number; empty if there is none.
        remark: Remark on the comparison.
    """

    name: str
    value: float
    unit: str
    source: str
    use: Use
    formula: str = ""
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published number with the simulated one.

    Args:
        published: The published number.
        simulated: The simulated number; None if it was not simulated.
    """

    published: Published
    simulated: float | None

    @property
    def ratio(self) -> float | None:
        """Simulated over published."""
        return ratio(self.simulated, self.published.value)

    @property
    def wrong(self) -> str:
        """The model's error: a reversed order, or a number off by more than 15 %; else empty."""
        if self.simulated is None:
            return ""
        if self.published.unit == "x" and (self.published.value - 1) * (self.simulated - 1) < 0:
            return "order reversed"
        if self.ratio is None:
            return "off" if self.simulated else ""
        return f"off by {self.ratio - 1:+.0%}" if abs(self.ratio - 1) > OFF else ""

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        published = self.published
        return {
            "name": published.name,
            "unit": published.unit,
            "source": published.source,
            "published": published.value,
            "simulated": self.simulated,
            "ratio": self.ratio,
            "use": published.use,
            "wrong": self.wrong,
            "remark": published.remark,
        }


def _read(table: str) -> Iterator[Published]:
    """Yield the numbers of a table of text."""
    section = use = ""
    for line in re.sub(r"\|\n +", "| ", table).strip().splitlines():
        if line.startswith("# "):
            section, _, use = line.removeprefix("# ").partition(", ")
            continue
        name, quantity, formula, remark = (*line.split(" | "), "", "")[:4]
        value, _, unit = quantity.partition(" ")
        source = f"HeteroLLM, section {section}"
        yield Published(name, float(value), unit, source, use, formula, remark)  # type: ignore[arg-type]


PUBLISHED: Final = tuple(_read(PUBLISHED_TABLE))


def comparisons(rows: PaperRows) -> Iterator[Comparison]:
    """Yield every published number with the simulated one."""
    for published in PUBLISHED:
        name, *words = published.formula.split() or [""]
        formula: Callable[..., float | None] | None = FORMULAS.get(name)
        yield Comparison(published, None if formula is None else formula(rows, *words))


# -- formulas: None where a row lacks ----------------------------------------------------------------------


def _some(values: Iterator[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Iterator[float | None]) -> float | None:
    found = _some(values)
    return sum(found) / len(found) if found else None


def _row(rows: PaperRows, way: str, *, game: bool = False) -> Simulated | None:
    """Return the row of the 8B model and 256 tokens."""
    return rows.get(MODELS["8B"], DECODE_AFTER, WAYS[way], GAME if game else None)


def _prefill(rows: PaperRows, model: str, length: str, way: str) -> float | None:
    return rows.prefill(MODELS[model], int(length), WAYS[way])


def _decode(rows: PaperRows, model: str, way: str) -> float | None:
    return rows.decode(MODELS[model], WAYS[way])


def _faster(rows: PaperRows, model: str, length: str, one: str, other: str) -> float | None:
    """Return a prompt's speed one way over the other, or the mean over the lengths of the paper's plots."""
    if length == "mean":
        return _mean(_faster(rows, model, str(tokens), one, other) for tokens in LENGTHS)
    return ratio(*(_prefill(rows, model, length, way) for way in (one, other)))


def _most_over_layer(rows: PaperRows) -> float | None:
    known = [name for name, model in MODELS.items() if model in rows.models]
    gains = (_faster(rows, name, str(length), "tensor", "layer") for name in known for length in LENGTHS)
    return max(_some(gains), default=None)


def _decodes(rows: PaperRows, model: str, one: str, other: str) -> float | None:
    return ratio(*(_decode(rows, model, way) for way in (one, other)))


def _waits(rows: PaperRows, lengths: str, way: str) -> float | None:
    """Return the time to the first token one way over tensor level's, at one length or over several."""
    several = JUST_PAST if lengths == "past" else ODD_LENGTHS
    times = (
        ratio(*(rows.ttft_ms(MODELS["8B"], tokens, one) for one in (WAYS[way], TENSOR)))
        for tokens in ((int(lengths),) if lengths.isdigit() else several)
    )
    if lengths in ("least", "most"):
        return (min if lengths == "least" else max)(_some(times), default=None)
    return _mean(times)


def _watts(rows: PaperRows, way: str) -> float | None:
    row = _row(rows, way)
    if row is None or row.prefill_joules is None or row.ttft_ms is None:
        return None
    return row.prefill_joules / row.ttft_ms * 1e3


def _more_watts(rows: PaperRows, one: str, other: str) -> float | None:
    return ratio(_watts(rows, one), _watts(rows, other))


def _more_joules(rows: PaperRows, one: str, other: str) -> float | None:
    return ratio(*(rows.prefill_joules(MODELS["8B"], WAYS[way]) for way in (one, other)))


def _decode_gbps(rows: PaperRows, way: str) -> float | None:
    row = _row(rows, way)
    return None if row is None or row.decode is None else float(row.decode["dram_gbps"])  # type: ignore[arg-type]


def _with_game(rows: PaperRows, way: str, alone: str) -> float | None:
    """Return the speed of a prompt with a game over that of another way without it."""
    row = _row(rows, way, game=True)
    return None if row is None else ratio(row.prefill_tokens_per_second, _prefill(rows, "8B", "256", alone))


def _kept(rows: PaperRows, way: str) -> float | None:
    return _with_game(rows, way, way)


def _kept_over_layer(rows: PaperRows) -> float | None:
    return ratio(_kept(rows, "tensor"), _kept(rows, "layer"))


def _game_over_layer(rows: PaperRows) -> float | None:
    return _with_game(rows, "tensor", "layer")


def _frames(rows: PaperRows, way: str) -> float | None:
    """Return frames of the game that are drawn in time during a prompt, in percent of those that are due."""
    row = _row(rows, way, game=True)
    frames: Any = None if row is None or row.prefill is None else row.prefill["frames"]
    return None if frames is None else 100 * frames["in_time"] / frames["due"]


def _build_share(rows: PaperRows) -> float | None:
    """Return the share of building in online-prepare's time at 135 tokens, an input of the model."""
    total_ms = rows.ttft_ms(MODELS["8B"], 135, ONLINE)
    return None if total_ms is None else 100 * BUILD_MS / total_ms


FORMULAS: Final = {
    function.__name__.removeprefix("_"): function
    for function in (
        *(_prefill, _decode, _faster, _most_over_layer, _decodes, _waits, _watts, _more_watts),
        *(_more_joules, _decode_gbps, _kept, _kept_over_layer, _game_over_layer, _frames, _build_share),
    )
}
"""Functions by the first word of a formula."""

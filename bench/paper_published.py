"""Published numbers with the simulated ones: the source of each, and its use in the model.

The numbers are HeteroLLM's (arXiv 2501.14794): all of section 5, and two of section 1. Its GPU-only engine is
PPL-OpenCL; the simulated level ``gpu`` is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    Way,
    ratio,
)

Use: TypeAlias = Literal["fitted", "input", "chose a parameter", "power only", "predicted", "not simulated"]
"""Use of a number in the model: its parameters were fitted to it (``fitted``), it is a parameter (``input``),
it chose an assumption, the power splits were made to meet it, or none."""

OFF: Final = 0.15
"""A simulated number further than this from the published one counts as wrong."""

Simulated: TypeAlias = Callable[[PaperRows], float | None]
"""Finds the simulated number among the rows."""

LLAMA_8B: Final = "llama-3-8b"
LLAMA_7B: Final = "llama-2-7b"
LLAMA_3B: Final = "llama-3.2-3b"
INTERN: Final = "internlm2-1.8b"
JUST_PAST: Final = (135, 300, 525, 600)
"""Lengths that slightly exceed a standard one."""

GAME: Final = LOADS[1]


@dataclass(frozen=True, slots=True)
class Published:
    """A published number and its counterpart among the rows.

    Args:
        name: Name of the quantity.
        value: Published value.
        unit: Unit of the value.
        source: Section that publishes it.
        use: Use of the number in the model.
        simulated: Returns the simulated number; None if the rows lack it.
        remark: Remark on the comparison.
    """

    name: str
    value: float
    unit: str
    source: str
    use: Use
    simulated: Simulated
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


def comparisons(rows: PaperRows) -> Iterator[Comparison]:
    """Yield every published number with the simulated one."""
    for published in PUBLISHED:
        yield Comparison(published, published.simulated(rows))


def _float(found: Any, name: str) -> float:  # noqa: ANN401 - a record of JSON
    return float(found[name])


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _mean(values: Iterator[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else None


def _faster(model: str, length: int, one: Way, other: Way) -> Simulated:
    """A prompt's speed one way over the other."""
    return lambda rows: ratio(rows.prefill(model, length, one), rows.prefill(model, length, other))


def _mean_faster(model: str, one: Way, other: Way) -> Simulated:
    """The mean over the lengths of the paper's plots."""
    return lambda rows: _mean(_faster(model, length, one, other)(rows) for length in LENGTHS)


def _decodes(model: str, one: Way, other: Way) -> Simulated:
    return lambda rows: ratio(rows.decode(model, one), rows.decode(model, other))


def _waits(length: int, way: Way) -> Simulated:
    """Time to the first token one way over tensor level's."""
    return lambda rows: ratio(rows.ttft_ms(LLAMA_8B, length, way), rows.ttft_ms(LLAMA_8B, length, TENSOR))


def _all_waits(rows: PaperRows, way: Way, lengths: Sequence[int]) -> list[float]:
    found = (_waits(length, way)(rows) for length in lengths)
    return [value for value in found if value is not None]


def _most_over_layer(rows: PaperRows) -> float | None:
    return _largest(
        _faster(model, length, TENSOR, LAYER)(rows) for model in rows.models for length in LENGTHS
    )


def _watts(way: Way) -> Simulated:
    def found(rows: PaperRows) -> float | None:
        row = rows.get(LLAMA_8B, DECODE_AFTER, way)
        if row is None or row.prefill_joules is None or row.prefill_ms is None:
            return None
        return row.prefill_joules / row.prefill_ms * 1e3

    return found


def _more_watts(one: Way, other: Way) -> Simulated:
    return lambda rows: ratio(_watts(one)(rows), _watts(other)(rows))


def _more_joules(one: Way, other: Way) -> Simulated:
    return lambda rows: ratio(*(rows.prefill_joules(LLAMA_8B, way) for way in (one, other)))


def _decode_gbps(way: Way) -> Simulated:
    def found(rows: PaperRows) -> float | None:
        row = rows.get(LLAMA_8B, DECODE_AFTER, way)
        return None if row is None or row.decode is None else _float(row.decode, "dram_gbps")

    return found


def _kept(way: Way) -> Simulated:
    """Speed of a prompt with a game over its speed alone."""

    def found(rows: PaperRows) -> float | None:
        row = rows.get(LLAMA_8B, DECODE_AFTER, way, GAME)
        alone = rows.prefill(LLAMA_8B, DECODE_AFTER, way)
        return None if row is None else ratio(row.prefill_tokens_per_second, alone)

    return found


def _kept_over_layer(rows: PaperRows) -> float | None:
    return ratio(_kept(TENSOR)(rows), _kept(LAYER)(rows))


def _game_over_layer(rows: PaperRows) -> float | None:
    row = rows.get(LLAMA_8B, DECODE_AFTER, TENSOR, GAME)
    alone = rows.prefill(LLAMA_8B, DECODE_AFTER, LAYER)
    return None if row is None else ratio(row.prefill_tokens_per_second, alone)


def _frames(way: Way) -> Simulated:
    """Frames of the game that are drawn in time during a prompt, in percent of those that are due."""

    def found(rows: PaperRows) -> float | None:
        row = rows.get(LLAMA_8B, DECODE_AFTER, way, GAME)
        if row is None or row.prefill is None:
            return None
        frames = row.prefill["frames"]
        return 100 * _float(frames, "in_time") / _float(frames, "due")

    return found


def _build_share(rows: PaperRows) -> float | None:
    """Share of building in online-prepare's time at 135 tokens: 408.4 ms are an input of the model."""
    total_ms = rows.ttft_ms(LLAMA_8B, 135, ONLINE)
    return None if total_ms is None else 100 * BUILD_MS / total_ms


def _nothing(_: PaperRows) -> None:
    return None


def _of(section: str, use: Use, *numbers: tuple[str, float, str, Simulated, str]) -> Iterator[Published]:
    for name, value, unit, simulated, remark in numbers:
        yield Published(name, value, unit, f"HeteroLLM, section {section}", use, simulated, remark)


def _others(section: str, over: str, *numbers: tuple[str, float]) -> Iterator[Published]:
    """Numbers of other engines, which are not simulated."""
    for engine, value in numbers:
        yield Published(
            f"{over} over {engine}", value, "x", f"HeteroLLM, section {section}", "not simulated", _nothing
        )


BUILD_MS: Final = 408.4

PUBLISHED: Final = (
    *_of(
        "5.2.1",
        "fitted",
        (
            "prefill 1024, tensor level, 8B",
            247.9,
            "tok/s",
            lambda rows: rows.prefill(LLAMA_8B, 1024, TENSOR),
            "",
        ),
    ),
    *_of(
        "5.2.1",
        "predicted",
        (
            "prefill 256, tensor level, InternLM-1.8B",
            1092,
            "tok/s",
            lambda rows: rows.prefill(INTERN, 256, TENSOR),
            "section 1: more than 1000",
        ),
        ("layer level over GPU, prefill 256, 8B", 2.99, "x", _faster(LLAMA_8B, 256, LAYER, GPU), ""),
        (
            "tensor over layer level, 8B, mean",
            1.302,
            "x",
            _mean_faster(LLAMA_8B, TENSOR, LAYER),
            "of 64, 256 and 1024 tokens; the fit has the one of 256",
        ),
        (
            "tensor over layer level, most",
            1.408,
            "x",
            _most_over_layer,
            "published of 32 tokens, which are not simulated; models and lengths here",
        ),
        (
            "tensor level over GPU, 3B, mean",
            3.51,
            "x",
            _mean_faster(LLAMA_3B, TENSOR, GPU),
            "of 64, 256 and 1024 tokens",
        ),
    ),
    *_others(
        "5.2.1", "layer level, prefill 256, 8B,", ("MNN-OpenCL", 5.85), ("llama.cpp", 24.9), ("MLC", 5.64)
    ),
    *_others("5.2.1", "layer level, prefill 64, 8B,", ("others, least", 3.67), ("others, most", 14.36)),
    *_others("5.2.1", "layer level, prefill 1024, 8B,", ("others, least", 3.17), ("others, most", 25.12)),
    *_others(
        "5.2.1", "tensor level, prefill 1024, 8B,", ("llama.cpp", 34.5), ("MLC", 9.99), ("MNN-OpenCL", 4.36)
    ),
    *_others("5.2.1", "tensor level, prefill, 7B, mean,", ("MNN-OpenCL", 6.05), ("MLC", 6.63)),
    *_others("5.2.1", "tensor level, prefill, 3B, mean,", ("MNN-OpenCL", 10.2)),
    Published(
        "MLLM-npu, prefill 256, 1.8B", 564, "tok/s", "HeteroLLM, section 5.2.1", "not simulated", _nothing
    ),
    *_of(
        "5.2.2",
        "predicted",
        ("online-prepare over tensor level, 525 tokens, 8B", 2.24, "x", _waits(525, ONLINE), ""),
        ("padding over tensor level, 525 tokens, 8B", 2.21, "x", _waits(525, PADDING), "2.12 in section 1"),
        ("pipe over tensor level, 525 tokens, 8B", 1.35, "x", _waits(525, PIPE), ""),
        (
            "padding over tensor level, just past a graph, 8B, mean",
            1.91,
            "x",
            lambda rows: _mean(iter(_all_waits(rows, PADDING, JUST_PAST))),
            "of 135, 300, 525 and 600 tokens here",
        ),
        (
            "pipe over tensor level, least",
            1 / (1 - 0.132),
            "x",
            lambda rows: min(_all_waits(rows, PIPE, ODD_LENGTHS), default=None),
            "published as 13.2 % less latency",
        ),
        (
            "pipe over tensor level, most",
            1 / (1 - 0.301),
            "x",
            lambda rows: max(_all_waits(rows, PIPE, ODD_LENGTHS), default=None),
            "published as 30.1 % less latency",
        ),
        ("share of building in online-prepare, 135 tokens, 8B", 34.6, "%", _build_share, ""),
    ),
    *_of(
        "5.2.2",
        "input",
        ("building graphs, 135 tokens", BUILD_MS, "ms", _nothing, ""),
        ("building graphs, 1000 tokens", 2050, "ms", _nothing, ""),
    ),
    *_of(
        "5.3",
        "fitted",
        (
            "decode after 256, tensor level, 8B",
            14.01,
            "tok/s",
            lambda rows: rows.decode(LLAMA_8B, TENSOR),
            "",
        ),
        (
            "tensor level over GPU, decode, 8B",
            1.234,
            "x",
            _decodes(LLAMA_8B, TENSOR, GPU),
            "the fit took 1.227, the mean of this and of 1.22 in version 2",
        ),
        ("GPU alone in decode, 8B", 43.3, "GB/s", _decode_gbps(GPU), ""),
        (
            "both processors in decode, 8B",
            59.1,
            "GB/s",
            _decode_gbps(TENSOR),
            "the fit took 59.5 for a moment at which both read; simulated is the mean of a token",
        ),
    ),
    *_of(
        "5.3",
        "predicted",
        ("decode after 256, tensor level, 3B", 29.9, "tok/s", lambda rows: rows.decode(LLAMA_3B, TENSOR), ""),
        (
            "decode after 256, tensor level, InternLM-1.8B",
            51.12,
            "tok/s",
            lambda rows: rows.decode(INTERN, TENSOR),
            "",
        ),
        ("tensor level over GPU, decode, 3B", 1.0852, "x", _decodes(LLAMA_3B, TENSOR, GPU), ""),
        ("tensor level over GPU, decode, InternLM-1.8B", 1.1338, "x", _decodes(INTERN, TENSOR, GPU), ""),
    ),
    *_others("5.3", "tensor level, decode, 8B,", ("MNN-OpenCL", 1.50), ("llama.cpp", 2.53), ("MLC", 1.52)),
    *_others("5.3", "tensor level, decode, InternLM-1.8B,", ("MNN-OpenCL", 1.94), ("MLC", 2.62)),
    *_of(
        "5.4",
        "fitted",
        (
            "prefill 256, tensor level, 8B",
            236.92,
            "tok/s",
            lambda rows: rows.prefill(LLAMA_8B, 256, TENSOR),
            "",
        ),
        (
            "prefill 256, tensor level, 8B, driver's synchronisation",
            196.44,
            "tok/s",
            lambda rows: rows.prefill(LLAMA_8B, 256, DRIVER),
            "the fit used the ratio of the two",
        ),
    ),
    *_of(
        "5.4",
        "chose a parameter",
        (
            "fast over driver's synchronisation, decode, 8B",
            4.01,
            "x",
            _decodes(LLAMA_8B, TENSOR, DRIVER),
            "in no fit, but npu.spill_dram_fraction was chosen by it",
        ),
    ),
    *_of(
        "5.4",
        "predicted",
        (
            "fast over driver's synchronisation, prefill, 8B, mean",
            1.243,
            "x",
            _mean_faster(LLAMA_8B, TENSOR, DRIVER),
            "of 64, 256 and 1024 tokens; the fit has the one of 256",
        ),
        (
            "fast over driver's synchronisation, prefill, 7B, mean",
            1.49,
            "x",
            _mean_faster(LLAMA_7B, TENSOR, DRIVER),
            "",
        ),
        (
            "fast over driver's synchronisation, prefill, InternLM-1.8B, mean",
            1.345,
            "x",
            _mean_faster(INTERN, TENSOR, DRIVER),
            "",
        ),
        *(
            (
                f"fast over driver's synchronisation, decode, {name}",
                2.2,
                "x",
                _decodes(model, TENSOR, DRIVER),
                "published once for all models but 8B",
            )
            for name, model in (("7B", LLAMA_7B), ("3B", LLAMA_3B), ("InternLM-1.8B", INTERN))
        ),
    ),
    *_of(
        "5.4",
        "not simulated",
        ("the same at layer level, prefill, 8B, mean", 1.158, "x", _nothing, ""),
        ("the same at layer level, prefill, 7B, mean", 1.317, "x", _nothing, ""),
        ("the same at layer level, prefill, InternLM-1.8B, mean", 1.267, "x", _nothing, ""),
    ),
    *_of(
        "5.5",
        "predicted",
        (
            "prefill 256 with a game over alone, layer level",
            1 - 0.0957,
            "",
            _kept(LAYER),
            "a game of 3 ms a frame here",
        ),
        ("prefill 256 with a game over alone, tensor level", 1 - 0.0726, "", _kept(TENSOR), "the same"),
        (
            "the second over the first",
            (1 - 0.0726) / (1 - 0.0957),
            "x",
            _kept_over_layer,
            "so at 1 and 6 ms a frame, too",
        ),
        ("tensor level with a game over layer level alone", 1.153, "x", _game_over_layer, ""),
        ("frames in time, layer level", 100, "%", _frames(LAYER), "published as a steady 60 a second"),
        ("frames in time, tensor level", 100, "%", _frames(TENSOR), "published as a steady 60 a second"),
        ("frames in time, GPU", 0, "%", _frames(GPU), "published as dropping to zero"),
    ),
    *_of(
        "5.6",
        "fitted",
        ("tensor over layer level, prefill 256, 8B", 1.244, "x", _faster(LLAMA_8B, 256, TENSOR, LAYER), ""),
    ),
    *_of(
        "5.6",
        "predicted",
        (
            "tensor level over GPU, prefill 256, 8B",
            3.72,
            "x",
            _faster(LLAMA_8B, 256, TENSOR, GPU),
            "published as 2.72 times faster",
        ),
        (
            "power, tensor over layer level",
            1.232,
            "x",
            _more_watts(TENSOR, LAYER),
            "the middle of three assumptions",
        ),
        (
            "power, tensor level over GPU",
            1 - 0.367,
            "x",
            _more_watts(TENSOR, GPU),
            "the middle of three assumptions",
        ),
        (
            "energy, tensor over layer level",
            1.033,
            "x",
            _more_joules(TENSOR, LAYER),
            "the middle of three assumptions",
        ),
    ),
    *_of(
        "5.6",
        "power only",
        ("power, layer level", 2.23, "W", _watts(LAYER), "the middle of three assumptions"),
        (
            "energy, GPU over tensor level",
            5.87,
            "x",
            _more_joules(GPU, TENSOR),
            "the splits meet it with a slower GPU than the modelled one",
        ),
    ),
)
"""All numbers of section 5, in its order."""

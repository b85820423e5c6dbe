"""Published numbers beside the simulated ones: where each is from, and whether the model was fitted to it.

The numbers are HeteroLLM's (arXiv 2501.14794, both versions), as far as they are known here. Other published
results are not in the table, and the model was not fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from paper_cases import (
    DECODE_AFTER,
    DRIVER,
    GPU,
    LAYER,
    LENGTHS,
    ODD_LENGTHS,
    PADDING,
    TENSOR,
    PaperRows,
    ratio,
)

Use: TypeAlias = Literal["fitted", "not fitted", "power only"]
"""Whether the parameters were fitted to a number; ``power only``: the split of power was made to meet it."""

LLAMA_8B: Final = "llama-3-8b"
CALIBRATION: Final = "HeteroLLM, end to end, Llama-3-8B"


@dataclass(frozen=True, slots=True)
class Published:
    """A published number and what stands for it among the rows.

    Args:
        name: What it is.
        value: As published.
        unit: Of the value.
        source: Where it was published.
        use: Whether the model was fitted to it.
        simulated: Returns the same of the rows; None where they lack it.
        remark: What to know about the comparison.
    """

    name: str
    value: float
    unit: str
    source: str
    use: Use
    simulated: Callable[[PaperRows], float | None]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published number beside the simulated one.

    Args:
        published: The number.
        simulated: What the model says; None where it was not simulated.
    """

    published: Published
    simulated: float | None

    @property
    def ratio(self) -> float | None:
        """Simulated over published."""
        return ratio(self.simulated, self.published.value)

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
            "remark": published.remark,
        }


def comparisons(rows: PaperRows) -> Iterator[Comparison]:
    """Yield every published number with the simulated one."""
    for published in PUBLISHED:
        yield Comparison(published, published.simulated(rows))


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _most_over_layer(rows: PaperRows) -> float | None:
    return _largest(
        ratio(rows.prefill(model, length, TENSOR), rows.prefill(model, length, LAYER))
        for model in rows.models
        for length in LENGTHS
    )


def _most_over_padding(rows: PaperRows) -> float | None:
    return _largest(
        ratio(rows.ttft_ms(LLAMA_8B, length, PADDING), rows.ttft_ms(LLAMA_8B, length, TENSOR))
        for length in ODD_LENGTHS
    )


def _fastest(rows: PaperRows) -> float | None:
    return _largest(rows.prefill(model, length, TENSOR) for model in rows.models for length in LENGTHS)


def _watts(rows: PaperRows) -> float | None:
    row = rows.get(LLAMA_8B, DECODE_AFTER, LAYER)
    if row is None or row.prefill_joules is None or row.prefill_ms is None:
        return None
    return row.prefill_joules / row.prefill_ms * 1e3


def _energy_of_gpu(rows: PaperRows) -> float | None:
    return ratio(*(rows.prefill_joules(LLAMA_8B, way) for way in (GPU, TENSOR)))


PUBLISHED: Final = (
    Published(
        "prefill of 256 tokens, tensor level",
        236.92,
        "tok/s",
        CALIBRATION,
        "fitted",
        lambda rows: rows.prefill(LLAMA_8B, 256, TENSOR),
    ),
    Published(
        "prefill of 256 tokens, tensor level, driver's hand-overs",
        196.44,
        "tok/s",
        CALIBRATION,
        "fitted",
        lambda rows: rows.prefill(LLAMA_8B, 256, DRIVER),
        "the fit used the ratio of the two",
    ),
    Published(
        "tensor over layer level, prefill of 256 tokens",
        1.244,
        "x",
        CALIBRATION,
        "fitted",
        lambda rows: ratio(rows.prefill(LLAMA_8B, 256, TENSOR), rows.prefill(LLAMA_8B, 256, LAYER)),
    ),
    Published(
        "prefill of 1024 tokens, tensor level",
        247.9,
        "tok/s",
        CALIBRATION,
        "fitted",
        lambda rows: rows.prefill(LLAMA_8B, 1024, TENSOR),
    ),
    Published(
        "decode after 256 tokens, tensor level",
        14.01,
        "tok/s",
        CALIBRATION,
        "fitted",
        lambda rows: rows.decode(LLAMA_8B, TENSOR),
    ),
    Published(
        "tensor level over GPU only, decode",
        1.227,
        "x",
        CALIBRATION,
        "fitted",
        lambda rows: ratio(rows.decode(LLAMA_8B, TENSOR), rows.decode(LLAMA_8B, GPU)),
        "published as 22 to 23.4 %",
    ),
    Published(
        "fast over driver's hand-overs, decode",
        4.01,
        "x",
        CALIBRATION,
        "not fitted",
        lambda rows: ratio(rows.decode(LLAMA_8B, TENSOR), rows.decode(LLAMA_8B, DRIVER)),
        "follows from the plan: each cut pays the driver four times",
    ),
    Published(
        "tensor over layer level, most",
        1.4,
        "x",
        "HeteroLLM, section 1",
        "not fitted",
        _most_over_layer,
        "published as nearly 40 %; models and lengths here",
    ),
    Published(
        "padding over tensor level, odd lengths, most",
        2.12,
        "x",
        "HeteroLLM, section 1",
        "not fitted",
        _most_over_padding,
        "published as up to; lengths here",
    ),
    Published(
        "fastest prefill of a model of billions",
        1000.0,
        "tok/s",
        "HeteroLLM, section 1",
        "not fitted",
        _fastest,
        "published as more than 1000; the model is not named there",
    ),
    Published(
        "power, layer level, prefill of 256 tokens",
        2.23,
        "W",
        CALIBRATION,
        "power only",
        _watts,
        "the middle of three assumptions",
    ),
    Published(
        "energy of GPU only over tensor level, prefill of 256 tokens",
        5.87,
        "x",
        CALIBRATION,
        "power only",
        _energy_of_gpu,
        "published of another engine's GPU kernels, which take longer",
    ),
)

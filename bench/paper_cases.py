"""The cases of HeteroLLM's evaluation (arXiv 2501.14794, section 5) that `paper.py` simulates, and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rungs import RungRequest
from simulated_rows import Simulated

from heterollm.kernels.sim import GpuLoad
from heterollm.simulate.request import SimulatedLengthPolicy, SimulatedSync

PAPER_MODELS: Final = ("llama-3-8b", "llama-2-7b", "llama-3.2-3b", "internlm2-1.8b")
PAPER_SOC: Final = "snapdragon-8gen3-paper"
LENGTHS: Final = (64, 256, 1024)
ODD_LENGTHS: Final = (135, 300, 525, 600, 1000)
DECODE_AFTER: Final = 256
DECODED: Final = 16
"""Decoded tokens; virtual time repeats itself, so few are enough."""

LOADS: Final = (GpuLoad(60.0, 1000.0), GpuLoad(60.0, 3000.0), GpuLoad(60.0, 6000.0))
"""Games of 60 frames a second; the paper does not state its game's GPU time a frame."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a model.

    Args:
        name: Name in tables.
        level: Level of the plan.
        every_form: Whether graphs may have forms that the paper lacks, such as a k-split of FFN-down.
        length_policy: How lengths without a graph run.
        sync: How the processors wait for each other.
        resolve: Whether the plan is solved for ``sync``.
        left_out: Graph forms that the plan cannot take.
    """

    name: str
    level: str
    every_form: bool = False
    length_policy: SimulatedLengthPolicy = "padding"
    sync: SimulatedSync = "predict"
    resolve: bool = False
    left_out: tuple[str, ...] = ()

    def request(self, model: str, prompt: int, decode: int, load: GpuLoad | None, soc: str) -> RungRequest:
        """Return the case of a model and a prompt run this way."""
        return RungRequest(
            model,
            soc=soc,
            prompt=prompt,
            decode=decode,
            level=self.level,
            plan_for="prompt",
            length_policy=self.length_policy,
            sync=self.sync,
            resolve=self.resolve,
            load=load,
            every_form=self.every_form,
            left_out=self.left_out,
        )


GPU: Final = Way("gpu", "gpu")
NPU: Final = Way("npu", "npu")
LAYER: Final = Way("layer", "layer")
TENSOR: Final = Way("tensor", "tensor")
PAPER_WAYS: Final = (GPU, NPU, LAYER, TENSOR)

PIECES: Final = Way("tensor, k-chunked", "tensor", every_form=True)
BLOCK: Final = Way("block", "block", every_form=True, left_out=("k_chunked", "ffn_k_chunked"))
BOTH: Final = Way("block, k-chunked", "block", every_form=True)
OWN_WAYS: Final = (PIECES, BLOCK, BOTH)
"""Additions of this project: a k-split of long rows, the feed-forward network split as a whole, and both."""

ONLINE: Final = Way("online-prepare", "layer", length_policy="online")
PIPE: Final = Way("pipe", "layer", length_policy="pipe")
PADDING: Final = Way("padding", "layer")
ODD_WAYS: Final = (ONLINE, PADDING, PIPE, TENSOR, BOTH)

DRIVER: Final = Way("tensor, driver", "tensor", sync="finish")
RESOLVED: Final = Way("tensor, driver, solved for it", "tensor", sync="finish", resolve=True)
GAME_WAYS: Final = (GPU, LAYER, TENSOR)


def paper_cases(models: Sequence[str] = PAPER_MODELS, soc: str = PAPER_SOC) -> tuple[RungRequest, ...]:
    """Return every case, in an order in which neighbours share profiles and plans.

    Args:
        models: The models.
        soc: The SoC.
    """
    return tuple(case for model in models for case in _cases_of(model, soc))


def _cases_of(model: str, soc: str) -> Iterator[RungRequest]:
    for length in LENGTHS:
        decode = DECODED if length == DECODE_AFTER else 0
        for way in (*PAPER_WAYS, *OWN_WAYS, DRIVER):
            yield way.request(model, length, decode, None, soc)
    yield RESOLVED.request(model, DECODE_AFTER, DECODED, None, soc)
    for length in ODD_LENGTHS:
        for way in ODD_WAYS:
            yield way.request(model, length, 0, None, soc)
    for load in LOADS:
        for way in GAME_WAYS:
            yield way.request(model, DECODE_AFTER, DECODED, load, soc)


class PaperRows:
    """The rows of a sweep by case.

    Args:
        rows: Rows of a sweep over :func:`paper_cases`.
    """

    def __init__(self, rows: Sequence[Simulated]) -> None:
        self.rows = tuple(rows)
        self.models = tuple(dict.fromkeys(row.model for row in rows))
        self._found: dict[tuple[object, ...], Simulated] = {_key_of(row): row for row in rows}

    def get(self, model: str, prompt: int, way: Way, load: GpuLoad | None = None) -> Simulated | None:
        """Return a row; None if it is missing or failed."""
        text = None if load is None else str(load)
        key = model, prompt, way.level, way.every_form, way.left_out, way.length_policy, way.sync
        row = self._found.get((*key, way.resolve, text))
        return None if row is None or row.error is not None else row

    def prefill(self, model: str, prompt: int, way: Way) -> float | None:
        """Return tokens a second of a prompt."""
        row = self.get(model, prompt, way)
        return None if row is None else row.prefill_tokens_per_second

    def ttft_ms(self, model: str, prompt: int, way: Way) -> float | None:
        """Return the time to the first token."""
        row = self.get(model, prompt, way)
        return None if row is None else row.ttft_ms

    def prefill_joules(self, model: str, way: Way) -> float | None:
        """Return the energy of a prompt of 256, the middle of its range."""
        row = self.get(model, DECODE_AFTER, way)
        return None if row is None else row.prefill_joules

    def decode(self, model: str, way: Way) -> float | None:
        """Return tokens a second after a prompt of 256."""
        row = self.get(model, DECODE_AFTER, way)
        return None if row is None else row.decode_tokens_per_second


def _key_of(row: Simulated) -> tuple[object, ...]:
    return (
        *(row.model, row.prompt_tokens, row.plan_level, row.every_form, tuple(row.left_out)),
        *(row.length_policy, row.sync, row.resolve, row.gpu_load),
    )


def ratio(one: float | None, other: float | None) -> float | None:
    """Return one number over another; None if one is missing."""
    return None if one is None or other is None or other == 0 else one / other

"""Tests and configurations of ablation.py, and an estimate of their time. Used by it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from heterollm.benchmarks import Configuration, expand
from heterollm.benchmarks.cases import Case, Threads

SPLIT: Final[Threads] = (1, 1)
WHOLE: Final[Threads] = (2, 0)
ALIGNED: Final = (256,)
ODD: Final = (135, 300, 525, 600, 1000)
DEPTH: Final = 256
STANDARD_LENGTHS: Final = (32, 64, 128, 256, 512, 1024)
"""Of the NPU part's graphs on `host`, to count padded tokens in an estimate."""

SLOW_DECODE_S: Final = 4.0
"""A sample of decode that would take longer gets fewer tokens, down to `FEWEST`."""
FEWEST: Final = 4
WARM_UP_S: Final = 3.0
LOAD_S: Final = 4.0
"""To load a model and compare its logits."""

TINYLLAMA_BYTES: Final = 2.2e9
RATES: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("w4a16", "gpu"): (43, 13.5),
    ("w4a16", "gpu whole"): (75, 21),
    ("w4a16", "npu"): (42, 1.3),
    ("w4a16", "layer"): (46, 13),
    ("w4a16", "tensor operator"): (79, 10),
    ("w4a16", "tensor"): (78, 15.8),
    ("w4a16", "block"): (67, 16),
    ("w4a8", "gpu"): (128, 18.9),
    ("w4a8", "gpu whole"): (210, 28),
    ("w4a8", "npu"): (45, 4),
    ("w4a8", "layer"): (45, 18),
    ("w4a8", "tensor operator"): (125, 14),
    ("w4a8", "tensor"): (130, 21),
    ("w4a8", "block"): (150, 20),
    ("w4a16", "llama.cpp"): (150, 25),
}
"""Tokens a second of TinyLlama-1.1B's shape in prefill and decode, from earlier runs on two cores of a Xeon
with AVX-512 VNNI: for estimates, and to tell what is too slow for all tokens. Never compared with."""


@dataclass(frozen=True, slots=True)
class Part:
    """One precision: everything in it takes turns.

    Args:
        precision: Of weights and activations.
        configurations: The columns of the table.
        cases: The tests.
        light: Tests of which one sample is enough.
        left_out: What is not run.
        remarks: What was left out or shortened, and why.
    """

    precision: str
    configurations: tuple[Configuration, ...]
    cases: tuple[Case, ...]
    light: frozenset[Case]
    left_out: frozenset[tuple[Configuration, Case]]
    remarks: tuple[str, ...]


def configurations(precision: str, *, llama_cpp: bool) -> tuple[Configuration, ...]:
    """Return the columns of the table of one precision, in its order."""
    common = {"precisions": [precision], "device": "host"}
    found = expand(levels=["gpu"], threads=[SPLIT], **common)
    found += expand(levels=["npu"], policies=["padding", "pipe"], threads=[SPLIT], **common)
    found += expand(levels=["layer"], threads=[SPLIT], **common)
    found += expand(levels=["tensor"], syncs=["operator", "auto"], threads=[SPLIT], **common)
    found += expand(levels=["block"], threads=[SPLIT], **common)
    found += expand(levels=["gpu"], threads=[WHOLE], **common)
    if llama_cpp:
        found += expand(engines=["llama.cpp"], threads=[WHOLE], **common)
    return found


def waits(precision: str) -> tuple[Configuration, ...]:
    """Return the configurations of the bundled model that differ in how they wait."""
    common = {"precisions": [precision], "threads": [SPLIT], "device": "host"}
    return expand(levels=["npu"], syncs=["operator", "auto"], **common)


def part(
    precision: str, aligned: Sequence[int], odd: Sequence[int], decoded: int, *, llama_cpp: bool, scale: float
) -> Part:
    """Return the tests and configurations of one precision.

    Args:
        precision: The precision.
        aligned: Prompts of full repetitions, and with traces.
        odd: Prompts of which one sample is enough.
        decoded: Tokens of a sample of decode.
        llama_cpp: Whether llama.cpp takes part.
        scale: Size of the model's checkpoint by that of TinyLlama's shape.
    """
    columns = configurations(precision, llama_cpp=llama_cpp)
    whole = Case(0, decoded, DEPTH)
    cases = [*(Case(length, 0) for length in aligned)]
    left_out: set[tuple[Configuration, Case]] = set()
    remarks, own = [], {}
    if decoded:
        for one in columns:
            if one.length_policy == "pipe":
                remarks.append(f"{one.label} decodes as padding does, and is left out there.")
                continue
            rate = rates(one)[1] / scale
            count = min(decoded, max(FEWEST, int(SLOW_DECODE_S * rate)))
            own[one] = replace(whole, n_gen=count)
            if count < decoded:
                remarks.append(
                    f"{one.label} decodes {count} tokens a sample instead of {decoded}, as it was seen to "
                    f"write {rate:.1f} a second."
                )
        cases += dict.fromkeys(own.values())
    light = [Case(length, 0) for length in odd]
    for one in columns:
        left_out |= {(one, case) for case in cases if case.n_gen and own.get(one) != case}
    return Part(precision, columns, (*cases, *light), frozenset(light), frozenset(left_out), tuple(remarks))


def rates(one: Configuration) -> tuple[float, float]:
    """Return the rates of an earlier run that come nearest."""
    kind = one.plan_level if one.engine == "self" else one.engine
    if one.engine == "self" and one.threads == WHOLE:
        kind = f"{kind} whole"
    if one.sync == "operator" and kind == "tensor":
        kind = "tensor operator"
    return RATES[one.precision, kind]


def estimate_s(this: Part, repetitions: int, *, trace: bool, scale: float) -> float:
    """Return about how long a part takes on two cores like those that the rates are from."""
    return sum(_estimates(this, repetitions, trace, scale))


def _estimates(this: Part, repetitions: int, trace: bool, scale: float) -> Iterator[float]:
    for one in this.configurations:
        traced = trace and one.engine == "self"
        yield LOAD_S * (2 if traced else 1)
        prefill, decode = (rate / scale for rate in rates(one))
        for case in this.cases:
            if (one, case) in this.left_out:
                continue
            length = case.n_prompt
            if one.length_policy == "padding" and length:
                length = next((at for at in STANDARD_LENGTHS if at >= length), length)
            sample_s = length / prefill + case.n_gen / decode
            times = 1 if case in this.light else repetitions + (2 if traced else 0)
            warm = case not in this.light or sample_s < WARM_UP_S
            fills = (2 if traced else 1) * case.n_depth / prefill
            yield (times + warm) * sample_s + fills


def checkpoint_scale(folder: Path) -> float:
    """Return the size of a checkpoint by that of TinyLlama's shape."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / TINYLLAMA_BYTES

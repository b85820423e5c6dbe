"""What the project asks of a split on `host`, and whether rows reach it. Used by ablation.py.

Ratios are of medians taken in turns, with the 95 % interval of the rounds. An aim is reached if the ratio is,
and "within the noise" is added where the interval reaches to the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.benchmarks import BenchRow, best_of
from heterollm.benchmarks.verdict import compare_rows, is_split

Chosen: TypeAlias = Callable[[BenchRow], bool]

ODD_LENGTHS: Final = (135, 300, 525, 600, 1000)
JUST_PAST: Final = 1.2
"""A length "just passes" a standard one if it is at most so many times as long."""

STANDARD_LENGTHS: Final = (32, 64, 128, 256, 512, 1024)
PREDICTION_FRACTION: Final = 0.15

WAITS_TEST: Final = "tg64 @ d32"
"""The test of the bundled model, and of nothing else."""


def gpu_alone(row: BenchRow) -> bool:
    """`gpu` on one core of two."""
    return row.engine == "self" and row.plan_level == "gpu" and row.asked.npu_threads != 0


def gpu_whole(row: BenchRow) -> bool:
    """`gpu` on all cores."""
    return row.engine == "self" and row.plan_level == "gpu" and row.asked.npu_threads == 0


def npu_alone(row: BenchRow) -> bool:
    """The linears on the NPU part, with any length policy."""
    return row.plan_level in ("npu", "layer") and row.asked.sync == "auto"


def one_part(row: BenchRow) -> bool:
    """One part alone computes the linears of a pass."""
    return gpu_alone(row) or npu_alone(row)


def padding(row: BenchRow) -> bool:
    """The NPU with padding."""
    return row.plan_level == "npu" and row.asked.length_policy == "padding"


def npu_lengths(row: BenchRow) -> bool:
    """The NPU with padding or as a pipe."""
    return row.plan_level == "npu" and row.asked.sync == "auto"


def split(row: BenchRow) -> bool:
    """Plans of the solver, with fast waits."""
    return is_split(row) and row.asked.sync == "auto"


def tensor(row: BenchRow) -> bool:
    """Level `tensor` with fast waits."""
    return split(row) and row.plan_level == "tensor"


def llama_cpp(row: BenchRow) -> bool:
    """llama.cpp."""
    return row.engine == "llama.cpp"


@dataclass(frozen=True, slots=True)
class Aim:
    """A ratio that is asked for.

    Args:
        text: What it is.
        test: Of which tests: the beginning of their name.
        precision: Of which precision; other engines have none.
        ours: Rows of which the fastest counts.
        theirs: Rows of which the fastest is the measure.
        asked: The ratio.
        hoped: A ratio that would be better still.
    """

    text: str
    test: str
    precision: str
    ours: Chosen
    theirs: Chosen
    asked: float
    hoped: float | None = None


def just_past(length: int) -> bool:
    """Whether a length just passes a standard one."""
    below = max((standard for standard in STANDARD_LENGTHS if standard < length), default=0)
    return below > 0 and length <= JUST_PAST * below


def aims() -> Iterator[Aim]:
    """Yield every aim, in the order of the issue that set them."""
    for precision in ("w4a16", "w4a8"):
        yield Aim("both parts against the better alone", "pp256", precision, split, one_part, 1.65, 1.8)
    yield Aim("both parts against the better alone", "tg", "w4a8", split, one_part, 1.35, 1.6)
    yield Aim("not slower than the GPU part alone", "tg", "w4a16", split, gpu_alone, 1.0)
    for precision in ("w4a16", "w4a8"):
        for length in ODD_LENGTHS:
            text = "not slower than the better of padding and pipe"
            yield Aim(text, f"pp{length}", precision, split, npu_lengths, 1.0)
            if just_past(length):
                yield Aim("against padding, just past a graph", f"pp{length}", precision, split, padding, 1.2)
    for precision, hoped in (("w4a16", None), ("w4a8", 1.2)):
        yield Aim("both parts against llama.cpp, all cores", "pp256", precision, split, llama_cpp, 1.0, hoped)
    yield Aim("both parts against llama.cpp, all cores", "tg", "w4a8", split, llama_cpp, 0.95, 1.1)


def judge_aims(rows: Sequence[BenchRow]) -> list[str]:
    """Return a line for each aim, reached or missed, with the numbers, and the rows that splits must beat."""
    large = [row for row in rows if row.usable and not is_of_waits(row)]
    lines = ["", "Aims", "----"]
    lines += [_line(aim, large) for aim in aims()]
    lines += _waits([row for row in rows if row.usable and is_of_waits(row)])
    lines += list(_predictions(large))
    lines += [
        "",
        "Beside `gpu` on all cores, which a split of one processor has to beat to be worth anything",
        "",
    ]
    for precision in ("w4a16", "w4a8"):
        for test in ("pp256", "tg"):
            whole = Aim("both parts against gpu on all cores", test, precision, split, gpu_whole, 1.0)
            theirs = Aim("gpu on all cores against llama.cpp", test, precision, gpu_whole, llama_cpp, 1.0)
            lines += [_line(whole, large), _line(theirs, large)]
    return lines


def _line(aim: Aim, rows: Sequence[BenchRow]) -> str:
    name = f"{aim.precision} {aim.test}: {aim.text}"
    own = {row.run for row in rows if row.engine == "self" and row.precision == aim.precision}
    alike = [
        row
        for row in rows
        if row.phase != "both"
        and (row.test == aim.test or (aim.test == "tg" and row.phase == "decode"))
        and (row.precision == aim.precision if row.engine == "self" else row.run in own)
    ]
    ours, theirs = (best_of([row for row in alike if chosen(row)]) for chosen in (aim.ours, aim.theirs))
    if ours is None or theirs is None:
        return f"not measured | {name}"
    change = compare_rows(theirs, ours)
    wanted = f"{aim.asked:.2f} asked" + ("" if aim.hoped is None else f", {aim.hoped:.2f} hoped for")
    word = _word(change.ratio, change.low, change.high, aim.asked)
    rates = " / ".join(f"{row.label} {row.times.median_ts:.1f}" for row in (ours, theirs))
    return f"{word} | {name}: {change}, {wanted} | {rates} tokens/s"


def _word(ratio: float, low: float, high: float, asked: float) -> str:
    word = "reached" if ratio >= asked else f"missed by {1 - ratio / asked:.0%}"
    return f"{word}, within the noise" if low < asked <= high else word


def is_of_waits(row: BenchRow) -> bool:
    """Whether a row belongs to the comparison of waits on the bundled model."""
    return row.test == WAITS_TEST


def _waits(rows: Sequence[BenchRow]) -> list[str]:
    slow, fast = (
        next((row for row in rows if row.asked.sync == sync), None) for sync in ("operator", "auto")
    )
    name = "decode of the bundled model: fast waits against clFinish after every operator"
    if slow is None or fast is None:
        return [f"not measured | {name}"]
    change = compare_rows(slow, fast)
    return [
        f"{_word(change.ratio, change.low, change.high, 1.3)} | {name}: {change}, 1.30 asked | {fast.label}"
    ]


def _predictions(rows: Sequence[BenchRow]) -> Iterator[str]:
    for row in rows:
        if not tensor(row) or not (row.test == "pp256" or row.phase == "decode"):
            continue
        name = f"{row.precision} {row.test}: predicted time within {PREDICTION_FRACTION:.0%} of the measured"
        if row.account.predicted_ms is None or not row.times.measured_ms:
            yield f"not measured | {name}"
            continue
        off = row.account.predicted_ms / row.times.measured_ms - 1.0
        word = (
            "reached"
            if abs(off) <= PREDICTION_FRACTION
            else f"missed by {abs(off) - PREDICTION_FRACTION:.0%}"
        )
        times = f"{row.account.predicted_ms:.1f} ms predicted, {row.times.measured_ms:.1f} ms measured"
        yield f"{word} | {name}: {times}, {off:+.0%}"

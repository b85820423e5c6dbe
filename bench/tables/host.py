"""Rows of the ablation in docs/bench.md: which ones a claim compares, and their table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from heterollm.benchmarks import BenchRow
from heterollm.benchmarks.verdict import is_split

Chosen: TypeAlias = Callable[[BenchRow], bool]

ODD_LENGTHS: Final = (135, 300, 525, 600, 1000)
JUST_PAST: Final = 1.2
"""A length "just passes" a standard one if it is at most so many times as long."""

STANDARD_LENGTHS: Final = (32, 64, 128, 256, 512, 1024)

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


def llama_cpp(row: BenchRow) -> bool:
    """llama.cpp."""
    return row.engine == "llama.cpp"


def just_past(length: int) -> bool:
    """Whether a length just passes a standard one."""
    below = max((standard for standard in STANDARD_LENGTHS if standard < length), default=0)
    return below > 0 and length <= JUST_PAST * below


def is_of_waits(row: BenchRow) -> bool:
    """Whether a row belongs to the comparison of waits on the bundled model."""
    return row.test == WAITS_TEST


# -- the table --------------------------------------------------------------------------------------------


def _level(level: str, *, policy: str | None = None, sync: str = "auto", whole: bool = False) -> Chosen:
    def chosen(row: BenchRow) -> bool:
        return (
            row.engine == "self"
            and row.asked.asked_level == level
            and row.asked.sync == sync
            and (row.asked.npu_threads == 0) is whole
            and (policy is None or row.asked.length_policy == policy)
        )

    return chosen


COLUMNS: Final[dict[str, Chosen]] = {
    "`gpu`, one core": _level("gpu"),
    "`npu`, padded": _level("npu", policy="padding"),
    "`npu`, pipe": _level("npu", policy="pipe"),
    "`layer`": _level("layer"),
    "`tensor`, clFinish": _level("tensor", sync="operator"),
    "`tensor`": _level("tensor"),
    "`block`": _level("block"),
    "`gpu`, both cores": _level("gpu", whole=True),
    "llama.cpp, both cores": lambda row: row.engine == "llama.cpp",
}


def latest(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the last of the rows that have the same test, configuration and precision of the run."""
    precisions = precisions_of_runs(rows)
    found: dict[tuple[object, ...], BenchRow] = {}
    for row in rows:
        key = (
            row.setup.model_filename,
            row.test,
            row.label,
            row.setup.device,
            precisions.get(row.run, row.precision),
        )
        found.pop(key, None)
        found[key] = row
    return list(found.values())


def precisions_of_runs(rows: Iterable[BenchRow]) -> dict[str | None, str]:
    """Return the precision of heterollm's own rows by run."""
    return {row.run: row.precision for row in rows if row.engine == "self" and row.run is not None}


def _place(row: BenchRow) -> tuple[object, ...]:
    column = next((index for index, chosen in enumerate(COLUMNS.values()) if chosen(row)), len(COLUMNS))
    return (
        row.phase != "prefill",
        row.asked.n_prompt % 256 != 0,
        row.asked.n_prompt,
        row.asked.n_depth,
        -row.asked.n_gen,
        column,
    )


def table(rows: Sequence[BenchRow]) -> list[str]:
    """Return the lines of a Markdown table: medians in tokens a second, a line for each length and precision.

    Args:
        rows: Of one model; decode of all configurations stands in one line, however many tokens each wrote.
    """
    usable = [row for row in rows if row.usable]
    precisions = precisions_of_runs(rows)
    lines: dict[tuple[str, str], dict[str, BenchRow]] = {}
    for row in sorted(usable, key=_place):
        precision = precisions.get(row.run, row.precision)
        what = f"prefill {row.asked.n_prompt}" if row.asked.n_prompt else f"decode behind {row.asked.n_depth}"
        name = next((name for name, chosen in COLUMNS.items() if chosen(row)), None)
        if name is not None:
            lines.setdefault((what, precision), {}).setdefault(name, row)
    shown = [name for name in COLUMNS if any(name in cells for cells in lines.values())]
    made = [f"| tokens a second | {' | '.join(shown)} |", f"|---|{'---:|' * len(shown)}"]
    for (what, precision), cells in sorted(lines.items(), key=lambda item: item[0][1] != "w4a16"):
        texts = [f"{cells[name].times.median_ts:.1f}" if name in cells else "" for name in shown]
        made.append(f"| {what}, `{precision}` | {' | '.join(texts)} |")
    return made

"""The NPU's stages, order of operands and effect of ``k``, as in section 3 of the HeteroLLM paper."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from heterollm.base import Section
from heterollm.kernels.npu import K_SPLIT_COLUMNS

if TYPE_CHECKING:
    from heterollm.profiler import ProfileSummary, SweepRow

Curves: TypeAlias = Mapping[str, Mapping[int, float]]
"""Values by tokens or inputs, by the name of the curve."""

STAGE_TOKENS: Final = 32
ORDERS: Final = ("weight_first", "activation_first")
EMULATED_COST: Final = "CPU time of emulation"
TILES: Final[Mapping[bool | None, str]] = {
    None: "Too even to tell steps: predictions assume steps of 32 tokens.",
    False: "Times move in steps of 32 tokens, as predictions assume.",
    True: "Times rise within 32 tokens: predictions take the line between two multiples.",
}
"""Notes by what the lengths behind multiples of 32 show."""

RISE: Final = 1.25
"""Ratio of a weight's cost to the least that counts as a rise."""


def npu_sections(summary: ProfileSummary) -> Iterator[Section]:
    """Yield the tables of ``profile --characterise``, as far as they were measured."""
    if not summary.sweeps:
        note = "Not measured; `heterollm profile --update --characterise` measures them."
        yield Section("NPU: stages, order of operands and effect of k", notes=(note,))
        return
    cost = EMULATED_COST if is_emulated(summary) else f"{summary.time_kind} time"
    unit = f"ms, {cost}"
    stages = stage_curves(summary)
    notes = [*(_steps(*item) for item in stages.items()), TILES[summary.grows_within_tiles]]
    columns = column_curves(summary)
    if not columns:
        notes.append("`heterollm profile --update --characterise` measures the order of operands and k, too.")
    yield _table(f"NPU: stages, {unit}", "tokens", stages, notes)
    if not columns:
        return
    ratios = order_ratios(summary)
    notes = ["Activation first (x·W) over weight first (W·x)."] if ratios else []
    yield _table("NPU: order of operands", "tokens", ratios, [*notes, *_missing(summary)])
    unit = f"ns for 1000 weights, {cost}"
    knees = [_knee(name, curve) for name, curve in columns.items() if "k-split" not in name]
    if summary.time_kind == "simulated":
        knees.append("A simulated NPU has this limit as a parameter: the table only checks the model.")
    yield _table(f"NPU: effect of k at weights of one size, {unit}", "inputs k", columns, knees)


def stage_curves(summary: ProfileSummary) -> Curves:
    """Return the cost of one square weight by tokens, in ms, by format and form."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for row in _square(summary):
        curves[f"{row.point.weight} {_form(row)}"][row.point.tokens] = row.cost_us / 1e3
    return curves


def order_ratios(summary: ProfileSummary) -> Curves:
    """Return the cost of activation first over that of weight first by tokens, by format."""
    costs: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in _square(summary):
        costs[str(row.point.weight), row.point.tokens][row.point.form] = row.cost_us
    ratios: dict[str, dict[int, float]] = defaultdict(dict)
    for (weight, tokens), found in costs.items():
        if set(ORDERS) <= set(found):
            ratios[weight][tokens] = found["activation_first"] / found["weight_first"]
    return ratios


def column_curves(summary: ProfileSummary) -> Curves:
    """Return the cost of a weight by inputs ``k``, in ns for 1000, by tokens and form."""
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for row in summary.sweeps:
        point = row.point
        if point.rows != point.columns:
            form = ", k-split" if point.form == "k_chunked" else ""
            name = f"{point.tokens} token{'s' if point.tokens > 1 else ''}{form}"
            curves[name][point.columns] = row.cost_us * 1e6 / (point.rows * point.columns)
    return dict(sorted(curves.items()))


def _square(summary: ProfileSummary) -> list[SweepRow]:
    return [row for row in summary.sweeps if row.point.rows == row.point.columns]


def is_emulated(summary: ProfileSummary) -> bool:
    """Return whether the sweeps have the CPU time of emulation instead of time."""
    return all(row.emulated for row in summary.sweeps)


def _form(row: SweepRow) -> str:
    return row.point.form.replace("_", " ")


def _table(title: str, first: str, curves: Curves, notes: Sequence[str]) -> Section:
    places = sorted({place for curve in curves.values() for place in curve})
    rows = tuple(
        (str(place), *(f"{curve[place]:.3g}" if place in curve else "" for curve in curves.values()))
        for place in places
    )
    return Section(title, (f">{first}", *(f">{name}" for name in curves)), rows, tuple(notes))


def _steps(name: str, curve: Mapping[int, float]) -> str:
    """Return the cost of the first token after each stage, in words."""
    edges = [edge for edge in sorted(curve) if edge % STAGE_TOKENS == 0 and edge + 1 in curve]
    words = ", ".join(f"{edge + 1} cost {curve[edge + 1] / curve[edge]:.2f} times {edge}" for edge in edges)
    return f"{name}: of tokens, {words}." if words else f"{name}: not measured at both sides of a stage."


def _missing(summary: ProfileSummary) -> list[str]:
    """Return notes about the formats that were measured in one order only."""
    forms: dict[str, set[str]] = defaultdict(set)
    for row in _square(summary):
        forms[str(row.point.weight)].add(row.point.form)
    return [
        f"{weight}: the NPU offers {', '.join(sorted(found)).replace('_', ' ')} alone, so there is no other "
        "order to compare."
        for weight, found in forms.items()
        if not set(ORDERS) <= found
    ]


def _knee(name: str, curve: Mapping[int, float]) -> str:
    """Return a sentence on where the cost of a weight rises, and on the k-split's prior."""
    least, places = min(curve.values()), sorted(curve)
    risen = len(places)
    while risen and curve[places[risen - 1]] > RISE * least:
        risen -= 1
    prior = f"the k-split's {K_SPLIT_COLUMNS} inputs, a prior from the paper,"
    if risen == len(places):
        return (
            f"At {name} no lasting rise by a quarter up to {places[-1]} inputs: the measurement supports "
            f"neither {prior} nor another length."
        )
    last, first = places[risen - 1], places[risen]
    verdict = "agree with it"
    if first <= K_SPLIT_COLUMNS:
        verdict = "are more than it allows"
    elif last > K_SPLIT_COLUMNS:
        verdict = "are fewer than it needs"
    return (
        f"At {name} a weight costs more from between {last} and {first} inputs on, "
        f"{curve[first] / least:.1f} times the least at {first}: {prior} {verdict}."
    )

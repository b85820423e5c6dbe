"""The tables of the simulated evaluation; each says in its title that it is simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

from paper_cases import (
    DECODE_AFTER,
    DECODED,
    DRIVER,
    GAME_WAYS,
    GPU,
    LAYER,
    LENGTHS,
    LOADS,
    ODD_LENGTHS,
    ODD_WAYS,
    OWN_WAYS,
    PADDING,
    PAPER_WAYS,
    RESOLVED,
    TENSOR,
    PaperRows,
    Way,
    ratio,
)
from paper_published import comparisons
from simulated_rows import Simulated

from heterollm.base import Section

PAGE_HEAD: Final = """\
# HeteroLLM's evaluation, simulated: tables

Written by `bench/paper.py`; the rows are in `bench/results/simulated_paper.jsonl`:

```
python bench/paper.py --out bench/results/simulated_paper.jsonl --page docs/simulated-paper-tables.md
```

**Nothing here was measured.** [simulated-paper.md](simulated-paper.md) says how to read these tables.
"""

Cells: TypeAlias = tuple[str, ...]
Lines: TypeAlias = Callable[[PaperRows], Iterator[Cells]]

WAYS: Final = (*PAPER_WAYS, *OWN_WAYS)

SPLIT_NOTE: Final = (
    "G is the GPU, N the NPU. Splits are NPU:GPU: `r` of output rows and `b` of an ffn's width in percent, "
    "`s` of tokens in numbers; `@` gives the lengths of the NPU's graphs if they differ from the prompt's; "
    "b100 is a whole ffn on the NPU. Brackets give the graph form unless it is the plain one."
)


PUBLISHED_NOTES: Final = (
    "Every number of HeteroLLM's section 5. Its GPU-only engine is PPL-OpenCL; level `gpu` is compared with "
    "it. Fitted: the parameters were fitted to this number, so its ratio proves little; the fit runs a "
    "chain of operators (`bench/soc_chain.py`), these rows run the whole engine with its waits and "
    "submissions. Input: the number is a parameter. Chose a parameter: the number is in no fit, but an "
    "assumption was chosen to meet it. Power only: the three power splits were made to meet it. Predicted: "
    "the model did not use the number. Not simulated: another engine, or a case without a row.",
    "Wrong: off by more than 15 %, or on the other side of 1. The known reasons:",
    "- **Synchronisation by the driver: decode, and prefill of InternLM-1.8B.** The 8B model's prefill "
    "(196.44 tokens a second) needs the modelled cost of 1.75 ms for each split. Operators of the other "
    "models take less time, so they lose more here than in the paper: these numbers refute an equal cost "
    "for every split.",
    "- **Online-prepare at 525 tokens.** The modelled build time is a line through the two published times. "
    "With the simulated time of tensor level, 2.24 would need a longer build at 525 tokens than the 2050 ms "
    "published for 1000. Another effect slows the paper's graphs of odd lengths, and the model lacks it.",
    "- **Power and energy.** No sum of a base, a GPU and an NPU meets the three published watts with the "
    "modelled shares of time "
    "([soc-model.md](soc-model.md#assumptions-and-limits)).",
    "- **With a game.** Layer level loses more than tensor level in the paper, and less here; with the GPU "
    "alone some frames are in time here, and none in the paper. The paper does not publish the game's GPU "
    "time for each frame. Like power, this indicates that the modelled tensor level keeps the GPU too busy "
    "(54 % of the time), and that in a driver a frame waits for more than one kernel.",
)


def number(value: float | None, digits: int) -> str:
    """Return a number with a fixed count of decimals; an empty text for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def paper_page(rows: Sequence[Simulated]) -> str:
    """Return the whole page as Markdown."""
    found = PaperRows(rows)
    socs = ", ".join(dict.fromkeys(row.soc for row in rows))
    failed = sum(row.error is not None for row in rows)
    cases = f"{len(rows)} cases on {socs or 'nothing'}{f', {failed} of which failed' if failed else ''}."
    head = f"{PAGE_HEAD}\n{cases}\n"
    return "\n".join([head, *(table.to_markdown() for table in paper_tables(found))])


def paper_tables(rows: PaperRows) -> Iterator[Section]:
    """Yield every table."""
    for title, columns, lines, notes in TABLES:
        yield Section(title, tuple(columns.split(" | ")), tuple(lines(rows)), notes)


def _published(rows: PaperRows) -> Iterator[Cells]:
    for one in comparisons(rows):
        published = one.published
        yield (
            *(published.name, published.source.removeprefix("HeteroLLM, section ")),
            f"{published.value:.5g} {published.unit}".strip(),
            number(one.simulated, 3 if published.unit in ("x", "") else 2),
            *(number(one.ratio, 3), published.use, one.wrong, published.remark),
        )


def _prefill(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        for length in LENGTHS:
            speeds = {way: rows.prefill(model, length, way) for way in WAYS}
            gains = (times(speeds[TENSOR], speeds[way]) for way in (GPU, LAYER))
            cells = (number(speed, 1) for speed in speeds.values())
            yield model, str(length), *cells, *gains, times(speeds[OWN_WAYS[-1]], speeds[TENSOR])


def _odd(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        for length in ODD_LENGTHS:
            waits = {way: rows.ttft_ms(model, length, way) for way in ODD_WAYS}
            over = (times(waits[way], waits[TENSOR]) for way in ODD_WAYS[:3])
            yield model, str(length), *(number(wait, 0) for wait in waits.values()), *over


def _decode(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        rates = {way: rows.decode(model, way) for way in WAYS}
        gains = times(rates[TENSOR], rates[GPU]), times(rates[OWN_WAYS[-1]], rates[TENSOR])
        yield model, *(number(rate, 2) for rate in rates.values()), *gains


def _phases(
    rows: PaperRows, model: str, ways: Sequence[Way]
) -> Iterator[tuple[str, list[float | None], int]]:
    """Yield the name of each phase, its speeds, and the digits to show."""
    for length in LENGTHS:
        yield f"prefill of {length}", [rows.prefill(model, length, way) for way in ways], 1
    yield "decode", [rows.decode(model, way) for way in ways], 2


def _sync(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        for phase, (fast, driver, solved), digits in _phases(rows, model, (TENSOR, DRIVER, RESOLVED)):
            rates = number(fast, digits), number(driver, digits)
            yield model, phase, *rates, times(fast, driver), number(solved, digits)


def _levers(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        for phase, (tensor, *own), _ in _phases(rows, model, (TENSOR, *OWN_WAYS)):
            yield model, phase, *(times(speed, tensor) for speed in own)


def _game(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        for load in LOADS:
            found = [rows.get(model, DECODE_AFTER, way, load) for way in GAME_WAYS]
            for phase in ("prefill", "decode"):
                cells = (cell for row in found for cell in _beside(row, phase))
                yield model, str(load), phase, *cells


def _beside(row: Simulated | None, phase: str) -> tuple[str, str]:
    """Return the slowdown of a phase by a game, and the fraction of frames in time."""
    slower = None if row is None or row.slowdown is None else row.slowdown.get(phase)
    if row is None or slower is None:
        return "", ""
    frames: Any = (getattr(row, phase) or {}).get("frames") or {}
    due = frames.get("due")
    return f"{100 * (slower - 1):.1f} %", f"{100 * frames['in_time'] / due:.0f} %" if due else ""


def _energy(rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        tensor_joules = rows.prefill_joules(model, TENSOR)
        for way in WAYS:
            row = rows.get(model, DECODE_AFTER, way)
            if row is not None and row.prefill is not None and row.decode is not None:
                prefill, decode = _energies(row.prefill, 1), _energies(row.decode, row.decode_tokens)
                yield model, way.name, *prefill, *decode, number(ratio(row.prefill_joules, tensor_joules), 2)


def _energies(phase: Any, tokens: int) -> Iterator[str]:  # noqa: ANN401 - a record of JSON
    """Yield joules a token and watts of a phase: the middle of three assumptions, and the range."""
    joules = [phase[name] for name in ("joules", "joules_low", "joules_high")]
    yield "{:.3g} ({:.3g} to {:.3g})".format(*(value / tokens for value in joules))
    yield "{:.2f} ({:.2f} to {:.2f})".format(*(value / phase["milliseconds"] * 1e3 for value in joules))


GROUPS: Final = ("qkv", "o", "gate_up", "down", "ffn", "head")


def _plans(lengths: Sequence[int], phase: str, rows: PaperRows) -> Iterator[Cells]:
    for model in rows.models:
        for length in lengths:
            for way in (LAYER, TENSOR, *OWN_WAYS) if length in LENGTHS else (PADDING, *ODD_WAYS[2:]):
                row = rows.get(model, length, way)
                splits = {} if row is None else row.cuts.get(phase, {})
                speed = None if row is None else getattr(row, f"{phase}_tokens_per_second")
                yield (
                    model,
                    str(length),
                    way.name,
                    *(splits.get(group, "") for group in GROUPS),
                    number(speed, 1),
                )


def times(one: float | None, other: float | None) -> str:
    """Return one number over another as text for a table."""
    found = ratio(one, other)
    return "" if found is None else f"{found:.2f}"


def _columns(first: str, ways: Sequence[Way], last: str = "", form: str = ">{}") -> str:
    """Return titles: those before the ways, one for each way, and those after them."""
    return " | ".join(filter(None, (first, *(form.format(way.name) for way in ways), last)))


TABLES: Final[tuple[tuple[str, str, Lines, Cells], ...]] = (
    (
        "Published and simulated",
        "published number | section | >published | >simulated | >ratio | use | wrong | remark",
        _published,
        PUBLISHED_NOTES,
    ),
    (
        "Simulated prefill, tokens a second",
        _columns(
            "model | >tokens", WAYS, ">tensor over gpu | >tensor over layer | >all additions over tensor"
        ),
        _prefill,
        ("The first four levels are the paper's; the others are this project's additions to tensor level.",),
    ),
    (
        "Simulated time to the first token at odd lengths, ms",
        _columns("model | >tokens", ODD_WAYS, _columns("", ODD_WAYS[:3], form=">{} over tensor")),
        _odd,
        (
            "Layer level with the graph of the exact length built while the user waits (online-prepare), "
            "padded to the next standard length, or in consecutive standard lengths (pipe); tensor level; "
            "all additions.",
        ),
    ),
    (
        f"Simulated decode after {DECODE_AFTER} tokens, tokens a second",
        _columns("model", WAYS, ">tensor over gpu | >all additions over tensor"),
        _decode,
        (f"The mean of {DECODED} tokens.",),
    ),
    (
        "Simulated tensor level with and without fast synchronisation, tokens a second",
        "model | phase | >fast | >driver's waits and copies | >fast over driver | >driver, solved for it",
        _sync,
        ("The plan is solved for fast synchronisation; in the last column for the driver's waits.",),
    ),
    (
        "Simulated with a game: slowdown, and frames in time",
        _columns("model | game | phase", GAME_WAYS, form=">{0}: slower | >{0}: frames in time"),
        _game,
        (
            "Assumptions: the GPU finishes a kernel before the next job. A frame waits for the running "
            "kernel and precedes the queued ones; the game drops a late frame when the next is due. Frames "
            "in time are drawn within one period, as a fraction of the frames that were due. Section 5.5 "
            "does not state the GPU time for each frame, with which slowdowns grow; the first table "
            "compares its numbers with the game of 3 ms.",
        ),
    ),
    (
        f"Simulated power and energy: prefill of {DECODE_AFTER} tokens, and decode after it",
        "model | way | >prefill J | >prefill W | >decode J a token | >decode W | "
        ">prefill energy over tensor's",
        _energy,
        (
            "Middle and range of three assumptions. All meet two published numbers about power, and none "
            "meets the third. The range is no error bar.",
        ),
    ),
    (
        "Simulated: gain of each addition over tensor level",
        _columns("model | phase", OWN_WAYS),
        _levers,
        (
            "k-chunked: a k-split of FFN-down's long rows, a sum over ranges of at most 4096 inputs in the "
            "graph. Block: the feed-forward network may be split along its intermediate width, with one "
            "join. Both gains depend on the length at which the model lets rows spill; the emulator does not "
            "confirm it: see [soc-model.md](soc-model.md).",
        ),
    ),
    *(
        (
            f"Simulated {name}: the chosen plans",
            f"model | >tokens | way | {' | '.join(GROUPS)} | >tokens a second",
            partial(_plans, lengths, name.split()[0]),
            (SPLIT_NOTE,),
        )
        for name, lengths in (
            ("prefill", LENGTHS),
            ("prefill at odd lengths", ODD_LENGTHS),
            ("decode", (DECODE_AFTER,)),
        )
    ),
)
"""Title, columns, lines and notes of each table."""

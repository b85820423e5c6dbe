"""The tables of the simulated evaluation; each says in its title that it is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Literal

from heterollm.base import Section, markdown_page
from heterollm.report.tables_sweep import number
from heterollm.simulate import (
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
    SimulatedRow,
    Way,
    comparisons,
    load_text,
    ratio,
)

__all__ = ["paper_page", "paper_tables"]

PAGE_HEAD: Final = """\
# HeteroLLM's evaluation, simulated

Written by `heterollm paper`; the rows are in `bench/results/simulated_paper.jsonl`:

```
heterollm paper -o bench/results/simulated_paper.jsonl --page docs/simulated-paper.md
```

**Nothing here was measured.** Every number but those called published comes from the model of a SoC that
[soc-model.md](soc-model.md) describes, on a virtual clock. [simulation.md](simulation.md) says what is
approximated. Weights are W4A16 in blocks of 128, head included, as in the paper.
"""

CUT_NOTE: Final = (
    "G is the GPU, N the NPU. Cuts are NPU:GPU, `r` of output rows and `b` of a block's width in percent, "
    "`s` of "
    "tokens in numbers; `@` names the lengths of the NPU's graphs where they are not the prompt's; b100 "
    "is a "
    "whole block on the NPU. In brackets stands the form of the graphs where it is not the plain one."
)


def paper_page(rows: Sequence[SimulatedRow]) -> str:
    """Return the whole page as Markdown."""
    found = PaperRows(rows)
    socs = ", ".join(dict.fromkeys(row.soc for row in rows))
    failed = sum(row.error is not None for row in rows)
    cases = f"{len(rows)} cases on {socs or 'nothing'}{f', {failed} of which failed' if failed else ''}."
    head = f"{PAGE_HEAD}\n{cases}\n"
    return f"{head}\n{markdown_page(list(paper_tables(found)))}"


def paper_tables(rows: PaperRows) -> Iterator[Section]:
    """Yield every table."""
    yield _published(rows)
    yield _prefill(rows)
    yield _odd(rows)
    yield _decode(rows)
    yield _sync(rows)
    yield _game(rows)
    yield _energy(rows)
    yield _levers(rows)
    yield _plans(rows, LENGTHS, "prefill")
    yield _plans(rows, ODD_LENGTHS, "prefill")
    yield _plans(rows, (DECODE_AFTER,), "decode")


def _published(rows: PaperRows) -> Section:
    lines = tuple(
        (
            one.published.name,
            one.published.source,
            f"{one.published.value:g} {one.published.unit}",
            number(one.simulated, 3 if one.published.unit == "x" else 2),
            number(one.ratio, 3),
            one.published.use,
            one.published.remark,
        )
        for one in comparisons(rows)
    )
    return Section(
        "Published and simulated",
        ("published number", "source", ">published", ">simulated", ">ratio", "in the fit", "remark"),
        lines,
        (
            "Fitted: the parameters were fitted to it, so that its ratio proves little; the fit runs a "
            "chain of "
            "operators (`bench/soc_chain.py`), these rows the whole engine, which waits and submits as "
            "well. "
            "Power only: the three splits of power were made to meet it.",
        ),
    )


def _prefill(rows: PaperRows) -> Section:
    ways = (*PAPER_WAYS, *OWN_WAYS)
    lines = []
    for model in rows.models:
        for length in LENGTHS:
            speeds = [rows.prefill(model, length, way) for way in ways]
            by_way = dict(zip(ways, speeds, strict=True))
            lines.append(
                (
                    model,
                    str(length),
                    *(number(speed, 1) for speed in speeds),
                    *(times(by_way[TENSOR], by_way[way]) for way in (GPU, LAYER)),
                    times(by_way[OWN_WAYS[-1]], by_way[TENSOR]),
                )
            )
    return Section(
        "Simulated prefill, tokens a second",
        (
            *("model", ">tokens"),
            *(f">{way.name}" for way in ways),
            *(">tensor over gpu", ">tensor over layer", ">all of ours over tensor"),
        ),
        tuple(lines),
        ("The paper's levels come first, then what this project adds to the last of them.",),
    )


def _odd(rows: PaperRows) -> Section:
    lines = []
    for model in rows.models:
        for length in ODD_LENGTHS:
            waits = [rows.ttft_ms(model, length, way) for way in ODD_WAYS]
            tensor_ms = rows.ttft_ms(model, length, TENSOR)
            lines.append(
                (
                    model,
                    str(length),
                    *(number(wait, 0) for wait in waits),
                    *(times(wait, tensor_ms) for wait in waits[:3]),
                )
            )
    return Section(
        "Simulated time to the first token at odd lengths, ms",
        (
            *("model", ">tokens"),
            *(f">{way.name}" for way in ODD_WAYS),
            *(f">{way.name} over tensor" for way in ODD_WAYS[:3]),
        ),
        tuple(lines),
        (
            "Layer level with the graph of the exact length built while the user waits (online-prepare), "
            "padded "
            "to the next standard length, or in consecutive standard lengths (pipe); tensor level; and "
            "all of "
            "ours.",
        ),
    )


def _decode(rows: PaperRows) -> Section:
    ways = (*PAPER_WAYS, *OWN_WAYS)
    lines = []
    for model in rows.models:
        rates = {way: rows.decode(model, way) for way in ways}
        lines.append(
            (
                model,
                *(number(rate, 2) for rate in rates.values()),
                times(rates[TENSOR], rates[GPU]),
                times(rates[OWN_WAYS[-1]], rates[TENSOR]),
            )
        )
    return Section(
        f"Simulated decode after {DECODE_AFTER} tokens, tokens a second",
        ("model", *(f">{way.name}" for way in ways), ">tensor over gpu", ">all of ours over tensor"),
        tuple(lines),
        (f"The mean of {DECODED} tokens.",),
    )


def _sync(rows: PaperRows) -> Section:
    lines = []
    for model in rows.models:
        for length in LENGTHS:
            fast, driver, solved = (rows.prefill(model, length, way) for way in (TENSOR, DRIVER, RESOLVED))
            cells = (number(fast, 1), number(driver, 1), times(fast, driver), number(solved, 1))
            lines.append((model, f"prefill of {length}", *cells))
        fast, driver, solved = (rows.decode(model, way) for way in (TENSOR, DRIVER, RESOLVED))
        cells = (number(fast, 2), number(driver, 2), times(fast, driver), number(solved, 2))
        lines.append((model, "decode", *cells))
    return Section(
        "Simulated tensor level with and without fast synchronisation, tokens a second",
        (
            "model",
            "phase",
            ">fast",
            ">driver's waits and copies",
            ">fast over driver",
            ">driver, solved for it",
        ),
        tuple(lines),
        (
            "The plan is that of fast synchronisation; in the last column it is solved for what waiting "
            "costs.",
        ),
    )


def _game(rows: PaperRows) -> Section:
    lines = []
    for model in rows.models:
        for load in LOADS:
            found = [rows.get(model, DECODE_AFTER, way, load) for way in GAME_WAYS]
            for phase in ("prefill", "decode"):
                cells = [cell for row in found for cell in _beside(row, phase)]
                lines.append((model, load_text(load.frames_per_s, load.frame_us), phase, *cells))
    columns = [f">{way.name}: {what}" for way in GAME_WAYS for what in ("slower", "frames in time")]
    return Section(
        "Simulated beside a game: slowdown, and frames in time",
        ("model", "game", "phase", *columns),
        tuple(lines),
        (
            "Assumed: the GPU leaves no kernel half done. A frame waits for the kernel that runs and goes "
            "before those that are queued; a late one is dropped once the next is due as well. In time, of "
            "the frames that were due, are those drawn within a period. Published is only that tensor level "
            "drops no frame of a game of 60 a second and takes 7.26 % longer (section 1). The GPU's time a "
            "frame is not stated, so that no ratio is given: slowdowns grow with it.",
        ),
    )


def _beside(row: SimulatedRow | None, phase: Literal["prefill", "decode"]) -> tuple[str, str]:
    """Return by how much a phase was slower beside a game, and which part of the frames was in time."""
    slower = None if row is None or row.slowdown is None else row.slowdown.get(phase)
    if row is None or slower is None:
        return "", ""
    frames = ((row.prefill if phase == "prefill" else row.decode) or {}).get("frames") or {}
    due = frames.get("due")
    return f"{100 * (slower - 1):.1f} %", f"{100 * frames['in_time'] / due:.0f} %" if due else ""


def _energy(rows: PaperRows) -> Section:
    lines = []
    for model in rows.models:
        tensor_joules = rows.prefill_joules(model, TENSOR)
        for way in (*PAPER_WAYS, *OWN_WAYS):
            row = rows.get(model, DECODE_AFTER, way)
            if row is not None and row.prefill is not None and row.decode is not None:
                over = ratio(row.prefill_joules, tensor_joules)
                lines.append(
                    (
                        *(model, way.name),
                        *(_joules(row.prefill, 1), _watts(row.prefill)),
                        *(_joules(row.decode, row.decode_tokens), _watts(row.decode), number(over, 2)),
                    )
                )
    return Section(
        f"Simulated power and energy: prefill of {DECODE_AFTER} tokens, and decode after it",
        (
            *("model", "way", ">prefill J", ">prefill W", ">decode J a token", ">decode W"),
            ">prefill energy over tensor's",
        ),
        tuple(lines),
        (
            "Middle and range of three assumptions that all meet the two published numbers about power. "
            "They "
            "are no error bars.",
        ),
    )


def _joules(phase: object, tokens: int) -> str:
    assert isinstance(phase, dict)
    middle, low, high = (phase[name] / tokens for name in ("joules", "joules_low", "joules_high"))
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _watts(phase: object) -> str:
    assert isinstance(phase, dict)
    values = (phase[name] / phase["milliseconds"] * 1e3 for name in ("joules", "joules_low", "joules_high"))
    middle, low, high = values
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def _levers(rows: PaperRows) -> Section:
    lines = []
    for model in rows.models:
        phases: list[tuple[str, dict[Way, float | None]]] = [
            (f"prefill of {length}", {way: rows.prefill(model, length, way) for way in (TENSOR, *OWN_WAYS)})
            for length in LENGTHS
        ]
        phases.append(("decode", {way: rows.decode(model, way) for way in (TENSOR, *OWN_WAYS)}))
        for name, speeds in phases:
            gains = [times(speeds[way], speeds[TENSOR]) for way in OWN_WAYS]
            lines.append((model, name, *gains))
    return Section(
        "Simulated: what each of our additions brings over tensor level",
        ("model", "phase", *(f">{way.name}" for way in OWN_WAYS)),
        tuple(lines),
        (
            "k-chunked: FFN-down's long rows go to the NPU in pieces of at most 4096 inputs that are "
            "summed in "
            "the graph. Block: the feed-forward network may be cut along its intermediate width, with one "
            "join. "
            "Both gain what they do because of where the model lets rows spill, which no emulator "
            "confirms: "
            "see [soc-model.md](soc-model.md).",
        ),
    )


def _plans(rows: PaperRows, lengths: Sequence[int], phase: str) -> Section:
    groups = ("qkv", "o", "gate_up", "down", "ffn", "head")
    lines = []
    for model in rows.models:
        for length in lengths:
            for way in (LAYER, TENSOR, *OWN_WAYS) if length in LENGTHS else (PADDING, *ODD_WAYS[2:]):
                row = rows.get(model, length, way)
                cuts = {} if row is None else row.cuts.get(phase, {})
                speed = None if row is None else row.prefill_tokens_per_second
                if phase == "decode":
                    speed = None if row is None else row.decode_tokens_per_second
                cells = (cuts.get(group, "") for group in groups)
                lines.append((model, str(length), way.name, *cells, number(speed, 1)))
    odd = "" if phase == "decode" or lengths == LENGTHS else " at odd lengths"
    return Section(
        f"Simulated {phase}{odd}: the plans that were chosen",
        ("model", ">tokens", "way", *groups, ">tokens a second"),
        tuple(lines),
        (CUT_NOTE,),
    )


def times(one: float | None, other: float | None) -> str:
    """Return how many times as much one number is, in words for a table."""
    found = ratio(one, other)
    return "" if found is None else f"{found:.2f}"

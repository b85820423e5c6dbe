"""The tables of bench/speculation.py's rows, which bench/figures.py writes into docs/speculative.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]

LENGTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
LLAMA: Final = "llama.cpp"
ANSWERS_HEAD: Final = (
    "model, text | plan, threads | plain, tokens/s | lookup | tokens a pass | right | draft | tokens a pass "
    "| right | disturbed"
)


def answer_lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each model, text and configuration, and one for llama.cpp behind its neighbour."""
    found = _latest(rows, "answers", "model", "text", "configuration")
    # Texts of a model stay together, whichever configuration ran first.
    for group in dict.fromkeys(key[:2] for key in found):
        for key, own in found.items():
            if key[:2] == group:
                ways = {row["way"]: row for row in own}
                yield (", ".join(group), _configuration(own[0]), *_answers(ways, ""))
                if f"{LLAMA} plain" in ways:
                    threads = f"{LLAMA}, {own[0]['llama_threads']} threads"
                    yield (", ".join(group), threads, *_answers(ways, f"{LLAMA} "))


def pass_lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Yield the times of passes by model and configuration, relative to one token, and their spread."""
    for (model, _), own in _latest(rows, "pass", "model", "configuration").items():
        of = {row["tokens"]: row for row in own}
        found = [of[length] for length in LENGTHS]
        over = [row["over_base"] for row in found[1:]]
        name = f"{model}, {_configuration(own[0])}"
        yield (name, f"{found[0]['ms']:.2f} ms", *(f"{row['ratio']:.2f}" for row in found[1:]))
        yield ("rounds", "", *(f"{min(rounds):.2f} to {max(rounds):.2f}" for rounds in over))
        if any(row["npu"] for row in found):
            yield ("runs graphs", *("yes" if row["npu"] else "no" for row in found))


def _latest(rows: Sequence[Row], kind: str, *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows of the last run of each combination of values; a bench that ran again appends."""
    own = [row for row in rows if row["kind"] == kind]
    last = {tuple(row[key] for key in keys): row["run"] for row in own}
    return {
        values: [row for row in own if row["run"] == run and tuple(row[key] for key in keys) == values]
        for values, run in last.items()
    }


def _configuration(row: Row) -> str:
    plan = row["configuration"].partition("@")[0]
    chosen = f": {row['level']}" if plan == "auto" else ""
    return f"`{plan}`{chosen}, {row['threads']}"


def _answers(ways: Mapping[str, Row], engine: str) -> Iterator[str]:
    plain = ways[f"{engine}plain"]
    yield f"{plain['tokens_per_s']:.0f}"
    for way in ("lookup", "draft"):
        row = ways.get(f"{engine}{way}")
        if row is None:
            yield from ("", "", "")
            continue
        gains = [1 / over for over in row["over_base"]]
        yield f"{row['gain']:.2f} ({min(gains):.2f} to {max(gains):.2f})"
        yield "" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}"
        yield "" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
    yield f"{sum(plain['disturbed'])} of {len(plain['disturbed'])}"

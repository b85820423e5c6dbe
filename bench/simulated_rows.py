"""Rows of simulations: the flat names that tables have for their values, and those of older versions.

python bench/simulated_rows.py rows.simulated.jsonl     # rewrites what an older version's -o wrote
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from heterollm.benchmarks.formats import read_json_items
from heterollm.benchmarks.rows import (
    GROUPS,
    Account,
    Asked,
    BenchRow,
    Modelled,
    Sample,
    Setup,
    Times,
    times_of,
)

NAIVE: Final = "llm.npu:naive"
NO_RUNG: Final[Mapping[str, Any]] = {"rung": "", "resolve": False, "left_out": [], "gpu_share": 1.0}
"""Edits of the plan of a row; see rungs.py."""


class Simulated(SimpleNamespace):
    """A row with flat names as attributes, and the row itself as ``raw``."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Simulated:
        """Return the attributes of a row."""
        return cls(raw=raw, **view(raw))


def view(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a row by flat names; the techniques of a rung are its name."""
    edits = {**NO_RUNG, **row.get("edits", {})}
    rung = edits.pop("rung")
    row = BenchRow.from_dict({name: value for name, value in row.items() if name != "edits"}).to_dict()
    asked = row["asked"]
    return {
        "model": row["setup"]["model_filename"],
        "plan_level": asked["asked_level"],
        "length_policy": "auto" if rung == NAIVE else asked["length_policy"],
        "sync": asked["sync"],
        "techniques": [rung] if rung else [name for name in asked["technique"].split("+") if name],
        "prompt_tokens": asked["n_prompt"],
        "decode_tokens": asked["n_gen"],
        "error": row["error"],
        "device": row["setup"]["device"],
        "fingerprint": row["setup"]["fingerprint"],
        **row["modelled"],
        **edits,
    }


def read(path: Path) -> list[Simulated]:
    """Read a file of simulated rows."""
    return [Simulated.of(item) for item in read_json_items(path)]  # type: ignore[arg-type]


def lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as JSON lines, without values that are empty."""
    return "".join(json.dumps(_full(row), allow_nan=False) + "\n" for row in rows)


def _full(row: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: _full(own) if name in GROUPS and own else own for name, own in row.items()}
    needed = ("times", "samples_ns")
    return {name: own for name, own in found.items() if name in needed or own not in (None, "", [], {})}


def converted(old: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of an older version, which had flat names, in the form of ``heterollm bench``."""
    names = old.get("techniques", old.get("passes", []))
    rung = next((name for name in names if ":" in name), "")
    plain = [] if rung == NAIVE else [name.partition(":")[0] for name in names]
    precision = "w8a8" if any(name.startswith("llm.npu") for name in names) else "w4a16"
    phases = [old[name] for name in ("prefill", "decode") if old.get(name)]
    time_us = 1e3 * sum(phase["milliseconds"] for phase in phases)
    joules = sum(phase["joules"] for phase in phases)
    tokens = old["prompt_tokens"] + old["decode_tokens"]
    known = {name: old[name] for name in Modelled.__struct_fields__ if name in old}
    row = BenchRow(
        label=" ".join((old["plan_level"], *plain, f"sync {old['sync']}", precision)),
        test="+".join(f"{kind}{n}" for kind, n in _tests(old) if n),
        engine="self",
        plan_level=old["plan_level"],
        precision=precision,
        time_kind="simulated",
        asked=Asked(
            n_prompt=old["prompt_tokens"],
            n_gen=old["decode_tokens"],
            n_depth=0,
            asked_level=old["plan_level"],
            length_policy="online" if rung == NAIVE else old["length_policy"],
            sync=old["sync"],
            group_size=128,
            technique="+".join(plain),
            repetitions=1,
        ),
        setup=Setup(device=old["device"], fingerprint=old["fingerprint"], model_filename=old["model"]),
        times=times_of([Sample(time_us)], tokens) if phases else Times(samples_ns=()),
        account=Account(energy="modelled", energy_j=joules) if phases else Account(),
        modelled=Modelled(**{"pruned": 0.85, **known}),
        error=old["error"],
        notes=(old["note"],) if old.get("note") else (),
    )
    own = {"rung": rung, "resolve": old.get("resolve", False), "left_out": list(old.get("left_out", []))}
    edits = {**NO_RUNG, **own}
    return row.to_dict() | ({"edits": edits} if edits != NO_RUNG else {})


def _tests(old: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    return ("pp", old["prompt_tokens"]), ("tg", old["decode_tokens"])


def main() -> None:
    """Rewrite files."""
    for name in sys.argv[1:]:
        rows = read_json_items(Path(name))
        Path(name).write_text(lines(converted(row) if row.get("simulated") else row for row in rows), "utf-8")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()

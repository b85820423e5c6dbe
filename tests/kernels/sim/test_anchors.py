"""The modelled Snapdragons are what bench/anchors.py fits, and meet public speeds that the fit never saw."""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from heterollm.kernels.sim.soc.parameters import load_soc
from heterollm.simulate.goals import PUBLIC_SPEEDS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = str(ROOT / "bench")
PHASES = ("prefill", "decode")


@pytest.fixture
def anchors() -> Iterator[ModuleType]:
    """A fresh module, since it keeps what it has fitted."""
    sys.path.insert(0, FOLDER)
    try:
        sys.modules.pop("anchors", None)
        yield importlib.import_module("anchors")
    finally:
        sys.path.remove(FOLDER)


def test_the_files_are_what_the_fit_says(anchors: ModuleType) -> None:
    for chip, own in anchors.CHIPS.items():
        values = load_soc(own.soc).values()
        assert {name: values[name] for name in anchors.fitted(chip)} == anchors.fitted(chip)


def test_the_rows_are_those_of_the_committed_model(anchors: ModuleType) -> None:
    kept = (ROOT / "bench" / "results" / "anchors.jsonl").read_text("utf-8").splitlines()
    assert list(map(json.loads, kept)) == list(anchors.rows())


def test_the_fit_never_sees_what_is_predicted(anchors: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(anchors.rows())
    assert sum(row["used"] for row in found) < len(found) / 2
    before = {chip: anchors.fitted(chip) for chip in anchors.CHIPS}
    changed = tuple(
        replace(one, **{phase: 2 * getattr(one, phase) for phase in PHASES if phase[0] not in one.used})
        for one in anchors.ANCHORS
    )
    monkeypatch.setattr(anchors, "ANCHORS", changed)
    for kept in (anchors.one_share, anchors.npu_fit):
        kept.cache_clear()
    assert {chip: anchors.fitted(chip) for chip in anchors.CHIPS} == before


@pytest.mark.parametrize(
    ("engine", "phase", "least", "median", "most"),
    [
        ("AI Hub", "prefill", 0.6, (0.75, 1.1), 1.2),
        ("AI Hub", "decode", 0.8, (0.95, 1.1), 1.75),  # one phone's Phi 3.5 mini; else 1.15
        ("AI Hub, float activations", "prefill", 0.4, (0.85, 1.1), 1.1),  # two rows of one model contradict
        ("AI Hub, float activations", "decode", 0.9, (0.95, 1.1), 1.1),
        ("llama.cpp GPU, 4 bits", "prefill", 0.6, (0.9, 1.3), 1.65),
        ("llama.cpp GPU, 4 bits", "decode", 0.8, (0.9, 1.6), 2.8),
    ],
)
def test_predicted_speeds_are_within_bounds(
    anchors: ModuleType, engine: str, phase: str, least: float, median: tuple[float, float], most: float
) -> None:
    ratios = [
        row["simulated"] / row["measured"]
        for row in anchors.rows()
        if (row["engine"], row["phase"], row["used"]) == (engine, phase, False)
    ]
    assert len(ratios) >= 4
    assert least < min(ratios)
    assert median[0] < statistics.median(ratios) < median[1]
    assert max(ratios) < most


def test_used_speeds_come_back(anchors: ModuleType) -> None:
    for row in anchors.rows():
        ratio = row["simulated"] / row["measured"]
        # One share of slots stands for three engines with one token, which differ by a factor of two.
        bound = 0.36 if row["anchor"] in anchors.EFFICIENCY_ONE and row["phase"] == "decode" else 0.11
        assert not row["used"] or abs(ratio - 1) < bound, row


def test_public_speeds_of_goals_are_anchors(anchors: ModuleType) -> None:
    for (soc, model), public in PUBLIC_SPEEDS.items():
        chips = [chip for chip, own in anchors.CHIPS.items() if own.soc == soc]
        rows = [one for one in anchors.ANCHORS if [one.chip] == chips and one.model == model]
        fastest = max(rows, key=lambda one: one.prefill)
        assert (public.prefill, public.decode) == (fastest.prefill, fastest.decode)
        assert public.engine.partition(",")[0] in fastest.engine

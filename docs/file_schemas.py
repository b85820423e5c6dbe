"""Makes the JSON Schemas of files from the types that the program decodes them with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from heterollm.benchmarks import BenchRow
from heterollm.calibration import Calibration
from heterollm.kernels.gpu.parameters import KernelParameters
from heterollm.kernels.gpu.tuning import TuningFile
from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.sim.soc.parameters import soc_file
from heterollm.profiler.records import LinearPoint
from heterollm.profiler.records.profile import ProfileFile
from heterollm.solver import PhaseSync, PlanRequest
from heterollm.solver.plan import OPTIONAL, PLAN_FILE, SCHEMA_VERSION
from heterollm.solver.request import TECHNIQUE_OPTIONS
from heterollm.trace.file import TraceFile

FOLDER: Final = Path(__file__).parent / "schemas"

FILES: Final[dict[str, tuple[type[msgspec.Struct], str, str]]] = {
    "plan": (
        PLAN_FILE,
        "A plan of heterollm: who computes each group of linear layers, at every length",
        "docs/plan-format.md",
    ),
    "bench-row": (
        BenchRow,
        "One line of a result file of `heterollm bench`; llama-bench's names where it has them",
        "docs/bench.md",
    ),
    "calibration": (
        Calibration,
        "A calibration of heterollm: the magnitudes of a model's activations",
        "docs/integer-activations.md",
    ),
    "profile": (
        ProfileFile,
        "A profile of heterollm: what was measured on one device",
        "docs/profile-format.md",
    ),
    "soc": (
        soc_file(),
        "A modelled SoC of heterollm: the parameters of one phone, as YAML",
        "docs/soc-model.md",
    ),
    "trace": (
        TraceFile,
        "A trace of heterollm, in the trace-event format of Chrome and Perfetto",
        "docs/trace.md",
    ),
    "tuning": (
        TuningFile,
        "A tuning table of heterollm: the kernel parameters of one GPU",
        "kernels/gpu/tuning.py",
    ),
}
"""The type of each file, its title, and the page (or module) about it."""

STATED: Final = (KernelParameters, LinearPoint, PhaseSync, PLAN_FILE, PlanRequest, WeightFormat)
"""Records of which a file must state every field, though Python gives some a default."""

LEFT_OUT: Final = (*OPTIONAL, *TECHNIQUE_OPTIONS)
"""Fields of such records that a file leaves out where they have no value."""


def schema_files() -> dict[Path, str]:
    """Return the text of each schema by its path."""
    return {
        FOLDER / f"{name}.schema.json": json.dumps(_schema(name, kind, title, page), indent=1) + "\n"
        for name, (kind, title, page) in FILES.items()
    }


def _schema(name: str, kind: type[msgspec.Struct], title: str, page: str) -> dict[str, Any]:
    records: dict[str, Any] = _tidy(msgspec.json.schema(kind)["$defs"])
    for stated in STATED:
        if stated.__name__ in records:
            named = records[stated.__name__]["properties"]
            records[stated.__name__]["required"] = [name for name in named if name not in LEFT_OUT]
    whole = records.pop(kind.__name__)
    if kind is PLAN_FILE:
        whole["properties"] = {"schema_version": {"const": SCHEMA_VERSION}, **whole["properties"]}
        whole["required"].insert(0, "schema_version")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.schema.json"}
    text = f"{page} says what the fields mean. Written by `python docs/generate.py`."
    return head | whole | {"title": title, "description": text, "$defs": records}


def _tidy(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Keep the first sentence of docstrings, and no limit that is merely the largest number."""
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {name: _tidy(item) for name, item in value.items() if not _endless(name, item)}
    if isinstance(kept.get("description"), str):
        kept["description"] = " ".join(kept["description"].split("\n\n")[0].split())
    return kept


def _endless(name: str, value: object) -> bool:
    return name in ("minimum", "maximum") and isinstance(value, float) and abs(value) >= sys.float_info.max

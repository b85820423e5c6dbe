"""One operator cut in two on a simulated phone: the numbers and the figure of docs/how-the-split-works.md.

``docs/generate.py`` writes both; ``tests/test_docs.py`` checks that they are what the solver says today.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heterollm.base import CACHE_VARIABLE, cache_root
from heterollm.loading import plan_for
from heterollm.planning import LoadOptions
from heterollm.simulate import SimulationRequest, simulate
from heterollm.solver import PlanRequest

HERE: Final = Path(__file__).parent
PAGE: Final = HERE / "how-the-split-works.md"
FIGURE: Final = HERE / "simulated_operator_cut.svg"
TEMPLATE: Final = HERE / "operator_cut.template.svg"
MODEL: Final = "llama-3-8b"
SOC: Final = "snapdragon-8gen3-paper"
GROUP: Final = "down"
TOKENS: Final = 256
FORM: Final = "matmul_nbits"
FEW_ROWS: Final = 512

LEFT: Final = 130.0
SCALE: Final = 20.0
"""Of the figure's time line: where 0 is, and units a millisecond."""


@dataclass(frozen=True, slots=True)
class Example:
    """What the solver says of the operator; times in milliseconds, all simulated.

    Args:
        rows: Of the whole weight.
        columns: Inputs.
        npu_rows: Rows of the NPU's part.
        gpu_all_ms: The GPU computes all rows.
        npu_all_ms: The NPU computes all rows.
        gpu_part_ms: The GPU's part, alone.
        npu_part_ms: The NPU's part, alone.
        gpu_beside_ms: The GPU's part beside the NPU's.
        npu_beside_ms: The NPU's part beside the GPU's.
        total_ms: Until the next kernel begins.
        npu_row_us: What one more row costs the NPU.
        gpu_slower: Factor while both compute.
        npu_slower: The same of the NPU.
        refill_ms: To fill the GPU's empty queue again.
        gpu_gbps: What the GPU alone reads.
        both_gbps: What both parts read together.
    """

    rows: int
    columns: int
    npu_rows: int
    gpu_all_ms: float
    npu_all_ms: float
    gpu_part_ms: float
    npu_part_ms: float
    gpu_beside_ms: float
    npu_beside_ms: float
    total_ms: float
    npu_row_us: float
    gpu_slower: float
    npu_slower: float
    refill_ms: float
    gpu_gbps: float
    both_gbps: float

    @property
    def gpu_rows(self) -> int:
        """Rows of the GPU's part."""
        return self.rows - self.npu_rows


@contextmanager
def _empty_cache() -> Iterator[Path]:
    """Keep files in a folder of their own, so that nothing that was measured before counts."""
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            yield cache_root()
        finally:
            del os.environ[CACHE_VARIABLE]
            if before is not None:
                os.environ[CACHE_VARIABLE] = before


def solved() -> Example:
    """Return the example, by what the page's two commands do."""
    with _empty_cache() as cache:
        simulate(SimulationRequest(MODEL, soc=SOC, prompt=32, decode=0, level="layer"))  # profiles
        (path,) = (cache / "profiles" / "simulated").glob("*.json")
        request = PlanRequest(histogram={TOKENS: 1.0})
        found = plan_for(MODEL, LoadOptions(group_size=128, plan="tensor", request=request), path)
        assert found.model is not None
        predicted = found.model.predict(found.plan, "prefill", TOKENS)
        profile, costs = found.model.profile, found.model.costs
    assert predicted is not None
    item = next(item for item in predicted.operators if item.spec.group == GROUP)
    spec, chosen = item.spec, item.option
    (rows,), (npu_rows,) = spec.member_rows, chosen.placement.npu_rows

    def npu_ms(count: int) -> float:
        return costs.npu_us(spec, (count,), TOKENS, FORM) / 1e3

    def gpu_ms(count: int) -> float:
        return costs.gpu_us(spec, (count,), TOKENS) / 1e3

    slower = costs.slowdown(spec, TOKENS)
    gbps = {
        (record.key.processor, record.key.together): record.values["gbps"]
        for record in profile.records.values()
        if type(record.key).__name__ == "BandwidthKey"
    }
    return Example(
        rows=rows,
        columns=spec.columns,
        npu_rows=npu_rows,
        gpu_all_ms=gpu_ms(rows),
        npu_all_ms=npu_ms(rows),
        gpu_part_ms=gpu_ms(rows - npu_rows),
        npu_part_ms=npu_ms(npu_rows),
        gpu_beside_ms=chosen.gpu_us / 1e3,
        npu_beside_ms=chosen.npu_us / 1e3,
        total_ms=chosen.time_us / 1e3,
        npu_row_us=1e3 * (npu_ms(rows) - npu_ms(FEW_ROWS)) / (rows - FEW_ROWS),
        gpu_slower=slower.gpu,
        npu_slower=slower.npu,
        refill_ms=costs.overheads.refill_us / 1e3,
        gpu_gbps=gbps["gpu", False],
        both_gbps=gbps["gpu", True] + gbps["npu", True],
    )


def figure(example: Example) -> str:
    """Return the figure: the template with the example's numbers, bars drawn to scale."""
    e = example
    later = max(e.gpu_beside_ms, e.npu_beside_ms)
    end = LEFT + SCALE * later
    why = "when the later of both has ended"
    if e.npu_beside_ms > e.gpu_beside_ms:
        why += f", and {e.refill_ms:.2f} ms for an empty queue"
    names = {
        "last_npu_row": e.npu_rows - 1,
        "last_row": e.rows - 1,
        "npu_rows": e.npu_rows,
        "gpu_rows": e.gpu_rows,
        "rows": e.rows,
        "columns": e.columns,
        "tokens": TOKENS,
        "why": why,
        "total": f"{e.total_ms:.2f}",
        "end": f"{end:.1f}",
        "join": f"{LEFT + SCALE * e.total_ms:.1f}",
        "join_middle": f"{LEFT + SCALE * e.total_ms + 26:.1f}",
        "beside": f"{LEFT + SCALE * e.total_ms + 60:.1f}",
    }
    for name in ("gpu_all", "npu_all", "gpu_part", "npu_part", "gpu_beside", "npu_beside"):
        value = getattr(e, f"{name}_ms")
        names[name] = f"{value:.2f}"
        names[f"{name}_width"] = f"{SCALE * value:.1f}"
        names[f"{name}_middle"] = f"{LEFT + SCALE * value / 2:.1f}"
    return re.sub(r"\{(\w+)\}", lambda found: str(names[found[1]]), TEMPLATE.read_text("utf-8"))


def with_numbers(page: str, example: Example) -> str:
    """Return the page with the example's numbers between its marks."""
    e = example
    rest_ms = e.npu_all_ms - e.npu_row_us * e.rows / 1e3
    wait_ms = e.total_ms - max(e.gpu_beside_ms, e.npu_beside_ms)
    parts = {
        "alone": (
            f"| processor | {e.rows} rows | each further row |",
            "|---|---:|---:|",
            f"| GPU | {e.gpu_all_ms:.2f} ms | {1e3 * e.gpu_all_ms / e.rows:.2f} us |",
            f"| NPU | {e.npu_all_ms:.2f} ms | {e.npu_row_us:.2f} us |",
            "",
            f"The NPU has a fixed time of {rest_ms:.2f} ms beside the time of its rows.",
        ),
        "cut": (
            "| | rows | alone | while the other runs |",
            "|---|---:|---:|---:|",
            f"| NPU | {e.npu_rows} | {e.npu_part_ms:.2f} ms | {e.npu_beside_ms:.2f} ms |",
            f"| GPU | {e.gpu_rows} | {e.gpu_part_ms:.2f} ms | {e.gpu_beside_ms:.2f} ms |",
            "",
            f"While both compute, the GPU is {100 * (e.gpu_slower - 1):.0f} % slower than alone, and the NPU",
            f"{100 * (e.npu_slower - 1):.0f} %.",
        ),
        "sum": (
            f"    max({e.gpu_beside_ms:.2f}, {e.npu_beside_ms:.2f}) + {wait_ms:.2f} = {e.total_ms:.2f} ms",
            "",
            f"against {e.gpu_all_ms:.2f} ms on the GPU and {e.npu_all_ms:.2f} ms on the NPU alone.",
        ),
        "bandwidth": (
            "In decode (one token) a row split is for memory bandwidth: the GPU alone reads",
            f"{e.gpu_gbps:.1f} GB/s, both processors together {e.both_gbps:.1f}.",
        ),
    }
    for name, lines in parts.items():
        text = "\n".join(lines)
        begin, end = f"<!-- {name}: written by docs/generate.py -->", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, mark, after = rest.partition(end)
        assert mark, f"the page has no marks of {name}"
        page = f"{before}{begin}\n\n{text}\n\n{mark}{after}"
    return page

"""How do a trained mixture's experts share the tokens, and what do capacities on the NPU cost?

For the mixture of bench/train_experts.py, through heterollm itself on `host`. The first half of each text
calibrates, windows of 512 tokens of the second half are measured: Python code that training held out,
and English prose, the paragraphs of Python's own language reference.

    python bench/trained_experts.py routing FOLDER --out bench/results/experts.jsonl
    python bench/trained_experts.py overflow FOLDER --out bench/results/experts.jsonl
    python bench/trained_experts.py bytes FOLDER qwen3-30b-a3b --out bench/results/experts.jsonl

`routing` gives each layer's popularity on each text, Overlap@K of the texts, and the padding and overflow
that capacities would have had. `overflow` runs plans with all experts on the NPU at one capacity, or at those
of NPUMoE's tiers, and takes the overflow from the device's counts and the perplexity from the logits. `bytes`
adds up the weights that the steps of a decoded token read; of models that are only a name, by their shape.

With `drop last` the last tokens of a chunk are dropped, not those with the least norm of attention's output.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
from accuracy import TEXTS
from conditions import append_rows, origin, script_parser
from expert_policies import capacity_tiers, experts_by_policy
from msgspec import structs
from numpy.typing import NDArray
from perplexity import llm_surprises

from heterollm.calibration import calibrate
from heterollm.calibration.routing import RoutingCalibration, overlap
from heterollm.engine import Step
from heterollm.engine.blocks.mixture import MixtureEmitter
from heterollm.engine.experts.slots import EXPERT_SALIENCY
from heterollm.llm import LLM
from heterollm.model import ModelShape, model_shape
from heterollm.model.known import find_model
from heterollm.solver import ExpertsEntry, ExpertsPlacement, Overflow, Plan, PlannedExperts
from heterollm.solver.experts.prices import ExpertPrices, estimate_experts
from heterollm.text.likelihood import perplexity

WINDOW: Final = 512
CALIBRATION_WINDOWS: Final = 16
WINDOWS: Final = 8
CAPACITIES: Final = (32, 64, 128, 256, 512)
TIERS: Final = "tiers"
DROP_LAST: Final = "drop last"
"""A fate of the overflow beside those of the product."""
MOST_POPULAR: Final = (1, 2, 3, 4)

Row = dict[str, Any]
Case = tuple[str, int | str, str]
"""Text, capacity or ``tiers``, and fate of the overflow."""

Routing = Sequence[RoutingCalibration]


def halves(name: str) -> tuple[str, str]:
    """Return the two halves of a text."""
    text = TEXTS[name]()[1]
    middle = text.index("\n", len(text) // 2)
    return text[:middle], text[middle:]


def calibrated(folder: Path, name: str, half: int) -> Routing:
    """Return the routing of a model on the first windows of half of a text; its file stays in the folder."""
    target = folder / f"calibration.{name}.{half}.json"
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "text.txt"
        path.write_text(halves(name)[half], "utf-8")
        found = calibrate(folder, [path], output=target, windows=CALIBRATION_WINDOWS, window_tokens=WINDOW)
    return found.routing


def placement(loads: NDArray[np.int64], capacity: int | str, fate: Overflow = "gpu") -> ExpertsPlacement:
    """Return the placement of all experts of a layer on the NPU, in a graph for each capacity.

    Args:
        loads: ``[chunks, experts]`` of the calibration, by which tiers are chosen.
        capacity: The capacity of all experts, or ``tiers``.
        fate: Fate of tokens beyond a capacity.
    """
    capacities = CAPACITIES if capacity == TIERS else (int(capacity),)
    return experts_by_policy(loads, _free(capacities), "groups", fate)


def routing_rows(folder: Path) -> Iterator[Row]:
    """Yield popularity, Overlap@K, and padding and overflow at capacities."""
    first, second = ({name: calibrated(folder, name, half) for name in TEXTS} for half in (0, 1))
    for name, routing in first.items():
        for own in routing:
            counts = [int(count) for count in own.counts]
            yield {
                "kind": "popularity",
                "text": name,
                "layer": own.layer,
                "counts": counts,
                "imbalance": own.imbalance,
                "tiers": capacity_tiers(own.loads(WINDOW), CAPACITIES),
            }
    for number in MOST_POPULAR:
        for one, other, found in (
            ("code", "prose", overlap(first["code"], first["prose"], number)),
            *((name, name, overlap(first[name], second[name], number)) for name in TEXTS),
        ):
            yield {"kind": "overlap", "one": one, "other": other, "experts": number, "by_layer": found}
    for calibration, text, capacity in (
        *((name, name, capacity) for name in TEXTS for capacity in (*CAPACITIES, TIERS)),
        ("code", "prose", TIERS),
        ("prose", "code", TIERS),
    ):
        prices = _free(CAPACITIES)
        estimates = [
            estimate_experts(placement(own.loads(WINDOW), capacity), other.loads(WINDOW), prices)
            for own, other in zip(first[calibration], second[text], strict=True)
        ]
        yield {
            "kind": "capacity",
            "calibration": calibration,
            "text": text,
            "capacity": capacity,
            "padding_share": float(np.mean([one.padding_share for one in estimates])),
            "overflow_share": float(np.mean([one.overflow_share for one in estimates])),
        }


def overflow_rows(folder: Path, texts: Sequence[str], done: Container[Case]) -> Iterator[Row]:
    """Yield the perplexity of texts under plans with all experts on the NPU, and what overflowed.

    Cases that are done are left out.
    """
    with LLM.load(folder, device="host", plan="gpu", context=WINDOW) as llm:
        plan, tokenizer = structs.replace(llm.plan, chunk_length=WINDOW), llm.tokenizer
    for name in texts:
        routing = calibrated(folder, name, 0)
        ids = tokenizer.encode(halves(name)[1], add_bos=False)
        windows = [ids[place : place + WINDOW] for place in range(0, WINDOWS * WINDOW, WINDOW)]
        for capacity in (0, *CAPACITIES, TIERS):
            for fate in _fates(capacity):
                if (name, capacity, fate) in done:
                    continue
                by_last = fate == DROP_LAST
                own_fate: Overflow = "gpu" if fate == "gpu" else "drop"
                entries = tuple(
                    ExpertsEntry(
                        (1, WINDOW), (own.layer,) * 2, placement(own.loads(WINDOW), capacity, own_fate)
                    )
                    for own in (routing if capacity else ())
                )
                found = _perplexity(folder, plan.with_technique(PlannedExperts(entries)), windows, by_last)
                yield {"kind": "overflow", "text": name, "capacity": capacity, "overflow": fate, **found}


def _fates(capacity: int | str) -> tuple[str, ...]:
    """Return the fates of the overflow to compare; without experts on the NPU there is one."""
    if not capacity:
        return ("drop",)
    return (*(("gpu",) if capacity == TIERS else ()), DROP_LAST, "drop")


def _perplexity(folder: Path, plan: Plan, windows: Sequence[Sequence[int]], by_last: bool) -> Row:
    """Return perplexity and shares under a plan; with ``by_last`` the last tokens are dropped."""
    with ExitStack() as stack:
        if by_last:
            stack.enter_context(mock.patch.object(MixtureEmitter, "weigh_tokens"))
        llm = stack.enter_context(LLM.load(folder, device="host", plan=plan, context=WINDOW))
        if by_last:
            places = np.arange(WINDOW, 0, -1, dtype=np.float32)
            engine = llm._engine  # noqa: SLF001
            slot = engine.private[EXPERT_SALIENCY].buffer
            llm.on_engine_thread(lambda: engine.device.gpu.copy(slot, places))
        surprises = llm_surprises(llm, windows)
        counts = llm.on_engine_thread(lambda: llm._engine.expert_pairs)  # noqa: SLF001
    means = [float(one.mean()) for one in surprises]
    pairs = max(1, sum(own.pairs for own in counts))
    return {
        "perplexity": perplexity(surprises),
        "mean_losses": means,
        "npu_share": sum(own.on_npu for own in counts) / pairs,
        "overflow_share": sum(own.overflow for own in counts) / pairs,
        "dropped_share": sum(own.dropped for own in counts) / pairs,
    }


def bytes_rows(folder: Path, names: Sequence[str]) -> Iterator[Row]:
    """Yield the bytes of weights that a decoded token reads, and the parameters that it needs."""
    with LLM.load(folder, device="host", plan="gpu", context=WINDOW) as llm:
        steps = llm.steps("decode", 1)
        shape = model_shape(llm.config, folder.name)
    read = sum(step.work.weight_bytes for step in _launches(steps) if step.work is not None)
    row = _shape_row(shape)
    if read != row["read_bytes"]:
        raise SystemExit(f"The steps read {read} bytes of weights, the shape says {row['read_bytes']}.")
    yield {**row, "counted": "steps"}
    for name in names:
        found = find_model(name)
        yield {**_shape_row(model_shape(found.config, name)), "counted": "shape"}


def _shape_row(shape: ModelShape) -> Row:
    experts = shape.experts
    assert experts is not None
    assert experts.experts is not None
    dense = shape.layers * sum(spec.weight_bytes() for spec in shape.layer) + shape.head.weight_bytes()
    every = shape.layers * experts.weight_bytes()
    chosen = every * experts.experts.chosen // experts.experts.experts
    active = shape.layers * sum(_parameters(spec.member_rows, spec.columns) for spec in shape.layer)
    active += _parameters(shape.head.member_rows, shape.head.columns)
    assert experts.then is not None
    one = _parameters(experts.member_rows, experts.columns)
    one += _parameters(experts.then.member_rows, experts.then.columns)
    active += shape.layers * experts.experts.chosen * one
    return {
        "kind": "bytes",
        "model": shape.name,
        "read_bytes": dense + chosen,
        "expert_bytes": chosen,
        "all_bytes": dense + every,
        "active_parameters": active,
        "all_parameters": active + shape.layers * (experts.experts.experts - experts.experts.chosen) * one,
    }


def _parameters(rows: Sequence[int], columns: int) -> int:
    return sum(rows) * columns


def _launches(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps of merged launches instead of these."""
    for step in steps:
        yield from step.merged or (step,)


def _free(capacities: Sequence[int]) -> ExpertPrices:
    """Return prices by which nothing takes time: shares of rows do not depend on them."""
    nothing: Callable[[int, int], float] = lambda _experts, _capacity: 0.0  # noqa: E731
    return ExpertPrices(nothing, np.zeros(WINDOW + 1), tuple(capacities), expert_bytes=0)


def main() -> None:
    """Measure, print and append rows."""
    parser = script_parser(__doc__)
    parser.add_argument("what", choices=("routing", "overflow", "bytes"))
    parser.add_argument("folder", type=Path, help="The trained mixture.")
    parser.add_argument("names", nargs="*", help="bytes: names of known models beside it.")
    parser.add_argument("--text", choices=tuple(TEXTS), action="append", help="overflow: one text alone.")
    options = parser.parse_args()
    lines = options.out.read_text("utf-8").splitlines() if options.out and options.out.exists() else []
    before = [row for row in map(json.loads, lines) if row["kind"] == "overflow"]
    done = {(row["text"], row["capacity"], row["overflow"]) for row in before}
    own = {"model": options.folder.name, **origin("trained_experts")}
    rows = {
        "routing": lambda: routing_rows(options.folder),
        "overflow": lambda: overflow_rows(options.folder, options.text or tuple(TEXTS), done),
        "bytes": lambda: bytes_rows(options.folder, options.names),
    }[options.what]
    for row in rows():
        print(json.dumps(row), flush=True)
        append_rows(options.out, {**own, **row})


if __name__ == "__main__":
    main()

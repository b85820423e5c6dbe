"""Any legal plan gives transformers' logits: every kind of cut, drawn and one by one."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB, LOGITS_WORST_DROP_DB

from heterollm.base import PlanError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import STANDARD_LENGTHS, HostNpu
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.llm import LLM
from heterollm.solver import Placement, Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, RowsPlacement
from heterollm.solver.plan_records import PlanEntry
from heterollm.trace import Span

LENGTHS = (1, 31, 32, 33, 70, 96, 130)
TRACED = (50, 128)
DECODED = 6
# As few as draw every kind on every group, which a test below sees to.
SEEDS = (1, 2, 13)
MORE_SEEDS = tuple(seed for seed in range(20) if seed not in SEEDS)
CHUNK = 160
GROUPS = ("qkv", "o", "gate_up", "down", "head")
# Wide enough that every member but one has cuts at multiples of 64, 1120 rows that end between two of
# them, and keys and values of 256 rows.
WIDTHS = {
    "hidden_size": 768,
    "intermediate_size": 1120,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
}
Reference = Callable[[LLM, Path, list[int]], np.ndarray]
Pairs = Iterator[tuple[str, Placement]]


# -- the legal placements of one group --------------------------------------------------------------------


def row_cuts(spec: OpSpec) -> list[tuple[int, ...]]:
    """Rows of each member on the NPU: the same fraction of each, on the alignment, members left whole too."""
    alignment, cuts = HostNpu.row_alignment, set()
    for eighths in range(1, 8):
        aligned = tuple(rows * eighths // 8 // alignment * alignment for rows in spec.member_rows)
        cuts.add(aligned)
        if len(aligned) > 1:
            # A member that is not cut: all of it on the GPU, or all of it on the NPU.
            cuts.add((*aligned[:-1], 0))
            cuts.add((spec.member_rows[0], *aligned[1:]))
    return sorted(cut for cut in cuts if any(cut) and cut != spec.member_rows)


def pipes(tokens: int) -> Iterator[tuple[int, ...]]:
    """Several lengths in a row that end at or behind the last token."""
    for first in STANDARD_LENGTHS[1:]:
        for last in STANDARD_LENGTHS:
            for count in range(1, 5):
                lengths = (first,) * count + (last,)
                if count * first < tokens <= sum(lengths):
                    yield lengths


def candidates(spec: OpSpec, tokens: int) -> Pairs:
    """Yield every kind of placement that ``tokens`` tokens of the group can have, with its name."""
    yield "gpu", GPU_ONLY
    padded = min(length for length in STANDARD_LENGTHS if length >= tokens)
    yield "npu" if padded == tokens else "npu padded", RowsPlacement(spec.member_rows, (padded,))
    cuts = row_cuts(spec)
    for cut in cuts:
        yield "row" if padded == tokens else "hybrid", RowsPlacement(cut, (padded,))
    for lengths in pipes(tokens):
        exact = "" if sum(lengths) == tokens else " padded"
        yield f"pipe{exact}", RowsPlacement(spec.member_rows, lengths)
        for cut in cuts:
            yield f"row pipe{exact}", RowsPlacement(cut, lengths)
    for first in STANDARD_LENGTHS:
        if first < tokens:
            yield "sequence", RowsPlacement(spec.member_rows, (first,))
        for second in STANDARD_LENGTHS:
            if first + second < tokens:
                yield "multi-sequence", RowsPlacement(spec.member_rows, (first, second))


# With what a plan calls each of them.
KINDS = {
    "gpu": "gpu",
    "npu": "npu",
    "npu padded": "npu",
    "pipe": "npu",
    "pipe padded": "npu",
    "row": "row",
    "hybrid": "hybrid",
    "row pipe": "hybrid",
    "row pipe padded": "hybrid",
    "sequence": "sequence",
    "multi-sequence": "sequence",
}


def by_kind(spec: OpSpec, tokens: int) -> dict[str, list[Placement]]:
    kinds = defaultdict(list)
    for kind, placement in candidates(spec, tokens):
        kinds[kind].append(placement)
    return kinds


# -- plans ------------------------------------------------------------------------------------------------


def cases(specs: tuple[OpSpec, ...]) -> Iterator[tuple[OpSpec, Phase, int]]:
    """Yield every (group of a layer, phase, length) that the tests below run."""
    for spec in specs:
        # The head runs for the last row, and for all rows 32 at a time.
        prefill = (1, 2, 6, 31, 32) if spec.group == "head" else (*LENGTHS, *TRACED)
        for tokens in prefill:
            yield spec, "prefill", tokens
        for tokens in (1, DECODED):
            yield spec, "decode", tokens


def make_plan(llm: LLM, choose: Callable[[OpSpec, Phase, int], Placement]) -> Plan:
    specs = llm._weights.specs
    entries = [
        PlanEntry(phase, (tokens, tokens), (spec.layer, spec.layer), spec.group, choose(spec, phase, tokens))
        for spec, phase, tokens in cases(specs)
    ]
    layers = max(spec.layer for spec in specs)
    rest = [
        PlanEntry(phase, (1, CHUNK), (-1, layers), group, GPU_ONLY)
        for phase in ("prefill", "decode")
        for group in GROUPS
    ]
    return Plan("by hand", "host", "w4a16", model_shape(specs), CHUNK, (*entries, *rest))


def drawing(seed: int, seen: dict[str, set[Placement]] | None = None) -> Callable[..., Placement]:
    """Return a function that draws a kind, then one of its placements."""
    random = np.random.default_rng(seed)

    def draw(spec: OpSpec, _phase: Phase, tokens: int) -> Placement:
        kinds = by_kind(spec, tokens)
        kind = random.choice(sorted(kinds))
        placement = kinds[kind][random.integers(len(kinds[kind]))]
        if seen is not None:
            seen[f"{kind} {spec.group}"].add(placement)
        return placement

    return draw


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", **WIDTHS)


@pytest.fixture(scope="module")
def gpu_only(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="host", plan="gpu", kv_bits=32) as llm:
        yield llm


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return np.random.default_rng(3).integers(1, 2048, 200).tolist()


@pytest.fixture(scope="module")
def expected(gpu_only: LLM, folder: Path, reference: Reference, ids: list[int]) -> np.ndarray:
    return reference(gpu_only, folder, ids)


def answers(llm: LLM, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of prompts of all lengths and of some decode behind each, and their positions."""
    session, rows, positions = llm.session(), [], []
    for length in LENGTHS:
        session.reset()
        rows.append(session.prefill(ids[:length], all_logits=True))
        rows.append(session.decode(ids[length])[np.newaxis])
        rows.append(session.decode(ids[length + 1 : length + 1 + DECODED]))
        session.reset()
        rows.append(session.prefill(ids[:length])[np.newaxis])
        positions += [*range(length + 1 + DECODED), length - 1]
    return np.concatenate(rows), np.array(positions)


def check(actual: np.ndarray, expected: np.ndarray) -> None:
    gate = LOGITS_SQNR_DB["fp32"]
    assert sqnr_db(actual, expected) >= gate
    error, power = np.square(actual - expected), np.square(expected)
    for axis in (0, 1):
        worst = 10 * np.log10((power.sum(axis) / np.maximum(error.sum(axis), 1e-300)).min())
        assert worst >= gate - LOGITS_WORST_DROP_DB


@pytest.fixture(scope="module")
def alone(gpu_only: LLM, ids: list[int]) -> np.ndarray:
    """What the GPU answers by itself."""
    return answers(gpu_only, ids)[0].astype(np.float64)


def run_and_check(llm: LLM, alone: np.ndarray, expected: np.ndarray, ids: list[int]) -> None:
    actual, positions = answers(llm, ids)
    check(actual, expected[positions])
    check(actual, alone)


# -- tests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE_SEEDS)]
)
def test_drawn_plans(
    seed: int,
    folder: Path,
    gpu_only: LLM,
    alone: np.ndarray,
    expected: np.ndarray,
    ids: list[int],
    host_llm: Callable[..., LLM],
) -> None:
    plan = make_plan(gpu_only, drawing(seed))
    run_and_check(host_llm(folder, plan=plan), alone, expected, ids)


def test_every_kind_is_drawn(gpu_only: LLM) -> None:
    """What the seeds above run: every kind on every group, and several cut positions of each kind of cut."""
    seen: dict[str, set[Placement]] = defaultdict(set)
    possible: dict[str, set[Placement]] = defaultdict(set)
    for seed in SEEDS:
        make_plan(gpu_only, drawing(seed, seen))
    for spec, _, tokens in cases(gpu_only._weights.specs):
        for kind, placement in candidates(spec, tokens):
            possible[f"{kind} {spec.group}"].add(placement)
            assert placement.kind(spec, tokens) == KINDS[kind]
    assert {name.rsplit(maxsplit=1)[0] for name in possible} == set(KINDS)
    assert set(seen) == set(possible)
    for name, placements in seen.items():
        if KINDS[name.rsplit(maxsplit=1)[0]] in ("row", "hybrid", "sequence"):
            assert len(placements) >= min(2, len(possible[name])), name


# The drawn plans above have every kind on every group.
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("gpu", "row", "row pipe padded") else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_one_kind_everywhere(
    kind: str,
    folder: Path,
    gpu_only: LLM,
    alone: np.ndarray,
    expected: np.ndarray,
    ids: list[int],
    host_llm: Callable[..., LLM],
) -> None:
    """The same kind for all groups wherever it is legal, so that a failure above has a name."""

    def choose(spec: OpSpec, _phase: Phase, tokens: int) -> Placement:
        offered = by_kind(spec, tokens).get(kind, [GPU_ONLY])
        return offered[len(offered) // 2]

    plan = make_plan(gpu_only, choose)
    assert plan.uses_npu or kind == "gpu"
    run_and_check(host_llm(folder, plan=plan), alone, expected, ids)


def test_a_cut_off_the_alignment_is_refused(
    folder: Path, gpu_only: LLM, host_llm: Callable[..., LLM]
) -> None:
    def choose(spec: OpSpec, _phase: Phase, tokens: int) -> Placement:
        return RowsPlacement((100,), (32,)) if spec.group == "o" and tokens == 32 else GPU_ONLY

    with pytest.raises(PlanError, match="100"):
        host_llm(folder, plan=make_plan(gpu_only, choose))


def test_a_length_without_graphs_is_refused(
    folder: Path, gpu_only: LLM, host_llm: Callable[..., LLM]
) -> None:
    def choose(spec: OpSpec, _phase: Phase, tokens: int) -> Placement:
        return RowsPlacement(spec.member_rows, (48,)) if spec.group == "down" and tokens == 33 else GPU_ONLY

    with pytest.raises(PlanError, match="48"):
        host_llm(folder, plan=make_plan(gpu_only, choose))


def extent(spans: list[Span]) -> tuple[int, int]:
    return min(span.begin_ns for span in spans), max(span.end_ns for span in spans)


def both_at_work(llm: LLM, ids: list[int]) -> dict[str, bool]:
    """Run one pass and return for each split whether the GPU worked within the time of the NPU's graphs."""
    llm.take_trace()
    llm.session().prefill(ids)
    trace = llm.take_trace()
    slack_ns = 2000 * trace.clock_uncertainty_us
    spans: dict[str, dict[str, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in trace.spans:
        if span.category == "linear":
            spans[span.name][span.track].append(span)
    found = {}
    for name, tracks in spans.items():
        if len(tracks) == 2:
            (begin, end), (first, last) = extent(tracks["gpu"]), extent(tracks["npu"])
            found[name] = first - slack_ns <= begin < end <= last + slack_ns
    return found


# Tokens, and the graphs' lengths: a row cut at several positions; a sequence cut behind one and two thirds;
# a cut along rows whose graph is padded, and one whose graphs follow each other.
OVERLAPS = {
    "row at a quarter": (32, 1, (32,)),
    "row in the middle": (32, 2, (32,)),
    "row at three quarters": (32, 3, (32,)),
    "sequence at a third": (96, 4, (32,)),
    "sequence at two thirds": (96, 4, (64,)),
    "several sequences": (128, 4, (32, 32)),
    "hybrid, padded": (50, 2, (64,)),
    "hybrid, piped": (96, 3, (64, 32)),
}


@pytest.mark.usefixtures("shards_meet")
@pytest.mark.parametrize("cut", OVERLAPS)
def test_both_parts_of_every_cut_run_at_once(
    cut: str,
    folder: Path,
    gpu_only: LLM,
    ids: list[int],
    host_llm: Callable[..., LLM],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length, quarters, lengths = OVERLAPS[cut]

    def choose(spec: OpSpec, _phase: Phase, tokens: int) -> Placement:
        rows = tuple(rows if quarters == 4 else rows * quarters // 4 // 64 * 64 for rows in spec.member_rows)
        return RowsPlacement(rows, lengths) if tokens == length else GPU_ONLY

    llm = host_llm(folder, plan=make_plan(gpu_only, choose), trace=True, sync="event")
    kind = cut.split()[0].rstrip(",").replace("several", "sequence")
    for spec in llm._weights.specs[:-1]:
        assert llm.plan.placement("prefill", length, spec).kind(spec, length) == kind
    found = both_at_work(llm, ids[:length])
    assert found == {f"{layer}.{group}": True for layer in (0, 1) for group in GROUPS[:-1]}

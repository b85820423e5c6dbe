"""The steps of every family at every kind of plan, its operators, tensors and buffers, held as hashes.

A change that was meant rewrites them with ``HETEROLLM_GOLDEN=write pytest -n0 -m "" FILE``. To see what
differs, set ``HETEROLLM_GOLDEN`` to a folder for the lists before and after the change, and compare them.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from heterollm.engine.memory import memory_need
from heterollm.engine.runner import Engine
from heterollm.engine.slots import pool_sizes
from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import FfnRanges, LinearRanges, StaticRanges
from heterollm.kernels.ops import Group, OpSpec, Phase, Precision, ffn_specs, joined_specs
from heterollm.kernels.sim import Simulation
from heterollm.model import (
    KNOWN_MODELS,
    ModelConfig,
    ModelWeights,
    expert_specs,
    op_specs,
    shape_only_weights,
)
from heterollm.model.blocks import MixtureBlock
from heterollm.model.layout import expected_tensors
from heterollm.solver import (
    ExpertGroup,
    ExpertsEntry,
    ExpertsPlacement,
    NpuAttention,
    Placement,
    Plan,
    PlannedAttention,
    PlannedExperts,
    level_plan,
    model_shape,
)
from heterollm.solver.placements import FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry
from heterollm.solver.sparse.attention import AttentionEntry
from tests.heterollm.conftest import FAMILIES, config_of

FILE = Path(__file__).resolve().parents[2] / "golden" / "steps.json"
ASKED = os.environ.get("HETEROLLM_GOLDEN", "")

CHUNK, CONTEXT = 320, 1024
BLOCK = 16
"""Divides the inputs of all linears, so that gate, up and down have one format, and form an ffn."""

STANDARD = (32, 64, 320)
PASSES: tuple[tuple[Phase, int], ...] = (
    *(("prefill", tokens) for tokens in (1, 2, 16, 33, 300)),
    ("decode", 1),
    ("decode", 2),
)
PLANS: dict[str, tuple[Precision, tuple[str, ...]]] = {
    "w4a16": ("w4a16", ("gpu", "npu", "layer", "tensor", "block", "fused")),
    "w4a8": ("w4a8", ("gpu", "tensor", "block")),
    "w8a8": ("w8a8", ("npu", "tensor")),
}
QUICK = {"w4a16": ("gpu", "tensor", "block"), "w4a8": ("tensor",), "w8a8": ("npu",)}


def plan_of(level: str, specs: tuple[OpSpec, ...], precision: Precision, experts: bool) -> Plan:
    """Return a plan of a level; ``tensor`` has row cuts, ``block`` splits networks along their width.

    ``fused`` has fused groups where layers have some, networks split along their width.
    """
    if level in ("gpu", "npu", "layer"):
        described = {"device": "sim", "precision": precision, "standard_lengths": STANDARD}
        return level_plan(level, specs, chunk_length=CHUNK, **described)  # type: ignore[arg-type]
    last = max(spec.layer for spec in specs)
    entries: list[PlanEntry] = []
    form = "static_int8" if precision == "w8a8" else None
    for phase, lengths, graphs in (
        ("prefill", (1, 32), (32,)),
        ("prefill", (33, CHUNK), (320,)),
        ("decode", (1, 32), (32,)),
    ):
        ffns = ffn_specs(specs) if level == "block" else ()
        if level == "fused":
            ffns = tuple(spec for spec in joined_specs(specs) if spec.fused)
        parts, sizes = {(ffn.layer, part) for ffn in ffns for part in ffn.parts}, defaultdict(set)
        for spec in specs:
            sizes[spec.group].add(spec.member_rows)
        # Kinds of layers whose groups differ in size have entries of their own.
        named = {
            (spec.group, spec.kind if len(sizes[(*spec.parts, spec.group)[0]]) > 1 else ""): spec
            for spec in (*specs, *ffns)
            if (spec.layer, spec.group) not in parts
        }
        for (group, kind), spec in named.items():
            layers = (-1, -1) if group == "head" else (0, last)
            cuts = tuple(rows // 128 * 64 for rows in spec.member_rows)
            placement: Placement = RowsPlacement(cuts, graphs, form)
            if spec.then is not None:
                placement = FfnPlacement.of(cuts, graphs, form)
            elif spec.fused:
                placement = RowsPlacement(spec.member_rows, graphs)
            entries.append(PlanEntry(phase, lengths, layers, group, placement, kind))  # type: ignore[arg-type]
    mixtures = ()
    if experts:
        placed = ExpertsPlacement((ExpertGroup((1, 0), 32), ExpertGroup((3,), 64)))
        mixtures = (PlannedExperts((ExpertsEntry((1, CHUNK), (0, last), placed),)),)
    return Plan(level, "sim", precision, model_shape(specs), CHUNK, tuple(entries), techniques=mixtures)


def ranges_of(specs: tuple[OpSpec, ...]) -> dict[tuple[int, Group], StaticRanges]:
    found: dict[tuple[int, Group], StaticRanges] = {
        (spec.layer, spec.group): LinearRanges(1.0, 1.0, bits=8) for spec in specs
    }
    return found | {(ffn.layer, "ffn"): FfnRanges(*(1.0,) * 7) for ffn in ffn_specs(specs)}


def spec_line(spec: OpSpec) -> str:
    names = " ".join(f"{member.name}:{member.rows}" for member in spec.members)
    line = f"{spec.layer} {spec.place} {names} of {spec.columns} {spec.weight!r} {spec.source} {spec.target}"
    parts = (spec.join, spec.integer_inputs, spec.experts)
    return f"{line} {parts}" + ("" if spec.then is None else f" then {spec_line(spec.then)}")


def model_lines(config: ModelConfig, precision: Precision) -> Iterator[str]:
    specs = op_specs(config, precision, BLOCK, True)
    yield from map(spec_line, (*specs, *ffn_specs(specs), *expert_specs(config, specs)))


def of_model(config: ModelConfig) -> dict[str, list[str]]:
    precisions: tuple[Precision, ...] = ("w4a16", "w4a8", "w8a8", "fp16")
    found: dict[str, list[str]] = {one: list(model_lines(config, one)) for one in precisions}
    tensors = sorted(expected_tensors(config).items())
    return {**found, "tensors": [f"{name} {shape}" for name, shape in tensors]}


def of_plans(config: ModelConfig, kind: str, levels: tuple[str, ...]) -> Iterator[tuple[str, list[str]]]:
    precision = PLANS[kind][0]
    specs = op_specs(config, precision, BLOCK, True)
    weights = shape_only_weights(config, specs)
    mixtures = config.blocks(MixtureBlock).values()
    on_npu = bool(mixtures) and not any(block.biased or not block.gated for block in mixtures)
    for level in levels:
        plan = plan_of(level, specs, precision, on_npu)
        yield from of_plan(level, weights, plan, ranges_of(specs) if precision == "w8a8" else {})


def of_plan(
    name: str, weights: ModelWeights, plan: Plan, ranges: dict[tuple[int, Group], StaticRanges]
) -> Iterator[tuple[str, list[str]]]:
    device = open_device("sim:snapdragon-8gen3", simulation=Simulation(lengths=STANDARD, every_form=True))
    config, specs = weights.config, weights.specs
    engine = Engine(device, weights, plan, CONTEXT, lambda *_: None, ranges=ranges)
    for phase, tokens in PASSES:
        yield f"{name} {phase} {tokens}", [repr(step) for step in engine.planned_steps(phase, tokens)]
    sizes = pool_sizes(config, specs, plan, device.activation_dtype.itemsize, CONTEXT)
    need = memory_need(config, specs, plan, CONTEXT, sizes, device.cache_dtype, device.npu)
    yield f"{name} buffers", [*(f"{slot} {size}" for slot, size in sizes.items()), str(need)]


def hold(name: str, lists: dict[str, list[str]]) -> None:
    """Fail where the hash of a list is not the golden one."""
    found = {key: hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] for key, lines in lists.items()}
    if ASKED not in ("", "write"):
        for key, lines in lists.items():
            path = Path(ASKED) / name / f"{key}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join([*lines, ""]), "utf-8")
    golden = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    if ASKED == "write":
        golden[name] = golden.get(name, {}) | found
        FILE.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", "utf-8")
    differ = [key for key, value in found.items() if golden.get(name, {}).get(key) != value]
    assert not differ, f"{name}: set HETEROLLM_GOLDEN to a folder for the lists of {differ}"


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_and_tensors(family: str) -> None:
    hold(family, of_model(config_of(family)))


def test_operators_of_known_models() -> None:
    for name, known in KNOWN_MODELS.items():
        hold(name, {"w4a16": list(model_lines(known.config, "w4a16"))})


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps(family: str, kind: str) -> None:
    found = dict(of_plans(config_of(family), kind, QUICK[kind]))
    hold(f"{family} {kind}", found)


def test_steps_of_attention_on_the_npu() -> None:
    config = config_of("llama")
    specs = op_specs(config, "w4a16", BLOCK, True)
    entry = AttentionEntry((1, CHUNK), (1, CONTEXT), (0, 0), NpuAttention())
    plan = plan_of("npu", specs, "w4a16", False).with_technique(PlannedAttention((entry,)))
    hold("llama w4a16", dict(of_plan("attention", shape_only_weights(config, specs), plan, {})))


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_of_further_levels(family: str, kind: str) -> None:
    levels = tuple(level for level in PLANS[kind][1] if level not in QUICK[kind])
    hold(f"{family} {kind}", dict(of_plans(config_of(family), kind, levels)))

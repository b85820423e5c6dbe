"""Plans with fused groups: the cheapest path through a layer, its slices, and norms in graphs of q, k, v."""

import dataclasses

import pytest
from msgspec import structs

from heterollm.kernels.ops import GraphMemory, WeightFormat, joined_specs
from heterollm.solver import Objective, Solver, with_norms
from heterollm.solver.candidates import candidates
from heterollm.solver.ffn import ffn_groups, gpu_shard_us
from heterollm.solver.placements import GPU_ONLY
from heterollm.solver.predict import layer_cost
from heterollm.solver.slices import Budget
from tests.solver.conftest import ProportionalBlockCosts, make_limits, make_model

LENGTHS = (1, 20, 64, 100)


class FusedCosts(ProportionalBlockCosts):
    """Times by work, those of a fused graph with all of its linears; each graph has a start."""

    def npu_us(self, spec, member_rows, length, form):
        own_us = 150.0 + super().npu_us(spec, member_rows, length, form)
        return own_us if spec.first is None else own_us + spec.first.rows * spec.first.columns / 1e4


def model(layers=2):
    """Return the groups of a model whose layers can be fused."""
    weight = WeightFormat(4, 32)
    return tuple(
        dataclasses.replace(spec, weight=weight, fusible=spec.group in ("qkv", "gate_up"))
        for spec in make_model(layers)
    )


def solver(seed, specs, **options):
    return Solver(specs, make_limits(), FusedCosts(seed), chunk_length=128, level="fused", **options)


def test_fused_groups_stand_for_others():
    specs = model(1)
    norm, fused, ffn = joined_specs(specs)
    assert [spec.group for spec in (norm, fused, ffn)] == ["norm_qkv", "o_ffn", "ffn"]
    qkv, o, gate_up, down, _ = specs
    assert fused.weight_bytes() == sum(spec.weight_bytes() for spec in (o, gate_up, down))
    assert fused.flops(7) == sum(spec.flops(7) for spec in (o, gate_up, down))
    assert norm.weight_bytes() == qkv.weight_bytes()
    # The stream is an input beside the output of attention.
    memory = GraphMemory(activation_bytes=2)
    io_bytes = fused.graph_bytes(fused.member_rows, [32], memory) - fused.weight_bytes()
    assert io_bytes == 32 * 2 * (o.columns + 2 * gate_up.columns)
    for changes in ({"fusible": False}, {"integer_inputs": True}, {"weight": WeightFormat(16)}):
        others = [dataclasses.replace(spec, **changes) for spec in specs]
        assert not any(spec.fused for spec in joined_specs(others))


@pytest.mark.parametrize("seed", range(12))
def test_no_other_path_is_cheaper(seed):
    specs = model(1)
    made = solver(seed, specs, objective=Objective(margin_fraction=0.0))
    _, o, gate_up, down, _ = specs
    _, fused, _ = joined_specs(specs)
    for tokens in LENGTHS:
        chosen = [(choice.spec, choice.chosen.placement) for choice in made.length(tokens).choices]
        cost = layer_cost(chosen, tokens, made.costs, made.objective)
        first = chosen[0]
        assert first[0].group == "qkv"
        paths = [[first, (o, GPU_ONLY), (gate_up, GPU_ONLY), (down, GPU_ONLY)]]
        paths += [[first, (fused, own)] for own in candidates(fused, tokens, made.limits)]
        least = min(layer_cost(path, tokens, made.costs, made.objective) for path in paths)
        assert cost == pytest.approx(least)


@pytest.mark.parametrize("budget", [None, 600_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_npu_holds_a_fused_group_or_its_parts(seed, budget):
    specs = model()
    limit = Budget(budget, GraphMemory(copies_by_length=budget is not None, activation_bytes=2))
    plan = solver(seed, specs, budget=limit).plan(device="x", precision="w4a16")
    assert not {"o", "gate_up", "down"} & {held.group for held in plan.slices}
    assert budget is None or plan.npu_bytes(specs, limit.memory) <= budget
    for phase, tokens in (("decode", 1), ("prefill", 64), ("prefill", 100)):
        groups = [spec.group for spec, _ in plan.operators(phase, tokens, specs[:4])]
        assert groups in (["qkv", "o", "gate_up", "down"], ["qkv", "o_ffn"])


def test_some_plan_is_fused_at_every_length():
    specs = model()
    plans = [solver(seed, specs).plan(device="x", precision="w4a16") for seed in range(4)]
    for phase, tokens in (("decode", 1), ("prefill", 64), ("prefill", 100)):
        found = [plan.operators(phase, tokens, specs[:4]) for plan in plans]
        assert any(spec.group == "o_ffn" for own in found for spec, _ in own)


def test_norms_join_groups_that_the_npu_computes_whole():
    specs = model()
    for seed in range(6):
        plan = solver(seed, specs).plan(device="x", precision="w4a16")
        found = with_norms(plan, specs)
        for before, after in zip(plan.entries, found.entries, strict=True):
            whole = before.group == "qkv" and before.placement.npu_rows == specs[0].member_rows
            assert after == (structs.replace(before, group="norm_qkv") if whole else before)
            assert not whole or sum(before.placement.npu_lengths) >= before.lengths[1]
        assert with_norms(plan, [dataclasses.replace(spec, fusible=False) for spec in specs]) == plan


def test_the_gpu_computes_o_beside_its_share():
    specs, costs = model(1), FusedCosts(3)
    _, o, _, _, _ = specs
    _, fused, ffn = joined_specs(specs)
    gate_up, _ = ffn_groups(fused)
    own_us = costs.gpu_us(o, o.member_rows, 9) + costs.between_us(gate_up, 9)
    assert gpu_shard_us(costs, fused, (128, 128), 9) == pytest.approx(
        own_us + gpu_shard_us(costs, ffn, (128, 128), 9)
    )

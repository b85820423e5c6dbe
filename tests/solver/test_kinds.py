"""Plans by kinds of layers: names alone change nothing, sizes are planned apart, and times are summed."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from heterollm.base import PlanError
from heterollm.kernels.ops import GraphMemory, ffn_specs
from heterollm.solver import (
    Budget,
    Plan,
    Solver,
    check_plan,
    kind_counts,
    plan_chunks,
    plan_flights,
    predict_pass,
)
from heterollm.solver.costs import Overheads

LONGEST = 128
PROMPTS = {96: 1.0, 300: 1.0, 1000: 1.0}
SINGLY = Overheads(8.0, 50.0, submit_us=12.0, merges_launches=False)


def named(specs, *names):
    """Give the layers names of kinds in turn."""
    return tuple(replace(one, kind=names[one.layer % len(names)] if one.layer >= 0 else "") for one in specs)


def mixed(made, layers=5, wide=(512, 256)):
    """Return a model with networks of two widths in turn."""
    models = [made.model(layers, wide=width) for width in wide]
    body = [one for one in models[0] if one.layer >= 0 and one.layer % 2 == 0]
    body += [one for one in models[1] if one.layer >= 0 and one.layer % 2]
    return (*named(sorted(body, key=lambda one: one.layer), "wide", "narrow"), models[0][-1])


def solver_of(made, specs, seed=0, level="block", overheads=None, budget=None):
    costs = made.proportional_blocks(seed, overheads=overheads or made.free)
    return Solver(
        specs, made.limits(), costs, budget=budget or Budget(), chunk_length=LONGEST, level=level, head_rows=4
    )


def solved(solver):
    return solver.solve(device="d", precision="fp16")


def placements(plan, specs, tokens):
    """Return who computes each operator of each layer in both phases."""
    found = {}
    for phase in ("prefill", "decode"):
        for spec, placement in plan.operators(phase, tokens, specs):
            found[phase, spec.layer, spec.group] = replace_predictions(placement)
    return found


def replace_predictions(placement):
    return placement.npu_rows, placement.npu_lengths, placement.form


@pytest.mark.parametrize("level", ["tensor", "block"])
@pytest.mark.parametrize("overheads", [None, SINGLY])
@pytest.mark.parametrize("limit", [None, 300_000])
def test_names_of_kinds_alone_change_no_plan(made, level, overheads, limit):
    """Not within a memory limit either: groups that are alike share their slices."""
    one = made.model(4)
    two, budget = named(one, "a", "b"), Budget(limit, GraphMemory(copies_by_length=True))
    solvers = [solver_of(made, specs, 1, level, overheads, budget) for specs in (one, two)]
    alone, apart = (solved(solver)[0] for solver in solvers)
    assert alone.entries == apart.entries
    assert alone.slices == apart.slices
    assert alone.shape != apart.shape
    for tokens in (1, 2, 31, 64, 100, LONGEST):
        assert placements(alone, one, tokens) == placements(apart, two, tokens)
    for phase, tokens in (("decode", 1), ("decode", 3), ("prefill", 100)):
        times_us = [
            predict_pass(plan, solver.specs, solver.costs, phase, tokens).time_us
            for plan, solver in zip((alone, apart), solvers, strict=True)
        ]
        assert times_us[1] == pytest.approx(times_us[0])


@pytest.mark.parametrize("level", ["tensor", "block"])
@pytest.mark.parametrize("seed", range(3))
def test_each_size_of_network_is_planned_by_itself(made, seed, level):
    specs = mixed(made)
    solver = solver_of(made, specs, seed, level)
    plan, _ = solved(solver)
    assert Plan.from_json(plan.to_json()) == plan
    alike = [solver_of(made, made.model(5, wide=width), seed, level) for width in (512, 256)]
    for tokens in (1, 64, LONGEST):
        wide, narrow = (solved(one)[0] for one in alike)
        found = placements(plan, specs, tokens)
        # A layer of the mixed model is placed as in a model of such layers.
        for layer, other in ((0, wide), (1, narrow)):
            expected = placements(other, alike[layer].specs, tokens)
            assert {key: own for key, own in found.items() if key[1] == layer} == {
                key: own for key, own in expected.items() if key[1] == layer
            }
        total = predict_pass(plan, specs, solver.costs, "prefill", tokens, logits=False)
        parts = [
            predict_pass(own, one.specs, one.costs, "prefill", tokens, logits=False)
            for own, one in zip((wide, narrow), alike, strict=True)
        ]
        expected_us = 3 * parts[0].kinds[0].layer_us + 2 * parts[1].kinds[0].layer_us
        assert total.time_us == pytest.approx(expected_us)
        assert [(kind.name, kind.layers) for kind in total.kinds] == [("wide", 3), ("narrow", 2)]


def test_groups_that_all_kinds_place_alike_are_written_once(made):
    plan, _ = solved(solver_of(made, mixed(made), level="tensor"))
    kinds = {}
    for entry in plan.entries:
        kinds.setdefault(entry.group, set()).add((entry.kind, entry.layers))
    assert kinds["qkv"] == kinds["o"] == {("", (0, 4))}
    assert kinds["head"] == {("", (-1, -1))}
    assert kinds["gate_up"] == {("wide", (0, 4)), ("narrow", (1, 3))}
    assert '"kind"' not in solved(solver_of(made, made.model(2)))[0].to_json()


def test_networks_in_some_layers_alone_need_no_name_in_entries(made):
    every = named(made.model(4), "a", "b")
    specs = tuple(one for one in every if one.kind != "b" or one.group in ("qkv", "o"))
    solver = solver_of(made, specs)
    plan, _ = solved(solver)
    assert {entry.kind for entry in plan.entries} == {""}
    found = predict_pass(plan, specs, solver.costs, "prefill", LONGEST)
    assert [len(kind.operators) for kind in found.kinds] in ([4, 2], [3, 2])
    operators = plan.operators("decode", 1, specs)
    assert {spec.layer for spec, _ in operators if spec.group in ("down", "ffn")} == {0, 2}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overheads", [None, SINGLY])
@pytest.mark.parametrize("limit", [300_000, 900_000])
def test_slices_of_all_kinds_keep_the_budget(made, limit, overheads, seed):
    memory, specs = GraphMemory(copies_by_length=True), mixed(made)
    solver = solver_of(made, specs, seed, "block", overheads, Budget(limit, memory))
    plan, slices = solved(solver)
    assert plan.npu_bytes(specs, memory) <= limit
    free, _ = solved(replace(solver, budget=Budget()))
    times_us = [predict_pass(own, specs, solver.costs, "prefill", LONGEST).time_us for own in (free, plan)]
    assert times_us[0] <= times_us[1] * (1 + 1e-9)
    assert set(slices) == {spec.place for spec in (*specs[:8], *ffn_specs(specs[:8]), specs[-1])} - {
        "narrow.qkv",
        "narrow.o",
    }


def test_kinds_cost_little_time_to_solve(made, calls_of):
    """Twice at most, within a budget too: only what differs is searched again."""
    memory = GraphMemory(copies_by_length=True)
    for limit in (None, 500_000):
        models = made.model(4), named(made.model(4), "a", "b"), mixed(made, 4)
        solvers = [solver_of(made, specs, 1, budget=Budget(limit, memory)) for specs in models]
        one, names, sizes = (calls_of(lambda solver=solver: solved(solver)) for solver in solvers)
        assert names < 1.8 * one
        assert sizes < 2 * one


def test_chunks_and_flights_sum_kinds(made):
    specs, one = mixed(made), made.model(4)
    solver = solver_of(made, specs, 1)
    plan, slices = solved(solver)
    flown = plan_flights(solver, plan, slices, 4, PROMPTS, lambda _: solver.costs)
    assert flown.schedule is not None
    assert {own.kind for own in flown.schedule.times} == {"wide", "narrow"}
    assert Plan.from_json(flown.to_json()) == flown
    shorter, _ = plan_chunks(solver, plan, slices, PROMPTS, lambda _: solver.costs)
    assert shorter.chunk_length <= plan.chunk_length
    # Two names of one kind of layer: the same times but for the begin of a flight.
    alone, apart = (solver_of(made, own, 1) for own in (one, named(one, "a", "b")))
    flights = []
    for own in (alone, apart):
        whole, held = solved(own)
        flights.append(plan_flights(own, whole, held, 4, PROMPTS, lambda _, own=own: own.costs))
    assert flights[0].schedule.entries == flights[1].schedule.entries
    assert kind_counts(apart.specs) == {"a": 2, "b": 2}


def test_a_slice_of_another_kind_is_not_held(made):
    plan, _ = solved(solver_of(made, mixed(made), level="tensor"))
    other = [replace_kind(held) for held in plan.slices]
    with pytest.raises(PlanError, match="hold no such graph"):
        Plan(*(getattr(plan, name) for name in plan.__struct_fields__[:7]), tuple(other))


def test_a_group_that_no_layer_has_is_named(made):
    specs = made.model(2)
    plan, _ = solved(solver_of(made, specs, level="tensor"))
    entries = [replace_struct(one, group="qvk") if one.group == "qkv" else one for one in plan.entries]
    wrong = replace_struct(plan, entries=tuple(entries), slices=())
    with pytest.raises(PlanError, match="places qvk") as caught:
        check_plan(wrong, specs, None, longest=LONGEST, head_rows=4)
    assert "qkv, o, gate_up, down, head, ffn" in caught.value.fix


def replace_kind(held):
    return type(held)(held.group, held.layers, held.npu_rows, held.lengths, "other" if held.kind else "")


def is_sparse(layer, step, dense):
    """Where Qwen3-MoE has experts: by ``decoder_sparse_step``, but not in ``mlp_only_layers``."""
    return layer not in dense and (layer + 1) % step == 0


def test_a_path_that_one_kind_alone_takes_is_of_that_kind(made):
    """Narrow networks run as ffns and wide ones in two groups: neither holds graphs of the other's."""

    class Costs(made.proportional_blocks):
        def npu_us(self, spec, member_rows, length, form):
            slower = (
                100.0 if (spec.then is None) == (spec.kind == "narrow") and "qkv" not in spec.group else 1.0
            )
            return slower * super().npu_us(spec, member_rows, length, form)

    specs, memory = mixed(made), GraphMemory(copies_by_length=True)
    solver = Solver(specs, made.limits(), Costs(0), chunk_length=LONGEST, level="block", head_rows=4)
    plan, slices = solved(solver)
    placed = {(entry.group, entry.kind) for entry in plan.entries}
    assert {("ffn", "narrow"), ("gate_up", "wide"), ("down", "wide")} <= placed
    assert not placed & {("ffn", ""), ("gate_up", ""), ("down", "")}
    held = sum(
        solver.count(spec) * spec.graph_bytes(rows, lengths, memory)
        for place, spec in solver.places.items()
        for rows, lengths in slices[place].items()
    )
    assert plan.npu_bytes(specs, memory) <= held


@pytest.mark.parametrize("overheads", [None, SINGLY])
@pytest.mark.parametrize(("step", "dense"), [(2, ()), (1, (0, 1)), (2, (3,))])
def test_dense_layers_among_sparse_ones_are_planned_by_kind(made, step, dense, overheads):
    class Mixtures(made.proportional_blocks):
        def mixture_us(self, tokens, kind=""):
            return (20.0, 3.0 * tokens) if kind == "sparse" else ()

    layers = range(6)
    sparse = {layer for layer in layers if is_sparse(layer, step, dense)}
    kinds = {layer: "sparse" if layer in sparse else "dense" for layer in layers}
    specs = tuple(
        replace(one, kind=kinds.get(one.layer, ""))
        for one in made.model(len(layers))
        if one.layer not in sparse or one.group in ("qkv", "o")
    )
    costs = Mixtures(1, overheads=overheads or made.free)
    solver = Solver(specs, made.limits(), costs, chunk_length=LONGEST, level="block", head_rows=4)
    plan, _ = solved(solver)
    for phase, tokens in (("decode", 1), ("decode", 2), ("prefill", LONGEST)):
        found = predict_pass(plan, specs, costs, phase, tokens)
        by_name = {kind.name: kind for kind in found.kinds}
        assert {name: kind.layers for name, kind in by_name.items()} == kind_counts(specs)
        assert by_name["sparse"].mixture_us == found.experts_us == 20.0 + 3.0 * tokens
        assert by_name["dense"].mixture_us == 0.0
        assert by_name["sparse"].ffn_us == 0.0 < by_name["dense"].ffn_us
        assert found.time_us == pytest.approx(
            sum(kind.layers * kind.layer_us for kind in found.kinds)
            + found.head.between_us
            + found.head.option.time_us
        )
        if tokens > 1:
            # Attention is placed alike, and takes as long in both.
            alike = [[item.option.time_us for item in kind.operators[:2]] for kind in found.kinds]
            assert alike[0] == alike[1]
    if not overheads:
        assert {entry.kind for entry in plan.entries} == {""}

"""The graphs of a plan by context: each once, all lengths of a slice together."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from heterollm.engine import PlannedGraph, planned_contexts, planned_graphs
from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import NpuBackend
from heterollm.llm import LLM
from heterollm.model import ModelConfig, op_specs
from heterollm.solver import level_plan


@pytest.mark.parametrize("seed", range(8))
def test_every_graph_has_one_context_with_all_lengths_of_its_slice(bundled_model: Path, seed: int) -> None:
    draw = random.Random(seed)
    specs = op_specs(ModelConfig.from_folder(bundled_model), "w4a16", 32, True)
    lengths = tuple(sorted(draw.sample((1, 32, 64, 128, 256), draw.randint(1, 5))))
    plan = level_plan(
        draw.choice(["layer", "npu"]),
        specs,
        device="d",
        precision="w4a16",
        standard_lengths=lengths,
        chunk_length=lengths[-1],
    )
    graphs = list(dict.fromkeys(planned_graphs(plan, specs, {})))
    assert [(graph,) for graph in graphs] == planned_contexts(graphs, 0)
    layers = draw.randint(1, 5)
    largest = sum(spec.weight_bytes() for spec in specs if spec.layer == 0)
    most_bytes = draw.randint(1, 2 * layers * largest)
    contexts = planned_contexts(graphs, layers, most_bytes)
    assert sorted(place(graph) for context in contexts for graph in context) == sorted(map(place, graphs))
    owners: dict[tuple[Any, ...], set[int]] = {}
    for number, context in enumerate(contexts):
        found = {graph.spec.layer for graph in context}
        assert max(found) - min(found) < layers
        slices = {place(graph)[:3]: graph.weight_bytes for graph in context}
        assert len(slices) == 1 or sum(slices.values()) <= most_bytes
        for one in slices:
            owners.setdefault(one, set()).add(number)
    assert all(len(numbers) == 1 for numbers in owners.values())
    # The order of a pass: layer by layer, groups in their order, the head last.
    order = list(dict.fromkeys(place(graph)[:3] for context in contexts for graph in context))
    ran = dict.fromkeys((spec.layer, spec.group) for spec in specs)
    assert [one[:2] for one in order] == [one for one in ran if one in {own[:2] for own in order}]
    # No two neighbours would fit one context.
    for first, second in itertools.pairwise(contexts):
        both = {place(graph)[:3]: graph.weight_bytes for graph in (*first, *second[:1])}
        begin, end = first[0].spec.layer, second[0].spec.layer
        assert end < 0 or end - begin >= layers or sum(both.values()) > most_bytes


def place(graph: PlannedGraph) -> tuple[Any, ...]:
    return graph.spec.layer, graph.spec.group, graph.npu_rows, graph.length, graph.form or ""


def test_the_engine_packages_what_it_prepares(bundled_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged: list[tuple[Any, ...]] = []
    prepared: list[tuple[Any, ...]] = []

    class Packager:
        context_layers = 2

        def package(self, contexts: Any) -> None:
            for context in contexts:
                assert {graph.shard().layer for graph in context} == {graph.layer for graph in context}
                packaged.extend(graph.place for graph in context)

        def test_sharing(self) -> Any:
            raise AssertionError

    class Recording:
        def __init__(self, npu: NpuBackend) -> None:
            self.npu = npu

        def __getattr__(self, name: str) -> Any:
            return getattr(self.npu, name)

        def prepare(self, shard: Any, length: int, form: Any = None, **options: Any) -> Any:
            rows = tuple(stop for _, stop in shard.row_ranges)
            prepared.append(((shard.layer, shard.group, rows, ()), length, form))
            return self.npu.prepare(shard, length, form, **options)

    def opened(*arguments: Any, **options: Any) -> Any:
        device = open_device(*arguments, **options)
        assert device.npu is not None
        device.npu, device.packager = Recording(device.npu), Packager()  # type: ignore[assignment]
        return device

    monkeypatch.setattr("heterollm.loading.open_device", opened)
    with LLM.load(bundled_model, device="host", plan="npu", context=64) as llm:
        llm.generate("import os", max_new_tokens=2)
    assert prepared
    assert set(prepared) <= set(packaged)
    assert len(packaged) == len(set(packaged))

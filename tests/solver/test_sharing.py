"""Chunk-sharing graphs of llm.npu, section 3.2, counted on the graphs of real plans."""

import pytest

from heterollm.kernels.ops import GraphMemory
from heterollm.model import find_model, op_specs
from heterollm.solver import graph_sharing, level_plan

LENGTHS = (32, 64, 128, 256, 512, 1024)


def shared(prompt, chunk=256, level="npu", model="qwen1.5-1.8b"):
    config = find_model(model).config
    specs = op_specs(config, "w4a16", 128, True)
    plan = level_plan(
        level, specs, device="d", precision="w4a16", standard_lengths=LENGTHS, chunk_length=chunk
    )
    return specs, graph_sharing(plan, specs, prompt, GraphMemory(copies_by_length=True))


def test_chunks_share_the_graphs_of_all_linears() -> None:
    """1024 tokens in chunks of 256 take 75 % less memory than graphs of each chunk, as in the paper."""
    specs, found = shared(1024)
    # One graph for each linear of a layer, whatever the number of chunks.
    assert (found.chunks, found.graphs, found.separate_graphs) == (4, 24 * 4, 4 * 24 * 4)
    assert found.saved_fraction == pytest.approx(0.75)
    assert found.held_bytes == sum(spec.slice_bytes(spec.member_rows) for spec in specs[:-1])


@pytest.mark.parametrize("prompt", [1, 256, 257, 700, 1024, 3000])
def test_a_last_shorter_chunk_has_graphs_of_its_own(prompt: int) -> None:
    specs, found = shared(prompt)
    full, rest = divmod(prompt, 256)
    assert found.chunks == full + bool(rest)
    layer_bytes = sum(spec.slice_bytes(spec.member_rows) for spec in specs[:-1])
    length = next((one for one in (1, *LENGTHS) if one >= rest), None)
    kinds = {*([256] if full else []), *([length] if rest else [])}
    assert found.held_bytes == len(kinds) * layer_bytes
    assert found.separate_bytes == found.chunks * layer_bytes


def test_without_npu_graphs_nothing_is_saved() -> None:
    _, found = shared(1024, level="gpu")
    assert (found.graphs, found.held_bytes, found.saved_fraction) == (0, 0, 0.0)

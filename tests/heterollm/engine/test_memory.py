"""What a model takes is counted from its parts, and one that does not fit is refused with the sum."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import heterollm.engine.memory
from heterollm.base import GIB, MIB, DeviceError, PlanError
from heterollm.engine import available_bytes, check_memory
from heterollm.engine.memory import MemoryNeed, memory_need
from heterollm.kernels.npu import LinearShard
from heterollm.kernels.ops import GraphMemory
from heterollm.llm import LLM
from heterollm.model import ModelConfig, op_specs
from heterollm.solver import check_plan, level_plan, with_shadows


def need_of(bundled_model: Path, level: str, context: int = 100, tied: bool = True) -> tuple[MemoryNeed, int]:
    config = ModelConfig.from_folder(bundled_model)
    object.__setattr__(config, "tie_word_embeddings", tied)
    specs = op_specs(config, "w4a16", 32, True)
    plan = level_plan(
        level,  # type: ignore[arg-type]
        specs,
        device="host",
        precision="w4a16",
        standard_lengths=(1, 32, 64),
        chunk_length=64,
    )
    need = memory_need(config, specs, plan, context, {"a": 1000, "b": 24}, np.dtype(np.float32))
    return need, specs[-1].weight_bytes()


def test_the_weights_of_hot_channels_count_where_a_plan_has_shadows(bundled_model: Path) -> None:
    specs = op_specs(ModelConfig.from_folder(bundled_model), "w8a8", 32, True)
    plan = level_plan(
        "npu", specs, device="host", precision="w8a8", standard_lengths=(1, 64), chunk_length=64
    )
    hot = {(0, "qkv"): 5, (1, "o"): 3, (2, "down"): 100}
    config, rest = ModelConfig.from_folder(bundled_model), (100, {}, np.dtype(np.float32))
    for shadows, weights in ((set(), 0), ({(0, "qkv"), (1, "o")}, 5 * 512 + 3 * 256)):
        made = with_shadows(plan, shadows)
        need = memory_need(config, specs, made, *rest, given={"shadow": hot}, item_bytes=4)
        assert need.techniques["weights of outliers"] == 4 * weights
        assert need.total - 4 * weights == memory_need(config, specs, made, *rest).total
        assert ("weights of outliers" in str(need)) is bool(weights)


def test_every_part_is_counted_once(bundled_model: Path) -> None:
    # 4 layers of hidden 256 and 768: q 256, k and v 128 each, o, gate and up, down; 4.5 bits a weight.
    weights = 4 * (256 * 256 * 2 + 2 * 128 * 256 + 3 * 768 * 256)
    need, head = need_of(bundled_model, "gpu")
    assert head == 2048 * 256 * 17 // 16
    assert need.gpu_weights == weights * 9 // 16 + head
    assert need.npu_graphs == 0
    assert need.slots == 1024
    # 100 positions of 32 float32 are 12,800 bytes: four pages for each of 4 heads, k and v, in 4 layers.
    assert need.kv_cache == 4 * 2 * 4 * 4 * 4096
    assert need.total == need.gpu_weights + need.kv_cache + 1024


def test_an_untied_embedding_and_the_plans_copies_come_on_top(bundled_model: Path) -> None:
    gpu, head = need_of(bundled_model, "gpu")
    assert need_of(bundled_model, "gpu", tied=False)[0].gpu_weights == gpu.gpu_weights + head
    layers = gpu.gpu_weights - head
    assert need_of(bundled_model, "layer")[0].npu_graphs == layers
    assert need_of(bundled_model, "npu")[0].npu_graphs == layers + head


@dataclass(frozen=True)
class Packaging:
    """The properties of an NPU that its memory depends on."""

    copies_by_length: bool
    io_by_graph: bool
    addressable_bytes: int | None
    reuses_io: bool = False
    unrolls_blocks: bool = False
    domain_bytes: int | None = None
    name: str = "the NPU"

    @property
    def activation_dtype(self) -> Any:
        return np.dtype(np.float16)


def test_graphs_of_each_length_count_with_inputs_and_outputs_up_to_the_address_space(
    bundled_model: Path,
) -> None:
    config = ModelConfig.from_folder(bundled_model)
    specs = op_specs(config, "w4a16", 32, True)
    plan = level_plan(
        "layer", specs, device="d", precision="w4a16", standard_lengths=(1, 32, 64), chunk_length=64
    )

    def graphs(npu: Any) -> int:
        return memory_need(config, specs, plan, 100, {}, np.dtype(np.float16), npu).npu_graphs

    once = graphs(None)
    assert once == sum(spec.weight_bytes() for spec in specs[:-1])
    assert graphs(Packaging(False, False, None)) == once
    lengths = {length for held in plan.slices for length in held.lengths}
    assert len(lengths) > 1
    assert graphs(Packaging(True, False, None)) == len(lengths) * once
    # 4 layers: q, k, v of 256 inputs; o; gate and up; down of 768 inputs. Two bytes an element.
    elements = 4 * (256 + 512 + 256 + 256 + 256 + 2 * 768 + 768 + 256)
    both = graphs(Packaging(True, True, None))
    assert both == len(lengths) * once + 2 * sum(lengths) * elements
    assert graphs(Packaging(True, True, both - 1)) == both - 1
    reused = graphs(Packaging(False, True, None, reuses_io=True))
    assert reused == once + 2 * max(lengths) * elements


def test_a_pass_whose_graphs_exceed_the_address_space_is_refused(bundled_model: Path) -> None:
    config = ModelConfig.from_folder(bundled_model)
    specs = op_specs(config, "w4a16", 32, True)
    plan = level_plan(
        "layer", specs, device="d", precision="w4a16", standard_lengths=(32, 64), chunk_length=64
    )
    one = max(
        sum(spec.graph_bytes(spec.member_rows, (length,), GraphMemory(True, 2)) for spec in specs[:-1])
        for length in (32, 64)
    )

    class Npu(Packaging):
        standard_lengths = (32, 64)
        row_alignment = 1

        def forms(self, *_: Any, **__: Any) -> tuple[str, ...]:
            return ("matmul_nbits",)

    def check(npu: Any) -> None:
        check_plan(plan, specs, npu, longest=100, head_rows=32)

    check(Npu(True, True, one))
    with pytest.raises(PlanError, match=r"A prefill pass of .* tokens needs NPU graphs of .* addresses"):
        check(Npu(True, True, one - 1))
    # Two process domains that hold half each leave no room for the graph across their border.
    largest = max(spec.graph_bytes(spec.member_rows, (64,), GraphMemory(True, 2)) for spec in specs[:-1])
    check(Npu(True, True, one + largest, domain_bytes=(one + largest) // 2))
    with pytest.raises(PlanError, match=r"addresses .* in process domains of"):
        check(Npu(True, True, one, domain_bytes=one // 2 - 1))


def test_the_context_counts(bundled_model: Path) -> None:
    short, long = (need_of(bundled_model, "gpu", context)[0].kv_cache for context in (1024, 2048))
    assert long == 2 * short


def test_what_fits_passes_and_what_does_not_is_refused_with_the_sum() -> None:
    need = MemoryNeed(gpu_weights=3 * GIB, npu_graphs=GIB, kv_cache=512 * MIB, slots=0)
    check_memory(need, 5 * GIB)
    with pytest.raises(DeviceError) as caught:
        check_memory(need, 4 * GIB)
    assert caught.value.message == (
        "The model takes 4.5 GiB of memory (3.0 GiB weights on the GPU + 1.0 GiB graphs on the NPU "
        "+ 512.0 MiB KV cache), and 4.0 GiB are available."
    )
    assert "smaller context" in caught.value.fix


def test_nothing_is_refused_where_the_system_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heterollm.engine.memory, "available_bytes", lambda: None)
    check_memory(MemoryNeed(10**15, 0, 0, 0))


def test_the_system_says_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 1024))
    monkeypatch.setattr(heterollm.engine.memory, "CGROUP", tmp_path)
    assert available_bytes() == 64 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == 64 * 1024
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("40000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 3000\nactive_file 2000\n")
    assert available_bytes() == 15000

    def silent() -> None:
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", silent)
    assert available_bytes() is None


def test_load_refuses_before_it_quantises(
    bundled_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(heterollm.engine.memory, "available_bytes", lambda: 4 * MIB)
    with pytest.raises(DeviceError, match=r"takes .* MiB of memory .*KV cache.*, and 4\.0 MiB are available"):
        LLM.load(bundled_model, device="host", plan="gpu")
    assert not (tmp_path / "weights").exists()


def test_slices_are_dropped_once_their_graphs_are_prepared(
    host_llm: Callable[..., LLM], bundled_model: Path
) -> None:
    others = shards()  # of tests before, as in parameters
    llm = host_llm(bundled_model, plan="layer")
    llm.session().prefill(list(range(40)))
    gc.collect()
    assert not [shard for shard in shards() if all(shard is not other for other in others)]


def shards() -> list[LinearShard]:
    """Return the slices of weights that anything in this process holds."""
    return [thing for thing in gc.get_objects() if type(thing) is LinearShard]


SHARED_MEMORY = """
import numpy as np
from pathlib import Path
from heterollm.kernels.devices import open_device
from heterollm.engine.memory import return_freed_memory

def anonymous_mib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1]) / 1024

gpu = open_device("host", shared_memory="host").gpu
before = anonymous_mib()
memory = gpu.shared((64 << 20,), np.uint8)
print(anonymous_mib() - before)
memory.array.fill(1)
print(anonymous_mib() - before)
del memory
return_freed_memory()
print(anonymous_mib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_shared_memory_counts_once_it_is_used() -> None:
    # In a process of its own: in one that has run other tests, allocators keep and reuse what was freed.
    command = [sys.executable, "-P", "-c", SHARED_MEMORY]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    made, used, freed = map(float, done.stdout.split())
    assert made < 8
    assert used > 56
    assert freed < 8

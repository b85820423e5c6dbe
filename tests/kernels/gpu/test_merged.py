"""Merged launches give what the launches one by one give, bit for bit, whatever the workers do meanwhile."""

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import quantize
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_WORDS,
    GlueKernels,
    GpuLinear,
    MergedLaunch,
    OpenClRuntime,
    Segments,
    merge_launches,
)
from heterollm.kernels.gpu.pocl import merged as merging
from heterollm.kernels.operators.gated_activation import activate
from heterollm.kernels.operators.norm import rms_norm

pytestmark = pytest.mark.usefixtures("merges")

HIDDEN = 128


class Chain:
    """Rounds of norm, linear and activation on one residual: each launch reads what the one before wrote."""

    def __init__(self, runtime, rounds=4, style=None, precision_bits=(4, 8)):
        generator = np.random.default_rng(rounds)
        layers = GlueKernels(runtime, np.float32, np.float32, style=style)
        self.runtime = runtime
        self.start = generator.standard_normal((1, HIDDEN)).astype(np.float32)
        self.residual, self.input, self.activated, self.output = (
            runtime.shared((1, width), np.float32) for width in (HIDDEN, HIDDEN, 2 * HIDDEN, HIDDEN)
        )
        self.wide = runtime.shared((1, 4 * HIDDEN), np.float32)
        self.step = runtime.shared((STEP_WORDS,), np.int32)
        self.step.array[STEP_LENGTH] = 1
        norm = runtime.upload(np.ones(HIDDEN, np.float32))
        self.launches, delta = [], None
        for number in range(rounds):
            bits = precision_bits[number % len(precision_bits)]
            self.launches.append(
                rms_norm(
                    layers,
                    self.residual,
                    norm,
                    self.input,
                    hidden=HIDDEN,
                    tokens=1,
                    epsilon=1e-5,
                    delta=delta,
                )
            )
            for rows, columns, x, y in (
                ((2 * HIDDEN, 2 * HIDDEN), HIDDEN, self.input, self.wide),
                ((HIDDEN,), 2 * HIDDEN, self.activated, self.output),
            ):
                members = [
                    quantize(generator.standard_normal((n, columns)).astype(np.float32), bits=bits, block=32)
                    for n in rows
                ]
                linear = GpuLinear.pack(runtime, members, activation_dtype=np.float32)
                self.launches.append(linear.launch(x, y, tokens=1, style=style, label=f"{number}"))
                if y is self.wide:
                    gate_up = Segments(self.wide, self.wide, rows, (0, 0))
                    self.launches.append(
                        activate(layers, gate_up, self.activated, tokens=1, intermediate=2 * HIDDEN)
                    )
            delta = Segments(self.output, self.output, (HIDDEN,), (0,))

    @property
    def pieces(self):
        """Merged launches that take all: on a matrix unit a launch splits inputs before each linear."""
        return -(-sum(len(launch.parts) for launch in self.launches) // merging.LARGEST_MERGE)

    def run(self, calls):
        self.residual.array[...] = self.start
        for call in calls:
            call()
        self.runtime.finish()
        return np.concatenate([self.residual.array[0], self.output.array[0]]).copy()


def test_merged_is_bit_for_bit_what_the_launches_give(runtime):
    chain = Chain(runtime)
    expected = chain.run(chain.launches)
    assert np.isfinite(expected).all()
    assert np.any(expected)
    merged = merge_launches(runtime, chain.launches)
    assert [type(call) for call in merged] == [MergedLaunch]
    for _ in range(50):
        chain.output.array.fill(np.nan)
        assert np.array_equal(chain.run(merged), expected)


def test_many_launches_are_cut_into_pieces_of_one_program(runtime, monkeypatch):
    chain = Chain(runtime, rounds=16)
    built = []
    monkeypatch.setattr(runtime, "_build", lambda *args, real=runtime._build: built.append(1) or real(*args))
    merged = merge_launches(runtime, chain.launches)
    assert len(merged) == chain.pieces == (4 if runtime.traits.has_matrix else 3)
    assert len(built) <= 1
    assert np.array_equal(chain.run(merged), chain.run(chain.launches))


def test_other_calls_stay_where_they_are(runtime):
    chain = Chain(runtime)
    seen = []
    calls = [
        *chain.launches[:1],
        runtime.finish,
        *chain.launches[1:8],
        lambda: seen.append(chain.output.array.copy()),
        runtime.finish,
        *chain.launches[8:],
    ]
    merged = merge_launches(runtime, calls)
    assert merged[:2] == calls[:2]
    assert [type(call) is MergedLaunch for call in merged[2:]] == [True, False, False, True]
    assert np.array_equal(chain.run(merged), chain.run(chain.launches))
    assert len(seen) == 1


def test_launches_that_enqueue_another_first_are_merged_with_it(runtime):
    x, y = runtime.shared((1, HIDDEN), np.float32), runtime.shared((1, 64), np.float32)
    x.array[...] = np.random.default_rng(0).standard_normal((1, HIDDEN))
    weight = quantize(
        np.random.default_rng(1).standard_normal((64, HIDDEN)).astype(np.float32), bits=4, block=32
    )
    linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    launches = [linear.launch(x, y, tokens=1, label=f"{number}") for number in range(2)]
    for launch in launches:
        launch()
    runtime.finish()
    expected = y.array.copy()
    y.array.fill(np.nan)
    (merged,) = merge_launches(runtime, launches)
    merged()
    runtime.finish()
    assert np.array_equal(y.array, expected)


def test_memory_can_move(runtime):
    chain = Chain(runtime)
    expected = chain.run(chain.launches)
    (merged,) = merge_launches(runtime, chain.launches)
    before, other = chain.output.array, runtime.shared(chain.output.array.shape, np.float32)
    before.fill(np.nan)
    chain.output.array, chain.output.buffer = other.array, other.buffer
    merged.rebind()
    assert np.array_equal(chain.run([merged]), expected)
    assert np.isnan(before).all()


@pytest.mark.parametrize("change", ["simt", "not coherent", "single"])
def test_what_cannot_be_merged_is_left_alone(runtime, change):
    opened = OpenClRuntime(runtime._device, shared_memory="mapped") if change == "not coherent" else runtime
    launches = Chain(opened, style="simt" if change == "simt" else None).launches
    if change == "single":
        launches = launches[:1]
    assert merge_launches(opened, launches) == launches


def test_a_program_that_does_not_build_leaves_the_launches(runtime, monkeypatch, caplog):
    def refuse(*_):
        raise KernelError("The compiler refuses.")

    chain = Chain(runtime)
    monkeypatch.setattr(runtime, "kernel_of_source", refuse)
    with caplog.at_level(logging.WARNING):
        assert merge_launches(runtime, chain.launches) == chain.launches
    assert "The compiler refuses." in caplog.text


@pytest.mark.parametrize("patience", [1, 20])
def test_workers_that_leave_early_change_nothing(runtime, monkeypatch, patience):
    real = merging.read_sources
    monkeypatch.setattr(
        merging,
        "read_sources",
        lambda files: real(files).replace("#define PATIENCE 6000", f"#define PATIENCE {patience}"),
    )
    chain = Chain(runtime)
    (merged,) = merge_launches(runtime, chain.launches)
    expected = chain.run(chain.launches)
    for _ in range(20):
        assert np.array_equal(chain.run([merged]), expected)


PARALLEL = """
import importlib.util, sys
from heterollm.kernels.devices import open_device
spec = importlib.util.spec_from_file_location("chain", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runtime = open_device("host", gpu_threads=int(sys.argv[2]), npu_threads=0).gpu
assert runtime.traits.compute_units == int(sys.argv[2])
chain = module.Chain(runtime, rounds=10)
expected = chain.run(chain.launches)
merged = module.merge_launches(runtime, chain.launches)
assert len(merged) == chain.pieces > 1, merged
for turn in range(500):
    assert module.np.array_equal(chain.run(merged), expected), turn
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_workers_in_parallel_keep_the_order(threads):
    """In a process of its own, since the number of OpenCL threads is fixed at the first use."""
    variables = {key: value for key, value in os.environ.items() if key != "POCL_MAX_PTHREAD_COUNT"}
    command = [sys.executable, "-c", PARALLEL, __file__, str(threads)]
    subprocess.run(command, check=True, timeout=600, cwd="/", env=variables)

"""A kernel that does not build, or computes wrongly, gives way to the next variant, with a record."""

from dataclasses import replace

import numpy as np
import pytest

from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import BuildError, GlueKernels, HeadShape, Segments, Variant, VariantRecord
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.variants import variants_for
from heterollm.kernels.operators.attention import AttentionCase
from heterollm.kernels.operators.gated_activation import activate
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.operators.norm import NormCase
from heterollm.kernels.operators.operator import check_case
from heterollm.kernels.ops import WeightFormat

ALL = variants_for(is_cpu=True)


@pytest.fixture
def runtime():
    """A runtime of its own, as on a CPU without a matrix unit."""
    device = open_device("host")
    device.gpu.traits = replace(device.gpu.traits, has_matrix=False)
    yield device.gpu
    device.close()


def break_builds(monkeypatch, runtime, broken):
    """Make the OpenCL compiler refuse what ``broken(files, defines)`` says; return what was built."""
    build, built = runtime.kernel, []

    def kernel(files, name, defines=None):
        if broken(files, dict(defines or {})):
            # The driver's own compiler refuses it, so that its error takes the usual road.
            return build(files, name, {**(defines or {}), "BROKEN(": 1})
        built.append((tuple(files), dict(defines or {})))
        return build(files, name, defines)

    monkeypatch.setattr(runtime, "kernel", kernel)
    return built


class TestTheRecord:
    def test_the_first_that_works_is_taken_and_the_others_are_noted_once(self):
        record, asked = VariantRecord("a device"), []

        def build(variant):
            asked.append(variant)
            if variant != ALL[2]:
                raise BuildError("syntax error\nline 2", fix="nothing")
            return "kernel"

        for _ in range(3):
            assert record.first("norm", ALL, build) == "kernel"
        assert asked == [ALL[0], ALL[1], ALL[2], ALL[2], ALL[2]]
        assert record.notes == [
            "a device cannot use the vector kernel for norm: syntax error",
            "a device cannot use the plain vector kernel for norm: syntax error",
        ]
        assert record.first("attention", ALL, str) == "vector"

    def test_a_test_runs_once_and_its_failure_counts(self):
        record, tested = VariantRecord("a device"), []

        def test(variant):
            tested.append(variant)
            if variant == ALL[0]:
                raise BuildError("it computes wrong numbers")

        for _ in range(2):
            assert record.first("linear", ALL, str, test) == "plain vector"
        assert tested == [ALL[0], ALL[1]]
        assert len(record.notes) == 1

    def test_none_left_is_the_last_error_every_time(self):
        record = VariantRecord("a device")

        def build(variant):
            raise BuildError(f"no {variant}", fix="Report it.")

        for _ in range(2):
            with pytest.raises(BuildError, match="no plain simt Report it"):
                record.first("norm", ALL, build)
        assert len(record.notes) == 3

    def test_other_errors_are_nobodys_fault(self):
        record = VariantRecord("a device")
        with pytest.raises(ZeroDivisionError):
            record.first("norm", ALL, lambda _: 1 // 0)
        assert record.notes == []

    def test_what_is_tried_suits_the_device(self):
        assert list(map(str, variants_for(is_cpu=True))) == ["vector", "plain vector", "plain simt"]
        assert list(map(str, variants_for(is_cpu=False))) == ["simt", "plain simt", "plain vector"]
        assert variants_for(is_cpu=True, style="simt") == (Variant("simt"),)
        assert variants_for(is_cpu=True, style=ALL[1]) == (ALL[1],)


BROKEN = {
    "nothing": (lambda files, defines: False, 0),
    "what a processor has": (lambda files, defines: "PLAIN" not in defines, 1),
    "vectors": (lambda files, defines: defines.get("WG") == 1 or any("vector" in file for file in files), 2),
}


@pytest.mark.cpu
class TestKernels:
    @pytest.mark.parametrize("integer_inputs", [False, True])
    @pytest.mark.parametrize("broken", BROKEN)
    def test_linear_layers_are_right_whatever_is_broken(
        self, monkeypatch, runtime, within_gate, broken, integer_inputs
    ):
        refuses, passed_over = BROKEN[broken]
        built = break_builds(monkeypatch, runtime, refuses)
        for tokens in (1, 9):
            case = LinearCase(WeightFormat(4, 32), (100,), 128, tokens, integer_inputs=integer_inputs)
            within_gate(case.on_gpu(runtime, np.float32), case)
        assert len(runtime.variants.notes) == passed_over
        assert all("linear int4 block 32" in note for note in runtime.variants.notes)
        assert not any(refuses(*each) for each in built)

    @pytest.mark.parametrize("broken", BROKEN)
    def test_attention_and_norms_are_right_whatever_is_broken(
        self, monkeypatch, runtime, within_gate, broken
    ):
        refuses, passed_over = BROKEN[broken]
        break_builds(monkeypatch, runtime, refuses)
        layers, generator = GlueKernels(runtime, np.float32, np.float32), np.random.default_rng(2)
        for case in (NormCase(3, 64, 0), AttentionCase(1, 40, HeadShape(4, 2, 32, 64), parts=2)):
            for numbers in check_case(case, layers, generator).values():
                within_gate(numbers, case)
        assert len(runtime.variants.notes) == 3 * passed_over

    def test_wrong_numbers_are_found_before_they_are_used(self, monkeypatch, runtime, within_gate):
        runtime.tests_kernels = True

        def wrong_sums(files):
            faulty = (
                "#define FAULT(c) (c)\n#ifndef PLAIN\n#undef FAULT\n#define FAULT(c) 1.5f * (c)\n#endif\n"
            )
            return faulty + read_sources(files).replace("((a) * (b) + (c))", "((a) * (b) + FAULT(c))")

        monkeypatch.setattr("heterollm.kernels.gpu.programs.read_sources", wrong_sums)
        within_gate(LinearCase(WeightFormat(32), (100,), 128, 1).on_gpu(runtime, np.float32))
        assert len(runtime.variants.notes) == 1
        assert "wrong numbers" in runtime.variants.notes[0]

    def test_nothing_that_builds_is_an_error_of_ours(self, monkeypatch, runtime):
        break_builds(monkeypatch, runtime, lambda files, defines: True)
        layers = GlueKernels(runtime, np.float32, np.float32)
        slot = runtime.shared((1, 64), np.float32)
        segments = Segments(slot, slot, (32, 32), (0, 0))
        with pytest.raises(BuildError, match="refuses the program"):
            activate(layers, segments, slot, tokens=1, intermediate=32)
        assert len(runtime.variants.notes) == 3

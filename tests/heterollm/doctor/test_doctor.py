import importlib.metadata
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from heterollm.base import DeviceError, KernelError, OptionError
from heterollm.doctor import Diagnosis, diagnose
from heterollm.doctor import checks as doctor_checks
from heterollm.doctor import run as doctor
from heterollm.doctor.case import DoctorCase, run_case
from heterollm.doctor.checks import FLAG, device_cases
from heterollm.doctor.contexts import CONTEXTS
from heterollm.doctor.experts import EXPERTS, expert_cases
from heterollm.doctor.linears import AGREEMENT
from heterollm.doctor.npu_attention import GRAPH, attention_cases
from heterollm.doctor.power import CLOCKS, CORES
from heterollm.doctor.run import Problem, unlisted_vendors
from heterollm.doctor.scores import SCORES, score_cases
from heterollm.doctor.sparse import ATTENTION, CODES, SELECTION, sparse_cases
from heterollm.kernels.device import DeviceStatus
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import reference
from heterollm.kernels.gpu import CACHE_DTYPES, GpuLinear, GpuWork
from heterollm.kernels.npu import ExpertsShard
from heterollm.kernels.npu.contexts import SharingVerdict
from heterollm.kernels.operators import (
    AttentionGraphCase,
    attention,
    embedding,
    gated_activation,
    norm,
    rope,
    sparse_attention,
)
from heterollm.kernels.operators.score_codes import ScoresCase
from heterollm.kernels.operators.sparse_attention import SparseCase
from heterollm.kernels.sync.litmus import Litmus
from heterollm.report import console as report
from heterollm.report import diagnosis_report


@pytest.fixture(scope="module")
def diagnosis():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor_checks, "LITMUS_ROUNDS", 300)
        patch.setattr(doctor_checks, "LIMIT_S", 600.0)
        return diagnose("host")


@pytest.fixture(scope="module")
def device():
    with_parts = open_device("host")
    with_parts.cache_dtype = CACHE_DTYPES[32]
    yield with_parts
    with_parts.close()


def cases_of(device, *operators):
    return [case for case in device_cases(device) if case.operator in operators]


def test_host_passes_every_check(diagnosis):
    assert diagnosis.passed
    assert diagnosis.device == "host"
    without_numbers = (FLAG, CLOCKS, CORES, SCORES, GRAPH, CODES, SELECTION)
    compared = [check for check in diagnosis.checks if check.operator not in without_numbers]
    assert all(check.error <= check.gate for check in compared)
    stored = [check.operator for check in compared if check.gate != 1e-10]
    assert set(stored) == {"RoPE and KV write", "linear and RoPE"}  # what lies in the KV cache has 16 bits
    assert len(stored) == 10


ROUNDED = ("int4 block 32", "int8 block 32", "int4 block 32 with minimums")
"""Weights whose linears are checked with rounded activations, too, in the order of the checks."""


def test_every_operator_is_checked_on_every_part_that_has_it(diagnosis):
    operators = {
        part: {check.operator for check in diagnosis.checks if check.part == part} for part in ("GPU", "NPU")
    }
    linears = {f"linear int4 block {block}{kind}" for block in (32, 64, 128) for kind in ("", " asymmetric")}
    linears |= {f"linear int8 block 32{kind}" for kind in ("", " asymmetric", ", one scale")}
    linears |= {f"linear {kind} with minimums" for kind in ("int4 block 32", "int8 block 16")}
    linears |= {"linear f16", "linear f32"}
    rounded = {f"linear {kind}, w4a8" for kind in ROUNDED}
    assert operators["NPU"] == linears | rounded | {AGREEMENT, CLOCKS, EXPERTS, SCORES, GRAPH}
    assert operators["GPU"] == linears | rounded | {
        "embedding int8 block 32",
        "embedding int8 block 32 with minimums",
        "embedding f16",
        "norm with residual",
        "final norm",
        "norm of an output",
        "RoPE and KV write",
        "linear and norm",
        "linear and activation",
        "linear and RoPE",
        "attention, prefill",
        "attention, decode",
        "attention inputs",
        "gated activation",
        "gate cutoff",
        "streams",
        "laurel",
        "short convolution",
        "gated delta net",
        "state space",
        "turned queries",
        "absorbed queries",
        "expanded values",
        "gated norm",
        "output gate",
        "token gate",
        "codes for the NPU",
        "soft cap of the logits",
        "join of the logits",
        "shadow outliers",
        CODES,
        SCORES,
        SELECTION,
        ATTENTION,
        "mixture of experts",
        FLAG,
        CLOCKS,
        CORES,
    }
    npu_cases = {check.case for check in diagnosis.checks if check.part == "NPU"}
    for case in ("1 token", "32 tokens"):
        assert f"matmul_nbits_int8, {case}" in npu_cases
        assert f"int4 block 32, matmul_nbits_int8, {case}" in npu_cases
    for form in ("matmul_nbits", "activation_first", "weight_first", "conv_1x1"):
        assert {f"{form}, 1 token", f"{form}, 32 tokens", f"{form}, 256 tokens"} <= npu_cases
    assert {case for case in npu_cases if case.startswith("token_tiles")} == {"token_tiles, 256 tokens"}
    assert {"integer, 32 tokens", "integer, 64 tokens", "static_int8, 64 tokens"} <= npu_cases


def test_a_real_device_does_no_work_for_simulated_ones(device, monkeypatch):
    def refuse(work):
        raise AssertionError(f"{work} was computed")

    monkeypatch.setattr(GpuWork, "__post_init__", refuse)
    checks = [run_case(case, "fp32") for case in device_cases(device) if case.operator not in (FLAG, CLOCKS)]
    assert {check.status for check in checks} == {"pass"}


def test_the_flags_litmus_test_is_run_in_full(diagnosis, device, monkeypatch):
    [check] = [check for check in diagnosis.checks if check.operator == FLAG]
    assert (check.status, check.case, check.error) == ("pass", "300 rounds", None)
    assert check.message.startswith("0 stale bytes in 300 rounds, ")
    shown = report.render(diagnosis_report(diagnosis), width=80)
    assert "0 stale bytes" in shown
    [case] = cases_of(device, FLAG)
    assert case.case == "100000 rounds"

    monkeypatch.setattr(doctor_checks, "LIMIT_S", 0.0)
    assert run_case(case, "fp32").message.startswith("0 stale bytes in 0 rounds")
    monkeypatch.setattr(doctor_checks, "flag_litmus", lambda *_, **named: Litmus(5000, 2, 64))
    check = run_case(case, "fp32")
    assert check.status == "fail"
    assert "64 stale bytes in 5000 rounds" in check.message
    assert "2 rounds" in check.message
    assert "--sync" in check.fix


def test_a_device_without_a_flag_says_so(device, monkeypatch):
    monkeypatch.setattr(doctor_checks, "refused_strategies", lambda _: {"flag": "memory must be mapped"})
    [case] = cases_of(device, FLAG)
    check = run_case(case, "fp32")
    assert (check.status, check.message) == ("not offered", "not offered: memory must be mapped")


def test_facts_name_software_limits_and_synchronisation(diagnosis):
    facts = dict(diagnosis.facts)
    for name in ("python", "numpy", "pyopencl", "onnxruntime", "OpenCL driver", "OpenCL extensions"):
        assert facts[name] not in ("", "not installed")
    assert "iB" in facts["largest buffer"]
    assert facts["synchronisation"].startswith("coherent")
    assert facts["standard lengths"].startswith("1, 32, 64")
    data = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert data["passed"] is True
    assert data["facts"] == facts


def test_a_missing_onnxruntime_qnn_is_told_in_words(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "onnxruntime-qnn":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    fact = dict(doctor._software_facts())["onnxruntime-qnn"]
    assert fact.startswith("not installed; emulator and snapdragon need it")


def test_a_simulated_device_computes_nothing():
    with pytest.raises(OptionError, match=r"sim:snapdragon-8gen3 .*computes nothing.*--device host"):
        diagnose("sim:snapdragon-8gen3")


ORACLES = {
    "linear int4 block 32": (reference, "linear"),
    "linear int4 block 32, w4a8": (reference, "linear"),
    "embedding f16": (embedding, "exact_embedding"),
    "norm with residual": (norm, "exact_rms_norm"),
    "RoPE and KV write": (rope, "exact_rotation"),
    "attention, prefill": (attention, "exact_attention"),
    "attention, decode": (attention, "exact_attention"),
    ATTENTION: (sparse_attention, "exact_selected_attention"),
    "gated activation": (gated_activation, "exact_gated_activation"),
}


@pytest.mark.parametrize("operator", ORACLES)
def test_one_wrong_number_in_a_hundred_thousandth_is_seen(device, monkeypatch, operator):
    module, name = ORACLES[operator]
    oracle = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **options: oracle(*given, **options) * (1 + 2e-5))
    checks = [run_case(case, "fp32") for case in cases_of(device, operator)]
    failed = [check for check in checks if check.status == "fail"]
    assert {check.part for check in failed} == {check.part for check in checks}
    for check in failed:
        assert check.error > check.gate
        assert "wrong" in check.message
        assert check.fix
    # What RoPE does not turn, the values, and what no norm divides have no part in this.
    without = {
        "RoPE and KV write": ["7 tokens at 11, split, values", "normed values", "values are keys"],
        "norm with residual": ["scaled sum", "no norm"],
    }
    assert [check.case for check in checks if check.status == "pass"] == without.get(operator, [])


def test_inputs_that_are_not_rounded_are_seen(device, monkeypatch):
    operator = "linear int4 block 32, w4a8"
    monkeypatch.setattr(reference, "round_inputs", lambda x, _block: x.astype(np.float64))
    checks = [run_case(case, "fp32") for case in cases_of(device, operator)]
    assert [(check.part, check.status) for check in checks] == [("GPU", "fail")] * 2 + [("NPU", "fail")] * 2
    assert all(check.gate < check.error < 1e-3 for check in checks)


def test_parts_that_round_differently_do_not_agree(device, monkeypatch):
    pack = GpuLinear.pack
    monkeypatch.setattr(
        GpuLinear, "pack", lambda *given, **options: pack(*given, **(options | {"integer_inputs": False}))
    )
    checks = [run_case(case, "fp32") for case in cases_of(device, AGREEMENT)]
    assert len(checks) == 2 * len(ROUNDED)
    assert {check.status for check in checks} == {"fail"}


def test_a_device_that_rounds_no_inputs_says_so_by_name(device, monkeypatch):
    forms = device.npu.forms
    monkeypatch.setattr(
        device.npu,
        "forms",
        lambda shape, length: () if getattr(shape, "integer_inputs", False) else forms(shape, length),
    )
    operators = [f"linear {kind}, w4a8" for kind in ROUNDED]
    checks = [run_case(case, "fp32") for case in cases_of(device, *operators, AGREEMENT)]
    npu = [check for check in checks if check.part == "NPU"]
    reason = f"cannot: {device.npu.name} has float activations only, so host refuses w4a8"
    assert [check.operator for check in npu] == [name for one in operators for name in (one, AGREEMENT)]
    assert all((check.status, check.error, check.message) == ("not offered", None, reason) for check in npu)
    assert [check.status for check in checks if check.part == "GPU"] == ["pass"] * 2 * len(ROUNDED)
    found = Diagnosis("host", (), tuple(checks), (), ())
    assert found.passed
    shown = report.render(diagnosis_report(found), like=io.StringIO())
    assert " ".join(shown.split()).count("cannot:") == len(ROUNDED) + 1


def test_without_an_npu_the_gpu_alone_is_checked(device, monkeypatch):
    monkeypatch.setattr(device, "npu", None)
    cases = [case for case in device_cases(device) if "w4a8" in case.operator]
    assert [case.part for case in cases] == ["GPU"] * 2 * len(ROUNDED)


def test_an_operator_that_raises_is_a_failed_check(device, monkeypatch):
    def refuse(*_given, **_options):
        raise KernelError("The compiler refuses.", fix="Another driver.")

    monkeypatch.setattr(GpuLinear, "pack", refuse)
    checks = [run_case(case, "fp32") for case in cases_of(device, "linear f32")]
    gpu = [check for check in checks if check.part == "GPU"]
    assert [(check.status, check.error, check.message, check.fix) for check in gpu] == [
        ("fail", None, "The compiler refuses.", "Another driver.")
    ] * len(gpu)
    assert all(check.status == "pass" for check in checks if check.part == "NPU")


def test_exchanged_experts_fail(device, monkeypatch):
    assert run_case(*expert_cases(device.npu), "fp32").status == "pass"
    prepare = device.npu.prepare

    def exchanged(shard, length):
        return prepare(ExpertsShard(shard.experts[::-1], shard.parts[::-1]), length)

    monkeypatch.setattr(device.npu, "prepare", exchanged)
    assert run_case(*expert_cases(device.npu), "fp32").status == "fail"


def test_nan_fails_and_can_be_written_as_json():
    exact = np.ones((2, 3))
    check = run_case(DoctorCase("GPU", "norm", "", lambda: (np.full((2, 3), np.nan), exact)), "fp32")
    assert (check.status, check.error) == ("fail", None)
    report = Diagnosis("host", (), (check,), (), ())
    assert not report.passed
    json.dumps(report.to_dict(), allow_nan=False)


def test_what_a_part_does_not_offer_is_no_failure():
    check = run_case(DoctorCase("NPU", "linear f32", "", None), "fp16")
    assert check.status == "not offered"
    assert Diagnosis("host", (), (check,), (), ()).passed


def test_a_device_that_does_not_open_is_a_finding(monkeypatch):
    def refuse(*_given, **_options):
        raise DeviceError("No OpenCL here.", fix="Install one.")

    monkeypatch.setattr(doctor, "open_device", refuse)
    found = diagnose("host")
    assert not found.passed
    assert [(problem.message, problem.fix) for problem in found.problems] == [
        ("No OpenCL here.", "Install one.")
    ]
    assert dict(found.facts)["numpy"] == np.__version__


def test_every_missing_part_is_named(monkeypatch):
    statuses = [
        DeviceStatus("snapdragon", False, "missing", "missing", "No GPU. No NPU.", "Buy one."),
        DeviceStatus("host", True, "a CPU", "a CPU", "", ""),
    ]
    monkeypatch.setattr(doctor, "list_devices", lambda: statuses)
    monkeypatch.setattr(doctor, "open_device", lambda *_, **__: (_ for _ in ()).throw(DeviceError("No GPU.")))
    assert diagnose("snapdragon").problems == (Problem("No GPU. No NPU.", "Buy one."),)
    assert diagnose("auto").problems == (Problem("No GPU.", ""),)
    assert Problem("snapdragon: No GPU. No NPU.", "Buy one.") in diagnose("auto").warnings


def test_an_unknown_device_is_an_error():
    with pytest.raises(OptionError):
        diagnose("toaster")


def test_the_command_exits_1_when_a_check_fails(monkeypatch, capsys):
    from heterollm.cli import main

    check = run_case(DoctorCase("GPU", "norm", "", lambda: (np.zeros((2, 3)), np.ones((2, 3)))), "fp32")
    monkeypatch.setattr("heterollm.doctor.diagnose", lambda *_, **__: Diagnosis("host", (), (check,), (), ()))
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False
    assert main(["doctor"]) == 1
    assert "FAIL" in capsys.readouterr().out


# -- the OpenCL libraries that a loader passes over --------------------------------------------------


def test_libraries_that_are_listed_but_not_loaded(tmp_path):
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "adreno.icd").write_text("libOpenCL_adreno.so.1\n")
    (vendors / "pocl.icd").write_text("/usr/lib/libpocl.so.2\n\n")
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/aarch64-linux-gnu/libpocl.so.2.11.0\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n"
    )
    assert unlisted_vendors(vendors, maps) == ("libOpenCL_adreno.so.1",)
    assert unlisted_vendors(tmp_path / "none", maps) == ()
    assert unlisted_vendors(vendors, tmp_path / "none") == ()


def test_the_way_out_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "unlisted_vendors", lambda: ("libOpenCL_adreno.so.1",))
    monkeypatch.setattr(doctor, "open_device", lambda *_, **__: (_ for _ in ()).throw(DeviceError("None.")))
    warning = diagnose("host").warnings[0]
    assert "libOpenCL_adreno.so.1" in warning.message
    assert "OCL_ICD_VENDORS=/etc/OpenCL/vendors" in warning.fix


@pytest.mark.parametrize(
    ("verdict", "status", "words"),
    [
        (SharingVerdict("pass", "2 graphs", reuses_io=True), "pass", "counts a buffer of all graphs once"),
        (SharingVerdict("pass", "2 graphs", io_reason="refused"), "pass", "count for each: refused"),
        (SharingVerdict("unverified", "only a Hexagon loads it"), "unverified", "only a Hexagon"),
        (SharingVerdict("fail", "crashed (SIGSEGV)"), "fail", "SIGSEGV"),
    ],
)
def test_the_row_of_shared_contexts(device, monkeypatch, verdict, status, words):
    assert not cases_of(device, CONTEXTS)
    monkeypatch.setattr(device, "packager", SimpleNamespace(test_sharing=lambda: verdict))
    (case,) = cases_of(device, CONTEXTS)
    check = run_case(case, "fp32")
    assert (check.part, check.status) == ("NPU", status)
    assert words in check.message
    assert ("contexts-with-shared-weights" in check.fix) is (status == "fail")


@pytest.mark.parametrize(("offset", "status"), [(0, "pass"), (1, "fail")])
def test_scores_whose_codes_all_lie_beside_the_exact_ones_fail(device, monkeypatch, offset, status):
    def shifted(case, npu):
        found, exact = run(case, npu)
        return found + offset, exact

    run = ScoresCase.on_npu
    monkeypatch.setattr(ScoresCase, "on_npu", shifted)
    assert [run_case(case, "fp32").status for case in score_cases(device.npu)] == [status] * 3


@pytest.mark.parametrize(
    ("operator", "module", "name", "changed"),
    [
        (CODES, sparse_attention, "exact_codes", lambda codes: codes ^ 1),
        (CODES, sparse_attention, "nearest_bucket", lambda _: (0.5, 2.0)),
        (SCORES, sparse_attention, "exact_estimate", lambda codes: codes ^ 1),
        (SELECTION, SparseCase, "select", lambda heads: [[kept[1:] for kept in own] for own in heads]),
        (SELECTION, SparseCase, "select", lambda heads: [[kept[::-1] for kept in own] for own in heads]),
        (
            SELECTION,
            SparseCase,
            "select",
            lambda heads: [[np.arange(len(kept)) for kept in own] for own in heads],
        ),
    ],
)
def test_a_wrong_kernel_of_sparse_attention_is_named(device, monkeypatch, operator, module, name, changed):
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given, **options: changed(right(*given, **options)))
    checks = [run_case(case, "fp32") for case in sparse_cases(device) if case.operator == operator]
    failed = [check for check in checks if check.status == "fail"]
    assert failed
    assert all("shadowattn" in check.fix for check in failed)


def test_a_token_that_gets_another_expert_is_seen(device, monkeypatch):
    right = np.argsort
    monkeypatch.setattr(np, "argsort", lambda *given, **options: right(*given, **options)[::-1])
    checks = [run_case(case, "fp32") for case in cases_of(device, "mixture of experts")]
    # The last case, the norms of tokens, chooses no expert.
    assert [check.status for check in checks] == ["fail"] * 3 + ["pass"]


def test_an_npu_without_such_a_graph_says_so(device, monkeypatch):
    monkeypatch.setattr(device.npu, "forms", lambda shape, length: ())
    checks = [run_case(case, "fp32") for case in score_cases(device.npu)]
    assert [check.status for check in checks] == ["not offered"] * 3
    assert checks[0].message == f"{device.npu.name} has no such graph"


@pytest.mark.parametrize(("error", "status"), [(0.0, "pass"), (1e-3, "fail")])
def test_attention_in_a_graph_is_compared_with_its_own_gate(device, monkeypatch, error, status):
    def changed(case, npu):
        found, exact = run(case, npu)
        return found * (1 + error), exact

    run = AttentionGraphCase.on_npu
    monkeypatch.setattr(AttentionGraphCase, "on_npu", changed)
    checks = [run_case(case, "fp32") for case in attention_cases(device.npu)]
    assert [check.status for check in checks] == [status] * 2
    assert ("npu-attention" in checks[0].fix) is (status == "fail")
    monkeypatch.setattr(device.npu, "forms", lambda shape, length: ())
    missing = [run_case(case, "fp32").status for case in attention_cases(device.npu)]
    assert missing == ["not offered"] * 2

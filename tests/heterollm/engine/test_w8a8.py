"""Precision ``w8a8``: activations of 8 bits on the NPU, on calibrated ranges, and floats on the GPU."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heterollm.base import CalibrationError, DeviceError, OptionError, PlanError
from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.cli import main
from heterollm.engine import check_precision
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import LinearShape, qnn_available
from heterollm.llm import LLM
from heterollm.solver import Plan, PlanRequest

INT8_DB = 24.0
"""Measured 26.4 dB against float activations with the same weights; 32 dB with ``down`` in 16 bits."""

INT16_DB = 30.0
USABLE, REASON, _ = qnn_available(emulator=True)
WINDOWS = 2


@pytest.fixture(scope="module")
def files(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibrations: all operators in 8 bits, and those below 30 dB in 16."""
    folder = tmp_path_factory.mktemp("w8a8")
    found = {}
    for name, limit in (("int8", None), ("int16", 30.0)):
        found[name] = folder / f"{name}.json"
        policy = Policy(limit, pruned=1.0)
        calibrate(
            bundled_model,
            output=found[name],
            windows=WINDOWS,
            precision="w8a8",
            policy=policy,
            gpu_threads=1,
        )
    return found


@pytest.fixture(scope="module")
def ids(bundled_model: Path) -> list[int]:
    from heterollm.text import Tokenizer

    text = (bundled_model / "held_out.txt").read_text("utf-8")
    return Tokenizer.from_folder(bundled_model).encode(text[:2000])[:100]


@pytest.fixture
def logits(bundled_model: Path, ids: list[int], host_llm: Callable[..., LLM]) -> Callable[..., Any]:
    def compute(**options: Any) -> NDArray[np.float32]:
        llm = host_llm(bundled_model, precision="w8a8", **options)
        session = llm.session()
        first = session.prefill(ids[:70], all_logits=True)
        return np.concatenate([first, *(session.decode(token)[np.newaxis] for token in ids[70:76])])

    return compute


def forms(plan_steps: Any) -> set[str]:
    """Return the forms of the graphs of a pass."""
    return {step.label.rpartition(" as ")[2] for step in plan_steps if step.action == "graph"}


def test_the_npu_is_close_to_float_activations_and_closer_with_16_bits(
    logits: Callable[..., Any], files: dict[str, Path]
) -> None:
    floats = logits(plan="gpu")
    int8 = logits(plan="npu", calibration=files["int8"])
    assert INT8_DB < sqnr_db(int8, floats) < INT16_DB
    int16 = logits(plan="npu", calibration=files["int16"])
    assert INT16_DB < sqnr_db(int16, floats) < 60
    # Level layer decodes on the GPU, in floats behind keys and values of the NPU.
    layer = logits(plan="layer", calibration=files["int8"])
    assert sqnr_db(layer[:70], int8[:70]) > 90
    assert sqnr_db(layer[70:], int8[70:]) < 60


def test_16_bits_take_the_form_of_16_bits(
    bundled_model: Path, files: dict[str, Path], host_llm: Callable[..., LLM]
) -> None:
    decided = load_calibration(files["int16"]).activations()
    assert {kind for (_, group), kind in decided.items() if group == "down"} == {"int16"}
    llm = host_llm(bundled_model, precision="w8a8", plan="npu", calibration=files["int16"])
    for step in llm.steps("prefill", 5):
        if step.action == "graph" and step.layer is not None:
            bits = decided[step.layer, step.operator]  # type: ignore[index]
            assert step.label.endswith(" as integer" if bits == "int16" else " as static_int8")
            assert "0:64" in step.label  # padded to whole tiles of 8-bit activations
    assert llm.plan.calibration == load_calibration(files["int16"]).key


def test_nothing_runs_without_a_calibration_but_the_gpu(bundled_model: Path) -> None:
    for plan in ("npu", "layer", "tensor", "auto"):
        with pytest.raises(OptionError, match="w8a8 needs the calibrated ranges") as caught:
            LLM.load(bundled_model, device="host", precision="w8a8", plan=plan)
        assert "heterollm calibrate MODEL --precision w8a8" in caught.value.fix
    for options in ({"scales": "stepped"}, {"symmetric": False}):
        with pytest.raises(OptionError, match="one scale for a tensor"):
            LLM.load(bundled_model, device="host", precision="w8a8", plan="gpu", **options)  # type: ignore[arg-type]


def test_a_plan_needs_its_own_calibration(
    bundled_model: Path, files: dict[str, Path], host_llm: Callable[..., LLM]
) -> None:
    plan = host_llm(bundled_model, precision="w8a8", plan="layer", calibration=files["int8"]).plan
    assert isinstance(plan, Plan)
    again = host_llm(bundled_model, precision="w8a8", plan=plan, calibration=files["int8"])
    assert again.plan == plan
    for options in ({}, {"calibration": files["int16"]}):
        with pytest.raises((PlanError, OptionError), match="calibrat"):
            LLM.load(bundled_model, device="host", precision="w8a8", plan=plan, **options)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="w8a8"):
        LLM.load(bundled_model, device="host", precision="w4a16", plan=plan)


def test_other_weights_and_missing_operators_are_refused(
    bundled_model: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"device": "host", "plan": "layer", "calibration": files["int8"]}
    with pytest.raises(CalibrationError, match="other weights"):
        LLM.load(bundled_model, precision="w4a16", scales="stepped", **options)
    data = json.loads(files["int8"].read_bytes())
    data["linears"] = [one for one in data["linears"] if (one["layer"], one["group"]) != (2, "o")]
    options["calibration"] = tmp_path / "less.json"
    options["calibration"].write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match="no ranges of o of layer 2"):
        LLM.load(bundled_model, precision="w8a8", **options)


def test_the_command_line_runs_from_calibration_to_answer(
    bundled_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "calibration.json")
    options = ["--windows", "2", "--pruned", "1", "--gpu-threads", "1", "-o", file]
    assert main(["calibrate", str(bundled_model), "--precision", "w8a8", *options]) == 0
    assert "load the model with --precision w8a8" in " ".join(capsys.readouterr().out.split())
    words = ["generate", str(bundled_model), "def add(a, b):", "--max-new-tokens", "4", "--device", "host"]
    assert main([*words, "--precision", "w8a8", "--calibration", file, "--plan", "npu", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["precision"], answer["plan"]) == ("w8a8", "npu")
    assert main([*words, "--precision", "w8a8", "--plan", "npu"]) != 0
    assert "heterollm calibrate MODEL --precision w8a8" in " ".join(capsys.readouterr().err.split())


class FloatOnlyNpu:
    """An NPU without the forms."""

    name = "Hexagon"
    standard_lengths = (1, 32, 64)

    def forms(self, shape: LinearShape, _length: int) -> tuple[str, ...]:
        return () if shape.weight.scales == "tensor" else ("matmul_nbits",)


def test_a_device_without_the_forms_is_refused_by_name(
    bundled_model: Path, host_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = host_llm(bundled_model, precision="w8a8", plan="gpu")
    monkeypatch.setattr(llm.device, "npu", FloatOnlyNpu())
    with pytest.raises(DeviceError, match=r"cannot run precision w8a8: Hexagon computes int8 .*one scale"):
        check_precision(llm.device, "w8a8", llm._weights.specs)


@pytest.fixture
def quick_profile(bundled_model: Path) -> None:
    options = ["--device", "sim:snapdragon-8gen3", "--precision", "w8a8", "--quick"]
    assert main(["profile", str(bundled_model), *options]) == 0


@pytest.mark.usefixtures("quick_profile")
def test_a_solved_plan_uses_static_int8_graphs(
    bundled_model: Path, files: dict[str, Path], ids: list[int]
) -> None:
    """On a simulated device, which computes the answer with the graphs of the host."""
    options: dict[str, Any] = {"device": "sim:snapdragon-8gen3", "precision": "w8a8"}
    on_npu = PlanRequest(forbidden=("gpu",))
    with LLM.load(bundled_model, plan="tensor", request=on_npu, calibration=files["int8"], **options) as llm:
        assert "static_int8" in {entry.placement.form for entry in llm.plan.placed}
        assert not {"integer", "matmul_nbits"} & {
            entry.placement.form for entry in llm.plan.placed if entry.group != "head"
        }
        assert "static_int8" in forms(llm.steps("prefill", 256))
        split = llm.session().prefill(ids, all_logits=True)
    with LLM.load(bundled_model, plan="gpu", **options) as llm:
        assert sqnr_db(split, llm.session().prefill(ids, all_logits=True)) > INT8_DB


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_the_emulator_runs_the_same_graphs(
    bundled_model: Path, files: dict[str, Path], logits: Callable[..., Any], ids: list[int]
) -> None:
    with LLM.load(
        bundled_model, device="emulator", precision="w8a8", plan="layer", calibration=files["int8"]
    ) as llm:
        emulated = llm.session().prefill(ids[:70], all_logits=True)
    assert sqnr_db(emulated, logits(plan="gpu")[:70]) > INT8_DB

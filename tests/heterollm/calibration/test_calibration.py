"""Calibrations of the bundled model, and the integer graphs that use them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from msgspec import structs

from heterollm.base import CalibrationError, InputError, OptionError, PlanError
from heterollm.calibration import calibrate, load_calibration
from heterollm.calibration.check import RangeCheck
from heterollm.calibration.observer import LinearStatistics
from heterollm.cli import main
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import INTEGER_FORMS, FfnRanges, LinearRanges, qnn_available
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.llm import LLM
from heterollm.planning import precompile
from heterollm.profiler.records import LinearKey, Profile
from heterollm.solver import Plan
from heterollm.solver.placements import FfnPlacement

torch = pytest.importorskip("torch")

WINDOWS = 3
USABLE, REASON, _ = qnn_available(emulator=True)


@pytest.fixture(scope="module")
def calibrated(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    calibrate(bundled_model, output=path, windows=WINDOWS, gpu_threads=1)
    return path


@pytest.fixture(scope="module")
def ids(bundled_model: Path) -> list[int]:
    from heterollm.text import Tokenizer

    text = (bundled_model / "held_out.txt").read_text("utf-8")
    return Tokenizer.from_folder(bundled_model).encode(text[:2000])[:67]


def integer_plan(llm: LLM, calibration: Path, *, ffn: bool = False, width: int | None = None) -> Plan:
    """Return the plan of level ``npu`` with integer graphs of at least 32 tokens in the layers.

    Args:
        llm: A model loaded with that level.
        calibration: The calibration of the plan.
        ffn: Whether feed-forward networks are one graph.
        width: Their channels on the NPU; the GPU has the others.
    """
    entries = []
    for entry in llm.plan.entries:
        placement = entry.placement
        if entry.group == "head" or not placement.npu_lengths:
            entries.append(entry)
            continue
        lengths = tuple(max(32, length) for length in placement.npu_lengths)
        if ffn and entry.group in ("gate_up", "down"):
            if entry.group == "gate_up":
                placed = FfnPlacement(width or placement.npu_rows[0], lengths, "ffn_integer")
                entries.append(structs.replace(entry, group="ffn", placement=placed))
            continue
        changed = structs.replace(placement, npu_lengths=lengths, form="integer")
        entries.append(structs.replace(entry, placement=changed))
    key = load_calibration(calibration).key
    return structs.replace(llm.plan, entries=tuple(entries), slices=(), calibration=key)


def edited(calibration: Path, folder: Path, **changes: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of a calibration with changed records, by name such as ``linear_0_down``."""
    data = json.loads(calibration.read_bytes())
    for name, change in changes.items():
        _, layer, group = name.split("_", 2)
        [record] = [one for one in data["linears"] if (one["layer"], one["group"]) == (int(layer), group)]
        change(record)
    path = folder / "edited.json"
    path.write_text(json.dumps(data))
    return path


def test_the_magnitudes_are_those_that_transformers_sees(bundled_model: Path, calibrated: Path) -> None:
    from transformers import AutoModelForCausalLM

    from heterollm.calibration.run import BUILT_IN_CHARACTERS, WINDOW_TOKENS
    from heterollm.text import Tokenizer

    with LLM.load(bundled_model, device="host", plan="gpu", scales="stepped") as llm:
        state = {name: torch.from_numpy(values.copy()) for name, values in llm.reference_state_dict()}
    model = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    seen: dict[str, list[float]] = {}
    partial: dict[str, float] = {}

    def sums(name: str) -> Callable[..., None]:
        def measure(module: Any, given: Any, _made: Any) -> None:
            products = given[0][0].reshape(-1, 12, 64).transpose(0, 1)
            weights = module.weight.reshape(-1, 12, 64).permute(1, 2, 0)
            largest = float(torch.bmm(products, weights).cumsum(0).abs().max())
            partial[name] = max(partial.get(name, 0.0), largest)

        return measure

    def hook(name: str) -> Callable[..., None]:
        def measure(_module: Any, given: Any, made: Any) -> None:
            values = [float(given[0].abs().max()), float(made.abs().max())]
            seen[name] = [max(pair) for pair in zip(values, seen.get(name, values), strict=True)]

        return measure

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(hook(name))
            if name.endswith("down_proj"):
                module.register_forward_hook(sums(name))
    text = (bundled_model / "held_out.txt").read_text("utf-8")[-BUILT_IN_CHARACTERS:]
    every = Tokenizer.from_folder(bundled_model).encode(text)
    for window in range(WINDOWS - 1):
        part = every[window * WINDOW_TOKENS : (window + 1) * WINDOW_TOKENS]
        with torch.no_grad():
            model(torch.tensor([part]))
    found = load_calibration(calibrated)
    names = {
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    assert len(found.linears) == 4 * len(names)
    for one in found.linears:
        members = [seen[f"model.layers.{one.layer}.{member}"] for member in names[one.group]]
        assert one.inputs == pytest.approx(members[0][0], rel=1e-3)
        assert one.outputs == pytest.approx([member[1] for member in members], rel=1e-3)
    for ffn in found.ffns:
        assert ffn.partial == pytest.approx(partial[f"model.layers.{ffn.layer}.mlp.down_proj"], rel=1e-3)


def test_a_record_has_a_histogram_and_outliers(calibrated: Path) -> None:
    found = load_calibration(calibrated)
    assert found.complete
    assert not found.failed
    assert found.checked_tokens > 0
    for one in found.linears:
        columns = 768 if one.group == "down" else 256
        assert sum(one.histogram) == (WINDOWS - 1) * found.window_tokens * columns
        assert all(outlier.maximum > one.threshold for outlier in one.outliers)
    schema = Path(__file__).parents[3] / "docs" / "schemas" / "calibration.schema.json"
    jsonschema.validate(json.loads(calibrated.read_bytes()), json.loads(schema.read_bytes()))
    ranges = found.ranges()
    qkv = found.linears[0]
    assert ranges[0, "qkv"] == LinearRanges(max(qkv.relative_outputs))
    # No token has the largest input and the largest output of all, or at most one.
    for largest, relative in zip(qkv.outputs, qkv.relative_outputs, strict=True):
        assert relative >= largest / qkv.inputs
    assert isinstance(ranges[0, "ffn"], FfnRanges)


def test_a_static_grid_serves_where_a_scale_for_each_token_fails() -> None:
    """A channel that no weight reads widens the outputs' grid, too wide for a row of small weights."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((64, 32)).astype(np.float32)
    x[1:, 0] = 30
    weight = generator.standard_normal((8, 32)).astype(np.float32)
    weight[:, 0] = 0
    for small, static in ((1.0, False), (0.02, True)):
        weight[1] *= small
        spec = OpSpec("o", 0, (Member("o", 8),), 32, WeightFormat(32), "x", "y")
        seen = LinearStatistics(spec)
        y = x @ weight.T
        seen.add(x, y, lambda: weight)
        check = RangeCheck(SimpleNamespace(linear=lambda *_: [weight]), {(0, "o"): seen.record()}, {}, 64)  # type: ignore[arg-type]
        check.read(spec, x, y)
        found = check.linears[0, "o"]
        assert found.errors is not None
        assert found.errors.passed
        assert found.static == static


def test_a_stopped_calibration_goes_on(bundled_model: Path, calibrated: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"

    def stop(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("Calibrating", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(bundled_model, output=path, windows=WINDOWS, gpu_threads=1, progress=stop)
    stopped = load_calibration(path)
    assert (stopped.windows, stopped.complete) == (1, False)
    with pytest.raises(CalibrationError, match="stopped after 1 of 2"):
        stopped.check_weights(stopped.weights_key)
    begun: list[int] = []
    calibrate(
        bundled_model,
        output=path,
        windows=WINDOWS,
        gpu_threads=1,
        progress=lambda stage, done, _: begun.append(done) if stage == "Calibrating" else None,
    )
    assert begun[0] == 1  # the first window did not run again
    assert path.read_bytes() == calibrated.read_bytes()


def load_integer(bundled_model: Path, calibration: Path, device: str, **options: Any) -> LLM:
    ffn, width = options.pop("ffn", False), options.pop("width", None)
    given = {"device": device, "scales": "stepped", "context": 600, **options}
    if device == "emulator":
        given["allow_slow"] = True
    with LLM.load(bundled_model, plan="npu", **given) as plain:
        plan = integer_plan(plain, calibration, ffn=ffn, width=width)
    return LLM.load(bundled_model, plan=plan, calibration=calibration, **given)


DEVICES = [
    ("host", False, None),
    ("host", True, None),
    ("host", True, 256),
    pytest.param(
        *("emulator", False, None),
        marks=[pytest.mark.emulator, pytest.mark.skipif(not USABLE, reason=REASON)],
    ),
    *(
        pytest.param(
            *("emulator", True, width),
            marks=[pytest.mark.emulator, pytest.mark.slow, pytest.mark.skipif(not USABLE, reason=REASON)],
        )
        for width in (None, 256)
    ),
]


@pytest.mark.parametrize(("device", "ffn", "width"), DEVICES)
def test_integer_graphs_are_within_the_gate_of_logits(
    bundled_model: Path, calibrated: Path, ids: list[int], device: str, ffn: bool, width: int | None
) -> None:
    with LLM.load(bundled_model, device="host", plan="gpu", scales="stepped", context=600) as llm:
        session = llm.session()
        expected = [*session.prefill(ids, all_logits=True), session.decode(5)]
    with load_integer(bundled_model, calibrated, device, ffn=ffn, width=width) as llm:
        session = llm.session()
        got = [*session.prefill(ids, all_logits=True), session.decode(5)]
        if device == "host":
            session.reset()
            np.testing.assert_array_equal([*session.prefill(ids, all_logits=True), session.decode(5)], got)
        labels = [step.label for step in llm.steps("decode", 1) if step.action == "graph"]
        # Decode runs graphs of 32 tokens.
        inside = [label for label in labels if "head" not in label]
        assert all("tokens 0:32" in label and label.endswith("integer") for label in inside)
        assert not [note for note in llm.notes if "ranges" in note]
    quality_db = sqnr_db(np.stack(got), np.stack(expected))
    assert quality_db >= LOGITS_SQNR_DB["fp16"]
    # They did run: float graphs on the host agree to 100 dB.
    assert quality_db < 90


def test_operators_that_failed_the_check_keep_floats(
    bundled_model: Path, calibrated: Path, tmp_path: Path, ids: list[int]
) -> None:
    def fail(record: dict[str, Any]) -> None:
        record["errors"]["worst_token"] = 2e-5

    path = edited(calibrated, tmp_path, linear_1_down=fail)
    assert load_calibration(path).failed == ("1.down",)
    with load_integer(bundled_model, path, "host") as llm:
        steps = llm.steps("prefill", len(ids))
        labels = [step.label for step in steps if (step.operator, step.action) == ("down", "graph")]
        assert [label.endswith("integer") for label in labels] == [True, False, True, True]
        [note] = [note for note in llm.notes if "float activations" in note]
        assert "1 operators" in note
        assert "1.down" in note


@pytest.mark.parametrize("width", [None, 256])
def test_shards_of_an_ffn_that_failed_the_check_keep_floats(
    bundled_model: Path, calibrated: Path, tmp_path: Path, width: int | None
) -> None:
    data = json.loads(calibrated.read_bytes())
    data["ffns"][2]["split_errors"]["nmse"] = 2e-6
    path = tmp_path / "edited.json"
    path.write_text(json.dumps(data))
    with load_integer(bundled_model, path, "host", ffn=True, width=width) as llm:
        labels = [step.label for step in llm.steps("decode", 1) if step.action == "graph"]
        integer = [label.endswith("integer") for label in labels if "ffn" in label]
        assert integer == [True, True, width is None, True]
        assert len([note for note in llm.notes if "2.ffn" in note]) == (width is not None)


def test_a_plan_runs_with_its_own_calibration_only(
    bundled_model: Path, calibrated: Path, tmp_path: Path
) -> None:
    other = edited(calibrated, tmp_path, linear_2_o=lambda record: record.update(inputs=1e3))
    keys = [load_calibration(path).key for path in (calibrated, other)]
    assert keys[0] != keys[1]
    given: dict[str, Any] = {"device": "host", "scales": "stepped"}
    with LLM.load(bundled_model, plan="npu", **given) as llm:
        plan = integer_plan(llm, calibrated)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    with pytest.raises(PlanError, match=f"with the calibration {keys[0]}, and the calibration {keys[1]} is"):
        LLM.load(bundled_model, plan=path, calibration=other, **given)
    with pytest.raises(PlanError, match="and none is given"):
        LLM.load(bundled_model, plan=path, **given)
    unnamed = structs.replace(plan, calibration=None)
    assert "calibration" not in json.loads(unnamed.to_json())
    with pytest.raises(PlanError, match="names no calibration"):
        LLM.load(bundled_model, plan=unnamed, calibration=calibrated, **given)


def test_saturated_outputs_are_counted(
    bundled_model: Path, calibrated: Path, tmp_path: Path, ids: list[int]
) -> None:
    def narrow(record: dict[str, Any]) -> None:
        record["relative_outputs"] = [value / 20 for value in record["relative_outputs"]]

    path = edited(calibrated, tmp_path, linear_2_o=narrow)
    with load_integer(bundled_model, path, "host") as llm:
        assert not [note for note in llm.notes if "calibrated ranges" in note]
        llm.session().prefill(ids)
        [note] = [note for note in llm.notes if "calibrated ranges" in note]
        assert "1 operators" in note
        assert "2.o" in note


def test_other_weights_are_refused(bundled_model: Path, calibrated: Path) -> None:
    options: dict[str, Any] = {"device": "host", "plan": "layer", "calibration": calibrated}
    with pytest.raises(OptionError, match="stepped"):
        LLM.load(bundled_model, **options)
    with pytest.raises(OptionError, match="path of a file"):
        LLM.load(bundled_model, device="host", calibration=3, scales="stepped")  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="other weights"):
        LLM.load(bundled_model, scales="stepped", group_size=64, **options)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda text: text[:1000], "not JSON"),
        (lambda text: text.replace('"inputs"', '"input"', 1), r"linears\[0\].*`input`"),
        (lambda text: text.replace('"windows"', '"windows": 3, "windows"', 1), "windows"),
        (lambda text: text.replace('"inputs": ', '"inputs": -', 1), r"linears\[0\]\.inputs"),
        (lambda text: text.replace('"inputs": ', '"inputs": 1e999, "x": ', 1), r"1e999|linears\[0\]"),
        (lambda text: text.replace('"partial": ', '"partial": NaN, "x": ', 1), r"ffns\[0\]\.partial"),
        (lambda text: text.replace('"layer": 3', '"layer": 2'), r"linears\[12\]\.group: qkv of layer 2"),
        (lambda text: text.replace('"group": "o"', '"group": "ffn"', 1), r"linears\[1\]\.group: ffn"),
        (lambda text: text.replace('"nmse": ', '"nmse": [', 1), "not JSON"),
        (lambda text: text.replace('"version": 5', '"version": 4'), "has version 4; .* reads 5"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: "[]", "not a calibration"),
    ],
)
def test_damaged_files_are_refused(
    calibrated: Path, tmp_path: Path, damage: Callable[[str], str], named: str
) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(damage(calibrated.read_text()))
    with pytest.raises(CalibrationError, match=named) as caught:
        load_calibration(path)
    assert caught.value.fix
    assert len(str(caught.value)) < 1000


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")


def test_files_of_other_text_are_refused(bundled_model: Path, calibrated: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 500)
    with pytest.raises(CalibrationError, match="another text key"):
        calibrate(bundled_model, [text], output=calibrated, windows=WINDOWS, gpu_threads=1)
    text.write_text("short")
    with pytest.raises(InputError, match="two windows"):
        calibrate(bundled_model, [text], output=tmp_path / "new.json")
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be read"):
        calibrate(bundled_model, [text], output=tmp_path / "new.json")
    with pytest.raises(OptionError, match="at least 2"):
        calibrate(bundled_model, output=tmp_path / "new.json", windows=1)


def test_the_command_prints_a_summary(
    bundled_model: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "calibrate",
        str(bundled_model),
        "-o",
        str(calibrated),
        "--windows",
        str(WINDOWS),
        "--gpu-threads",
        "1",
    ]
    assert main(words) == 0  # complete already
    assert "ranges of 1024 tokens" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["linears"], summary["ffns"], summary["failed"]) == (16, 4, [])
    named = {"path", "model", "weights_key", "tokens", "checked_tokens", "linears", "ffns", "failed"}
    assert set(summary) == named | {"window_tokens", "head_importance", "keep"}


# -- a profile that measures integer forms, and plans that choose among them ---------------------------


PHONE = """
soc: a phone
version: 1
based_on: snapdragon-8gen3
description: A phone on which the NPU pays for a tiny model, and unpacks codes slowly.
gpu:
  gemm_tflops: {value: 0.01, unit: TFLOP/s, source: user}
  small_tflops: {value: 0.005, unit: TFLOP/s, source: user}
npu:
  execute_us: {value: 1.0, unit: us, source: user}
  dequantize_gweights_per_s: {value: 0.5, unit: Gweight/s, source: user}
  int16_tflops: {value: INT16, unit: TFLOP/s, source: user}
"""


def forms_of(plan: Plan) -> set[str | None]:
    return {entry.placement.form for entry in plan.entries if entry.placement.npu_lengths}


def chosen_forms(device: str, model: Path, calibration: Path, folder: Path, *limits: str) -> set[str | None]:
    """Profile a device with stepped scales, plan with and without the calibration, and run the first plan."""
    given = [str(model), "--device", device, "--scales", "stepped"]
    assert main(["profile", *given, "--quick"]) == 0
    given += limits
    paths = [folder / name for name in ("with.json", "without.json")]
    assert main(["plan", *given, "-o", str(paths[0]), "--calibration", str(calibration)]) == 0
    assert main(["plan", *given, "-o", str(paths[1])]) == 0
    plan, without = map(Plan.load, paths)
    assert plan.calibration == load_calibration(calibration).key
    assert without.calibration is None
    assert not forms_of(without) & INTEGER_FORMS
    if plan.uses_npu:
        options: dict[str, Any] = {"device": device, "scales": "stepped"}
        with LLM.load(model, plan=paths[0], calibration=calibration, context=256, **options) as llm:
            llm.session().prefill(range(40))
            labels = [step.label for step in llm.steps("prefill", 40) if step.action == "graph"]
            assert any("integer" in label for label in labels) == bool(forms_of(plan) & INTEGER_FORMS)
    return forms_of(plan)


@pytest.mark.parametrize(("rate", "integers"), [("9.3", True), ("0.001", False)])
def test_a_plan_takes_integer_forms_where_the_profile_has_them_faster(
    bundled_model: Path,
    calibrated: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rate: str,
    integers: bool,
) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    soc = tmp_path / "phone.yaml"
    soc.write_text(PHONE.replace("INT16", rate))
    forms = chosen_forms(f"sim:{soc}", bundled_model, calibrated, tmp_path)
    assert bool(forms & INTEGER_FORMS) == integers
    words = "some NPU graphs compute in integers" if integers else "no NPU graph computes in integers"
    assert f"{load_calibration(calibrated).key}: {words}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_the_emulators_profile_chooses_integer_forms(
    bundled_model: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    # An emulated NPU does not pay beside a real GPU, whose share is therefore as small as it can be.
    chosen = chosen_forms("emulator", bundled_model, calibrated, tmp_path, "--gpu-share", "0.01")
    measured = Profile.load(next((tmp_path / "cache" / "profiles").glob("*.json")))
    assert "integer" in {key.point.form for key, _ in measured.of_kind(LinearKey)}
    assert chosen & INTEGER_FORMS


@pytest.mark.emulator
@pytest.mark.slow
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_integer_graphs_that_were_compiled_ahead_are_found(
    bundled_model: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    options: dict[str, Any] = {"scales": "stepped", "context": 64}
    with LLM.load(bundled_model, device="host", plan="layer", **options) as llm:
        plan = integer_plan(llm, calibrated)
    ahead = structs.replace(plan, device="snapdragon")
    given: dict[str, Any] = {"soc": "57", "prompts": [32], "decode": False, **options}
    with pytest.raises(PlanError, match="and none is given"):
        precompile(bundled_model, plan=ahead, **given)
    built = precompile(bundled_model, plan=ahead, calibration=calibrated, **given).builds
    assert [(one.length, one.compiled, one.loadable) for one in built] == [(32, 4, 4)] * 4
    options["allow_slow"] = True
    emulated = structs.replace(plan, device="emulator")
    with LLM.load(bundled_model, device="emulator", plan=emulated, calibration=calibrated, **options) as llm:
        graphs = [step.label for step in llm.steps("prefill", 32) if step.action == "graph"]
        assert all(label.endswith("integer") for label in graphs)
        assert (llm.device.npu.compiled_count, len(graphs)) == (0, 16)

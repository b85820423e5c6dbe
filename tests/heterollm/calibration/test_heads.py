"""Attention heads in calibrations: their importance, longer windows, and the ratios that follow."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import CalibrationError, OptionError
from heterollm.calibration import calibrate, load_calibration
from heterollm.calibration.head_importance import measure_importance
from heterollm.calibration.head_records import HeadCalibration
from heterollm.calibration.run import BUILT_IN_CHARACTERS, IMPORTANCE_WINDOWS
from heterollm.cli import main
from heterollm.solver.sparse.keep import keep_ratios

torch = pytest.importorskip("torch")

OPTIMISED = True
"""Long prompts take longer than compilers."""

OPTIONS: dict[str, Any] = {"windows": 3, "window_tokens": 128, "gpu_threads": 1}


@pytest.fixture(scope="module")
def calibrated(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished file that went on with importance."""
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    first = calibrate(bundled_model, output=path, **OPTIONS)
    assert first.complete
    assert first.head_needs().importance is None
    then = calibrate(bundled_model, output=path, head_importance=True, **OPTIONS)
    assert then == load_calibration(path)
    assert [one.needed for one in then.heads] == [one.needed for one in first.heads]
    return path


def test_importance_is_the_loss_that_transformers_has_without_a_head_or_layer(
    bundled_model: Path, calibrated: Path
) -> None:
    from transformers import AutoModelForCausalLM

    from heterollm.llm import LLM
    from heterollm.text import Tokenizer

    found = load_calibration(calibrated)
    assert found.window_tokens == 128
    with LLM.load(bundled_model, device="host", plan="gpu", scales="stepped") as llm:
        state = {name: torch.from_numpy(values.copy()) for name, values in llm.reference_state_dict()}
    model = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    text = (bundled_model / "held_out.txt").read_text("utf-8")[-BUILT_IN_CHARACTERS:]
    ids = torch.tensor(Tokenizer.from_folder(bundled_model).encode(text)[: 3 * 128]).view(3, 128)

    @torch.no_grad()
    def loss() -> float:
        return float(model(ids[-IMPORTANCE_WINDOWS:], labels=ids[-IMPORTANCE_WINDOWS:]).loss)

    plain = loss()
    for number in (0, 3):
        layer, record = model.model.layers[number], found.heads[number]
        weights = [layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight]
        kept = [weight.detach().clone() for weight in weights]
        rises = []
        for head in range(8):
            weights[0].data[:, 32 * head : 32 * (head + 1)] = 0
            rises.append(loss() - plain)
            weights[0].data[...] = kept[0]
        np.testing.assert_allclose(record.importance, rises, atol=2e-5)
        for weight in weights:
            weight.data[...] = 0
        assert record.layer_importance == pytest.approx(loss() - plain, abs=1e-4)
        for weight, values in zip(weights, kept, strict=True):
            weight.data[...] = values
        assert max(rises) > 1e-3


class Meter:
    """Stands for the loss: each pass has a loss of its own, and the first is that of the whole model."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def surprises_with(self, reader: Any, only: Any = None) -> np.ndarray:
        self.asked.append(only if reader is not None else None)
        # Losses by what is left out, so that the order of passes does not matter.
        x, y = np.eye(8, dtype=np.float32), np.ones((8, 4), np.float32)
        made = y if reader is None else reader(None, x, y)
        return np.array([float(made.sum()), 100.0 * (only[0][0] if only else 0)])


@pytest.mark.parametrize("done", [0, 4, 7, 14])
def test_importance_goes_on_after_the_last_measured_head(done: int) -> None:
    record = HeadCalibration(0, (1.0,) * 4, (1.0,) * 2, (1.0,) * 4, (1.0,) * 4, (1.0,) * 2, (1.0,) * 4, ())
    heads = [structs.replace(record, layer=layer) for layer in range(3)]
    weight = np.arange(32, dtype=np.float32).reshape(4, 8)
    weights: Any = SimpleNamespace(
        linear=lambda *_: [weight], config=SimpleNamespace(attention=SimpleNamespace(head_dim=2))
    )
    meter: Any = Meter()
    every = list(measure_importance(heads, weights, meter, lambda *_: None))
    assert len(every) == 3 * 5
    assert meter.asked[:6] == [None, *[[(0, "o")]] * 4, [(0, "o"), (0, "down")]]
    stopped: Any = Meter()
    begun: list[int] = []
    rest = measure_importance(every[done], weights, stopped, lambda *given: begun.append(given[1]))
    assert list(rest) == every[done + 1 :]
    # One more pass for the loss of the whole model, unless nothing is left.
    assert len(stopped.asked) == (15 - done if done < 14 else 0)
    assert begun[:1] == ([done + 1] if done < 14 else [])


def test_ratios_follow_from_a_file(calibrated: Path) -> None:
    needs = load_calibration(calibrated).head_needs()
    for rule in ("mass", "importance"):
        ratios = np.array(keep_ratios(needs, 0.2, rule))
        assert ratios.shape == (4, 8)
        assert ratios.mean() == pytest.approx(0.2)
        assert ratios.std() > 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda heads: heads[1]["needed"][2].reverse(), r"heads\[1\].needed: .* shares that rise"),
        (lambda heads: heads[1]["needed"].pop(), r"heads\[1\].needed: 7 heads, not 8"),
        (lambda heads: heads[2]["mean_scores"].pop(), r"heads\[2\].mean_scores: 7 heads, not 8"),
        (lambda heads: heads[0]["importance"].append(1.0), r"heads\[0\].importance: 9 heads of 8"),
        (lambda heads: heads[0]["keys"].pop(), r"heads\[0\].keys: 8 query heads cannot share 3"),
    ],
)
def test_damaged_heads_are_refused(calibrated: Path, tmp_path: Path, change: Any, message: str) -> None:
    data = json.loads(calibrated.read_bytes())
    change(data["heads"])
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=message):
        load_calibration(path)


def test_a_window_too_short_is_refused(bundled_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="window of 63 tokens"):
        calibrate(bundled_model, output=tmp_path / "none.json", window_tokens=63)


def test_the_command_shows_what_heads_keep(
    bundled_model: Path, calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(calibrated.read_bytes())
    command = ["calibrate", str(bundled_model), "-o", str(path), "--windows", "3", "--window", "128"]
    assert main([*command, "--head-importance"]) == 0
    shown = capsys.readouterr().out
    assert "windows of 128 tokens" in shown
    [line] = [one for one in shown.splitlines() if one.split()[:1] == ["0"]]
    # All heads of the first layer keep as much.
    assert line.split()[:3] == ["0", "38", "38"]
    assert main([*command, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert np.mean(summary["keep"]) == pytest.approx(0.2)
    assert summary["window_tokens"] == 128

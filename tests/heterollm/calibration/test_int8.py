"""Calibrations of 8-bit activations: thresholds of outliers, errors, decisions, heads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from heterollm.base import CalibrationError, OptionError
from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.calibration.check import RangeCheck
from heterollm.calibration.decision import decide
from heterollm.calibration.float_weights import FloatWeights
from heterollm.calibration.head_records import MASSES
from heterollm.calibration.int8_records import ChannelOutliers, Int8Calibration, Int8Errors, Shadow
from heterollm.calibration.observer import LinearStatistics
from heterollm.calibration.range_records import LinearCalibration
from heterollm.cli import main
from heterollm.kernels.ops import Member, OpSpec, WeightFormat

OPTIMISED = True
"""Long prompts take longer than compilers."""

WINDOWS = 3
HOT = (3, 17)


@pytest.fixture(scope="module")
def calibrated(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    run(bundled_model, path, Policy(pruned=0.5))
    return path


def run(model: Path, path: Path, policy: Policy, **options: Any) -> list[str]:
    """Calibrate, and return the stages that ran."""
    stages: list[str] = []
    options.setdefault("progress", lambda stage, *_: stages.append(stage))
    calibrate(model, output=path, precision="w8a8", windows=WINDOWS, gpu_threads=1, policy=policy, **options)
    return stages


def with_outliers(tokens: int, seed: int) -> np.ndarray:
    """Return inputs of 256 channels of which two are large at every fourth token."""
    x = np.random.default_rng(seed).standard_normal((tokens, 256)).astype(np.float32)
    x[::4, HOT] *= 100
    return x


def checked(seed: int = 0) -> LinearCalibration:
    """Return the record of a linear whose inputs have two outlier channels."""
    weight = np.random.default_rng(seed).standard_normal((48, 256)).astype(np.float32) / 16
    members = (Member("q", 32), Member("k", 8), Member("v", 8))
    spec = OpSpec("qkv", 0, members, 256, WeightFormat(32), "x", "y")
    seen = LinearStatistics(spec, int8=True)
    for window in range(2):
        x = with_outliers(128, window)
        seen.add(x, x @ weight.T, lambda: weight)
    weights = SimpleNamespace(linear=lambda *_: np.split(weight, [32, 40]))
    check = RangeCheck(weights, {(0, "qkv"): seen.record()}, {}, 64)  # type: ignore[arg-type]
    x = with_outliers(64, 9)
    check.read(spec, x, x @ weight.T)
    found = check.linears[0, "qkv"]
    assert found.int8 is not None
    # An oracle of its own: codes, exact products, each member's grid, and the rest in floats.
    shadow, exact = found.int8.shadow, x.astype(np.float64) @ weight.T
    limit = shadow.threshold
    codes = np.rint(np.clip(x, -limit, limit).astype(np.float64) / (limit / 127))
    parts = np.split(codes * (limit / 127) @ weight.T, [32, 40], axis=1)
    steps = [largest / 127 for largest in shadow.outputs]
    rounded = [
        np.clip(np.rint(part / step), -128, 127) * step for part, step in zip(parts, steps, strict=True)
    ]
    y = np.concatenate(rounded, axis=1) + (x - np.clip(x, -limit, limit)) @ weight.T
    tokens = np.square(y - exact).sum(axis=1) / np.square(exact).sum(axis=1)
    assert shadow.errors is not None
    assert shadow.errors.token_nmse == pytest.approx(tokens.mean(), rel=0.02)
    return found


def test_the_threshold_is_below_the_outliers_and_the_shadow_takes_their_error_away() -> None:
    found = checked()
    assert found.int8 is not None
    assert found.int8.errors is not None
    shadow = found.int8.shadow
    assert shadow.errors is not None
    assert shadow.threshold < 10 < found.inputs
    assert set(HOT) <= {one.channel for one in shadow.outliers}
    assert shadow.hot_channels[:2] in (HOT, HOT[::-1])
    assert found.importance == pytest.approx(127 * found.inputs / shadow.threshold)
    assert shadow.errors.sqnr_db > found.int8.errors.sqnr_db + 12
    assert shadow.window_channels <= 2 * shadow.most_channels <= 2 * len(shadow.outliers)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_hot_channels_are_the_fewest_that_cover_four_fifths(counts: list[int]) -> None:
    outliers = tuple(ChannelOutliers(channel, count, 2.0) for channel, count in enumerate(counts))
    hot = Shadow(1.0, (1.0,), outliers, len(counts), len(counts)).hot_channels
    covered = sum(counts[channel] for channel in hot)
    assert covered >= 0.8 * sum(counts)
    assert sum(sorted(counts, reverse=True)[: len(hot) - 1]) < 0.8 * sum(counts)


def records(gains: Sequence[float]) -> tuple[LinearCalibration, ...]:
    """Return records whose shadows take these errors away."""
    made = []
    for layer, gain in enumerate(gains):
        shadow = Shadow(1.0, (1.0,), (ChannelOutliers(0, 1, 2.0),), 1, 1, Int8Errors(0.001, 0.001))
        int8 = Int8Calibration((shadow,), Int8Errors(0.001 + gain, 0.001 + gain), 0)
        made.append(LinearCalibration(layer, "o", 2.0, (1.0,), (1.0,), (), 1.0, (), int8=int8))
    return tuple(made)


def kinds(linears: Sequence[LinearCalibration]) -> list[str | None]:
    return [one.int8.activations for one in linears if one.int8 is not None]


def test_shadows_that_take_least_error_away_are_pruned_first() -> None:
    linears = records([0.4, 0.1, -0.1, 0.3])
    no_loss: Callable[..., float] = lambda _: pytest.fail("the share was given")  # noqa: E731
    for pruned, expected in (
        (0.0, ["shadow", "shadow", "int8", "shadow"]),
        (0.5, ["shadow", "int8", "int8", "shadow"]),
        (1.0, ["int8"] * 4),
    ):
        decided, decision = decide(linears, Policy(pruned=pruned), no_loss)
        assert kinds(decided) == expected
        assert decision.pruned == pruned
    # Below 6 dB: an error of a quarter, so pruned ones alone.
    decided, _ = decide(linears, Policy(6.0, 0.5), no_loss)
    assert kinds(decided) == ["shadow", "int8", "int8", "shadow"]
    decided, _ = decide(linears, Policy(6.0, 1.0), no_loss)
    assert kinds(decided) == ["int16", "int8", "int8", "int16"]


@given(st.integers(0, 16), st.floats(0.5, 5))
def test_the_largest_share_within_the_limit_is_found(tolerated: int, limit: float) -> None:
    """The loss passes the limit with one operator more than ``tolerated``."""

    def loss(linears: Sequence[LinearCalibration]) -> np.ndarray:
        pruned = kinds(linears).count("int8")
        rise = 0.5 if pruned <= tolerated else 2
        return np.full(40, np.log1p(rise * limit / 100) if pruned else 0.0)

    decided, decision = decide(records([0.1 + place for place in range(16)]), Policy(None, None, limit), loss)
    assert kinds(decided).count("int8") == tolerated
    assert decision.loss_limit_percent == limit
    assert all(one.loss_percent <= limit for one in decision.losses if one.pruned <= decision.pruned)


def test_a_loss_that_is_not_known_well_enough_prunes_nothing() -> None:
    """Tokens that gain as much as others lose: no loss on average, with a standard error beyond the limit."""

    def loss(linears: Sequence[LinearCalibration]) -> np.ndarray:
        return np.resize([-1.0, 1.0], 100) * ("int8" in kinds(linears)) - 0.005

    decided, decision = decide(records([0.1, 0.2, 0.3]), Policy(loss_limit_percent=5), loss)
    assert set(kinds(decided)) == {"shadow"}
    assert all(one.error_percent == pytest.approx(10, abs=1) for one in decision.losses if one.loss_percent)


def test_a_file_has_checked_records_and_heads(calibrated: Path, bundled_model: Path) -> None:
    found = load_calibration(calibrated)
    assert found.complete
    assert found.precision == "w8a8"
    assert not found.ffns  # at 8 bits no graph is a whole ffn
    assert len(found.activations()) == 16
    for one in found.linears:
        assert one.int8 is not None
        assert one.int8.checked
        assert one.int8.shadow.outliers or one.int8.activations == "int8"
    schema = Path(__file__).parents[3] / "docs" / "schemas" / "calibration.schema.json"
    jsonschema.validate(json.loads(calibrated.read_bytes()), json.loads(schema.read_bytes()))
    config = json.loads((bundled_model / "config.json").read_text())
    assert len(found.heads) == config["num_hidden_layers"]
    for heads in found.heads:
        sizes = (len(heads.queries), len(heads.keys), len(heads.needed))
        queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
        assert sizes == (queries, keys, queries)


def head_figures(queries: np.ndarray, keys: np.ndarray) -> tuple[Any, ...]:
    """Return each head's largest query, key and score in a window, and the shares of keys that it needs."""
    keys_of_queries = np.repeat(keys, len(queries) // len(keys), axis=0)
    tokens = queries.shape[1]
    raw = np.where(np.tri(tokens, dtype=bool), queries @ keys_of_queries.swapaxes(1, 2), 0)
    weights = np.where(np.tri(tokens, dtype=bool), np.exp(raw / queries.shape[2] ** 0.5), 0)
    weights /= weights.sum(axis=2, keepdims=True)
    needed = []
    for end in (320, 384, 448, 512):
        held = -np.sort(-weights[:, end - 32 : end].mean(axis=1), axis=1).cumsum(axis=1)
        needed.append([[1 + (one < mass).sum() for mass in MASSES] for one in held] / np.float64(end))
    largest = (np.abs(values).max(axis=(1, 2)) for values in (queries, keys, raw))
    return (*largest, np.mean(needed, axis=0))


def test_the_heads_are_those_of_transformers(bundled_model: Path, calibrated: Path, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama

    from heterollm.calibration.run import BUILT_IN_CHARACTERS, WINDOW_TOKENS
    from heterollm.llm import LLM
    from heterollm.text import Tokenizer

    with LLM.load(bundled_model, device="host", plan="gpu", precision="w8a8") as llm:
        state = {name: torch.from_numpy(values.copy()) for name, values in llm.reference_state_dict()}
    model = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    seen: list[list[Any]] = []
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotated(*given: Any, **options: Any) -> Any:
        pair = rotate(*given, **options)
        seen.append(head_figures(*(values[0].double().numpy() for values in pair)))
        return pair

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    text = (bundled_model / "held_out.txt").read_text("utf-8")[-BUILT_IN_CHARACTERS:]
    every = Tokenizer.from_folder(bundled_model).encode(text)
    for window in range(WINDOWS - 1):
        with torch.no_grad():
            model(torch.tensor([every[window * WINDOW_TOKENS : (window + 1) * WINDOW_TOKENS]]))
    found = load_calibration(calibrated)
    layers = len(found.heads)
    assert len(seen) == (WINDOWS - 1) * layers
    for one in found.heads:
        own = seen[one.layer :: layers]
        pairs = ((one.queries, one.mean_queries), (one.keys, one.mean_keys), (one.scores, one.mean_scores))
        for place, (largest, mean) in enumerate(pairs):
            expected = np.array([made[place] for made in own])
            np.testing.assert_allclose(largest, expected.max(axis=0), rtol=1e-3)
            np.testing.assert_allclose(mean, expected.mean(axis=0), rtol=1e-3)
        # Rounding may add a key in the shortest block of 320 keys.
        needed = np.mean([made[3] for made in own], axis=0)
        np.testing.assert_allclose(one.needed, needed, atol=1.01 / 320)


def test_a_stopped_calibration_goes_on(bundled_model: Path, calibrated: Path, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"

    def stop(stage: str, done: int, _total: int) -> None:
        if (stage, done) == ("Calibrating", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(bundled_model, path, Policy(pruned=0.5), progress=stop)
    assert load_calibration(path).windows == 1
    run(bundled_model, path, Policy(pruned=0.5))
    assert path.read_bytes() == calibrated.read_bytes()


def test_another_policy_decides_again_without_measuring_again(
    bundled_model: Path, calibrated: Path, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    path.write_bytes(calibrated.read_bytes())
    assert "Calibrating" not in run(bundled_model, path, Policy(pruned=0.5))
    assert path.read_bytes() == calibrated.read_bytes()
    first = load_calibration(calibrated)
    assert run(bundled_model, path, Policy(loss_limit_percent=1e-6)).count("Measuring the loss") > 2
    again = load_calibration(path)
    assert again.key != first.key
    assert again.decision is not None
    assert again.decision.losses[0].pruned == 1
    undecided = [
        [
            structs.replace(one, int8=structs.replace(one.int8, activations=None))
            for one in found.linears
            if one.int8
        ]
        for found in (first, again)
    ]
    assert undecided[0] == undecided[1]
    # 16 bits everywhere: nothing is left to prune, and nothing is lost.
    run(bundled_model, path, Policy(int16_limit_db=200))
    exact = load_calibration(path)
    assert set(exact.activations().values()) == {"int16"}
    assert exact.decision is not None
    assert [one.loss_percent for one in exact.decision.losses] == [0.0]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda one: one["shadows"].clear(), r"linears\[0\]\.int8\.shadows: no threshold"),
        (lambda one: one["shadows"].reverse(), r"int8\.shadows: the thresholds .* do not fall"),
        (lambda one: one["shadows"][0]["outputs"].pop(), r"shadows\[0\]\.outputs: 2 members, not 3"),
        (
            lambda one: one["shadows"][0].update(threshold=1e6),
            r"outliers\[0\]\.maximum: .* no outlier|do not",
        ),
        (lambda one: one["shadows"][-1]["outliers"].reverse(), "out of order|outliers"),
        (lambda one: one["shadows"][0].update(most_channels=10**6), r"shadows\[0\]\.most_channels"),
        (lambda one: one.update(chosen=9), r"int8\.chosen: 9 of 3"),
        (lambda one: one.update(errors=None), r"int8\.activations: .* without a check"),
        (lambda one: one.update(activations=None), r"int8\.activations: none, although"),
        (lambda one: one.update(activations="int4"), r"linears\[0\]\.int8\.activations"),
    ],
)
def test_damaged_records_are_refused(
    calibrated: Path, tmp_path: Path, damage: Callable[[dict[str, Any]], None], named: str
) -> None:
    data = json.loads(calibrated.read_bytes())
    damage(data["linears"][0]["int8"])
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=named):
        load_calibration(path)


def test_weights_that_fit_are_made_once() -> None:
    weight = np.arange(12, dtype=np.float16).reshape(4, 3)
    made: list[int] = []

    def linear(layer: int, _group: str) -> tuple[np.ndarray, ...]:
        made.append(layer)
        return (weight + layer,)

    floats = FloatWeights(SimpleNamespace(linear=linear), kept_bytes=2 * 4 * weight.size)  # type: ignore[arg-type]
    specs = [OpSpec("o", layer, (Member("o", 4),), 3, WeightFormat(32), "x", "y") for layer in range(3)]
    for _ in range(4):
        for spec in specs:
            assert np.array_equal(floats.of(spec), weight.astype(np.float32) + spec.layer)
    assert made == [0, 1, 2, 2, 2, 2]  # the third does not fit


def test_heads_in_disorder_are_refused(calibrated: Path, tmp_path: Path) -> None:
    data = json.loads(calibrated.read_bytes())
    data["heads"].reverse()
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError, match=r"heads\[0\].layer: 3, not 0"):
        load_calibration(path)


def test_policies_that_make_no_sense_are_refused(bundled_model: Path, tmp_path: Path) -> None:
    for options in ({"pruned": 1.5}, {"loss_limit_percent": 0.0}, {"int16_limit_db": float("nan")}):
        with pytest.raises(OptionError):
            Policy(**options)
    with pytest.raises(OptionError, match="and a limit"):
        Policy(pruned=0.5, loss_limit_percent=1.0)
    with pytest.raises(OptionError, match="8-bit activations at w4a16"):
        calibrate(bundled_model, output=tmp_path / "new.json", policy=Policy(pruned=0.5))
    with pytest.raises(OptionError, match="calibration of fp16"):
        calibrate(bundled_model, output=tmp_path / "new.json", precision="fp16")


def test_the_command_prints_outliers_and_decisions(
    bundled_model: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["calibrate", str(bundled_model), "-o", str(calibrated), "--windows", str(WINDOWS)]
    words += ["--precision", "w8a8", "--pruned", "0.5"]
    assert main(words) == 0  # complete already
    shown = " ".join(capsys.readouterr().out.split())
    assert "50% of the shadows pruned" in shown
    assert f"--precision w8a8 --calibration {calibrated}" in shown.replace(
        "calibration. json", "calibration.json"
    )
    assert main([*words, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert sum(summary["activations"].values()) == 16
    assert summary["activations"]["int8"] >= 8
    assert 0 < summary["hot_channels"] <= 768

"""Calibrated routing: the tokens of each expert against transformers, and the overlap of two texts."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from heterollm.base import CalibrationError, OptionError
from heterollm.calibration import Calibration, calibrate, load_calibration
from heterollm.calibration.routing import ROUTED_TOKENS, RoutingCalibration, RoutingStatistics, overlap
from heterollm.calibration.run import BUILT_IN_CHARACTERS
from heterollm.cli import main
from heterollm.llm import LLM
from heterollm.model import ModelConfig, expert_specs

torch = pytest.importorskip("torch")

TOKENS, WINDOWS = 150, 3


@pytest.fixture(scope="module")
def mixture(
    checkpoint: Callable[..., Path], bundled_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    source = checkpoint("qwen3_moe", vocab_size=2048, max_position_embeddings=512)
    folder = shutil.copytree(source, tmp_path_factory.mktemp("mixture") / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled_model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def calibrated(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("routing") / "calibration.json"
    calibrate(mixture, output=path, windows=WINDOWS, window_tokens=TOKENS, gpu_threads=1)
    return path


@pytest.fixture
def routers(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[np.ndarray]]:
    """The experts that transformers' routers choose, layer after layer."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    seen: list[np.ndarray] = []
    forward = Qwen3MoeTopKRouter.forward

    def recorded(self: torch.nn.Module, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = forward(self, states)
        seen.append(made[2].numpy())
        return made

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", recorded)
    return seen


def test_counts_are_those_of_transformers(
    mixture: Path,
    calibrated: Path,
    bundled_model: Path,
    routers: list[np.ndarray],
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
) -> None:
    from heterollm.text import Tokenizer

    text = (bundled_model / "held_out.txt").read_text("utf-8")[-BUILT_IN_CHARACTERS:]
    ids = Tokenizer.from_folder(bundled_model).encode(text)
    found = load_calibration(calibrated).routing
    assert [one.layer for one in found] == [0, 1]
    with LLM.load(mixture, device="host", plan="gpu", scales="stepped") as llm:
        for window in range(WINDOWS - 1):
            reference(llm, mixture, ids[window * TOKENS : (window + 1) * TOKENS])
    whole = TOKENS // ROUTED_TOKENS
    for place, one in enumerate(found):
        for window in range(WINDOWS - 1):
            chosen = routers[2 * window + place][: whole * ROUTED_TOKENS]
            chunks = [np.bincount(part.ravel(), minlength=12) for part in np.split(chosen, whole)]
            assert np.array_equal(one.windows[window], chunks)


def test_dense_layers_are_calibrated_beside_sparse_ones(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1], intermediate_size=192)
    found = calibrate(folder, output=tmp_path / "found.json", windows=2, window_tokens=64, gpu_threads=1)
    assert found.complete
    assert [one.layer for one in found.routing] == [0, 2]
    groups = [(one.layer, one.group) for one in found.linears]
    assert groups == [
        *((0, "qkv"), (0, "o"), (1, "qkv"), (1, "o"), (1, "gate_up"), (1, "down")),
        *((2, "qkv"), (2, "o")),
    ]
    assert [one.layer for one in found.ffns] == [1]
    assert [one.layer for one in found.heads] == [0, 1, 2]


def test_a_stopped_calibration_goes_on_with_its_counts(
    mixture: Path, calibrated: Path, tmp_path: Path
) -> None:
    whole = load_calibration(calibrated)
    stopped = structs.replace(
        whole,
        windows=1,
        checked_tokens=0,
        routing=tuple(structs.replace(one, windows=one.windows[:1]) for one in whole.routing),
    )
    path = tmp_path / "stopped.json"
    stopped.save(path)
    found = calibrate(mixture, output=path, windows=WINDOWS, window_tokens=TOKENS, gpu_threads=1)
    assert found.routing == whole.routing


def test_the_report_names_popular_experts(
    mixture: Path, calibrated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(mixture), "-o", str(calibrated), "--windows", str(WINDOWS)]
    main([*arguments, "--window", str(TOKENS), "--gpu-threads", "1"])
    printed = capsys.readouterr().out
    for one in load_calibration(calibrated).routing:
        assert f"{one.imbalance:.2f}" in printed
        assert " ".join(map(str, one.most_popular(8))) in printed


def layer(windows: list[list[list[int]]], place: int = 0) -> RoutingCalibration:
    return RoutingCalibration(place, tuple(tuple(tuple(own) for own in chunks) for chunks in windows))


def test_loads_of_longer_chunks_are_sums_within_windows() -> None:
    one = layer([[[60, 4], [30, 34], [1, 63]], [[64, 0], [32, 32], [2, 62]]])
    assert one.loads(64).tolist() == [[60, 4], [30, 34], [1, 63], [64, 0], [32, 32], [2, 62]]
    assert one.loads(128).tolist() == [[90, 38], [96, 32]]
    assert one.loads(192).tolist() == [[91, 101], [98, 94]]
    assert one.counts.tolist() == [189, 195]
    assert one.imbalance == 195 / 192
    for tokens in (0, 32, 100, 256):
        with pytest.raises(CalibrationError, match=f"chunks of {tokens} tokens"):
            one.loads(tokens)


def test_overlap_counts_common_experts() -> None:
    first = [layer([[[40, 30, 20, 10]]]), layer([[[40, 30, 20, 10]]], 3)]
    other = [layer([[[10, 30, 20, 40]]]), layer([[[39, 31, 20, 10]]], 3)]
    assert overlap(first, other, 1) == (0.0, 1.0)
    assert overlap(first, other, 2) == (0.5, 1.0)
    assert overlap(first, other, 4) == (1.0, 1.0)
    assert first[0].most_popular(3) == [0, 1, 2]
    assert layer([[[5, 9, 9, 1]]]).most_popular(2) == [1, 2]
    with pytest.raises(OptionError, match="5 most popular of 4"):
        overlap(first, other, 5)
    for wrong in ([], other[:1], [layer([[[1]]], 1), layer([[[1]]], 3)]):
        with pytest.raises(CalibrationError, match="no experts, or not those of the same layers"):
            overlap(first, wrong, 1)
        with pytest.raises(CalibrationError, match="no experts, or not those of the same layers"):
            overlap(wrong, first, 1)


def test_statistics_count_whole_chunks(mixture: Path) -> None:
    config = ModelConfig.from_folder(mixture)
    draw = np.random.default_rng(0)
    with LLM.load(mixture, device="host", plan="gpu") as llm:
        specs = expert_specs(config, llm._weights.specs)
    found = RoutingStatistics(specs)
    chosen = [draw.integers(0, 12, (tokens, 3)).astype(np.float32) for tokens in (130, 128)]
    for own in chosen:
        found.add(1, own)
    counted = found.record()[1]
    assert found.record()[0].windows == ()
    expected = sum(np.bincount(own[:128].astype(int).ravel(), minlength=12) for own in chosen)
    assert np.array_equal(counted.counts, expected)
    assert counted.loads(128).sum(axis=1).tolist() == [384, 384]
    assert RoutingStatistics(specs, found.record()).record() == found.record()


def test_damaged_records_are_refused(calibrated: Path) -> None:
    whole = load_calibration(calibrated)
    first, second = whole.routing
    for routing, message in (
        ((second, first), "do not rise"),
        ((first, structs.replace(second, windows=second.windows[:1])), r"routing\[1\].windows: not 2"),
        ((first, structs.replace(second, windows=(((1, 2),), ((1,),)))), r"routing\[1\].windows: not 2"),
        ((first, structs.replace(second, windows=(((1, 2),), ((1, 3),)))), "do not have 64 tokens"),
    ):
        damaged = structs.replace(whole, routing=routing)
        with pytest.raises(CalibrationError, match=message):
            Calibration.from_json(msgspec.json.encode(damaged))

"""The cache file of float weights by input channel."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from heterollm.base import CheckpointError, cache_root
from heterollm.model import Checkpoint, ModelConfig, load_weights
from heterollm.model.channel_file import channel_file
from heterollm.model.expert_layout import TensorRows
from heterollm.model.layout import linear_rows
from heterollm.model.weights import WEIGHTS_FOLDER


@pytest.fixture
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("phi3")  # whose q, k and v are one tensor


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_channel_holds_the_checkpoint_s_weights_of_all_members(folder: Path, dtype: type) -> None:
    checkpoint, config = Checkpoint(folder), ModelConfig.from_folder(folder)
    weights = load_weights(checkpoint, config, precision="w8a8")
    for group, members in linear_rows(config, 1).items():
        file = weights.channels(1, group, dtype)
        assert file is not None
        parts = [checkpoint.read(rows.name, (rows.start, rows.stop)) for rows in members.values()]
        expected = np.concatenate(parts).astype(dtype)
        for channel in (0, 7, expected.shape[1] - 1):
            file.read_ahead(channel)
            np.testing.assert_array_equal(file.weights[channel], expected[:, channel])
        file.close()


def test_a_damaged_or_stale_file_is_written_again(folder: Path) -> None:
    checkpoint, config = Checkpoint(folder), ModelConfig.from_folder(folder)
    path = cache_root() / WEIGHTS_FOLDER / f"{'0' * 32}.0.o.float32.safetensors"
    members = tuple(linear_rows(config, 0)["o"].values())
    expected = channel_file(path, "first", checkpoint, members, np.float32).weights.copy()
    content = path.read_bytes()
    for damage in (content[:-5], content.replace(b"first", b"other")):
        path.write_bytes(damage)
        np.testing.assert_array_equal(
            channel_file(path, "first", checkpoint, members, np.float32).weights, expected
        )
        assert path.read_bytes() == content


def test_values_beyond_float16_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(folder)
    name = next(iter(linear_rows(ModelConfig.from_folder(folder), 0)["o"].values())).name
    rows, columns = checkpoint.shape(name)
    large = np.full((rows, columns), 1e6, np.float32)
    monkeypatch.setattr(checkpoint, "read", lambda _, span: large[slice(*span)])
    with pytest.raises(CheckpointError, match="range of float16"):
        channel_file(cache_root() / "large", "key", checkpoint, [TensorRows(name, 0, rows)], np.float16)

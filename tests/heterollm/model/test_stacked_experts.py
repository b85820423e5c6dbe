"""Experts in one tensor for all, in which gate and up alternate: gpt-oss' MXFP4 blocks, and floats."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from safetensors.numpy import load_file, save_file

from heterollm.base import CheckpointError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import Checkpoint, ModelConfig

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

EXPERTS, HIDDEN, WIDTH = 6, 160, 96
HIDDEN_LLAMA4 = 128
STACKS = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
Tensors = dict[str, Any]


def published(folder: Path, target: Path) -> tuple[Path, Path]:
    """Write a checkpoint with random MXFP4 experts, and one with the floats that transformers reads."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = json.loads((folder / "config.json").read_text())
    blocks, floats = (load_file(folder / "model.safetensors") for _ in range(2))
    generator = np.random.default_rng(3)
    for layer in range(config["num_hidden_layers"]):
        for stack, (rows, columns) in STACKS.items():
            name, shape = f"model.layers.{layer}.mlp.experts.{stack}", (EXPERTS, rows, columns // 32)
            packed = generator.integers(0, 256, (*shape, 16), np.uint8)
            scales = generator.integers(118, 124, shape, np.uint8)
            del blocks[name]
            blocks |= {f"{name}_blocks": packed, f"{name}_scales": scales}
            floats[name] = (
                convert_moe_packed_tensors(
                    torch.from_numpy(packed), torch.from_numpy(scales), dtype=torch.float32
                )
                .numpy()
                .copy()
            )
    written = []
    for kind, tensors in (("mxfp4", blocks), ("floats", floats)):
        own = target / kind
        own.mkdir()
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
        stated = {"quantization_config": {"quant_method": "mxfp4"}} if kind == "mxfp4" else {}
        (own / "config.json").write_text(json.dumps({**config, **stated}))
        for file in folder.glob("tokenizer*"):
            (own / file.name).write_bytes(file.read_bytes())
        written.append(own)
    return written[0], written[1]


def test_blocks_hold_the_values_that_transformers_reads(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    mxfp4, floats = map(Checkpoint, published(checkpoint("gpt_oss"), tmp_path))
    for one in (mxfp4, floats):
        one.validate(ModelConfig.from_folder(one.folder))
    assert set(mxfp4.names) == set(floats.names)
    for name in mxfp4.names:
        assert mxfp4.shape(name) == floats.shape(name), name
        np.testing.assert_array_equal(mxfp4.read(name), floats.read(name), name)
        if len(mxfp4.shape(name)) > 1:
            np.testing.assert_array_equal(mxfp4.read(name, (3, 5)), floats.read(name, (3, 5)), name)
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    assert (mxfp4.kind(name), floats.kind(name)) == ("MXFP4", None)
    assert mxfp4.size_bytes(name) == WIDTH * HIDDEN // 2
    stack = load_file(floats.folder / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(floats.read(name), stack[4, :, 1::2].T)


def test_members_may_follow_each_other(checkpoint: Callable[..., Path]) -> None:
    """Llama 4's gate and up, of which a stack has one behind the other."""
    folder = checkpoint("llama4_text")
    opened, prefix = Checkpoint(folder), "model.layers.3.feed_forward.experts."
    stack = load_file(folder / "model.safetensors")[f"{prefix}gate_up_proj"]
    width = stack.shape[2] // 2
    for first, member in ((0, "gate"), (width, "up")):
        name = f"{prefix}4.{member}_proj.weight"
        assert opened.shape(name) == (width, HIDDEN_LLAMA4)
        np.testing.assert_array_equal(opened.read(name), stack[4, :, first : first + width].T)
        np.testing.assert_array_equal(opened.read(name, (3, 5)), stack[4, :, first + 3 : first + 5].T)
        assert opened.size_bytes(name) == 4 * width * HIDDEN_LLAMA4


def test_logits_of_published_blocks(
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    reference: Callable[..., np.ndarray],
    token_ids: Callable[[int], list[int]],
    tmp_path: Path,
) -> None:
    """Experts keep their values at 4 bits and floats; transformers has those of the other checkpoint."""
    mxfp4, floats = published(checkpoint("gpt_oss"), tmp_path)
    ids = token_ids(44)
    for precision in ("w4a16", "fp16"):
        llm = host_llm(mxfp4, plan="gpu", precision=precision)
        if precision == "w4a16":
            assert any("MXFP4" in note and "bit for bit" in note for note in llm.notes), llm.notes
        found = llm.session().prefill(ids, all_logits=True)
        assert sqnr_db(found, reference(llm, floats, ids)) >= LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda stack: {f"{stack}_scales": None}, "gate_up_proj_blocks .* lacks its scales"),
        (lambda stack: {f"{stack}_scales": np.zeros((6, 192, 4), np.uint8)}, "another type or shape"),
        (lambda stack: {f"{stack}_blocks": np.zeros((6, 191, 5, 16), np.uint8)}, "another type or shape"),
        (lambda stack: {f"{stack}_blocks": np.zeros((6, 192, 5, 16), np.float32)}, "another type or shape"),
        (lambda stack: {f"{stack}_bias": np.zeros((6, 191), np.float32)}, "gate_up_proj_bias"),
    ],
)
def test_damaged_stacks_are_named(
    change: Callable[[str], Tensors], said: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder, _ = published(checkpoint("gpt_oss"), tmp_path)
    tensors = load_file(folder / "model.safetensors") | change("model.layers.0.mlp.experts.gate_up_proj")
    left = {name: values for name, values in tensors.items() if values is not None}
    save_file(left, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(folder)

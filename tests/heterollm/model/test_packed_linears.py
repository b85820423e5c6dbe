"""GPTQ, AWQ and compressed-tensors checkpoints, packed here as their documentation says."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model import Checkpoint, ModelConfig, load_weights

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def compressed(bits=4, symmetric=True, **weights):
    stated = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": GROUP,
    }
    group = {"targets": ["Linear"], "weights": {**stated, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


def packed(codes, bits, order=None):
    """Codes along the last axis in 32-bit words, the lowest bits first."""
    per_word = 32 // bits
    if codes.shape[-1] % per_word:
        codes = np.pad(codes, [(0, 0), (0, -codes.shape[-1] % per_word)])
    parts = codes.reshape(*codes.shape[:-1], -1, per_word)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for place, column in enumerate(order or range(per_word)):
        words |= parts[..., column].astype(np.uint32) << np.uint32(place * bits)
    return words.view(np.int32)


def random_linear(rows, columns, bits, symmetric, rng):
    """Codes, zero points, scales, and the weight that they stand for."""
    codes = rng.integers(0, 1 << bits, (rows, columns))
    shape = rows, columns // GROUP
    zeros = np.full(shape, 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, shape)
    scales = (rng.uniform(0.5, 2, shape) * 0.02).astype(np.float16)
    values = (codes - np.repeat(zeros, GROUP, 1)) * np.repeat(scales, GROUP, 1).astype(np.float32)
    return codes, zeros, scales, values.astype(np.float32)


def gptq_tensors(linear, bits, rng, *, shift=1, indexed=False):
    codes, zeros, scales, _ = linear
    tensors = {
        "qweight": packed(codes, bits).T,
        "qzeros": packed((zeros - shift).T, bits),
        "scales": scales.T,
        "g_idx": (np.arange(codes.shape[1]) // GROUP).astype(np.int32),
    }
    if indexed:
        order = rng.permutation(codes.shape[1])
        tensors["qweight"] = packed(codes[:, order], bits).T
        tensors["g_idx"] = tensors["g_idx"][order]
        return tensors, order
    return tensors, None


def awq_tensors(linear):
    codes, zeros, scales, _ = linear
    return {
        "qweight": packed(codes.T, 4, AWQ_ORDER),
        "qzeros": packed(zeros.T, 4, AWQ_ORDER),
        "scales": scales.T,
    }


def compressed_tensors(linear, bits, symmetric):
    codes, zeros, scales, _ = linear
    tensors = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    return tensors if symmetric else {**tensors, "weight_zero_point": packed(zeros.T, bits).T}


@pytest.fixture
def pack(checkpoint, tmp_path):
    """Return a function that packs the linears of a checkpoint and gives its folder and their values."""

    def make(config, bits=4, symmetric=True, **options):
        folder = shutil.copytree(checkpoint("llama", **MODEL), tmp_path / "packed", dirs_exist_ok=True)
        rng = np.random.default_rng(2)
        tensors, values = {}, {}
        for name, stored in load_file(folder / "model.safetensors").items():
            if not name.endswith("_proj.weight"):
                tensors[name] = stored
                continue
            linear = random_linear(*stored.shape, bits, symmetric, rng)
            values[name] = linear[3]
            if config["quant_method"] == "gptq":
                parts, order = gptq_tensors(linear, bits, rng, **options)
                if order is not None:
                    values[name] = linear[3][:, order]
            elif config["quant_method"] == "awq":
                parts = awq_tensors(linear)
            else:
                parts = compressed_tensors(linear, bits, symmetric)
            for part, array in parts.items():
                tensors[f"{name.removesuffix('weight')}{part}"] = np.ascontiguousarray(array)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
        return folder, values

    return make


CASES = {
    "gptq": (GPTQ, {}, "int4 block 32"),
    "gptq asymmetric": ({**GPTQ, "sym": False}, {"symmetric": False}, "int4 block 32 asymmetric"),
    "gptq v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, {"shift": 0}, "int4 block 32"),
    "gptq 8 bits": ({**GPTQ, "bits": 8}, {"bits": 8}, "int8 block 32"),
    "awq": (AWQ, {"symmetric": False}, "int4 block 32 asymmetric"),
    "compressed": (compressed(), {}, "int4 block 32"),
    "compressed asymmetric": (compressed(symmetric=False), {"symmetric": False}, "int4 block 32 asymmetric"),
    "compressed 8 bits": (compressed(8), {"bits": 8}, "int8 block 32"),
}


@pytest.mark.parametrize("case", CASES)
def test_packed_linears_keep_their_values(case, pack):
    config, options, stored = CASES[case]
    folder, values = pack(config, **options)
    source = Checkpoint(folder)
    weights = load_weights(source, ModelConfig.from_folder(folder), group_size=128)
    assert {str(spec.weight) for spec in weights.specs[:-1]} == {stored}
    for name, wanted in values.items():
        assert np.array_equal(source.read(name), wanted)
        assert np.array_equal(source.read(name, (9, 30)), wanted[9:30])
        assert np.array_equal(weights.linears[name].dequantize(), wanted)
    assert [note for note in weights.notes if "bit for bit" in note] == list(weights.notes)


def test_groups_in_the_order_of_activations_are_requantised_to_8_bits(pack):
    folder, values = pack({**GPTQ, "desc_act": True}, indexed=True)
    source = Checkpoint(folder)
    weights = load_weights(source, ModelConfig.from_folder(folder))
    assert weights.specs[0].weight.bits == 8
    for name, wanted in values.items():
        assert np.array_equal(source.read(name), wanted)
    assert "at least 4" in weights.notes[0]


def test_logits_are_those_of_the_packed_values(pack, host_llm, token_ids, tmp_path):
    folder, values = pack(AWQ, symmetric=False)
    plain = shutil.copytree(folder, tmp_path / "plain")
    path = plain / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    kept = load_file(folder / "model.safetensors")
    floats = {name: kept[name] for name in kept if "_proj." not in name}
    save_file({**floats, **values}, plain / "model.safetensors", metadata={"format": "pt"})
    ids = token_ids(20)
    own, wanted = (
        host_llm(model, plan="gpu", precision="fp16").session().prefill(ids, all_logits=True)
        for model in (folder, plain)
    )
    assert np.array_equal(own, wanted)


@pytest.mark.parametrize(
    ("ending", "change"),
    [
        ("qweight", lambda array: array[:-1]),
        ("qzeros", lambda array: array[:, :-1]),
        ("scales", lambda array: array[:-1]),
        ("g_idx", lambda array: array[:-1]),
        ("g_idx", lambda array: array + 1000),
        ("scales", lambda array: array * np.float16(np.nan)),
        ("qweight", lambda array: array.astype(np.float32)),
        ("scales", None),
    ],
)
def test_damaged_linears_are_refused(ending, change, pack):
    folder, _ = pack(GPTQ)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{ending}"
    array = tensors.pop(name)
    if change is not None:
        tensors[name] = np.ascontiguousarray(change(array))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj"):
        load_weights(Checkpoint(folder), ModelConfig.from_folder(folder))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({**GPTQ, "bits": 3}, "3 bits"),
        ({**GPTQ, "group_size": 24}, "block is 24"),
        ({**AWQ, "version": "gemv"}, "'gemv'"),
        ({**compressed(), "format": "float-quantized"}, "float-quantized"),
        (compressed(type="float"), "pack-quantized"),
        ({"quant_method": "gptq"}, "None bits"),
        ([], "quantization_config"),
    ],
)
def test_other_methods_are_refused_by_name(config, said, pack):
    folder, _ = pack(GPTQ)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        ModelConfig.from_folder(folder)

"""GPTQ, AWQ and compressed-tensors checkpoints, packed here as their documentation says."""

import inspect
import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model import Checkpoint, ModelConfig, load_weights
from heterollm.model.fields import FOREIGN_METHODS, QUANTIZATION_FIELDS

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
        (compressed(type="float"), "type 'float'"),
        ({**compressed(), "format": None}, "format None"),
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


# -- every field of the methods ----------------------------------------------------------------------

BASES = {"gptq": (GPTQ, {}), "awq": (AWQ, {"symmetric": False}), "compressed-tensors": (compressed(), {})}
SPELLINGS = {
    "gptq": {**GPTQ, "quant_method": "GPTQ", "checkpoint_format": "GPTQ"},
    "gptq, newer name": {**GPTQ, "format": "GPTQ_v2"},
    "gptq, both names": {**GPTQ, "checkpoint_format": "GPTQ_V2", "format": "gptq"},
    "awq": {**AWQ, "quant_method": "AWQ", "version": "GEMM"},
    "awq, newer name": {name: AWQ[name] for name in AWQ if name != "version"} | {"format": "GEMM"},
    "awq, no layout and no bits": {"quant_method": "awq", "group_size": GROUP, "zero_point": True},
    "compressed": compressed(type="INT", strategy="GROUP")
    | {"quant_method": "Compressed-Tensors", "format": "Pack-Quantized"},
    "compressed, ordered by weight": compressed(actorder="Static"),
}
READ_CASES = {
    ("gptq", "bits"): ({**GPTQ, "bits": 8}, {"bits": 8}),
    ("gptq", "group_size"): ({**GPTQ, "group_size": 64}, {}),
    ("gptq", "sym"): ({**GPTQ, "sym": False}, {"symmetric": False}),
    ("gptq", "desc_act"): ({**GPTQ, "desc_act": True}, {"indexed": True}),
    ("gptq", "checkpoint_format"): ({**GPTQ, "checkpoint_format": "gptq_v2"}, {"shift": 0}),
    ("gptq", "format"): ({**GPTQ, "format": "gptq_v2"}, {"shift": 0}),
    ("awq", "bits"): None,
    ("awq", "group_size"): ({**AWQ, "group_size": 64}, {"symmetric": False}),
    ("awq", "zero_point"): ({**AWQ, "zero_point": False}, {}),
    ("awq", "version"): None,
    ("awq", "format"): None,
    ("compressed-tensors", "format"): None,
    ("compressed-tensors", "config_groups.*.weights.num_bits"): (compressed(8), {"bits": 8}),
    ("compressed-tensors", "config_groups.*.weights.symmetric"): (
        compressed(symmetric=False),
        {"symmetric": False},
    ),
    ("compressed-tensors", "config_groups.*.weights.group_size"): (compressed(group_size=64), {}),
    ("compressed-tensors", "config_groups.*.weights.actorder"): (compressed(actorder="group"), {}),
    ("compressed-tensors", "config_groups.*.weights.strategy"): None,
    ("compressed-tensors", "config_groups.*.weights.type"): None,
    ("compressed-tensors", "config_groups.*.format"): None,
}
"""A configuration with another value, and how its tensors are packed; None for names with one read value."""
OTHERS = {
    "version": "marlin",
    "format": "marlin",
    "bits": 2,
    "config_groups.*.weights.strategy": "block",
    "config_groups.*.weights.type": "float",
    "config_groups.*.format": "naive-quantized",
}
REFUSED = {
    "dynamic": {"-:.*down.*": {}},
    "adapter": {"name": "lora"},
    "rotation": "hadamard",
    "is_marlin_format": True,
    "pack_dtype": "int64",
    "backend": "LLM-AWQ",
    "config_groups.*.weights.dynamic": True,
    "config_groups.*.weights.block_structure": [128, 128],
    "config_groups.*.input_activations*": {"num_bits": 8, "type": "int"},
    "config_groups.*.output_activations*": {"num_bits": 8, "type": "int"},
    "sparsity_config.format": "sparse-24-bitmask",
    "kv_cache_scheme*": {"num_bits": 8, "type": "float"},
    "transform_config*": {"config_groups": {"u": {"type": "hadamard", "apply": []}}},
    "moe_sparsity_config*": {"method": "reap"},
}


def with_field(config, name, value):
    """Return a configuration with another value of a field, which may lie in a section."""
    first, _, rest = name.removesuffix("*").replace("*", "group_0").partition(".")
    own = config.get(first, {})
    return config | {first: with_field(own, rest, value) if rest else value}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("case", SPELLINGS)
def test_values_and_names_count_as_their_readers_take_them(case, pack):
    """In capitals, and under newer names: transformers' GPTQConfig and AwqConfig, and compressed-tensors."""
    symmetric = "awq" not in case
    options = {"shift": 0} if "name" in case and "gptq" in case else {}
    stated = SPELLINGS[case]
    folder, values = pack(
        {**stated, "quant_method": stated["quant_method"].lower()}, symmetric=symmetric, **options
    )
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"quantization_config": stated}))
    weights = load_weights(Checkpoint(folder), ModelConfig.from_folder(folder), group_size=128)
    for name, wanted in values.items():
        assert np.array_equal(weights.linears[name].dequantize(), wanted)


@pytest.mark.parametrize(
    ("method", "row"),
    [
        pytest.param(method, row, id=f"{method}-{row.name}")
        for method in BASES
        for row in QUANTIZATION_FIELDS[method].fields
        if row.name != "quant_method"
    ],
)
def test_each_field_is_read_or_ignored_or_refused_by_name(method, row, pack):
    base, options = BASES[method]
    if row.effect == "refused":
        folder, values = pack(base, **options)
        fields = config_of(folder)
        stated = with_field(base, row.name, REFUSED[row.name])
        named = row.name.removesuffix("*").replace("*", "group_0")
        with pytest.raises(UnsupportedModelError, match=re.escape(f"{named} = ")) as caught:
            ModelConfig.from_dict(fields | {"quantization_config": stated})
        assert row.meaning in str(caught.value)
        for neutral in (*row.neutral, None):
            stated = with_field(base, row.name, neutral)
            own = ModelConfig.from_dict(fields | {"quantization_config": stated})
            assert own == ModelConfig.from_dict(fields)
    elif row.effect == "none":
        name = row.name.removesuffix("*")
        folder, values = pack(with_field(base, name, "any"), **options)
        read = Checkpoint(folder)
        assert all(np.array_equal(read.read(one), values[one]) for one in values)
        plain = config_of(folder) | {"quantization_config": base}
        assert ModelConfig.from_folder(folder) == ModelConfig.from_dict(plain)
    elif READ_CASES[method, row.name] is None:
        stated = with_field(base, row.name, OTHERS[row.name])
        if row.name == "format" and method == "awq":
            del stated["version"]
        folder, _ = pack(base, **options)
        with pytest.raises(UnsupportedModelError, match=str(OTHERS[row.name])):
            ModelConfig.from_dict(config_of(folder) | {"quantization_config": stated})
    else:
        stated, changed = READ_CASES[method, row.name]
        folder, values = pack(stated, **changed)
        read = Checkpoint(folder)
        assert all(np.array_equal(read.read(one), values[one]) for one in values)
        same = ModelConfig.from_folder(folder) == ModelConfig.from_dict(
            config_of(folder) | {"quantization_config": base}
        )
        assert same == ("format" in row.name)


@pytest.mark.parametrize("method", [*FOREIGN_METHODS, "new-method", None])
def test_a_foreign_method_is_named(method, pack):
    folder, _ = pack(GPTQ)
    for spelt in {method, method and method.upper()}:
        fields = config_of(folder) | {"quantization_config": {"quant_method": spelt, "bits": 4}}
        with pytest.raises(UnsupportedModelError, match=re.escape(repr(method))) as caught:
            ModelConfig.from_dict(fields)
        assert FOREIGN_METHODS.get(method, "") in str(caught.value)


def test_bitsandbytes_is_known_by_its_flags(pack):
    folder, _ = pack(GPTQ)
    with pytest.raises(UnsupportedModelError, match=r"bitsandbytes.*NF4"):
        ModelConfig.from_dict(config_of(folder) | {"quantization_config": {"load_in_4bit": True}})


def test_a_field_of_quantisation_that_no_table_has_is_noted(pack):
    folder, _ = pack({**GPTQ, "new_thing": 1})
    weights = load_weights(Checkpoint(folder), ModelConfig.from_folder(folder))
    assert [note for note in weights.notes if "quantization_config: no table" in note and "new_thing" in note]


def test_every_field_that_transformers_knows_has_a_row():
    pytest.importorskip("torch")
    configs = pytest.importorskip("transformers.utils.quantization_config")
    own = {
        "gptq": configs.GPTQConfig,
        "awq": configs.AwqConfig,
        "compressed-tensors": configs.CompressedTensorsConfig,
        "mxfp4": configs.Mxfp4Config,
        "bitnet": configs.BitNetQuantConfig,
    }
    for method, kind in own.items():
        names = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs", "config_groups"}
        names |= set(re.findall(r"""kwargs\.(?:pop|get)\("(\w+)""", inspect.getsource(kind.__init__)))
        if method in ("gptq", "awq"):
            names |= set(kind(bits=4).to_dict())
        table = QUANTIZATION_FIELDS[method]
        assert {name for name in names if table.find(name) is None} == set()
    methods = {one.value for one in configs.QuantizationMethod} - {"gguf"}
    assert methods <= set(QUANTIZATION_FIELDS) | set(FOREIGN_METHODS)

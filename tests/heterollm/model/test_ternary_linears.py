"""BitNet checkpoints, packed and rounded by transformers' own functions."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model import Checkpoint, ModelConfig, load_weights

torch = pytest.importorskip("torch")
bitnet = pytest.importorskip("transformers.integrations.bitnet")

OFFLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = {**OFFLINE, "quantization_mode": "online"}
DIVIDED = {"quant_method": "BitNet"}
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pack(checkpoint, tmp_path):
    """Return a function that writes a BitNet checkpoint and gives its folder and the values of linears."""

    def make(config, change=None):
        folder = shutil.copytree(checkpoint("bitnet"), tmp_path / "ternary", dirs_exist_ok=True)
        torch.manual_seed(5)
        tensors, values = {}, {}
        for name, stored in load_file(folder / "model.safetensors").items():
            tensors[name] = stored.bfloat16()
            if not name.endswith("_proj.weight"):
                continue
            if config is ONLINE:
                rounded = bitnet.WeightQuant.apply(tensors[name].float())
                values[name] = rounded.numpy()
                continue
            codes, scale = torch.randint(-1, 2, stored.shape), torch.rand(1).add(0.5).bfloat16()
            factor = scale.float() if config is OFFLINE else 1 / scale.float()
            values[name] = (codes * factor).numpy()
            tensors[name], tensors[f"{name}_scale"] = bitnet.pack_weights(codes.clone()), scale
        if change is not None:
            change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
        return folder, values

    return make


@pytest.mark.parametrize("config", [OFFLINE, ONLINE, DIVIDED], ids=["offline", "online", "divided"])
def test_weights_of_three_values_keep_them(config, pack, host_llm, token_ids):
    folder, values = pack(config)
    source = Checkpoint(folder)
    weights = load_weights(source, ModelConfig.from_folder(folder), group_size=128)
    assert {spec.weight.bits for spec in weights.specs[:-1]} == {4}
    assert any("transformers rounds" in note for note in weights.notes)
    for name, wanted in values.items():
        np.testing.assert_allclose(source.read(name), wanted, rtol=1e-6)
        assert np.array_equal(source.read(name, (9, 60)), source.read(name)[9:60])
        held = weights.linears[name].dequantize()
        assert np.array_equal(np.sign(held), np.sign(wanted))
        np.testing.assert_allclose(held, wanted, rtol=2**-11)
    logits = host_llm(folder, plan="gpu").session().prefill(token_ids(9))
    assert np.isfinite(logits).all()


def test_some_linears_stay_floats(pack):
    folder, _ = pack(ONLINE)
    (folder / "config.json").write_text(
        json.dumps(
            json.loads((folder / "config.json").read_text())
            | {"quantization_config": {**ONLINE, "modules_to_not_convert": ["up_proj"]}}
        )
    )
    found = Checkpoint(folder)
    assert len(np.unique(found.read(NAME))) > 3
    assert len(np.unique(found.read(NAME.replace("up", "down")))) == 3


@pytest.mark.parametrize("scale", [None, torch.ones(2), torch.ones(1, dtype=torch.int32)])
def test_a_linear_without_its_scale_is_refused(scale, pack):
    def change(tensors):
        del tensors[f"{NAME}_scale"]
        if scale is not None:
            tensors[f"{NAME}_scale"] = scale

    folder, _ = pack(OFFLINE, change)
    with pytest.raises(CheckpointError, match=re.escape(f"lacks its scale {NAME}_scale")):
        Checkpoint(folder)


@pytest.mark.parametrize("scale", [0.0, float("nan")])
def test_a_scale_that_is_no_number_is_refused(scale, pack):
    folder, _ = pack(DIVIDED, lambda tensors: tensors[f"{NAME}_scale"].fill_(scale))
    with pytest.raises(CheckpointError, match=re.escape(f"{NAME} holds NaN or infinite")):
        Checkpoint(folder).read(NAME)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"linear_class": "other"}, "BitNet with linear_class 'other'"),
        ({"quantization_mode": "later"}, "BitNet with quantization_mode 'later'"),
        ({"use_rms_norm": True}, "a norm before each linear"),
    ],
)
def test_other_forms_are_refused(change, said, pack):
    folder, _ = pack(OFFLINE)
    values = json.loads((folder / "config.json").read_text())
    with pytest.raises(UnsupportedModelError, match=said):
        ModelConfig.from_dict(values | {"quantization_config": OFFLINE | change})
    same = values | {"quantization_config": OFFLINE | {"use_rms_norm": False, "rms_norm_eps": 1e-3}}
    assert ModelConfig.from_dict(same) == ModelConfig.from_dict(values)

"""Quantised checkpoints that `heterollm convert` writes, loaded again."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from heterollm.base import HeteroLLMError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.model import Checkpoint, ModelConfig, convert_model, load_weights


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


def loaded(folder, **options):
    return load_weights(Checkpoint(folder), ModelConfig.from_folder(folder), **options)


@pytest.mark.parametrize(
    ("family", "symmetric", "sizes"),
    [
        *(("llama", True, {}), ("qwen2", False, {}), ("phi3", True, {}), ("olmoe", False, {})),
        *(("lfm2", True, {}), ("qwen3_5_text", True, {})),
        *(("mixtral", True, {}), ("qwen3_moe", True, {"mlp_only_layers": [0], "intermediate_size": 192})),
    ],
)
def test_a_written_model_has_the_weights_of_its_source(family, symmetric, sizes, checkpoint, tmp_path):
    source = checkpoint(family, **sizes)
    found = convert_model(source, tmp_path / "small", symmetric=symmetric)
    own, wanted = loaded(found.folder), loaded(source, group_size=found.block, symmetric=symmetric)
    assert list(own.linears) == list(wanted.linears)
    for name, weight in wanted.linears.items():
        assert np.array_equal(own.linears[name].dequantize(), weight.dequantize()), name
    assert all(np.array_equal(own.floats[name], values) for name, values in wanted.floats.items())
    assert 15 < found.worst_db <= found.signal_db < 30
    assert found.size_bytes == (found.folder / "model.safetensors").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "small"]


def test_another_reader_finds_what_the_format_says(checkpoint, tmp_path):
    """Unpacked as compressed-tensors' documentation says."""
    source = checkpoint("llama")
    folder = convert_model(source, tmp_path / "small", symmetric=False, group_size=64).folder
    tensors = load_file(folder / "model.safetensors")
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    weights = stated["config_groups"]["group_0"]["weights"]
    module = "model.layers.0.mlp.gate_proj"
    words, zeros, scales = (tensors[f"{module}.weight_{part}"] for part in ("packed", "zero_point", "scale"))
    rows, columns = tensors[f"{module}.weight_shape"]
    shifts = np.arange(8) * 4
    codes = (words.view(np.uint32)[:, :, None] >> shifts & 15).reshape(rows, columns).astype(np.float32)
    points = zeros.view(np.uint32)[:, None, :] >> shifts[:, None] & 15
    points = points.reshape(-1, zeros.shape[1])[:rows].astype(np.float32)
    block = weights["group_size"]
    values = (codes - np.repeat(points, block, 1)) * np.repeat(scales, block, 1).astype(np.float32)
    wanted = loaded(source, group_size=block, symmetric=False).linears[f"{module}.weight"].dequantize()
    assert np.array_equal(values, wanted)


def test_answers_are_those_of_the_source(bundled_model, host_llm, run, tmp_path):
    code, out, _ = run("convert", str(bundled_model), "-o", str(tmp_path / "small"), "--json")
    assert code == 0
    assert json.loads(out)["linears"] > 20
    texts = [
        host_llm(model, plan="gpu").generate("def f(", max_new_tokens=12).text
        for model in (bundled_model, tmp_path / "small")
    ]
    assert texts[0] == texts[1]
    assert run("convert", str(bundled_model), "-o", str(tmp_path / "small"))[0] == 1


@pytest.mark.slow
def test_transformers_has_the_logits_of_the_written_model(bundled_model, host_llm, tmp_path):
    """By the library compressed-tensors, in float32; its version 0.20 expects unpacked zero points there."""
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder = convert_model(bundled_model, tmp_path / "small").folder
    ids = list(range(20, 60))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        wanted = model(torch.tensor([ids])).logits[0].numpy()
    own = host_llm(folder, plan="gpu", precision="fp16").session().prefill(ids, all_logits=True)
    assert sqnr_db(own, wanted) > 90


def test_what_cannot_be_converted_is_refused(checkpoint, tmp_path):
    folder = convert_model(checkpoint("llama"), tmp_path / "small").folder
    with pytest.raises(HeteroLLMError, match="quantised already"):
        convert_model(folder, tmp_path / "again")
    with pytest.raises(HeteroLLMError, match="stacks its experts"):
        convert_model(checkpoint("granitemoe"), tmp_path / "experts")
    with pytest.raises(HeteroLLMError, match="factors on its linears"):
        convert_model(checkpoint("falcon_h1"), tmp_path / "factors")
    # Before the model is looked at.
    with pytest.raises(HeteroLLMError, match="cannot be written"):
        convert_model(tmp_path / "no model", folder / "config.json" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "small"]

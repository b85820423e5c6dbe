"""The same weights in other engines' formats: what they hold, and that the ONNX decoder computes the same."""

import json

import numpy as np
import pytest

from heterollm.base import UnsupportedModelError
from heterollm.benchmarks.child import random_ids
from heterollm.benchmarks.onnx_twin import write_onnx
from heterollm.benchmarks.plain_llama import check_plain_llama
from heterollm.benchmarks.quality import sqnr_db
from heterollm.model import ModelConfig

TOKENS, DECODED = 20, 3


@pytest.mark.parametrize(("integer_inputs", "precision"), [(False, "w4a16"), (True, "w4a8")])
def test_the_onnx_decoder_computes_what_heterollm_does(
    bundled_model, host_llm, tmp_path, integer_inputs, precision
):
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = write_onnx(
        bundled_model, tmp_path / "onnx", integer_inputs=integer_inputs, context=64, threads=1
    )
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    config = ModelConfig.from_folder(bundled_model)
    shape = (1, config.kv_heads, 0, config.head_dim)
    names = [f"{layer}.{kind}" for layer in range(config.layers) for kind in ("key", "value")]
    past = {f"past_key_values.{name}": np.zeros(shape, np.float32) for name in names}
    ids = random_ids(3, config.vocab_size, TOKENS + DECODED)
    rows, seen = [], 0
    for part in (ids[:TOKENS], *(ids[index : index + 1] for index in range(TOKENS, len(ids)))):
        seen += len(part)
        given = {
            "input_ids": part[None].astype(np.int64),
            "attention_mask": np.ones((1, seen), np.int64),
            **past,
        }
        outputs = dict(
            zip([item.name for item in session.get_outputs()], session.run(None, given), strict=True)
        )
        rows.append(outputs["logits"][0, -1])
        past = {f"past_key_values.{name}": outputs[f"present.{name}"] for name in names}
    own = host_llm(bundled_model, plan="gpu", precision=precision, context=64).session()
    expected = [own.prefill(ids[:TOKENS]), *(own.decode(int(token)) for token in ids[TOKENS:])]
    assert sqnr_db(np.stack(expected), np.stack(rows)) > (28 if integer_inputs else 90)
    settings = json.loads((folder / "genai_config.json").read_text())
    assert settings["model"]["context_length"] == settings["search"]["max_length"] == 64


def test_a_second_writing_changes_the_context_alone(bundled_model, tmp_path):
    options = {"integer_inputs": False, "threads": 1}
    folder = write_onnx(bundled_model, tmp_path / "onnx", context=64, **options)
    before = (folder / "model.onnx").stat().st_mtime_ns
    write_onnx(bundled_model, folder, context=128, **options)
    assert (folder / "model.onnx").stat().st_mtime_ns == before
    assert json.loads((folder / "genai_config.json").read_text())["search"]["max_length"] == 128


@pytest.mark.parametrize("family", ["qwen2", "mistral", "smollm3"])
def test_other_families_are_refused_by_name(checkpoint, family):
    config = ModelConfig.from_folder(checkpoint(family))
    with pytest.raises(UnsupportedModelError, match="is not written as GGUF"):
        check_plain_llama(config, "GGUF")


def test_scaled_positions_are_refused(checkpoint):
    with pytest.raises(UnsupportedModelError, match="is not written as ONNX"):
        check_plain_llama(ModelConfig.from_folder(checkpoint("llama")), "ONNX")

import json
import os
import tempfile

import pytest

from heterollm.kernels.threads import split_threads

# PoCL takes both from the environment of the process's first OpenCL call, which any test may make: the number
# of threads that `host` has by default, and a cache that outlives every test that moves heterollm's.
POCL_CACHE = tempfile.TemporaryDirectory(prefix="heterollm-pocl-", ignore_cleanup_errors=True)
os.environ.setdefault("POCL_MAX_PTHREAD_COUNT", str(len(split_threads().gpu_cores)))
os.environ.setdefault("POCL_CACHE_DIR", POCL_CACHE.name)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Every cache file of a test run lies in a folder of its own."""
    folder = tmp_path_factory.mktemp("heterollm cache")
    previous = os.environ.get("HETEROLLM_CACHE")
    os.environ["HETEROLLM_CACHE"] = str(folder)
    yield folder
    if previous is None:
        del os.environ["HETEROLLM_CACHE"]
    else:
        os.environ["HETEROLLM_CACHE"] = previous


@pytest.fixture(scope="session")
def model_fields():
    """A factory of ``config.json`` contents of tiny models: ``model_fields("llama", head_dim=32)``."""
    return tiny_fields


@pytest.fixture(scope="session")
def write_model():
    """A factory of random checkpoints: ``write_model(folder, "qwen2", dtype="bfloat16", **fields)``."""
    return write_random_model


def tiny_fields(family="llama", **changes):
    fields = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
    }
    return fields | changes


def write_random_model(folder, family="llama", *, dtype="float32", max_shard_size="1GB", seed=0, **changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = tiny_fields(family, **changes)
    fields.pop("architectures")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.05)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    generation = {"bos_token_id": 1, "eos_token_id": [2, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder

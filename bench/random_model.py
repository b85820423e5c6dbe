"""Writes the checkpoints that the whole-model benches run: known shapes with random weights.

TinyLlama-1.1B, or a mixture with OLMoE-1B-7B's sizes of attention and experts in Qwen3-MoE's architecture.

Real weights would need a download and would not change a time: every kernel does the same work on any value.
Norm weights are not one and every head differs, so that two engines agree only if they compute the same.

    python bench/random_model.py /tmp/tinyllama
    python bench/random_model.py /tmp/mixture --model mixture --layers 2
"""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np
from conditions import script_parser
from numpy.typing import NDArray

from heterollm.base import InputError
from heterollm.model import ModelConfig
from heterollm.model.layout import expected_tensors
from heterollm.model.tensor_file import layout_tensors, write_header

TINYLLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MIXTURE: Final[dict[str, Any]] = {
    **TINYLLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "vocab_size": 50304,
}
MODELS: Final = {"tinyllama": TINYLLAMA, "mixture": MIXTURE}
SEED: Final = "heterollm_bench_seed"
"""In the configuration of what was written here, and may be written again."""
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer_config.json")


def write_checkpoint(
    folder: Path, seed: int = 0, layers: int | None = None, model: str = "tinyllama"
) -> Path:
    """Write ``config.json``, a tokenizer and ``model.safetensors`` in bfloat16, unless they are there.

    Args:
        folder: Made if missing; a finished checkpoint of the same seed and layers in it is kept.
        seed: Of the weights.
        layers: How many, by default the model's; fewer keep each layer's shape, and take less time.
        model: ``tinyllama`` or ``mixture``.

    Returns:
        The folder.

    Raises:
        InputError: Another checkpoint is there: it is not written over.
    """
    shape = MODELS[model]
    config = {**shape, "num_hidden_layers": layers or shape["num_hidden_layers"], SEED: seed}
    done = folder / "config.json"
    if done.is_file():
        found = json.loads(done.read_text("utf-8"))
        if found == config:
            return folder
        if found.keys() != config.keys():
            raise InputError(f"{folder} has a checkpoint of its own.", fix="Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    source = resources.files("heterollm.data.tiny_python_lm")
    for name in TOKENIZER_FILES:
        with resources.as_file(source / name) as path:
            shutil.copyfile(path, folder / name)
    shapes = expected_tensors(ModelConfig.from_dict(config))
    entries = layout_tensors({name: ("BF16", shape) for name, shape in shapes.items()})
    with (folder / "model.safetensors").open("wb") as file:
        start = write_header(file, entries, {})
        for index, (name, shape) in enumerate(shapes.items()):
            file.seek(start + entries[name].start)
            file.write(_bfloat16(np.random.default_rng([seed, index]), shape).data)
        file.truncate(start + max(entry.stop for entry in entries.values()))
    done.write_text(json.dumps(config, indent=1), "utf-8")
    return folder


def _bfloat16(generator: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    values = generator.standard_normal(shape, np.float32)
    # A linear keeps the size of what it reads; norms are near one.
    values *= 0.2 if len(shape) == 1 else shape[-1] ** -0.5
    values += len(shape) == 1
    return np.ascontiguousarray(values.view(np.uint16).reshape(*shape, 2)[..., 1])


def main() -> None:
    """Write the checkpoint into the folder given."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--model", choices=MODELS, default="tinyllama")
    options = parser.parse_args()
    print(write_checkpoint(options.folder, options.seed, options.layers, options.model))


if __name__ == "__main__":
    main()

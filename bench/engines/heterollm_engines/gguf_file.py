"""Writes a checkpoint's quantised weights as GGUF, bit for bit those that heterollm computes with.

Symmetric 4-bit blocks of 32 are Q4_0 and 8-bit ones Q8_0: an FP16 scale, then the codes, those of Q4_0 with
the block's first half in the low nibbles (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).
llama.cpp rotates neighbouring elements of a head where Hugging Face's checkpoints rotate halves: q's and k's
rows move. Needs the package ``gguf``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import UnsupportedModelError, atomic_path, locked
from heterollm.kernels.formats import LinearWeight, QuantizedTensor, take_rows
from heterollm.model import Checkpoint, ModelConfig, ModelWeights, load_weights

BLOCK: Final = 32
"""Weights that share a scale."""

NAMES: Final = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


def write_gguf(folder: Path, path: Path | None = None) -> Path:
    """Write a Llama checkpoint as GGUF, unless a newer file is there.

    Args:
        folder: The checkpoint.
        path: The file to write; ``model.gguf`` in the folder by default.

    Returns:
        The file.

    Raises:
        UnsupportedModelError: The model has what this file does not describe.
        HeteroLLMError: The checkpoint cannot be read, or the file not be written.
    """
    path = folder / "model.gguf" if path is None else path
    checkpoint, config = Checkpoint(folder), ModelConfig.from_folder(folder)
    _check_plain(config)
    newest = max(file.stat().st_mtime for file in folder.glob("*.safetensors"))
    with locked(path):
        if path.is_file() and path.stat().st_mtime > newest:
            return path
        weights = load_weights(checkpoint, config, precision="w4a16", group_size=BLOCK, symmetric=True)
        with atomic_path(path) as temporary:
            _write(temporary, weights)
    return path


def _check_plain(config: ModelConfig) -> None:
    """Refuse models that llama.cpp would compute otherwise: plain Llama models alone are written.

    Raises:
        UnsupportedModelError: The model has other features.
    """
    widths = (config.hidden_size, config.ffn.width, config.attention.heads * config.attention.head_dim)
    plain = config.model_type == "llama" and config.rope.kind == "default" and not config.attention.qkv_bias
    if not plain or config.attention.o_bias or config.ffn.biased or any(width % BLOCK for width in widths):
        raise UnsupportedModelError(
            f"A {config.family} model with these features is not written as GGUF.",
            fix="Leave the engine out, or compare a Llama model without biases and RoPE scaling.",
        )


def _write(path: Path, weights: ModelWeights) -> None:
    import gguf

    config = weights.config
    writer = gguf.GGUFWriter(path, "llama")
    _write_header(writer, config)
    _add(writer, "token_embd.weight", weights.embedding)
    if not config.tie_word_embeddings:
        _add(writer, "output.weight", weights.head)
    writer.add_tensor("output_norm.weight", np.array(weights.final_norm))
    for layer in range(config.layers):
        _write_layer(writer, weights, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_header(writer: Any, config: ModelConfig) -> None:  # noqa: ANN401 - gguf's types are partial
    writer.add_block_count(config.layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.ffn.width)
    writer.add_head_count(config.attention.heads)
    writer.add_head_count_kv(config.attention.kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.attention.head_dim)
    writer.add_value_length(config.attention.head_dim)
    writer.add_rope_freq_base(config.rope.base)
    writer.add_rope_dimension_count(config.attention.head_dim)
    # Token ids go in and come out; llama.cpp's server alone asks for their texts, which nobody reads.
    size = config.vocab_size
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(f"<{token}>" for token in range(len(special), size))][:size])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * size][:size])


def _write_layer(writer: Any, weights: ModelWeights, layer: int) -> None:  # noqa: ANN401
    config = weights.config
    writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.array(weights.norm(layer, "attention")))
    writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.array(weights.norm(layer, "feed_forward")))
    for group, names in NAMES.items():
        for name, weight in zip(names, weights.linear(layer, group), strict=True):  # type: ignore[arg-type]
            if name in ("attn_q", "attn_k"):
                permuted = take_rows(weight, _interleaved_rows(config, weight))
                _add(writer, f"blk.{layer}.{name}.weight", permuted)
            else:
                _add(writer, f"blk.{layer}.{name}.weight", weight)


def _interleaved_rows(config: ModelConfig, weight: LinearWeight) -> list[tuple[int, int]]:
    assert isinstance(weight, QuantizedTensor)
    rows = np.arange(weight.rows).reshape(-1, 2, config.attention.head_dim // 2).swapaxes(1, 2).ravel()
    return [(row, row + 1) for row in rows.tolist()]


def _add(writer: Any, name: str, weight: LinearWeight) -> None:  # noqa: ANN401
    assert isinstance(weight, QuantizedTensor)
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_0 if weight.bits == 4 else gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, ggml_blocks(weight), raw_dtype=kind)


def ggml_blocks(weight: QuantizedTensor) -> NDArray[np.uint8]:
    """Return the rows as ggml's blocks, uint8 ``[n, bytes of a row]``."""
    codes = weight.unpacked_codes().reshape(*weight.scales.shape, BLOCK)
    low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    values = low | high << 4 if weight.bits == 4 else codes ^ 0x80
    scales = np.ascontiguousarray(weight.scales)[..., None].view(np.uint8)
    return np.concatenate([scales, values], axis=-1).reshape(weight.rows, -1)

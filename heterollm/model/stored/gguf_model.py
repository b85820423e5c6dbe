"""The model in a GGUF file: its metadata as ``config.json``, and its tensors by their Hugging Face names.

llama.cpp's names and changes of tensors: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import WeightFormat
from heterollm.model.stored.affine_blocks import AffineBlocks
from heterollm.model.stored.gguf_blocks import BlockType, block_type
from heterollm.model.stored.gguf_file import GgufFile

__all__ = ["GgufTensors", "gguf_config", "smallest_format"]


class Architecture(NamedTuple):
    """A value of ``general.architecture``.

    Args:
        model_type: That of ``config.json``.
        class_name: The class in transformers.
        permuted: Whether the rows of q and k stand in the order of rotated pairs.
        norm_offset: What the converter added to the weights of norms.
    """

    model_type: str
    class_name: str
    permuted: bool = False
    norm_offset: float = 0.0


ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
        "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", permuted=True),
        "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
        "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
        "phi3": Architecture("phi3", "Phi3ForCausalLM"),
        "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", norm_offset=1.0),
        "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0),
    }
)
MIXTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture("mixtral", "MixtralForCausalLM", permuted=True),
        "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
        "olmoe": Architecture("olmoe", "OlmoeForCausalLM"),
    }
)
"""The architectures of files with experts."""
GEMMA: Final = ("gemma2", "gemma3")

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "qkv"),
        "attn_output": "o",
        "ffn_gate": "gate_up",
        "ffn_up": "gate_up",
        "ffn_down": "down",
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "experts"),
    }
)
"""The group of linears of each matrix of a layer."""

GEMMA_MODULES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        **{
            kind: {
                f"ffn_{member}_exps": f"mlp.experts.{{}}.{member}_proj" for member in ("gate", "up", "down")
            }
            for kind in ("qwen3_moe", "olmoe")
        },
        "mixtral": {
            f"ffn_{member}_exps": f"block_sparse_moe.experts.{{}}.{name}"
            for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
)
"""Names of an expert's weight by the stack that holds it, of each kind of mixture."""
ROUTERS: Final = {"mixtral": "block_sparse_moe.gate", "qwen3_moe": "mlp.gate", "olmoe": "mlp.gate"}

TOP_MODULES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

REFUSED: Final = (
    *("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_scale"),
    *("embedding_scale", "residual_scale", "logit_scale", "leading_dense_block_count"),
    *("expert_shared_count", "expert_group_count", "expert_weights_scale"),
)
"""Fields that change the result in ways of no architecture above; 0 stands for none."""

SOFTMAX: Final = 1

LARGEST_GEMMA_LAYERS: Final = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest Gemmas, whose attention llama.cpp scales by the share of a head in the width."""


class GgufTensors:
    """The tensors of a GGUF file by their Hugging Face names.

    Args:
        file: The file.

    Raises:
        UnsupportedModelError: The architecture is not supported.
    """

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._file = file
        self._architecture = _architecture(file)
        stated = str(file.metadata["general.architecture"])
        modules = {**MODULES, **(GEMMA_MODULES if stated in GEMMA else {})}
        if stated == "phi3":
            modules = {**modules, "ffn_up": "mlp.gate_up_proj"}
        self._heads = {
            "attn_q": _count(file, "attention.head_count"),
            "attn_k": _count(file, "attention.head_count_kv", "attention.head_count"),
        }
        kind = self._architecture.model_type
        if kind in EXPERTS:
            modules = {**modules, "ffn_gate_inp": ROUTERS[kind]}
        stacks = EXPERTS.get(kind, {})
        self._names: dict[str, str] = {}
        self._experts: dict[str, int] = {}
        for own, entry in file.entries.items():
            match = LAYER_TENSOR.fullmatch(own)
            if match and match[2] in stacks and len(entry.shape) == len(("expert", "row", "column")):
                for expert in range(entry.shape[0]):
                    name = f"model.layers.{match[1]}.{stacks[match[2]].format(expert)}.{match[3]}"
                    self._names[name], self._experts[name] = own, expert
            elif own not in ROPE_TENSORS:
                self._names[_hugging_face_name(own, modules)] = own

    @property
    def names(self) -> Collection[str]:
        """The name of every tensor."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        shape = self._file.entries[self._names[name]].shape
        return shape[1:] if name in self._experts else shape

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in the file."""
        entry = self._file.entries[self._names[name]]
        return (entry.stop - entry.start) // (entry.shape[0] if name in self._experts else 1)

    def kind(self, name: str) -> str:
        """Return the type of a tensor, as llama.cpp spells it."""
        return self._file.entries[self._names[name]].kind

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored as integers."""
        return self._type(name).dtype is None

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks:
        """Return rows ``[start, stop)`` of a quantised tensor."""
        return self._type(name).blocks(self._rows(name, rows))

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a tensor, or rows ``[start, stop)`` of its matrix, as float32."""
        shape, kind = self.shape(name), self._type(name)
        data = self._rows(name, rows or (0, math.prod(shape[:-1])))
        values = (
            kind.blocks(data).values() if kind.dtype is None else data.view(kind.dtype).astype(np.float32)
        )
        if name.endswith("norm.weight"):
            values = values - np.float32(self._architecture.norm_offset)
        return values if rows is not None else values.reshape(shape)

    def _type(self, name: str) -> BlockType:
        return block_type(self.kind(name))

    def _rows(self, name: str, rows: tuple[int, int]) -> NDArray[np.uint8]:
        own = self._names[name]
        data = self._file.bits(own)
        if name in self._experts:
            count = self.shape(name)[0]
            data = data[self._experts[name] * count :][:count]
        match = LAYER_TENSOR.fullmatch(own)
        if match is None or match[2] not in self._heads or not self._architecture.permuted:
            return np.ascontiguousarray(data[rows[0] : rows[1]])
        if match[3] == "bias":  # one row, of which each element moves
            values = data.reshape(self.shape(name)[0], -1)
            return values[self._unpaired(match[2], len(values))].reshape(1, -1)
        return data[self._unpaired(match[2], len(data))[rows[0] : rows[1]]]

    def _unpaired(self, module: str, rows: int) -> NDArray[np.intp]:
        """Return where in the file the rows lie whose halves of a head follow each other."""
        heads = self._heads[module]
        if rows % (2 * heads):
            raise CheckpointError(f"{self.path}: {module} has {rows} rows, which {heads} heads cannot share.")
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """Return the content of ``config.json``, with the number formats that hold the file's weights.

    Raises:
        CheckpointError: The metadata lacks a number, or one is not possible.
        UnsupportedModelError: The file has features that would be computed wrongly.
    """
    architecture = _architecture(file)
    stated = str(file.metadata["general.architecture"])
    for name in REFUSED:
        if _own(file, name):
            raise UnsupportedModelError(
                f"{file.path}: {stated}.{name} = {_own(file, name)!r:.40} is not supported in a GGUF file.",
                fix="Take the Hugging Face checkpoint that it was made from.",
            )
    hidden, heads = _count(file, "embedding_length"), _count(file, "attention.head_count")
    head_dim = _count(file, "attention.key_length", default=hidden // heads)
    if _count(file, "attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: keys and values of different widths are not supported.")
    rotated = _count(file, "rope.dimension_count", default=head_dim)
    if rotated > head_dim:
        raise CheckpointError(f"{file.path}: RoPE rotates {rotated} elements of a head's {head_dim}.")
    layers = _count(file, "block_count")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "hidden_size": hidden,
        "intermediate_size": _count(file, "feed_forward_length", "expert_feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": _count(file, "attention.head_count_kv", "attention.head_count"),
        "head_dim": head_dim,
        "vocab_size": _vocabulary(file),
        "max_position_embeddings": _count(file, "context_length"),
        "rms_norm_eps": _own(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _own(file, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.entries,
        "sliding_window": _own(file, "attention.sliding_window") or None,
        **_rope_scaling(file),
        **_token_ids(file),
    }
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if stated in ("llama", "qwen3", "smollm3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.entries
    if stated in GEMMA:
        largest = layers == LARGEST_GEMMA_LAYERS[stated]
        config["query_pre_attn_scalar"] = hidden // heads if largest else head_dim
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            config[name] = _own(file, name)
    if stated == "gemma3":
        config["rope_local_base_freq"] = _own(file, "rope.freq_base_swa", 10000.0)
        del config["attn_logit_softcapping"]
    if architecture.model_type in EXPERTS:
        config |= _mixture(file, architecture)
    pattern = _own(file, "attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    formats = _formats(file)
    return {**config, **({"quantization_config": formats} if formats else {})}


def _mixture(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    """Return the fields of a mixture, whose router llama.cpp scores by softmax."""
    gating = _own(file, "expert_gating_func", SOFTMAX)
    if gating != SOFTMAX:
        raise UnsupportedModelError(
            f"{file.path}: experts are gated by function {gating!r:.40}, which is not supported."
        )
    count = "num_local_experts" if architecture.model_type == "mixtral" else "num_experts"
    found: dict[str, Any] = {
        count: _count(file, "expert_count"),
        "num_experts_per_tok": _count(file, "expert_used_count"),
    }
    if architecture.model_type == "qwen3_moe":
        found |= {
            "moe_intermediate_size": _count(file, "expert_feed_forward_length"),
            "norm_topk_prob": True,
            "use_sliding_window": False,
            "attention_bias": "blk.0.attn_q.bias" in file.entries,
        }
    return found


def _architecture(file: GgufFile) -> Architecture:
    stated = file.metadata.get("general.architecture")
    experts = isinstance(stated, str) and bool(_own(file, "expert_count"))
    known = MIXTURES if experts else ARCHITECTURES
    found = known.get(stated) if isinstance(stated, str) else None
    if found is None:
        said = " with experts" if experts else ""
        raise UnsupportedModelError(
            f"{file.path}: GGUF files of architecture {stated!r:.40}{said} are not supported.",
            fix=f"Supported{said} are {', '.join(known)}. Or take the Hugging Face checkpoint.",
        )
    return found


def _own(file: GgufFile, name: str, default: Any = None) -> Any:  # noqa: ANN401 - any metadata
    """Return the metadata ``<architecture>.<name>``."""
    return file.metadata.get(f"{file.metadata['general.architecture']}.{name}", default)


def _count(file: GgufFile, name: str, other: str = "", default: int | None = None) -> int:
    """Return a whole number above 0; a list, one for each layer, must repeat it."""
    value = _own(file, name, _own(file, other, default))
    if isinstance(value, list) and value and all(one == value[0] for one in value):
        value = value[0]
    if type(value) is not int or not 0 < value < 1 << 31:
        said = "is missing" if value is None else f"is {value!r:.40}"
        stated = file.metadata["general.architecture"]
        raise CheckpointError(f"{file.path}: {stated}.{name} {said}; expected a whole number above 0.")
    return value


def _vocabulary(file: GgufFile) -> int:
    entry = file.entries.get("token_embd.weight")
    if entry is None or len(entry.shape) != 2:
        raise CheckpointError(f"{file.path} has no token embedding.", fix="Download it again.")
    return entry.shape[0]


def _hugging_face_name(name: str, modules: Mapping[str, str]) -> str:
    match = LAYER_TENSOR.fullmatch(name)
    if match and match[2] in modules:
        return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
    module, _, ending = name.rpartition(".")
    return f"{TOP_MODULES[module]}.{ending}" if module in TOP_MODULES else name


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    """Return ``rope_scaling``, and the original context of models that state it."""
    kind = _own(file, "rope.scaling.type")
    original = _own(file, "rope.scaling.original_context_length")
    factors = {name: _floats(file, name) for name in ROPE_TENSORS if name in file.entries}
    if factors:
        # The factors that Llama 3 computes, and those of longrope: both divide the frequencies.
        short = factors.get("rope_freqs.weight", factors.get("rope_factors_short.weight"))
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": factors.get("rope_factors_long.weight", short),
        }
        if "rope_freqs.weight" in factors:
            scaling |= {"factor": 1.0, "attention_factor": 1.0}
            original = _own(file, "context_length")
        else:
            scaling["attention_factor"] = _own(file, "rope.scaling.attn_factor")
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn") or _own(file, "rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            f"{file.path}: RoPE scaling {kind!r:.40} of a GGUF file is not supported."
        )
    scaling = {"rope_type": kind, "factor": _own(file, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _floats(file: GgufFile, name: str) -> list[float]:
    if file.entries[name].kind != "F32":
        raise CheckpointError(f"{file.path}: tensor {name} has type {file.entries[name].kind}, not F32.")
    return [float(value) for value in file.bits(name).view("<f4").ravel()]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, own in (("bos_token_id", "bos"), ("pad_token_id", "padding")):
        found[name] = file.metadata.get(f"tokenizer.ggml.{own}_token_id")
    ends = (file.metadata.get(f"tokenizer.ggml.{own}_token_id") for own in ("eos", "eot", "eom"))
    found["eos_token_id"] = list(dict.fromkeys(one for one in ends if one is not None))
    return found


def _formats(file: GgufFile) -> dict[str, Any] | None:
    """Return the number formats of the layers' groups and of the head; None if no layer is quantised."""
    groups: dict[str, list[BlockType]] = {group: [] for group in dict.fromkeys(GROUPS.values())}
    heads = []
    for name, entry in file.entries.items():
        match = LAYER_TENSOR.fullmatch(name)
        if match and match[2] in GROUPS and match[3] == "weight":
            groups[GROUPS[match[2]]].append(block_type(entry.kind))
        elif name in ("token_embd.weight", "output.weight"):
            heads.append(block_type(entry.kind))
    if all(kind.dtype is not None for kinds in groups.values() for kind in kinds):
        return None
    formats = {group: smallest_format(kinds) for group, kinds in groups.items()}
    formats["head"] = structs.replace(smallest_format(heads), bits=8)
    stated = {
        group: {"bits": weight.bits, "block": weight.block, "minimum": weight.minimum}
        for group, weight in formats.items()
    }
    return {"quant_method": "gguf", "head": stated.pop("head"), "layers": stated}


def smallest_format(kinds: Sequence[BlockType]) -> WeightFormat:
    """Return the smallest canonical format that holds all blocks of some types, and floats in 8 bits."""
    four = all(kind.bits == 4 for kind in kinds)
    block = min((kind.scale_block for kind in kinds if kind.dtype is None), default=32)
    minimum = any(kind.minimum for kind in kinds)
    return WeightFormat(4 if four else 8, block, symmetric=not minimum, minimum=minimum)

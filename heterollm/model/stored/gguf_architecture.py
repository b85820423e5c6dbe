"""An architecture of GGUF files: names of its tensors, and the model in transformers that files come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from heterollm.model.stored.gguf_family_fields import Fields, no_fields
from heterollm.model.stored.gguf_file import GgufFile, Lists
from heterollm.model.stored.gguf_names import SKIP, Other


class Architecture(NamedTuple):
    """A value of ``general.architecture``.

    Args:
        model_type: That of ``config.json``.
        class_name: The class in transformers.
        layer: Prefix of the names of layers' tensors, before the number.
        grouped: Whether rows of ``attn_qkv`` stand by heads in the checkpoint: those of q, k and v of each.
        permuted: Whether the rows of q and k stand in the order of rotated pairs.
        norm_offset: What the converter added to the weights of norms.
        biases: Fields of ``config.json`` for biases, each with tensors of files that have them.
        modules: Modules of a layer by the file's names, where they differ from Llama's.
        joined: The file's names of tensors that share the rows of a module's weight.
        top: Modules outside of layers, likewise; with ``{}`` for the number of each in a stack.
        experts: Modules of an expert's weights by the stacks that hold them.
        experts_field: Field of ``config.json`` with the number of experts.
        epsilon: Field of ``config.json`` for the number added in norms, and the file's.
        fields: Returns the fields of ``config.json`` that other architectures lack.
        lists: Meaning of heads and widths that are lists.
        others: Other tensors of a layer by the file's names, where they differ from those of all.
        numbers: Names and shapes of tensors of each layer whose numbers the metadata has, by field.
        is_latent: Whether attention is latent.
        heads_in_turns: Whether the value heads of a delta net stand in turns: the first of each key head,
            then the second of each.
    """

    model_type: str
    class_name: str
    layer: str = "model.layers"
    grouped: bool = False
    permuted: bool = False
    norm_offset: float = 0.0
    biases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    modules: Mapping[str, str] = MappingProxyType({})
    joined: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    top: Mapping[str, str] = MappingProxyType({})
    experts: Mapping[str, str] = MappingProxyType({})
    experts_field: str = "num_experts"
    epsilon: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    fields: Callable[[GgufFile, Fields], Fields] = no_fields
    lists: Lists = "alike"
    others: Mapping[str, Other] = MappingProxyType({})
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = MappingProxyType({})
    is_latent: bool = False
    heads_in_turns: bool = False

    @property
    def has_spaces(self) -> bool:
        """Whether layers may be state spaces."""
        return SKIP in self.others


def key_heads(file: GgufFile, architecture: Architecture) -> int:
    """Return the key heads of layers with attention."""
    return file.count("attention.head_count_kv", "attention.head_count", lists=architecture.lists)


LAYER_NORM: Final = ("layer_norm_eps", "attention.layer_norm_epsilon")
QKV_BIAS: Final = ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")
ATTENTION_BIAS: Final = ("attention_bias", QKV_BIAS)
BIASES: Final = (ATTENTION_BIAS, ("mlp_bias", ("blk.0.ffn_down.bias",)))
OUTPUT_NORMS: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAMED_EXPERTS: Final = {
    f"ffn_{member}_exps": f"mlp.experts.{{}}.{member}_proj" for member in ("gate", "up", "down")
}
NUMBERED_EXPERTS: Final = {
    f"ffn_{member}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
SHARED_EXPERT: Final = {
    f"ffn_{member}_shexp": f"mlp.shared_expert.{member}_proj" for member in ("gate", "up", "down")
}
SHARED_EXPERTS: Final = {own: module.replace("expert", "experts") for own, module in SHARED_EXPERT.items()}
CHOICE_BIAS: Final = {"exp_probs_b.bias": Other("mlp.gate.e_score_correction_bias")}

"""Declarations of families of which layers may be state spaces, those of Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.family import ATTENTION_BIASES, NORMS, Family, StageNames, TensorNames
from heterollm.model.json_fields import JsonFields
from heterollm.model.mixtures import GRANITE_EXPERTS, GRANITE_FIELDS, SHARED

MAMBA_FIELDS: Final = frozenset(
    {
        *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        *("mamba_expand", "mamba_conv_bias"),
    }
)


def mamba_linears(module: str) -> Mapping[Group, Mapping[str, str]]:
    """Return the linears of a state space in a module."""
    return {"mamba_in": dict.fromkeys("qkvza", f"{module}.in_proj"), "mamba_out": {"out": f"{module}.out_proj"}}


def mamba_tensors(module: str) -> Mapping[str, str]:
    """Return the other tensors of a state space in a module."""
    return {
        "taps": f"{module}.conv1d.weight",
        "taps_bias": f"{module}.conv1d.bias",
        "decay": f"{module}.A_log",
        "decay_shift": f"{module}.dt_bias",
        "skip": f"{module}.D",
        "gated_norm": f"{module}.norm.weight",
    }


def granite_sizes(fields: JsonFields) -> dict[str, object]:
    """Return the width of heads, which a file may state."""
    width, heads = fields.count("mamba_expand") * fields.count("hidden_size"), fields.count("mamba_n_heads")
    if width % heads:
        raise fields.fail("mamba_n_heads", f"a divisor of mamba_expand times hidden_size, {width}")
    if fields.get("mamba_d_head") not in (None, "auto", width // heads):
        raise fields.fail("mamba_d_head", f"{width // heads}, so that {heads} heads are {width} wide")
    return {"mamba_d_head": width // heads}


def granite_layers(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
    """Return a layer whose shared experts stand beside others, or alone if there are none."""
    kinds = fields.get("layer_types")
    is_space = not isinstance(kinds, list) or kinds[layer : layer + 1] in (["mamba"], ["linear_attention"])
    sparse = fields.count("num_local_experts", minimum=0) > 0
    return ("mamba" if is_space else "attention",), ("mixture", "ffn") if sparse else ("ffn",)


STATE_SPACES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "granitemoehybrid": Family(
            name="Granite 4",
            covers="Granite 4",
            architecture="GraniteMoeHybridForCausalLM",
            tensors=TensorNames({**SHARED, **mamba_linears("mamba")}, NORMS, others=mamba_tensors("mamba")),
            layers=granite_layers,
            kinds=("linear_attention", "mamba"),
            mixture=replace(
                GRANITE_EXPERTS,
                shared_field="shared_intermediate_size",
                dense_field="shared_intermediate_size",
            ),
            defaults={
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "shared_intermediate_size": 1024,
                "mamba_n_heads": 128,
                "mamba_n_groups": 1,
                "mamba_d_state": 256,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
            derived=granite_sizes,
            follows=GRANITE_FIELDS | MAMBA_FIELDS | {"layer_types", "position_embedding_type"},
            biases=ATTENTION_BIASES,
            ignores={"layers_block_type": "layer_types counts"},
            bos_ids=(1,),
            eos_ids=(2,),
        ),
    }
)
"""The families by ``model_type``."""

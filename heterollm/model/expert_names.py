"""Tensor names, layers and routers that several families of mixtures of experts share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.family import SEPARATE, LayerNames, Mixture, StageNames, alike, gated_network
from heterollm.model.json_fields import JsonFields

ATTENTION: Final[Mapping[Group, Mapping[str, str]]] = {group: SEPARATE[group] for group in ("qkv", "o")}
SHARED: Final[Mapping[Group, Mapping[str, str]]] = {
    **ATTENTION,
    "gate_up": dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"),
    "down": {"down": "shared_mlp.output_linear"},
}

NAMED_EXPERTS: Final[Mapping[str, str]] = {
    member: f"mlp.experts.{{expert}}.{member}_proj" for member in ("gate", "up", "down")
}
SHARED_EXPERT: Final = gated_network("mlp.shared_expert")
SHARED_EXPERTS: Final = gated_network("mlp.shared_experts")
NUMBERED_EXPERTS: Final[Mapping[str, str]] = {
    member: f"block_sparse_moe.experts.{{expert}}.{name}"
    for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
STACKED_EXPERTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("gate", "up"), "block_sparse_moe.input_linear"),
    "down": "block_sparse_moe.output_linear",
}

SPARSE: Final = alike(("attention",), ("mixture",))


def by_mlp_type(sparse: StageNames) -> LayerNames:
    """Return layers that are sparse unless ``mlp_layer_types`` calls them dense."""

    def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
        kinds = fields.get("mlp_layer_types")
        if kinds is not None and not (
            isinstance(kinds, list) and layer < len(kinds) and kinds[layer] in ("dense", "sparse")
        ):
            raise fields.fail("mlp_layer_types", "a list of dense or sparse, one for each layer")
        return ("attention",), ("ffn",) if kinds and kinds[layer] == "dense" else sparse

    return stages


def first_are_dense(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of networks of a file without them: a field counts the first, dense ones."""
    if fields.get("mlp_layer_types") is not None:
        return {}
    dense, layers = fields.count("first_k_dense_replace", minimum=0), fields.count("num_hidden_layers")
    return {"mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)]}


def every_other_layer(_fields: JsonFields, layer: int) -> bool:
    """Return true for the first layer, the third and so on."""
    return layer % 2 == 0


def every_other_first_layer(fields: JsonFields, layer: int) -> bool:
    """Return true for the first, the third and so on of the first ``max_window_layers``."""
    return layer % 2 == 0 and layer < fields.count("max_window_layers", minimum=0)


def ernie_layers(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
    """Return a layer with experts at every so many layers of a range, else a dense one."""
    last = fields.count("moe_layer_end_index", minimum=-1)
    inside = fields.count("moe_layer_start_index", minimum=0) <= layer and (last < 0 or layer <= last)
    sparse = inside and (layer + 1) % fields.count("moe_layer_interval") == 0
    return ("attention",), ("mixture", "ffn") if sparse else ("ffn",)


GRANITE_EXPERTS: Final = Mixture(
    "block_sparse_moe.router.layer", STACKED_EXPERTS, count_fields=("num_local_experts",)
)

SIGMOID_EXPERTS: Final = Mixture(
    "mlp.gate",
    NAMED_EXPERTS,
    width_field="moe_intermediate_size",
    shared_count_field="n_shared_experts",
    scoring="sigmoid",
    normalized_field="norm_topk_prob",
    bias_field=True,
    group_fields=("n_group", "topk_group"),
    scale_field="routed_scaling_factor",
    count_fields=("n_routed_experts",),
)
NOT_READ: Final = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers"), "layers that predict further tokens are not read"
)

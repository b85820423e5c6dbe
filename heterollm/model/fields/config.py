"""The fields of ``config.json``, by model type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from heterollm.model.fields.config_rows import ALWAYS, CLASS, IGNORED, OPTIONAL, OWN, PUBLISHED, UNBOUNDED
from heterollm.model.fields.table import Effect, Field, FieldTable


@dataclass(frozen=True, slots=True)
class TypeFields:
    """The fields that distinguish a model type.

    Args:
        read: Optional fields that it reads.
        renamed: Its own names of common fields, by the common name.
        ignored: Fields that change other model types and not this one, each with the reason.
    """

    read: frozenset[str]
    renamed: Mapping[str, str]
    ignored: Mapping[str, str]


def config_fields(types: Mapping[str, TypeFields]) -> FieldTable:
    """Return the table for all supported model types.

    A field that the model type's class does not know, and that changes the results elsewhere, is refused all
    the same: such a file was written for another reader.
    """
    every = frozenset(types)

    def readers(*names: str) -> frozenset[str]:
        return frozenset(kind for kind, own in types.items() if own.read & {*names})

    def found() -> Iterator[Field]:
        for kind, own in types.items():
            for common, name in own.renamed.items():
                only = frozenset({kind})
                yield Field(name, "read", f"as {common} of other model types", CLASS, only=only)
                yield Field(common, "none", f"{name} counts", PUBLISHED, only=only)
            for name, why in own.ignored.items():
                yield Field(name, "none", why, CLASS, only=frozenset({kind}))
        for name, meaning in OWN.items():
            yield from _one("read", name, meaning, readers(name))
        # transformers has them there, and heterollm has not.
        lacking = readers("kv_lora_rank", "mamba_d_ssm")
        yield from _one(
            "refused", "attention_bias", "biases of attention's linears", lacking, neutral=(False,)
        )
        for name, (meaning, why) in IGNORED.items():
            yield from _one("read", name, meaning, readers(name))
            yield from _one("none", name, why, every - readers(name), PUBLISHED)
        for name, (meaning, neutral) in OPTIONAL.items():
            why = f"{meaning}; transformers ignores it in this model type"
            yield from _one("read", name, meaning, readers(name))
            yield from _one("refused", name, why, every - readers(name), PUBLISHED, neutral)
        yield from _by_type(every, readers)

    return FieldTable("config.json", (*found(), *ALWAYS))


def _one(
    effect: Effect,
    name: str,
    meaning: str,
    only: frozenset[str],
    source: str = CLASS,
    neutral: tuple[object, ...] = (),
) -> Iterator[Field]:
    if only:
        yield Field(name, effect, meaning, source, neutral, only)


def _by_type(every: frozenset[str], readers: Callable[..., frozenset[str]]) -> Iterator[Field]:
    """Yield the rows whose model types follow from several fields."""
    nested, layered = readers("rope_local_base_freq"), readers("layer_types")
    alike, sparse = readers("sliding_window") - layered, readers("num_experts_per_tok", "moe_k")
    yield from _one("none", "hidden_act", "hidden_activation counts", readers("hidden_activation"), PUBLISHED)
    yield from _one("read", "layer_types", "kind of each layer: full_attention and others", layered)
    yield from _one(
        "read",
        "layer_types",
        "must agree with sliding_window; transformers ignores it in this model type",
        alike,
        PUBLISHED,
    )
    yield from _one(
        "refused",
        "layer_types",
        "layers of different kinds; transformers ignores it in this model type",
        every - layered - alike,
        PUBLISHED,
        ("full_attention", "attention"),
    )
    capped = readers("attn_logit_softcapping")
    yield from _one(
        "refused",
        "sliding_window_pattern",
        "every second layer has full attention, whatever the field says",
        capped - nested,
        PUBLISHED,
        (2,),
    )
    for name, why in (
        ("_sliding_window_pattern", "a copy that transformers writes; layer_types counts"),
        ("sliding_window_size", "older name that transformers ignores"),
    ):
        yield from _one("none", name, why, readers("hidden_activation"), PUBLISHED)
    plain = readers("global_head_dim") - readers("enable_moe_block")
    for name, why, neutral, only in (
        ("enable_moe_block", "experts beside a network", (False,), plain),
        ("top_k_experts", "experts that compute a token", (0,), plain),
        (
            *("use_bidirectional_attention", "attention in both directions", (False, "vision")),
            readers("global_head_dim"),
        ),
    ):
        yield from _one("refused", name, why, only, neutral=neutral)
    why = "another stream than the first, which layers compute"
    yield from _one("refused", "altup_active_idx", why, readers("altup_num_inputs"), neutral=(0,))
    yield from _of_hybrids(readers)
    for name, why in (
        ("router_jitter_noise", "training"),
        ("input_jitter_noise", "training"),
        ("output_router_logits", "the values that transformers returns beside the logits"),
        ("router_aux_loss_coef", "training"),
    ):
        yield from _one("none", name, why, sparse)


def _of_hybrids(readers: Callable[..., frozenset[str]]) -> Iterator[Field]:
    """Yield such rows of model types with convolutions, delta nets, state spaces or latent attention."""
    convolves, biases = readers("conv_L_cache"), "biases of convolutions and their linears"
    yield from _one("refused", "conv_bias", biases, convolves, neutral=(False,))
    for name, why in (
        ("use_sandwich_norm", "outputs without norms"),
        ("use_attention_gate", "attention without gates of heads"),
    ):
        windowed = convolves & readers("sliding_window")
        yield from _one("refused", name, why, windowed, neutral=(True,))
    nets = readers("linear_conv_kernel_dim")
    for name, why, usual in (
        ("attn_output_gate", "attention without an output gate", True),
        ("mamba_ssm_dtype", "recurrent state in another type", "float32"),
    ):
        yield from _one("refused", name, why, nets, PUBLISHED, (usual,))
    spaces, named = readers("mamba_d_state"), readers("hybrid_override_pattern")
    why = "a choice of experts from groups of them"
    kinds = readers("kv_lora_rank") - readers("topk_method")
    yield from _one("refused", "topk_method", why, kinds, neutral=("greedy", "noaux_tc"))
    beside = readers("mamba_d_ssm")
    for name, kinds in (("mamba_proj_bias", spaces), ("use_bias", named), ("projectors_bias", beside)):
        yield from _one("refused", name, "biases of linears of a state space", kinds, neutral=(False,))
    yield from _one("refused", "moe_latent_size", "experts between linears of their own", named)
    why = "another activation behind the convolution of a state space"
    yield from _one("refused", "mamba_hidden_act", why, named, neutral=("silu", "swish"))
    why = "bounds of dt, which transformers applies to prompts alone"
    for name, kinds in (("time_step_limit", spaces | named), ("mamba_dt_limit", named)):
        yield from _one("refused", name, why, kinds, neutral=UNBOUNDED)
    yield from _one("none", "mamba_chunk_size", "the chunks change the time alone", spaces)
    yield from _one(
        "none", "mtp_*", "layers that predict further tokens, which no answer needs", nets, PUBLISHED
    )

"""Reads and checks the rotary position embedding in ``config.json``.

Supports the spelling of transformers 5 (``rope_parameters``, nested if layers differ) and the older one
(``rope_theta``, ``rope_scaling``, ``rope_local_base_freq``).
"""

from __future__ import annotations

from typing import Any

from heterollm.model.families import unsupported
from heterollm.model.family import Family
from heterollm.model.json_fields import JsonFields
from heterollm.model.rope import ROPE_KINDS, QueryGrowth, RopeConfig, RopeKind

DEFAULT_ROPE_BASE = 10_000.0
FULL, SLIDING = "full_attention", "sliding_attention"


def read_rotary_dim(fields: JsonFields, family: Family, head_dim: int) -> int:
    """Return the number of a head's elements that RoPE rotates.

    Raises:
        CheckpointError: The number is not possible.
        UnsupportedModelError: The number is a part of the head, and the family rotates all of it.
    """
    inside = _section(fields)
    source = inside if inside.get("partial_rotary_factor") is not None else fields
    fraction = source.positive("partial_rotary_factor", 1.0)
    if fraction != 1.0 and "partial_rotary_factor" not in family.follows:
        raise unsupported(f"Rotary embedding of part of a head ({fraction:g}) in model type {family.name}")
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise source.fail("partial_rotary_factor", f"an even part of a head's {head_dim} elements")
    return rotary_dim


def read_ropes(
    fields: JsonFields, family: Family, rotary_dim: int, max_positions: int
) -> tuple[RopeConfig, RopeConfig]:
    """Return the RoPE of layers with full attention and that of layers with a sliding window.

    Raises:
        CheckpointError: A field is missing, of the wrong type, or contradicts another.
        UnsupportedModelError: The scaling is not supported.
    """
    section = _section(fields)
    if not family.layered_rope:
        rope = _read(fields, section, "rope_theta", family, rotary_dim, max_positions)
        return rope, rope
    older = fields.section("rope_scaling")
    if older.get("type") is not None and older.get("rope_type") is None:
        raise unsupported(
            f"config.json, rope_scaling: type without rope_type in model type {family.name}, which "
            "transformers 4 follows and transformers 5 ignores,"
        )
    # The older spelling scales the layers with full attention alone.
    parts: dict[str, dict[str, Any]] = {FULL: dict(section.values), SLIDING: {}}
    nested = JsonFields(fields.section("rope_parameters"), f"{fields.where}, rope_parameters")
    if any(isinstance(nested.get(kind), dict) for kind in parts):
        parts = {kind: nested.section(kind) for kind in parts}
        parts[FULL] |= older
    full, sliding = (
        _read(fields, JsonFields(part, f"{section.where}, {kind}"), base, family, rotary_dim, max_positions)
        for (kind, part), base in zip(parts.items(), ("rope_theta", "rope_local_base_freq"), strict=True)
    )
    return full, sliding


def read_query_growth(fields: JsonFields, family: Family) -> QueryGrowth | None:
    """Return how queries grow with the position; None where they do not.

    Raises:
        CheckpointError: A field is missing or of the wrong type.
    """
    if "llama_4_scaling_beta" not in family.follows:
        return None
    rope = _section(fields)
    if rope.get("llama_4_scaling_beta") == 0:
        return None
    beta, positions = rope.positive("llama_4_scaling_beta"), rope.count("original_max_position_embeddings")
    return QueryGrowth(beta, positions)


def _section(fields: JsonFields) -> JsonFields:
    # transformers prefers the older spelling if both are present.
    name = next(
        (name for name in ("rope_scaling", "rope_parameters") if fields.section(name)), "rope_parameters"
    )
    return JsonFields(fields.section(name), f"{fields.where}, {name}")


def _read(
    fields: JsonFields, rope: JsonFields, base: str, family: Family, rotary_dim: int, max_positions: int
) -> RopeConfig:
    kind = _kind(rope, family)
    # A field beside the section overrides one inside, as in transformers.
    outside = fields if fields.get("original_max_position_embeddings") is not None else rope
    pairs = rotary_dim // 2
    own_factors = kind == "longrope" and "short_mscale" in family.follows
    theta = rope.optional_positive("rope_theta") or fields.positive(base, DEFAULT_ROPE_BASE)
    if kind == "dynamic" and "alpha" in family.follows and rope.get("alpha") and rotary_dim > 2:
        # The context does not count: the base alone is stretched, once.
        kind, theta = "default", theta * rope.positive("alpha") ** (rotary_dim / (rotary_dim - 2))
    config = RopeConfig(
        kind=kind,
        base=theta,
        max_positions=max_positions,
        original_max_positions=outside.count("original_max_position_embeddings", max_positions),
        factor=rope.optional_positive("factor"),
        attention_factor=rope.optional_positive("attention_factor"),
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        mscale=rope.optional_positive("mscale"),
        mscale_all_dim=rope.optional_positive("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        low_frequency_factor=rope.positive("low_freq_factor", None if kind == "llama3" else 1.0),
        high_frequency_factor=rope.positive("high_freq_factor", None if kind == "llama3" else 4.0),
        short_factor=rope.numbers("short_factor", pairs) if kind == "longrope" else (),
        long_factor=rope.numbers("long_factor", pairs) if kind == "longrope" else (),
        short_attention_factor=rope.positive("short_mscale") if own_factors else None,
        long_attention_factor=rope.positive("long_mscale") if own_factors else None,
        turning=rope.positive("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0,
    )
    _check(config, rope)
    return config


def _kind(rope: JsonFields, family: Family) -> RopeKind:
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise unsupported(f"Rotary embedding that differs between layers in model type {family.name}")
    named = rope.get("rope_type") or rope.get("type") or "default"
    for kind in ROPE_KINDS:
        if kind == (family.rope_aliases.get(named, named) if isinstance(named, str) else named):
            return kind
    raise unsupported(f"RoPE type {named!r}")


def _check(config: RopeConfig, rope: JsonFields) -> None:
    if config.kind in ("linear", "dynamic", "llama3") and config.factor is None:
        raise rope.fail("factor", f"a number of at least 1 for RoPE type {config.kind}")
    if config.kind != "default" and config.factor is not None and config.factor < 1:
        raise rope.fail("factor", "a number of at least 1")
    if config.kind == "longrope" and config.original_max_positions < 2:
        raise rope.fail("original_max_position_embeddings", "a whole number of at least 2")
    if config.beta_fast <= config.beta_slow:
        raise rope.fail("beta_fast", f"more than beta_slow ({config.beta_slow:g})")
    if config.high_frequency_factor <= config.low_frequency_factor:
        raise rope.fail("high_freq_factor", f"more than low_freq_factor ({config.low_frequency_factor:g})")
    if config.turning > 1:
        raise rope.fail("partial_rotary_factor", "a part of a head, at most 1")
    if config.base <= 1:
        raise rope.fail("rope_theta", "a number above 1")

"""Reads the fields of ``config.json`` that belong to a mixture of experts."""

from __future__ import annotations

from heterollm.kernels.ops import Routing
from heterollm.model.family import Mixture
from heterollm.model.json_fields import JsonFields

EXPERT_COUNTS = ("num_local_experts", "num_experts")
"""Fields with the number of experts. The first that a configuration has counts; families give the last a
default."""

MOST_EXPERTS = 10_000
"""A limit that refuses a damaged number before any list over experts is made."""


def read_mixture(fields: JsonFields, mixture: Mixture | None) -> tuple[Routing | None, int, int]:
    """Return the routing, the width of an expert, and that of the feed-forward network of every token."""
    if mixture is None:
        return None, 0, fields.count("intermediate_size")
    # transformers writes either name, whichever the family's publisher took.
    count = next(name for name in EXPERT_COUNTS if fields.get(name) is not None)
    experts = fields.count(count, maximum=MOST_EXPERTS)
    chosen = fields.count("num_experts_per_tok")
    if chosen > experts:
        raise fields.fail("num_experts_per_tok", f"at most the {experts} of {count}")
    sparsemixer = mixture.scoring == "sparsemixer"
    if sparsemixer and chosen != 2:
        raise fields.fail("num_experts_per_tok", "2, the number that sparsemixer chooses")
    field = mixture.normalized_field
    routing = Routing(
        experts,
        chosen,
        mixture.scoring,
        normalized=fields.flag(field, False) if field else not sparsemixer,
        jitter=fields.positive("router_jitter_noise") if sparsemixer else 0.0,
    )
    shared = fields.count(mixture.shared_field, minimum=0) if mixture.shared_field else 0
    return routing, fields.count(mixture.width_field), shared

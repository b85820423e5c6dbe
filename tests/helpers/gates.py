"""Gates for the logits of whole models."""

from heterollm.kernels.formats.tolerances import ComputeType

LOGITS_SQNR_DB: dict[ComputeType, float] = {"fp32": 90.0, "fp16": 45.0}
"""Smallest SQNR of a model's logits."""

LOGITS_WORST_DROP_DB = 15.0
"""Largest drop of the worst vocabulary row or position below :data:`LOGITS_SQNR_DB`."""

"""Attention in plans: dense on the GPU or the NPU, or sparse to keys that estimated scores choose.

:data:`AttentionPlacement` is a union of classes, told apart by ``type`` in JSON. Only passes of prefill have
one; decode is dense.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, get_args

from msgspec import Meta, Struct

from heterollm.base import Amount, Count, OptionError, PlanError, Positive
from heterollm.kernels.formats import BucketCount
from heterollm.kernels.npu import ATTENTION_CONTEXT_BYTES, RANGE_KEYS, AttentionShape
from heterollm.kernels.ops import GraphMemory, OpSpec
from heterollm.solver.standard_lengths import LEAST_KEYS, LEAST_SCORE_TOKENS, score_keys, score_tokens
from heterollm.solver.techniques.record import PlanTarget, TechniqueRecord

Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]

Exponent: TypeAlias = Annotated[int, Meta(ge=0, le=31)]

Estimator: TypeAlias = Literal["npu", "gpu"]
"""The processor that estimates the scores."""

EstimatorChoice: TypeAlias = Literal["auto", Estimator]
"""An estimator, or the faster one of each layer, length and number of keys."""

Pipeline: TypeAlias = Literal["heads", "fused", "ordered"]
"""Steps of the pipeline over heads, each with those before: a launch for each key head; fused heads; units in
the best order, and fused as far as that pays."""

KeepBy: TypeAlias = Literal["mass", "importance", "uniform"]
"""Rules by which :func:`.keep.keep_ratios` shares a ratio out over layers and heads."""

FUSED_HEADS: Final = (4, 2, 1)
"""Key heads that one launch of the NPU can estimate, most first."""

KeyHeads: TypeAlias = tuple[Count, ...]


class DenseAttention(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="dense", gc=False
):
    """Attention to every visible key.

    Args:
        predicted_us: Predicted time, if the plan came from a profile.
    """

    predicted_us: Amount | None = None


class SparseAttention(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="sparse", gc=False
):
    """Attention of each query head to the share of keys with the largest estimated scores.

    Args:
        keep: Share of the visible keys that each query head keeps.
        units: Key heads of each launch that estimates scores, in the order of launches.
        exponents: The exponent of each unit's graph: its factor on integer products is ``2 ** -exponent``.
        estimator: The processor that estimates scores.
        buckets: Scale factors to choose among.
        predicted_us: Predicted time of quantisation and pipeline, if the plan came from a profile.
    """

    keep: tuple[Share, ...]
    units: tuple[KeyHeads, ...]
    exponents: tuple[Exponent, ...]
    estimator: Estimator = "npu"
    buckets: BucketCount = 1
    predicted_us: Amount | None = None

    def check(self, heads: int, kv_heads: int, layers: tuple[int, int]) -> None:
        """Refuse what cannot run.

        Args:
            heads: Query heads of the model.
            kv_heads: Its key heads.
            layers: Layers for which an entry has this placement; they are named in the error.

        Raises:
            PlanError: A number of heads is not the model's, or the units do not hold each key head once.
        """
        where = f"Sparse attention of layers {layers[0]} to {layers[1]}"
        if len(self.keep) != heads:
            raise PlanError(
                f"{where} has ratios of {len(self.keep)} query heads, and the model has {heads}.",
                fix="Make the plan again for this model.",
            )
        if sorted(head for unit in self.units for head in unit) != list(range(kv_heads)):
            raise PlanError(
                f"{where} has units {self.units}, which do not hold each of {kv_heads} key heads once.",
                fix=f"Name the heads 0 to {kv_heads - 1} once each.",
            )
        sizes = {len(unit) for unit in self.units}
        if not sizes <= set(FUSED_HEADS):
            raise PlanError(
                f"{where} has units of {max(sizes)} key heads.", fix="Fuse 1, 2 or 4 heads in a launch."
            )
        if len(self.exponents) != len(self.units):
            raise PlanError(
                f"{where} has {len(self.exponents)} exponents of {len(self.units)} units.",
                fix="Give each unit one exponent.",
            )


class NpuAttention(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="npu", gc=False):
    """Attention of all heads to every visible key, on the NPU.

    Args:
        predicted_us: Predicted time of the graph and of its inputs, if the plan came from a profile.
    """

    predicted_us: Amount | None = None


class AttentionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the technique ``shadowattn``.

    Args:
        keep: Mean share of the visible keys that heads keep.
        keep_by: How it is shared out over layers and heads.
        buckets: Scale factors to choose among.
        estimator: The processor that estimates scores; ``auto``: the faster one.
        pipeline: Steps of the pipeline over heads.

    Raises:
        OptionError: A field is not legal.
    """

    keep: Share = 0.2
    keep_by: KeepBy = "mass"
    buckets: BucketCount = 1
    estimator: EstimatorChoice = "auto"
    pipeline: Pipeline = "ordered"

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, object, tuple[object, ...]], ...] = (
            ("rule to share out kept keys", self.keep_by, get_args(KeepBy)),
            ("number of score buckets", self.buckets, get_args(BucketCount)),
            ("estimator of scores", self.estimator, get_args(EstimatorChoice)),
            ("pipeline over heads", self.pipeline, get_args(Pipeline)),
        )
        for what, given, legal in choices:
            if given not in legal:
                raise OptionError(
                    f"There is no {what} {given!r:.40}.", fix=f"Choose {', '.join(map(str, legal))}."
                )
        if not 0.0 < self.keep <= 1.0:
            raise OptionError(
                f"Heads cannot keep a share of {self.keep} of their keys.",
                fix="Give a number above 0 and at most 1.",
            )


AttentionPlacement: TypeAlias = DenseAttention | SparseAttention | NpuAttention
DENSE_ATTENTION: Final = DenseAttention()


class AttentionEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """The attention of passes of prefill in ranges of lengths, of visible keys and of layers, all inclusive.

    Args:
        lengths: Least and most tokens of the pass.
        keys: Least and most keys that its last token sees: tokens of the session after the pass.
        layers: First and last layer.
        placement: How the layers attend.
    """

    lengths: tuple[Positive, Positive]
    keys: tuple[Positive, Positive]
    layers: tuple[Count, Count]
    placement: AttentionPlacement

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of lengths, keys and layers."""
        return (self.lengths, self.keys, self.layers)

    def serves(self, tokens: int, keys: int, layer: int) -> bool:
        """Whether the entry is for a pass of so many tokens and keys, and for a layer."""
        asked = (tokens, keys, layer)
        return all(low <= value <= high for value, (low, high) in zip(asked, self.ranges, strict=True))


class PlannedAttention(TechniqueRecord, frozen=True):
    """The attention of prefill; cases without an entry are dense, on the GPU."""

    KEY: ClassVar[str] = "attention"
    TITLE: ClassVar[str] = "Attention that is sparse or on the NPU"

    entries: tuple[AttentionEntry, ...] = ()

    def of(self, tokens: int, keys: int, layer: int) -> AttentionPlacement:
        """Return the attention of a layer in a pass.

        Args:
            tokens: Tokens of the pass.
            keys: Tokens of the session after the pass.
            layer: The layer.
        """
        serving = (entry.placement for entry in self.entries if entry.serves(tokens, keys, layer))
        return next(serving, DENSE_ATTENTION)

    @property
    def sparse(self) -> tuple[SparseAttention, ...]:
        """The sparse placements."""
        return tuple(
            entry.placement for entry in self.entries if isinstance(entry.placement, SparseAttention)
        )

    @property
    def on_npu(self) -> bool:
        """Whether the NPU attends in any case."""
        return any(isinstance(entry.placement, NpuAttention) for entry in self.entries)

    @property
    def is_active(self) -> bool:
        """Whether any attention is sparse or on the NPU."""
        return bool(self.sparse) or self.on_npu

    @property
    def uses_npu(self) -> bool:
        """Whether the NPU attends, or estimates any scores."""
        return self.changes_values or self.on_npu

    @property
    def changes_values(self) -> bool:
        """Whether the GPU alone would attend densely where this is sparse."""
        return any(one.estimator == "npu" for one in self.sparse)

    def borders(self, context: int) -> set[int]:
        """Return the ends of ranges of keys, and of the standard numbers of keys."""
        if not self.is_active:
            return set()
        changes = (border for entry in self.entries for border in (entry.keys[0] - 1, entry.keys[1]))
        return {min(border, context) for border in (*changes, *score_keys(context), context)} - {0}

    def npu_graphs(self, context: int, longest: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return the graphs of attention that some pass may run, by their tokens and keys, once each.

        Args:
            context: Positions of a session.
            longest: Longest pass; None for that of the entries.
        """
        found: dict[tuple[int, int], None] = {}
        standard = score_keys(context)
        for entry in self.entries:
            least, most = entry.lengths[0], min(entry.lengths[1], longest or entry.lengths[1])
            if not isinstance(entry.placement, NpuAttention) or least > most or entry.keys[0] > context:
                continue
            first, last = (bisect.bisect_left(standard, min(keys, context)) for keys in entry.keys)
            tokens, longest_tokens = score_tokens(least), score_tokens(most)
            while tokens <= longest_tokens:
                # A session is at least as long as its last pass.
                found |= {(tokens, keys): None for keys in standard[first : last + 1] if 2 * keys > tokens}
                tokens *= 2
        return tuple(found)

    def npu_bytes(self, specs: Sequence[OpSpec], memory: GraphMemory, tokens: int | None = None) -> int:
        """Return the bytes of all graphs of attention, or of a pass's largest, with inputs and outputs."""
        item_bytes = memory.activation_bytes
        if not (item_bytes and self.on_npu):
            return 0
        columns = next(spec.columns for spec in specs if spec.group == "o")
        cached = next(spec.member_rows[1] for spec in specs if spec.group == "qkv")  # those of k
        own = [
            ATTENTION_CONTEXT_BYTES * -(-keys // RANGE_KEYS)
            + item_bytes * (2 * length * columns + 2 * keys * cached + -(-keys // RANGE_KEYS) * length)
            for length, keys in self.npu_graphs(max(entry.keys[1] for entry in self.entries))
            if tokens is None or length == score_tokens(tokens)
        ]
        return sum(own) if tokens is None else max(own, default=0)

    def check(self, target: PlanTarget) -> None:
        """Refuse attention that is not the model's, or that the device cannot compute or estimate."""
        last = max((spec.layer for spec in target.specs), default=-1)
        for entry in self.entries:
            placement, layers = entry.placement, f"layers {entry.layers[0]} to {entry.layers[1]}"
            if entry.layers[1] > last:
                raise PlanError(
                    f"Attention of {layers} is planned, and layer {last} is the last.",
                    fix="Name the model's layers.",
                )
            if isinstance(placement, SparseAttention):
                placement.check(*target.heads, entry.layers)
                if placement.estimator == "npu" and target.npu is None:
                    raise PlanError(
                        f"Sparse attention of {layers} needs an NPU, and the device was opened without one.",
                        fix="Plan with --estimator gpu, or give the NPU at least one thread.",
                    )
            elif isinstance(placement, NpuAttention):
                shape = AttentionShape(*target.heads, keys=LEAST_KEYS, head_dim=1)
                if target.npu is None or not target.npu.forms(shape, LEAST_SCORE_TOKENS):
                    lack = "no graphs of attention" if target.npu else "no NPU, or was opened without one"
                    raise PlanError(
                        f"The plan has attention of {layers} on the NPU, and the device has {lack}.",
                        fix="Plan without the technique npu-attention, or take the entries out of the plan.",
                    )

"""Placements: the processors that compute one operator in one pass, and their shards.

:data:`Placement` is a union of classes, told apart by ``type`` in JSON.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from heterollm.base import Amount, Count, PlanError, Positive
from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import OpSpec

PlacementKind = Literal["gpu", "npu", "row", "sequence", "hybrid", "block"]
"""The paper's names of splits, and ``block`` for a split of an ffn, which the paper does not have."""

PLACEMENT_KINDS: Final[tuple[PlacementKind, ...]] = ("gpu", "npu", "row", "sequence", "hybrid", "block")


class RejectedOption(Struct, frozen=True, forbid_unknown_fields=True):
    """An option that the solver did not take.

    Args:
        description: The placement in words.
        predicted_us: Its predicted time.
        of_ffn: Whether ``predicted_us`` is the time of the other path through the feed-forward network
            (as one ffn, or as two groups) instead of that of the operator alone.
        error_us: Error of the predicted gain of a split, which it would have to exceed.
    """

    description: str
    predicted_us: Amount
    of_ffn: bool = False
    error_us: Amount = 0.0


class RowsPlacement(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="rows", gc=False):
    """The placement of a group of linears.

    The NPU computes the leading ``npu_rows`` output rows of each member. It runs graphs of ``npu_lengths``
    tokens in sequence from the first token on and pads the last one if the pass is shorter. The GPU computes
    the other rows of all tokens, or all rows of the tokens past the last graph.

    Args:
        npu_rows: Output rows of each member on the NPU; empty when the GPU computes all.
        npu_lengths: Standard lengths that the NPU runs, in order; empty when the GPU computes all.
        form: Form of the NPU graphs; None is the backend's first choice.
        shadow: Whether the NPU's inputs are clamped at the calibration's threshold, while the GPU multiplies
            the rest of them, in channels with outliers, by float weights; for integer forms.
        predicted_us: Predicted time of the group, if the plan came from a profile.
        rejected: The best rejected options.
    """

    npu_rows: tuple[Count, ...] = ()
    npu_lengths: tuple[Positive, ...] = ()
    form: str | None = None
    shadow: bool = False
    predicted_us: Amount | None = None
    rejected: tuple[RejectedOption, ...] = ()

    def kind(self, spec: OpSpec, tokens: int) -> PlacementKind:
        """Return the paper's name of this split of a pass of ``tokens`` tokens."""
        if not self.npu_lengths:
            return "gpu"
        if self.npu_rows == spec.member_rows:
            return "npu" if sum(self.npu_lengths) >= tokens else "sequence"
        return "row" if self.npu_lengths == (tokens,) else "hybrid"

    def check(self, spec: OpSpec, tokens: int) -> None:
        """Raise :class:`PlanError` unless the placement can run ``tokens`` tokens of the group."""
        where = _where(spec, tokens)
        if spec.then is not None:
            raise PlanError(
                f"{where}: an ffn is placed by its width, not by rows.",
                fix="Give it a width, or place gate_up and down instead.",
            )
        if bool(self.npu_rows) != bool(self.npu_lengths):
            raise PlanError(f"{where}: npu_rows {self.npu_rows} and npu_lengths {self.npu_lengths} disagree.")
        if self.shadow and self.form not in INTEGER_FORMS:
            raise PlanError(
                f"{where}: the form {self.form} clamps no inputs, so that it has no shadow of outliers.",
                fix=f"Give it a form among {', '.join(sorted(INTEGER_FORMS))}, or no shadow.",
            )
        covered = sum(self.npu_lengths) >= tokens
        if spec.fused and (self.npu_rows != spec.member_rows or self.shadow or not covered):
            raise PlanError(
                f"{where}: a graph with a norm computes all rows of all tokens, and has no shadow.",
                fix=f"Place {spec.parts[0]} instead.",
            )
        if not self.npu_rows:
            return
        if len(self.npu_rows) != len(spec.members):
            raise PlanError(f"{where}: npu_rows {self.npu_rows} must name {len(spec.members)} members.")
        limits = zip(self.npu_rows, spec.member_rows, strict=True)
        if any(not 0 <= rows <= limit for rows, limit in limits) or not any(self.npu_rows):
            raise PlanError(f"{where}: npu_rows {self.npu_rows} exceed the rows {spec.member_rows}.")
        _check_lengths(where, self.npu_lengths, tokens)
        if self.npu_rows != spec.member_rows and sum(self.npu_lengths) < tokens:
            raise PlanError(f"{where}: a split along rows must cover all tokens, not {self.npu_lengths}.")


class FfnPlacement(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="block", gc=False):
    """The placement of an ffn, which is split along its intermediate width.

    The NPU computes the leading ``width``, the GPU the rest, both for all tokens. The output is the sum.

    Args:
        width: The NPU's share of the intermediate width; all of it where the NPU computes the whole ffn.
        npu_lengths: Standard lengths that the NPU runs, in order; they cover the pass.
        form: Form of the NPU graphs; None is the backend's first choice.
        predicted_us: Predicted time of the ffn, if the plan came from a profile.
        rejected: The best rejected options.
        gated: False for a network without a gate, else left out.
    """

    width: Positive
    npu_lengths: tuple[Positive, ...]
    form: str | None = None
    predicted_us: Amount | None = None
    rejected: tuple[RejectedOption, ...] = ()
    gated: Literal[False] | UnsetType = UNSET
    shadow: ClassVar[bool] = False

    @classmethod
    def of(cls, npu_rows: tuple[int, ...], npu_lengths: tuple[int, ...], form: str | None) -> FfnPlacement:
        """Return the placement of equal rows of each member."""
        return cls(npu_rows[0], npu_lengths, form, gated=UNSET if len(npu_rows) > 1 else False)

    @property
    def npu_rows(self) -> tuple[int, ...]:
        """Rows of each of gate and up on the NPU."""
        return (self.width,) if self.gated is False else (self.width, self.width)

    def kind(self, spec: OpSpec, tokens: int) -> PlacementKind:  # noqa: ARG002 - as of RowsPlacement
        """Return ``npu`` where it computes the whole ffn, else ``block``."""
        return "npu" if self.npu_rows == spec.member_rows else "block"

    def check(self, spec: OpSpec, tokens: int) -> None:
        """Raise :class:`PlanError` unless the placement can run ``tokens`` tokens of the ffn."""
        where = _where(spec, tokens)
        if spec.then is None:
            raise PlanError(f"{where}: only an ffn is placed by its width.", fix="Give npu_rows instead.")
        if not 1 <= self.width <= spec.member_rows[0]:
            raise PlanError(f"{where}: width {self.width} is not within 1 to {spec.member_rows[0]}.")
        if len(self.npu_rows) != len(spec.members):
            has, what = (" no", "Add") if len(spec.members) == 1 else (" a", "Leave out")
            raise PlanError(f"{where}: the network has{has} gate.", fix=f'{what} "gated": false.')
        _check_lengths(where, self.npu_lengths, tokens)
        if sum(self.npu_lengths) < tokens:
            raise PlanError(f"{where}: an ffn must cover all tokens, not {self.npu_lengths}.")


Placement: TypeAlias = RowsPlacement | FfnPlacement
GPU_ONLY: Final = RowsPlacement()


def bare(placement: Placement) -> Placement:
    """Return a placement without its predictions, for comparisons."""
    return replace(placement, predicted_us=None, rejected=())


def _where(spec: OpSpec, tokens: int) -> str:
    return f"group {spec.group} of layer {spec.layer} at {tokens} tokens"


def _check_lengths(where: str, npu_lengths: tuple[int, ...], tokens: int) -> None:
    if not npu_lengths or any(length < 1 for length in npu_lengths):
        raise PlanError(f"{where}: npu_lengths {npu_lengths} must be positive.")
    if sum(npu_lengths[:-1]) >= tokens:
        raise PlanError(f"{where}: the last of npu_lengths {npu_lengths} would have no token.")

"""The plan: who computes each group of linear layers, at every length, as frozen data.

The solver returns exactly the object that the executor runs, and a person can read, edit and reload it
as JSON. Entries cover ranges of lengths and layers, so that identical cases share one placement.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from heterollm.base import PlanError, atomic_path, parse_json
from heterollm.kernels.ops import GROUPS, Group, OpSpec, Phase, feed_forward_blocks

__all__ = ["SCHEMA_VERSION", "Alternative", "Placement", "PlacementKind", "Plan", "PlanEntry", "model_shape"]

SCHEMA_VERSION: Final = 1
PlacementKind = Literal["gpu", "npu", "row", "sequence", "hybrid", "block"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """A placement that was considered and not taken: what it was and what it was predicted to cost."""

    description: str
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Who computes one group in one pass of ``tokens`` tokens.

    The NPU owns the leading ``npu_rows`` output rows of each member and runs its graphs of ``npu_lengths``
    tokens one after the other from the first token on, the last one padded if the pass is shorter. The GPU
    computes what is left: the other rows of all tokens, or all rows of the tokens past the last graph. Of a
    block the rows are those of its intermediate width, and both parts compute all tokens.

    Args:
        npu_rows: Output rows of each member on the NPU; empty when the GPU computes all.
        npu_lengths: Standard lengths that the NPU runs, in order; empty when the GPU computes all.
        form: Which of the equivalent NPU graphs is used; None leaves the backend's first choice.
        predicted_us: Predicted time of the group, if the plan came from a profile.
        rejected: The runners-up.
    """

    npu_rows: tuple[int, ...] = ()
    npu_lengths: tuple[int, ...] = ()
    form: str | None = None
    predicted_us: float | None = None
    rejected: tuple[Alternative, ...] = ()

    def kind(self, spec: OpSpec, tokens: int) -> PlacementKind:
        """Return the paper's name for what this placement does to ``tokens`` tokens of a group.

        A cut of a block, which the paper has not, is ``block``.
        """
        if not self.npu_lengths:
            return "gpu"
        if self.npu_rows == spec.member_rows:
            return "npu" if sum(self.npu_lengths) >= tokens else "sequence"
        if spec.then is not None:
            return "block"
        return "row" if self.npu_lengths == (tokens,) else "hybrid"

    def check(self, spec: OpSpec, tokens: int) -> None:
        """Raise :class:`PlanError` unless the placement can run ``tokens`` tokens of the group."""
        where = f"group {spec.group} of layer {spec.layer} at {tokens} tokens"
        if bool(self.npu_rows) != bool(self.npu_lengths):
            raise PlanError(f"{where}: npu_rows {self.npu_rows} and npu_lengths {self.npu_lengths} disagree.")
        if not self.npu_rows:
            if spec.then is not None:
                raise PlanError(
                    f"{where}: the GPU alone computes no block, but the groups that it stands for.",
                    fix="Give it rows, or place gate_up and down instead.",
                )
            return
        if len(self.npu_rows) != len(spec.members):
            raise PlanError(f"{where}: npu_rows {self.npu_rows} must name {len(spec.members)} members.")
        limits = zip(self.npu_rows, spec.member_rows, strict=True)
        if any(not 0 <= rows <= limit for rows, limit in limits) or not any(self.npu_rows):
            raise PlanError(f"{where}: npu_rows {self.npu_rows} exceed the rows {spec.member_rows}.")
        if any(length < 1 for length in self.npu_lengths):
            raise PlanError(f"{where}: npu_lengths {self.npu_lengths} must be positive.")
        if sum(self.npu_lengths[:-1]) >= tokens:
            raise PlanError(f"{where}: the last of npu_lengths {self.npu_lengths} would have no token.")
        if spec.then is not None and len(set(self.npu_rows)) > 1:
            raise PlanError(
                f"{where}: the members of a block are cut after the same row, not {self.npu_rows}."
            )
        along_sequence = self.npu_rows == spec.member_rows and spec.then is None
        if not along_sequence and sum(self.npu_lengths) < tokens:
            what = "block" if spec.then is not None else "cut along rows"
            raise PlanError(f"{where}: a {what} must cover all tokens, not {self.npu_lengths}.")


GPU_ONLY: Final = Placement()
BLOCK_MEMBERS: Final = 2


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """The placement of one group for a range of lengths and of layers, both inclusive."""

    phase: Phase
    lengths: tuple[int, int]
    layers: tuple[int, int]
    group: Group
    placement: Placement

    def covers(self, phase: Phase, length: int, layer: int, group: Group) -> bool:
        """Whether the entry decides this case."""
        return (
            self.group == group
            and self.phase == phase
            and self.lengths[0] <= length <= self.lengths[1]
            and self.layers[0] <= layer <= self.layers[1]
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """All placements of a model on a device.

    Args:
        level: Name of the rule or solver level that made it (``gpu``, ``npu``, ``layer``, ``tensor``,
            ``block``).
        device: Name of the device it was made for.
        precision: Precision of the linears.
        shape: What :func:`model_shape` says of the model.
        chunk_length: Longest pass; longer prompts run in chunks of this many tokens.
        entries: The placements; the first that covers a case decides. Where one of a block (``ffn``) does,
            the groups that it stands for need none, and none of theirs is looked at.
    """

    level: str
    device: str
    precision: str
    shape: str
    chunk_length: int
    entries: tuple[PlanEntry, ...]

    def placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement:
        """Return who computes a group in a pass of ``length`` tokens.

        Raises:
            PlanError: No entry covers the case, or the placement cannot run it.
        """
        for entry in self.entries:
            if entry.covers(phase, length, spec.layer, spec.group):
                entry.placement.check(spec, length)
                return entry.placement
        raise PlanError(
            f"The plan has no entry for {spec.group} of layer {spec.layer}, {phase} of {length} tokens.",
            fix="Add one, or use a plan level.",
        )

    def block_placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement | None:
        """Return who computes a block of groups; None where its groups have placements of their own.

        Raises:
            PlanError: The placement cannot run it.
        """
        for entry in self.entries:
            if entry.covers(phase, length, spec.layer, spec.group):
                entry.placement.check(spec, length)
                return entry.placement
        return None

    def longest_pass(self, entry: PlanEntry, head_rows: int) -> int:
        """Return the most tokens that an entry can be asked for: the head sees a few rows at a time."""
        return head_rows if entry.group == "head" else self.chunk_length

    def chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield ``(first token, length)`` of the passes that a prompt of ``tokens`` tokens runs in."""
        for first in range(0, tokens, self.chunk_length):
            yield first, min(self.chunk_length, tokens - first)

    def npu_bytes(self, specs: Sequence[OpSpec], *, copies_by_length: bool) -> int:
        """Return the bytes of weights that the NPU's graphs hold.

        Args:
            specs: Every group of the model.
            copies_by_length: Whether every length of a slice holds weights of its own.
        """
        groups = [*specs, *feed_forward_blocks(specs)]
        held = {
            (spec.layer, entry.group, entry.placement.npu_rows, length if copies_by_length else 0): spec
            for entry in self.entries
            for spec in groups
            if spec.group == entry.group and entry.layers[0] <= spec.layer <= entry.layers[1]
            for length in entry.placement.npu_lengths
        }
        return sum(spec.slice_bytes(rows) for (_, _, rows, _), spec in held.items())

    @property
    def has_blocks(self) -> bool:
        """Whether any block is placed as a whole."""
        return any(entry.group == "ffn" for entry in self.entries)

    @property
    def uses_npu(self) -> bool:
        """Whether any placement needs the NPU."""
        return any(entry.placement.npu_lengths for entry in self.entries)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return json.dumps({"schema_version": SCHEMA_VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Read a plan from JSON text.

        Raises:
            PlanError: The text is not a plan of this schema version.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise PlanError(f"{source} is not JSON: {error}.") from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"{source} has schema version {version!r}; this version of heterollm reads {SCHEMA_VERSION}.",
                fix="Make the plan again.",
            )
        try:
            return cls(
                level=_text(data, "level"),
                device=_text(data, "device"),
                precision=_text(data, "precision"),
                shape=_text(data, "shape"),
                chunk_length=_integer(data["chunk_length"], at_least=1),
                entries=tuple(_entry(item) for item in _items(data["entries"])),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise PlanError(f"{source} is not a plan: {type(error).__name__} {error}.") from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        with atomic_path(Path(path)) as temporary:
            temporary.write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Read a plan from a file.

        Raises:
            PlanError: The file is missing or not a plan.
        """
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"Cannot read the plan {path}: {error}.") from error
        return cls.from_json(text, source=str(path))


def model_shape(specs: Sequence[OpSpec]) -> str:
    """Return a line that two models share exactly if a plan for one fits the other."""
    layers = max((spec.layer for spec in specs), default=-1) + 1
    parts = []
    for group in GROUPS:
        spec = next((spec for spec in specs if spec.group == group), None)
        if spec is not None:
            parts.append(f"{group}={'+'.join(map(str, spec.member_rows))}x{spec.columns}")
    return f"layers={layers} {' '.join(parts)}"


def _entry(item: Mapping[str, Any]) -> PlanEntry:
    phase, group = item["phase"], item["group"]
    if phase not in get_args(Phase) or group not in get_args(Group):
        raise ValueError(f"unknown phase {phase!r} or group {group!r}")
    placement = item["placement"]
    form = placement.get("form")
    predicted = placement.get("predicted_us")
    _only(item, PlanEntry)
    _only(placement, Placement)
    if form is not None and not isinstance(form, str):
        raise TypeError(f"form is {form!r:.80}, not text")
    rows = tuple(_integer(value, at_least=0) for value in _items(placement["npu_rows"]))
    lengths = tuple(_integer(value, at_least=1) for value in _items(placement["npu_lengths"]))
    if group == "ffn" and (len(rows) != BLOCK_MEMBERS or len(set(rows)) > 1 or not rows[0] or not lengths):
        raise ValueError(f"a block needs the same rows of gate and up and a length, not {rows} and {lengths}")
    return PlanEntry(
        phase=phase,
        lengths=_pair(item["lengths"]),
        layers=_pair(item["layers"]),
        group=group,
        placement=Placement(
            npu_rows=rows,
            npu_lengths=lengths,
            form=form,
            predicted_us=None if predicted is None else _time_us(predicted),
            rejected=tuple(_alternative(other) for other in _items(placement.get("rejected", []))),
        ),
    )


def _alternative(item: Mapping[str, Any]) -> Alternative:
    _only(item, Alternative)
    return Alternative(_text(item, "description"), _time_us(item["predicted_us"]))


def _only(item: Mapping[str, Any], kind: type[PlanEntry | Placement | Alternative]) -> None:
    """Refuse fields that would be ignored, as a misspelt one would."""
    unknown = set(item).difference(field.name for field in fields(kind))
    if unknown:
        raise ValueError(f"there is no field {min(unknown)!r:.80} in {sorted(item)}")


def _time_us(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r:.80} is not a time")
    return float(value)


def _items(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def _pair(value: object) -> tuple[int, int]:
    low, high = (_integer(item, at_least=-1) for item in _items(value))
    if low > high:
        raise ValueError(f"range {low}..{high} is empty")
    return low, high


def _integer(value: Any, *, at_least: int) -> int:  # noqa: ANN401 - whatever JSON held
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(f"{value!r:.80} is not an integer of at least {at_least}")
    return value


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data[key]
    if not isinstance(value, str):
        raise TypeError(f"{key} is {value!r:.80}, not text")
    return value

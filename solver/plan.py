"""The plan: the whole decision of how a model runs on a device, as frozen data.

The solver returns exactly the object that the engine runs, and a person can read, edit and reload it as JSON.
It says who computes each operator in passes of every length, how the processors wait for each other, which
slices the NPU holds, and what it was asked to be. Entries cover ranges of lengths and layers, so that
identical cases share one placement.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, defstruct
from msgspec.structs import asdict, fields, force_setattr, replace

from heterollm.base import (
    Count,
    PlanError,
    Positive,
    atomic_path,
    decode,
    decode_json,
    missing_field,
    read_file,
)
from heterollm.kernels.npu import INTEGER_FORMS
from heterollm.kernels.ops import FUSED, PARTS, GraphMemory, Group, OpSpec, Phase, joined_specs
from heterollm.model import kinds_of_specs
from heterollm.solver.contexts import context_sizes
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, Placement
from heterollm.solver.plan_records import ChunkSchedule, PhaseSync, PlanEntry, ResidentSlice, resident_slices
from heterollm.solver.request import TECHNIQUE_OPTIONS, PlanRequest
from heterollm.solver.techniques.record import TechniqueRecord
from heterollm.solver.techniques.registry import RECORDS

SCHEMA_VERSION: Final = 2

Record = TypeVar("Record", bound=TechniqueRecord)

OPTIONAL: Final = ("schedule", "calibration", *RECORDS, "threads")
"""Fields that a file leaves out where they have no value."""

LARGEST_PLAN: Final = 16_000_000
"""Most characters of a file; a plan of 100 layers with a range of its own for each length takes a tenth."""


class Plan(Struct, frozen=True, forbid_unknown_fields=True):
    """All that run time decides by.

    Args:
        level: Name of the rule or solver level that made it (``gpu``, ``npu``, ``layer``, ``tensor``,
            ``ffn``).
        device: Name of the device it was made for.
        precision: Precision of the linears.
        shape: The model's shape, by :func:`model_shape`.
        chunk_length: Longest pass; longer prompts run in chunks of this many tokens.
        entries: The placements; the first that covers a case decides. Where one of an ffn or a fused group
            does, those of its parts do not count.
        sync: How the NPU waits for the GPU.
        slices: What the NPU holds; by default what the entries use.
        request: What it was asked to be; None for levels that follow a rule.
        schedule: How several chunks of a prompt run at once; None for one after the other.
        calibration: Identity of the calibration it was made with; None without one.
        techniques: The records of techniques, one of each at most; a file has their entries in its fields
            ``attention`` and ``experts``.
        threads: Threads of GPU and NPU that it was solved for, where both are cores of one CPU; a load takes
            them unless it is given others. None leaves them to the device.

    Raises:
        PlanError: An entry uses what no slice holds.
    """

    level: str
    device: str
    precision: str
    shape: str
    chunk_length: Positive
    entries: tuple[PlanEntry, ...]
    sync: PhaseSync = PhaseSync()
    slices: tuple[ResidentSlice, ...] = ()
    request: PlanRequest | None = None
    schedule: ChunkSchedule | None = None
    calibration: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    techniques: tuple[TechniqueRecord, ...] = ()
    threads: tuple[Positive, Count] | None = None

    def __repr__(self) -> str:
        return f"Plan({self.level} for {self.device}, {self.precision}, {len(self.entries)} entries)"

    def __post_init__(self) -> None:
        used = resident_slices(self.placed)
        if not self.slices:
            force_setattr(self, "slices", used)
        held = {replace(item, lengths=()): set(item.lengths) for item in self.slices}
        for item in used:
            left = set(item.lengths) - held.get(replace(item, lengths=()), set())
            if left:
                raise PlanError(
                    f"Entries run {item.group} with npu_rows {item.npu_rows} of layers {item.layers} at "
                    f"{min(left)} tokens on the NPU, but slices hold no such graph.",
                    fix="Add it to slices, or leave slices empty: they then hold what the entries use.",
                )

    def operators(
        self, phase: Phase, tokens: int, specs: Sequence[OpSpec], *, rows: int = 1
    ) -> Iterator[tuple[OpSpec, Placement]]:
        """Yield each operator of a pass with its placement, in the order of ``specs``.

        An ffn or fused group with a placement stands in the place of its parts.

        Args:
            phase: Prefill or decode.
            tokens: Tokens of the pass.
            specs: Groups of the model: all, or those of one layer; the head may be left out.
            rows: Positions that the head computes.

        Raises:
            PlanError: No entry covers a case, or a placement cannot run it.
        """
        decisive = [entry for entry in self.entries if entry.serves(phase, tokens)]
        placed = {entry.group for entry in decisive}
        whole: dict[tuple[int, Group], tuple[OpSpec, Placement]] = {}
        for joined in joined_specs(specs) if placed & PARTS.keys() else ():
            parts = [(joined.layer, part) for part in joined.parts]
            if joined.group in placed and not whole.keys() & parts:
                found = _first(decisive, joined, tokens)
                if found is not None:
                    whole |= dict.fromkeys(parts, (joined, found))
        for spec in specs:
            if spec.group == "head":
                yield spec, self.placement(phase, rows, spec)
            elif (own := whole.get((spec.layer, spec.group))) is not None:
                if spec.group == own[0].parts[0]:
                    yield own
            else:
                yield spec, _first(decisive, spec, tokens) or self.placement(phase, tokens, spec)

    def placement(self, phase: Phase, length: int, spec: OpSpec) -> Placement:
        """Return who computes a group in a pass of ``length`` tokens.

        Raises:
            PlanError: No entry covers the case, or the placement cannot run it.
        """
        serving = (entry for entry in self.entries if entry.serves(phase, length))
        found = _first(serving, spec, length)
        if found is None:
            raise PlanError(
                f"The plan has no entry for {spec.group} of layer {spec.layer}, {phase} of {length} tokens.",
                fix="Add one, or use a plan level.",
            )
        return found

    def technique(self, kind: type[Record]) -> Record:
        """Return the record of a technique, which is empty where the plan has none."""
        return next((one for one in self.techniques if isinstance(one, kind)), kind())

    def with_technique(self, record: TechniqueRecord) -> Plan:
        """Return the plan with a record in place of that of its technique."""
        own = {type(one): one for one in (*self.techniques, record)}
        found = (own[kind] for kind in RECORDS.values() if kind in own)
        return replace(self, techniques=tuple(one for one in found if one.entries))

    def longest_pass(self, entry: PlanEntry, head_rows: int) -> int:
        """Return the most tokens that an entry can be asked for: the head sees a few rows at a time."""
        return head_rows if entry.group == "head" else self.chunk_length

    @property
    def longest_flight(self) -> int:
        """Most tokens of a prompt that run at once: the chunks of all lanes."""
        return self.chunk_length * self.lanes

    def chunks(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Yield ``(first token, length)`` of the passes that a prompt of ``tokens`` tokens runs in."""
        for first in range(0, tokens, self.chunk_length):
            yield first, min(self.chunk_length, tokens - first)

    @property
    def placed(self) -> tuple[PlanEntry, ...]:
        """All entries, those of chunks in flight first."""
        return self.entries if self.schedule is None else (*self.schedule.entries, *self.entries)

    @property
    def of_flights(self) -> Plan:
        """The plan of each of several chunks in flight."""
        if self.schedule is None or not self.schedule.entries:
            return replace(self, schedule=None)
        # Else an ffn's entry of the plan would go before the schedule's entries of its two groups.
        whole = self.chunk_length
        others = (
            replace(entry, lengths=(entry.lengths[0], whole - 1))
            if entry.group != "head" and entry.serves("prefill", whole)
            else entry
            for entry in self.entries
            if entry.group == "head" or not (entry.phase == "prefill" and entry.lengths[0] == whole)
        )
        return replace(self, entries=(*self.schedule.entries, *others), schedule=None)

    @property
    def lanes(self) -> int:
        """Most chunks at once."""
        return 1 if self.schedule is None else self.schedule.in_flight

    def flights(self, tokens: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield the chunks of a prompt that run at once, as :meth:`chunks` does."""
        chunks = tuple(self.chunks(tokens))
        for start in range(0, len(chunks), self.lanes):
            yield chunks[start : start + self.lanes]

    def context_sizes(self, specs: Sequence[OpSpec], memory: GraphMemory) -> list[int]:
        """Return the bytes of the contexts of the NPU's graphs.

        Args:
            specs: Every group of the model, and the experts of a mixture.
            memory: How they count.
        """
        graphs = [
            (spec, held.npu_rows, held.lengths)
            for held in self.slices
            for spec in (*specs, *joined_specs(specs))
            if held.holds(spec)
        ]
        return context_sizes(graphs, memory, sum(one.npu_bytes(specs, memory) for one in self.techniques))

    def npu_bytes(self, specs: Sequence[OpSpec], memory: GraphMemory) -> int:
        """Return the bytes that they take together."""
        return sum(self.context_sizes(specs, memory))

    def without_npu(self) -> Plan:
        """Return a plan that gives everything to the GPU and is else the same."""
        entries = (
            replace(entry, group=group, placement=GPU_ONLY)
            for entry in self.entries
            for group in PARTS.get(entry.group, (entry.group,))
        )
        kept = tuple(dict.fromkeys(entries))
        own = (record.without_npu() for record in self.techniques)
        techniques = tuple(record for record in own if record.entries)
        return replace(self, entries=kept, slices=(), schedule=None, techniques=techniques)

    @property
    def has_ffn(self) -> bool:
        """Whether any feed-forward network has a placement as one operator, fused or not."""
        return any(isinstance(entry.placement, FfnPlacement) for entry in self.placed)

    @property
    def has_fused(self) -> bool:
        """Whether any fused group has a placement."""
        return any(entry.group in FUSED for entry in self.placed)

    @property
    def uses_npu(self) -> bool:
        """Whether any placement needs the NPU."""
        linears = any(entry.placement.npu_lengths for entry in self.placed)
        return linears or any(record.uses_npu for record in self.techniques)

    @property
    def changes_values(self) -> bool:
        """Whether a technique gives passes other results than the GPU alone, beyond rounding."""
        return any(record.changes_values for record in self.techniques)

    @property
    def has_shadows(self) -> bool:
        """Whether the GPU multiplies outliers of any operator."""
        return any(entry.placement.shadow for entry in self.placed)

    @property
    def has_integer_forms(self) -> bool:
        """Whether any NPU graph computes in integers, on calibrated ranges."""
        return any(entry.placement.form in INTEGER_FORMS for entry in self.placed)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
        for name, value in msgspec.to_builtins(self, str_keys=True).items():
            if name == "techniques":
                pairs = zip(self.techniques, value, strict=True)
                data |= {record.KEY: own["entries"] for record, own in pairs}
            elif value is not None or name not in OPTIONAL:
                data[name] = value
        if self.request is not None:
            for option, names in TECHNIQUE_OPTIONS.items():
                if not set(names).intersection(self.request.techniques):
                    del data["request"][option]
        for entry in (*data["entries"], *data.get("schedule", {}).get("entries", ())):
            if not entry["placement"].get("shadow", True):
                del entry["placement"]["shadow"]
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str = "plan") -> Plan:
        """Read a plan from JSON text.

        Raises:
            PlanError: The text is not a plan of this schema version.
        """
        if len(text) > LARGEST_PLAN:
            raise PlanError(f"{source} is not a plan: it has more than {LARGEST_PLAN} characters.")
        data = decode_json(text, source=source, error=PlanError)
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"{source} has schema version {version!r:.40}; this version of heterollm reads "
                f"{SCHEMA_VERSION}.",
                fix="Make the plan again: `heterollm plan MODEL -o FILE`.",
            )
        del data["schema_version"]
        request = data.get("request")
        if isinstance(request, dict) and "passes" in request:  # the former name
            request.setdefault("techniques", request.pop("passes"))
        file = decode(data, PLAN_FILE, source=f"{source} is not a plan", error=PlanError)
        fields = asdict(file)
        records = [kind(fields.pop(key)) for key, kind in RECORDS.items()]
        plan = cls(**fields, techniques=tuple(record for record in records if record.entries))
        problem = _lacking(data) or next(filter(None, map(_mistake, plan.placed)), _empty_range(plan))
        if problem is not None:
            raise PlanError(f"{source} is not a plan: {problem}.")
        return plan

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
            text = read_file(path, LARGEST_PLAN).decode()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise PlanError(f"Cannot read the plan {str(path)!r:.200}: {reason}.") from error
        return cls.from_json(text, source=str(path))


def _file_type() -> type[Struct]:
    """Return the type of a plan's file: a plan with the entries of each technique in a field of its own."""
    found: list[Any] = []
    for field in fields(Plan):
        if field.name == "techniques":
            found += [(key, fields(kind)[0].type, ()) for key, kind in RECORDS.items()]
        else:
            found.append((field.name, field.type, *(() if field.required else (field.default,))))
    options: dict[str, Any] = {"frozen": True, "forbid_unknown_fields": True}
    return defstruct("Plan", found, namespace={"__doc__": Plan.__doc__}, **options)


PLAN_FILE: Final = _file_type()


def _lacking(data: dict[str, Any]) -> str | None:
    """Name a field that a plan's file must state, though Python gives it a default."""
    if name := missing_field({**dict.fromkeys(OPTIONAL), **data}, PLAN_FILE):
        return f"{name} is missing"
    if name := missing_field(data["sync"], PhaseSync):
        return f"sync.{name} is missing"
    if data["request"] is not None and (
        name := missing_field({**dict.fromkeys(TECHNIQUE_OPTIONS), **data["request"]}, PlanRequest)
    ):
        return f"request.{name} is missing"
    return None


def _mistake(entry: PlanEntry) -> str | None:
    """Say why an entry can be none, whatever the model."""
    for low, high in (entry.lengths, entry.layers):
        if low > high:
            return f"range {low}..{high} of {entry.group} is empty"
    if entry.group == "experts":
        return "it places experts like a linear layer: the NPU's groups of them stand in `experts`"
    if (entry.group in ("ffn", "o_ffn")) is not isinstance(entry.placement, FfnPlacement):
        return f"a {type(entry.placement).__name__} cannot place {entry.group}"
    return None


def _empty_range(plan: Plan) -> str | None:
    """Name the first range of a technique that holds nothing."""
    ranges = ((one.KEY, own) for one in plan.techniques for entry in one.entries for own in entry.ranges)
    empty = (f"range {low}..{high} of {what} is empty" for what, (low, high) in ranges if low > high)
    return next(empty, None)


def _first(entries: Iterable[PlanEntry], spec: OpSpec, tokens: int) -> Placement | None:
    """Return the placement of the first entry of a group and layer, checked; None where there is none."""
    for entry in entries:
        if entry.holds(spec):
            entry.placement.check(spec, tokens)
            return entry.placement
    return None


def model_shape(specs: Sequence[OpSpec]) -> str:
    """Return a line that two models share exactly if a plan for one fits the other.

    Args:
        specs: Every group of the model, and the experts of a mixture.
    """
    heads = [_sizes(spec) for spec in specs if spec.group == "head"]
    texts = []
    for kind in kinds_of_specs(specs):
        layers = _ranges(kind.layers) if kind.name else str(kind.layers[-1] + 1)
        experts = [] if kind.experts is None else [_sizes(kind.experts)]
        texts.append(f"layers={layers} {' '.join([*map(_sizes, kind.specs), *heads, *experts])}")
    return "; ".join(texts or [f"layers=0 {' '.join(heads)}"])


def _sizes(spec: OpSpec) -> str:
    """Return the group of an operator and its sizes."""
    if spec.experts is None:
        return f"{spec.group}={'+'.join(map(str, spec.member_rows))}x{spec.columns}"
    return f"experts={spec.experts.chosen}of{spec.experts.experts}x{spec.member_rows[0]}x{spec.columns}"


def _ranges(layers: Sequence[int]) -> str:
    """Return ascending numbers of layers as ranges: ``0-2,5``."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda one: one[1] - one[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

"""The parameters of a modelled SoC: what each means, its unit, and what values are possible.

Values come from a YAML file (:mod:`heterollm.kernels.sim.soc.parameters`), one for each SoC.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_type_hints

from heterollm.base import OptionError

__all__ = [
    "BuildParameters",
    "CpuParameters",
    "GpuParameters",
    "HandOverParameters",
    "MemoryParameters",
    "NpuParameters",
    "PowerParameters",
    "PowerSplit",
    "Quantity",
    "SocParameters",
    "Source",
    "check_value",
    "quantities",
    "sections",
]

Source = Literal["published", "fitted", "prior", "extrapolated", "user"]
"""Where a value comes from: a paper or vendor; the fit script; an assumption; another SoC's value times a
published ratio; the person who wrote the file."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a parameter is.

    Args:
        unit: As the file must state it.
        meaning: One sentence.
        low: Smallest legal value.
        high: Largest legal value.
    """

    unit: str
    meaning: str
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GpuParameters:
    """The GPU: a roofline with two ways to compute a linear layer."""

    dram_gbps: Annotated[
        float, Quantity("GB/s", "DRAM bandwidth of the GPU while nothing else reads", 0.1, 10_000)
    ]
    gemm_tflops: Annotated[
        float,
        Quantity("TFLOP/s", "arithmetic of the kernel for many tokens, weights prepared", 1e-3, 10_000),
    ]
    prepare_gweights_per_s: Annotated[
        float, Quantity("Gweight/s", "weights brought into the tiles of that product, unpacked", 1e-2, 1e5)
    ]
    small_tflops: Annotated[
        float,
        Quantity("TFLOP/s", "arithmetic of the kernel for few tokens, which unpacks as it reads", 1e-3, 1e4),
    ]
    attention_tflops: Annotated[
        float, Quantity("TFLOP/s", "arithmetic of the attention core, causal half only", 1e-3, 10_000)
    ]
    kernel_gap_us: Annotated[
        float, Quantity("us", "time between two kernels of a queue that never runs empty", 0, 1e4)
    ]


@dataclass(frozen=True, slots=True)
class NpuParameters:
    """The NPU: systolic arrays behind a unit that unpacks weights."""

    tile: Annotated[
        int, Quantity("rows", "edge of a systolic array: all sizes are rounded up to it", 1, 1024)
    ]
    array_tflops: Annotated[
        float, Quantity("TFLOP/s", "FP16 arithmetic of all arrays while rows stream through them", 1e-3, 1e5)
    ]
    tile_load_rows: Annotated[
        float, Quantity("rows", "streamed rows that loading one stationary tile costs as much as", 0, 1e5)
    ]
    integer_array_ratio: Annotated[
        float, Quantity("1", "integer over FP16 arithmetic of the arrays", 0.1, 100)
    ]
    dequantize_gweights_per_s: Annotated[
        float, Quantity("Gweight/s", "4-bit codes unpacked for the arrays", 1e-2, 1e5)
    ]
    dequantize_int8_gweights_per_s: Annotated[
        float, Quantity("Gweight/s", "8-bit codes brought to the arrays", 1e-2, 1e5)
    ]
    dram_gbps: Annotated[
        float, Quantity("GB/s", "DRAM bandwidth of the NPU while nothing else reads", 0.1, 10_000)
    ]
    row_limit_columns: Annotated[
        int,
        Quantity("columns", "longest streamed row that stays on the chip; longer ones spill", 32, 1 << 24),
    ]
    spill_gbps: Annotated[
        float, Quantity("GB/s", "bandwidth at which spilled rows are written and read again", 0.1, 10_000)
    ]
    spill_dram_fraction: Annotated[
        float, Quantity("1", "share of those bytes that goes to DRAM, and not to a cache before it", 0, 1)
    ]
    vector_gbps: Annotated[float, Quantity("GB/s", "operands of element-wise work inside a graph", 0.1, 1e5)]
    execute_us: Annotated[
        float, Quantity("us", "running a graph, whatever its size, from the call to its return", 0, 1e6)
    ]
    execute_exposed_fraction: Annotated[
        float,
        Quantity("1", "share of that which is not hidden when the call is made while the GPU works", 0, 1),
    ]


@dataclass(frozen=True, slots=True)
class MemoryParameters:
    """The DRAM that both parts share."""

    limit_gbps: Annotated[float, Quantity("GB/s", "most that all parts together can move", 0.1, 10_000)]
    corun_slowdown: Annotated[
        float, Quantity("1", "stretch of work that computes all the time, while both run", 1, 10)
    ]
    cache_mib: Annotated[
        int,
        Quantity("MiB", "last cache before DRAM: weights of smaller models stay in it", 0, 4096),
    ]


@dataclass(frozen=True, slots=True)
class HandOverParameters:
    """What it costs until one part may use what the other wrote."""

    finish_us: Annotated[
        float, Quantity("us", "clFinish: until the host knows that the queue is empty", 0, 1e5)
    ]
    write_us: Annotated[
        float, Quantity("us", "clEnqueueWriteBuffer or a read through the driver, whatever the size", 0, 1e5)
    ]
    refill_us: Annotated[
        float, Quantity("us", "submitting to a queue that ran empty, beyond a busy one", 0, 1e5)
    ]
    poll_us: Annotated[float, Quantity("us", "from the end of a kernel until a polling core sees it", 0, 1e5)]


@dataclass(frozen=True, slots=True)
class CpuParameters:
    """The core that controls both parts; it computes nothing."""

    submit_us: Annotated[float, Quantity("us", "submitting a kernel to a busy queue", 0, 1e5)]
    sleep_granularity_us: Annotated[float, Quantity("us", "shortest sleep of the system", 0, 1e5)]


@dataclass(frozen=True, slots=True)
class BuildParameters:
    """Making a static NPU graph."""

    graph_us: Annotated[float, Quantity("us", "building one graph, whatever its length", 0, 1e9)]
    graph_us_per_token: Annotated[
        float, Quantity("us/token", "building one graph, for each token of its length", 0, 1e7)
    ]


@dataclass(frozen=True, slots=True)
class PowerSplit:
    """One way in which the parts may share the power that was published."""

    base_watts: Annotated[float, Quantity("W", "drawn whatever happens", 0, 1000)]
    gpu_watts: Annotated[float, Quantity("W", "drawn by the GPU while it works, beyond the base", 0, 1000)]
    npu_watts: Annotated[float, Quantity("W", "drawn by the NPU while it works, beyond the base", 0, 1000)]
    dram_joules_per_gbyte: Annotated[float, Quantity("J/GB", "energy of each byte moved, times 1e9", 0, 100)]
    poll_watts: Annotated[float, Quantity("W", "drawn by a core while it polls, beyond the base", 0, 1000)]


@dataclass(frozen=True, slots=True)
class PowerParameters:
    """Three splits of power that the published numbers cannot tell apart: they bound what is reported."""

    mostly_base: PowerSplit
    balanced: PowerSplit
    mostly_active: PowerSplit


@dataclass(frozen=True, slots=True)
class SocParameters:
    """Everything that the model of one SoC depends on.

    Args:
        name: Of the SoC.
        description: What it stands for, and how far to trust it.
        gpu: The GPU.
        npu: The NPU.
        memory: The DRAM.
        hand_over: Between the parts.
        build: NPU graphs.
        power: Three splits of power.
        cpu: The controlling core.
        sources: Where each value comes from, by dotted name, in order.
        changed: Dotted names that ``overrides`` changed.
    """

    name: str
    description: str
    gpu: GpuParameters
    npu: NpuParameters
    memory: MemoryParameters
    hand_over: HandOverParameters
    build: BuildParameters
    power: PowerParameters
    cpu: CpuParameters
    sources: tuple[tuple[str, Source], ...] = ()
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for part, own in (("gpu", self.gpu.dram_gbps), ("npu", self.npu.dram_gbps)):
            if own > self.memory.limit_gbps:
                raise OptionError(
                    f"{part}.dram_gbps of {self.name} is {own:g}, more than memory.limit_gbps, "
                    f"{self.memory.limit_gbps:g}: one part cannot move more than the memory can.",
                    fix="Change both.",
                )

    @property
    def extrapolated(self) -> bool:
        """Whether any value is another SoC's times a ratio: then nothing about it was ever checked."""
        return any(source == "extrapolated" for _, source in self.sources)

    def values(self) -> dict[str, float]:
        """Return all values by dotted name, in order."""
        return {name: _value(self, name) for name in quantities()}

    def digest(self) -> str:
        """Return a short hash of all values: equal hashes mean equal modelled times."""
        return hashlib.sha256(json.dumps(self.values(), sort_keys=True).encode()).hexdigest()[:16]


def quantities() -> dict[str, Quantity]:
    """Return every parameter by dotted name, such as ``npu.array_tflops``, in the order of the file."""
    return dict(_QUANTITIES)


def check_value(name: str, value: object) -> float:
    """Return the value of a parameter as a number.

    Args:
        name: Dotted name of a parameter.
        value: What was given.

    Raises:
        OptionError: There is no such parameter, or the value is no number or out of range.
    """
    quantity = _QUANTITIES.get(name)
    if quantity is None:
        section, _, last = name.rpartition(".")
        near = [known for known in _QUANTITIES if known.rpartition(".")[2] == last]
        listed = [known for known in _QUANTITIES if known.startswith(f"{section}.")] or list(_QUANTITIES)
        raise OptionError(
            f"A modelled SoC has no parameter {name!r:.80}.",
            fix=f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(listed)}.",
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(f"{name} must be a number in {quantity.unit}, not {value!r:.80}.")
    if not quantity.low <= value <= quantity.high:
        raise OptionError(
            f"{name} must be between {quantity.low:g} and {quantity.high:g} {quantity.unit}, not {value:g}."
        )
    if name in _WHOLE and value != int(value):
        raise OptionError(f"{name} must be a whole number of {quantity.unit}, not {value:g}.")
    return int(value) if name in _WHOLE else float(value)


def sections(values: Mapping[str, float]) -> dict[str, Any]:
    """Return the sections of :class:`SocParameters` that hold these values, by name.

    Args:
        values: Checked values of all parameters by dotted name.
    """
    made = _build(SocParameters, "", values)
    assert isinstance(made, dict)
    return made


def _build(kind: type[Any], prefix: str, values: Mapping[str, float]) -> Any:  # noqa: ANN401 - a section
    hints = get_type_hints(kind)
    built: dict[str, Any] = {}
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        if name in values:
            built[field.name] = values[name]
        elif is_dataclass(hints[field.name]):
            built[field.name] = _build(hints[field.name], f"{name}.", values)
    return built if kind is SocParameters else kind(**built)


def _walk(kind: type[Any], prefix: str) -> Iterator[tuple[str, Quantity, bool]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, name = hints[field.name], f"{prefix}{field.name}"
        if isinstance(hint, type) and is_dataclass(hint):
            yield from _walk(hint, f"{name}.")
        else:
            inner = get_args(hint)
            if len(inner) == 2 and isinstance(inner[1], Quantity):
                yield name, inner[1], inner[0] is int


def _value(soc: SocParameters, name: str) -> float:
    found: Any = soc
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


_QUANTITIES: Final = {name: quantity for name, quantity, _ in _walk(SocParameters, "")}
_WHOLE: Final = frozenset(name for name, _, whole in _walk(SocParameters, "") if whole)

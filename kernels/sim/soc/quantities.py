"""The parameters of a modelled SoC: the meaning, unit and legal range of each.

Values come from a YAML file (:mod:`heterollm.kernels.sim.soc.parameters`), one for each SoC.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal, TypeAlias, get_type_hints

from msgspec import Meta, Struct

from heterollm.base import OptionError, decode

Source: TypeAlias = Literal["published", "fitted", "prior", "extrapolated", "user"]
"""Origin of a value: a paper or vendor; the fit script; an assumption; another SoC's value times a published
ratio; the author of the file."""


INTEGER_PARAMETERS: Final[tuple[str, ...]] = ("npu.expand_gweights_per_s", "npu.integer_weight_bytes")
"""Parameters of graphs with integer activations alone."""

NEUTRAL: Final[Mapping[str, float]] = {
    "npu.scores_start_us": 1350.0,
    "npu.scores_tops": 0.0522,
    "npu.shared_contexts": 0,
    "npu.process_domains": 1,
    "npu.group_slowdown": 1.0,
    "npu.float_weights": 0,
    "npu.graph_gib": 0.0,
    "npu.most_graphs": 0,
    "gpu.choose_gscores_per_s": 0.0,
    "gpu.frames_wait": 0,
    "hand_over.shadow_us": 0.0,
    "build.graph_us_per_mweight": 0.0,
}
"""Parameters that came later than the first profiles, and the values of the time before. A digest leaves out
those that keep these, so that profiles and rows of then stay valid."""


def quantity(unit: str, meaning: str, low: float, high: float) -> Meta:
    """Return the annotation of a parameter.

    Args:
        unit: Unit that the file must state.
        meaning: One sentence.
        low: Smallest legal value.
        high: Largest legal value.
    """
    return Meta(ge=low, le=high, description=meaning, extra={"unit": unit})


class GpuParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The GPU: a roofline with two ways to compute a linear layer."""

    dram_gbps: Annotated[
        float, quantity("GB/s", "DRAM bandwidth of the GPU while nothing else reads", 0.1, 10_000)
    ]
    gemm_tflops: Annotated[
        float, quantity("TFLOP/s", "arithmetic of the kernel for many tokens, weights prepared", 1e-3, 10_000)
    ]
    prepare_gweights_per_s: Annotated[
        float,
        quantity("Gweight/s", "weights unpacked before that product; 0 if its tiles unpack them", 0, 1e5),
    ]
    small_tflops: Annotated[
        float,
        quantity("TFLOP/s", "arithmetic of the kernel for few tokens, which unpacks as it reads", 1e-3, 1e4),
    ]
    small_gweights_per_s: Annotated[
        float, quantity("Gweight/s", "weights that the kernel for few tokens unpacks for one", 1e-2, 1e5)
    ]
    attention_tflops: Annotated[
        float, quantity("TFLOP/s", "arithmetic of the attention core, causal half only", 1e-3, 10_000)
    ]
    kernel_gap_us: Annotated[
        float, quantity("us", "time between two kernels of a queue that never runs empty", 0, 1e4)
    ]
    choose_gscores_per_s: Annotated[
        float,
        quantity("Gscore/s", "scores among which positions are chosen; 0 follows from operations", 0, 1e5),
    ]
    frames_wait: Annotated[
        int, quantity("1", "1 if a game's frame waits for all kernels that were queued before it", 0, 1)
    ]


class NpuParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The NPU: systolic arrays behind a unit that unpacks weights."""

    tile: Annotated[
        int, quantity("rows", "edge of a systolic array: all sizes are rounded up to it", 1, 1024)
    ]
    array_tflops: Annotated[
        float, quantity("TFLOP/s", "FP16 arithmetic of all arrays while rows stream through them", 1e-3, 1e5)
    ]
    tile_load_rows: Annotated[
        float, quantity("rows", "streamed rows that loading one stationary tile costs as much as", 0, 1e5)
    ]
    integer_array_ratio: Annotated[
        float, quantity("1", "integer over FP16 arithmetic of the arrays", 0.1, 100)
    ]
    dequantize_gweights_per_s: Annotated[
        float, quantity("Gweight/s", "4-bit codes unpacked for the arrays", 1e-2, 1e5)
    ]
    dequantize_int8_gweights_per_s: Annotated[
        float, quantity("Gweight/s", "8-bit codes brought to the arrays", 1e-2, 1e5)
    ]
    dram_gbps: Annotated[
        float, quantity("GB/s", "DRAM bandwidth of the NPU while nothing else reads", 0.1, 10_000)
    ]
    row_limit_columns: Annotated[
        int,
        quantity("columns", "longest streamed row that stays on the chip; longer ones spill", 32, 1 << 24),
    ]
    spill_gbps: Annotated[
        float, quantity("GB/s", "bandwidth at which spilled rows are written and read again", 0.1, 10_000)
    ]
    spill_dram_fraction: Annotated[
        float, quantity("1", "share of those bytes that goes to DRAM, and not to a cache before it", 0, 1)
    ]
    vector_gbps: Annotated[float, quantity("GB/s", "operands of element-wise work inside a graph", 0.1, 1e5)]
    execute_us: Annotated[
        float, quantity("us", "running a graph, whatever its size, from the call to its return", 0, 1e6)
    ]
    execute_exposed_fraction: Annotated[
        float,
        quantity("1", "share of that which is not hidden when the call is made while the GPU works", 0, 1),
    ]
    clock_factor: Annotated[
        float, quantity("1", "clocks of the NPU over those that its other numbers hold for", 0.01, 10)
    ]
    every_form: Annotated[int, quantity("1", "1 if graphs have forms that HeteroLLM lacks", 0, 1)]
    float_weights: Annotated[int, quantity("1", "1 if graphs hold weights as floats alone", 0, 1)]
    group_slowdown: Annotated[
        float, quantity("1", "time of graphs of 8 bits over that with one scale for a tensor", 1, 1000)
    ]
    integer_graphs: Annotated[
        int, quantity("1", "1 if calibrated weights have graphs with 16-bit integer activations", 0, 1)
    ]
    int16_tflops: Annotated[
        float, quantity("TFLOP/s", "arithmetic of such graphs, in tiles of 32 tokens", 1e-3, 1e5)
    ]
    expand_gweights_per_s: Annotated[
        float,
        quantity("Gweight/s", "4-bit codes of such graphs multiplied by block scales to 8 bits", 1e-2, 1e5),
    ]
    integer_weight_bytes: Annotated[
        float, quantity("byte", "size of a weight of such graphs, its share of scales included", 0.5, 4)
    ]
    scores_start_us: Annotated[
        float, quantity("us", "starting a graph of attention scores, beyond running any graph", 0, 1e6)
    ]
    scores_tops: Annotated[
        float, quantity("TOP/s", "arithmetic of attention scores in 8-bit integers", 1e-4, 1e5)
    ]
    io_copy_gbps: Annotated[
        float, quantity("GB/s", "copies of a graph's inputs and outputs; 0 where none are made", 0, 10_000)
    ]
    address_space_gib: Annotated[
        float, quantity("GiB", "memory that open graphs can take in a process domain; 0 is no limit", 0, 1024)
    ]
    process_domains: Annotated[
        int, quantity("1", "process domains, each with that much, over which QNN spreads contexts", 1, 16)
    ]
    graph_gib: Annotated[
        float, quantity("GiB", "weights of one graph; 0 is a quarter of what all can take", 0, 1024)
    ]
    most_graphs: Annotated[int, quantity("1", "graphs that can be open at once; 0 is no limit", 0, 1_000_000)]
    io_by_graph: Annotated[
        int, quantity("1", "1 if each graph reserves memory for its own input and output", 0, 1)
    ]
    shared_contexts: Annotated[int, quantity("1", "1 if the lengths of a slice share its weights", 0, 1)]


class MemoryParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The DRAM that both parts share."""

    limit_gbps: Annotated[float, quantity("GB/s", "most that all parts together can move", 0.1, 10_000)]
    corun_slowdown: Annotated[
        float, quantity("1", "stretch of work that computes all the time, while both run", 1, 10)
    ]
    cache_mib: Annotated[
        int, quantity("MiB", "last cache before DRAM: weights of smaller models stay in it", 0, 4096)
    ]
    available_gib: Annotated[
        float, quantity("GiB", "memory that a model can take of the phone's; 0 is no limit", 0, 1024)
    ]
    fine_grained_svm: Annotated[int, quantity("1", "1 if host and GPU share memory without maps", 0, 1)]


class HandOverParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Costs of a sync, until one processor may read the other's output."""

    finish_us: Annotated[
        float, quantity("us", "clFinish: until the host knows that the queue is empty", 0, 1e5)
    ]
    write_us: Annotated[
        float, quantity("us", "clEnqueueWriteBuffer or a read through the driver, whatever the size", 0, 1e5)
    ]
    refill_us: Annotated[
        float, quantity("us", "submitting to a queue that ran empty, beyond a busy one", 0, 1e5)
    ]
    poll_us: Annotated[float, quantity("us", "from the end of a kernel until a polling core sees it", 0, 1e5)]
    map_us: Annotated[float, quantity("us", "a blocking map, whatever the size", 0, 1e5)]
    unmap_us: Annotated[float, quantity("us", "an unmap, whatever the size", 0, 1e5)]
    map_gbps: Annotated[
        float, quantity("GB/s", "caches cleaned by maps and unmaps; 0 where the hardware does it", 0, 10_000)
    ]
    maps_beside_kernels: Annotated[
        int, quantity("1", "1 if maps do not wait for kernels that read the same memory", 0, 1)
    ]
    shadow_us: Annotated[
        float, quantity("us", "wait of both processors for the sum with a shadow's outliers", 0, 1e6)
    ]
    driver_copies: Annotated[
        int, quantity("1", "1 if a driver's wait copies to and from the NPU as well", 0, 1)
    ]


class CpuParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """The core that controls both parts; it computes nothing."""

    submit_us: Annotated[float, quantity("us", "submitting a kernel to a busy queue", 0, 1e5)]
    sleep_granularity_us: Annotated[float, quantity("us", "shortest sleep of the system", 0, 1e5)]


class BuildParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Making a static NPU graph."""

    graph_us: Annotated[float, quantity("us", "building one graph, whatever its length", 0, 1e9)]
    graph_us_per_token: Annotated[
        float, quantity("us/token", "building one graph, for each token of its length", 0, 1e7)
    ]
    graph_us_per_mweight: Annotated[
        float, quantity("us/Mweight", "building one graph, for each million of its weights", 0, 1e9)
    ]
    session_us: Annotated[float, quantity("us", "opening one built graph in a process", 0, 1e9)]
    shared_graphs: Annotated[int, quantity("1", "1 if layers share graphs of one shape", 0, 1)]


class PowerSplit(Struct, frozen=True, forbid_unknown_fields=True):
    """One way in which the parts may share the power that was published."""

    base_watts: Annotated[float, quantity("W", "drawn whatever happens", 0, 1000)]
    gpu_watts: Annotated[float, quantity("W", "drawn by the GPU while it works, beyond the base", 0, 1000)]
    npu_watts: Annotated[float, quantity("W", "drawn by the NPU while it works, beyond the base", 0, 1000)]
    dram_joules_per_gbyte: Annotated[float, quantity("J/GB", "energy of each byte moved, times 1e9", 0, 100)]
    poll_watts: Annotated[float, quantity("W", "drawn by a core while it polls, beyond the base", 0, 1000)]


class PowerParameters(Struct, frozen=True, forbid_unknown_fields=True):
    """Three splits of power that the published numbers cannot tell apart: they bound reported energy."""

    mostly_base: PowerSplit
    balanced: PowerSplit
    mostly_active: PowerSplit


class SocParameters(Struct, frozen=True, forbid_unknown_fields=True):
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

    def values(self) -> dict[str, float]:
        """Return all values by dotted name, in order."""
        return {name: attrgetter(name)(self) for name in _QUANTITIES}

    def digest(self) -> str:
        """Return a short hash of all values: equal hashes mean equal modelled times."""
        values = self.values()
        # No time depends on these.
        unused: tuple[str, ...] = ("memory.available_gib",)
        unused += () if self.npu.integer_graphs else INTEGER_PARAMETERS
        if not self.hand_over.maps_beside_kernels:
            unused += ("hand_over.maps_beside_kernels",)
        unused += tuple(name for name, first in NEUTRAL.items() if values[name] == first)
        for name in unused:
            del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def quantities() -> dict[str, Meta]:
    """Return the annotation of every parameter by dotted name, such as ``npu.array_tflops``, in order."""
    return dict(_QUANTITIES)


def unit_of(quantity: Meta) -> str:
    """Return the unit of a parameter, given its annotation."""
    return str((quantity.extra or {})["unit"])


def soc_parameters(
    name: str,
    description: str,
    values: Mapping[str, float],
    sources: Mapping[str, Source],
    changed: Sequence[str] = (),
) -> SocParameters:
    """Return the parameters of a SoC.

    Args:
        name: Name of the SoC.
        description: What the model stands for.
        values: Values of all parameters by dotted name.
        sources: Origin of each value by dotted name.
        changed: Dotted names that the caller changed.

    Raises:
        OptionError: A value is no number of the type and range of its parameter.
    """
    tree: dict[str, Any] = {"name": name, "description": description, "changed": changed}
    tree["sources"] = [(dotted, sources[dotted]) for dotted in _QUANTITIES]
    for dotted, value in values.items():
        *parents, last = dotted.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = int(value) if isinstance(value, float) and value.is_integer() else value
    return decode(tree, SocParameters, source=f"Parameters of {name}", error=OptionError)


def _annotations(kind: type[Struct], prefix: str = "") -> Iterator[tuple[str, Meta]]:
    for field, hint in get_type_hints(kind, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            yield f"{prefix}{field}", hint.__metadata__[0]
        elif isinstance(hint, type) and issubclass(hint, Struct):
            yield from _annotations(hint, f"{prefix}{field}.")


_QUANTITIES: Final = dict(_annotations(SocParameters))

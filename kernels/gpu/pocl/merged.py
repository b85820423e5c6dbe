"""Merged launches: one launch that runs many kernels in order, on CPU devices.

Between two kernels a CPU runtime puts its threads to sleep and wakes them: 13 us on PoCL with two threads,
beside 200 kernels of 3 to 300 us per decoded token. A merged launch runs the work-groups of all kernels: its
workers take tasks in order and spin until earlier launches are done (merged_end.h).

The kernels' sources stay unchanged: the preprocessor turns each into a function of its work-group, and the
arguments lie in a table. The table holds host pointers, which are valid on CPU devices only.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu.launch import ChainedLaunch, OpenClLaunch, host_address
from heterollm.kernels.gpu.protocol import GpuRuntime, KernelIdentity
from heterollm.kernels.gpu.sources import read_sources

logger = logging.getLogger(__name__)

# As in merged_end.h.
ENTRY_WORDS: Final = 40
ENTRY_ARGUMENTS: Final = 8
COUNTERS: Final = 96

LARGEST_MERGE: Final = 24
"""Most launches in one; a worker that has left returns with the next merged launch."""

MACRO: Final = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
TYPE: Final = re.compile(
    r"^typedef\b[^{;]*?\b(\w+)(?:\s*__attribute__\(\(.*\)\))?;|^\}\s*(\w+);", re.MULTILINE
)
KERNEL: Final = re.compile(r"__kernel\b[^;{]*?\bvoid\s+(\w+)\s*\(")
FUNCTION: Final = re.compile(r"^static inline\b[^(;]*?\b(\w+)\(", re.MULTILINE)


LaunchChain: TypeAlias = tuple[OpenClLaunch, ...]
"""The launches of one call, in order."""


class MergedLaunch:
    """Several launches as a single one, run in order; made by :func:`merge_launches`.

    Attributes:
        label: Labels of the first and the last launch.
        labels: Labels of all calls in order, of which each is a launch or a chain of them.
    """

    __slots__ = ("_launch", "_memory", "_table", "label", "labels")

    def __init__(
        self, runtime: GpuRuntime, chains: Sequence[LaunchChain], kinds: Sequence[KernelIdentity], source: str
    ) -> None:
        launches = list(itertools.chain.from_iterable(chains))
        units = runtime.traits.compute_units
        self._table = runtime.shared((len(launches), ENTRY_WORDS), np.uint64)
        self._memory = [launch.arguments for launch in launches]
        self.label = f"{launches[0].label} to {launches[-1].label}"
        self.labels = tuple(chain[-1].label for chain in chains)
        first = 0
        for row, launch in enumerate(launches):
            groups = _groups(launch)
            # One run of adjacent work-groups per worker reads the weights as few long streams: 15 ms a token,
            # against 20 ms with 16 runs per worker.
            grain = -(-math.prod(groups) // units)
            tasks = -(-math.prod(groups) // grain)
            kind = kinds.index(runtime.kernel_identity(launch.kernel))
            self._table.array[row, :7] = (kind, first, first + tasks, grain, *groups)
            first += tasks
            for column, argument in enumerate(launch.arguments, ENTRY_ARGUMENTS):
                if isinstance(argument, np.generic):
                    self._table.array[row, column] = _bits(argument)
        self.rebind()
        kernel = runtime.kernel_of_source(source, "merged")
        workers = 1 if units == 1 else 2 * units
        counters = runtime.shared((COUNTERS,), np.int32)
        arguments = (self._table, np.int32(len(launches)), counters)
        self._launch = runtime.launch(kernel, arguments, (workers,), (1,), self.label)

    def __call__(self) -> Any:  # noqa: ANN401 - an OpenCL event, which pyopencl does not type
        """Enqueue the launch without waiting; returns its event."""
        return self._launch()

    def rebind(self) -> None:
        """Set all memory again, which may have got other buffers; no launch may be running."""
        for row, arguments in enumerate(self._memory):
            for column, argument in enumerate(arguments, ENTRY_ARGUMENTS):
                if not isinstance(argument, np.generic):
                    self._table.array[row, column] = host_address(argument)


def merge_launches(runtime: GpuRuntime, calls: Iterable[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """Return the calls with each run of two or more launches merged, if the device allows it.

    Args:
        runtime: The device.
        calls: Launches and other calls, in order.
    """
    merged: list[Callable[[], Any]] = []
    run: list[tuple[Callable[[], Any], LaunchChain]] = []

    def end_run() -> None:
        merged.extend(_merged(runtime, run))
        run.clear()

    for call in calls:
        parts = _kernels(call)
        if parts and _mergeable(runtime, parts):
            run.append((call, parts))
        else:
            end_run()
            merged.append(call)
    end_run()
    return merged


def _kernels(call: Callable[[], Any]) -> LaunchChain:
    """Return the launches of a call in order; none if it is no launch on a queue."""
    if isinstance(call, ChainedLaunch):
        return (*_kernels(call.before), *_kernels(call.last))
    return (call,) if isinstance(call, OpenClLaunch) else ()


def _mergeable(runtime: GpuRuntime, launches: Sequence[OpenClLaunch]) -> bool:
    if not (runtime.traits.is_cpu and runtime.traits.coherent):
        return False
    return all(
        set(launch.local_size) == {1} and len(launch.arguments) <= ENTRY_WORDS - ENTRY_ARGUMENTS
        for launch in launches
    )


def _merged(runtime: GpuRuntime, run: Sequence[tuple[Callable[[], Any], LaunchChain]]) -> list[Any]:
    calls, chains = [call for call, _ in run], [chain for _, chain in run]
    if len(chains) < 2:
        return calls
    examples = {runtime.kernel_identity(launch.kernel): launch for chain in chains for launch in chain}
    kinds = list(examples)
    total = sum(map(len, chains))
    size = -(-total // -(-total // LARGEST_MERGE))
    try:
        source = _source(kinds, examples)
        return [MergedLaunch(runtime, part, kinds, source) for part in _parts(chains, size)]
    except KernelError as error:
        logger.warning("Launches are not merged: %s", error.message)
        return calls


def _parts(chains: Sequence[LaunchChain], size: int) -> Iterator[Sequence[LaunchChain]]:
    """Yield runs of chains with so many launches each, or a few more; the last one has the rest."""
    part: list[LaunchChain] = []
    for chain in chains:
        part.append(chain)
        if sum(map(len, part)) >= size:
            yield part
            part = []
    if part:
        yield part


def _groups(launch: OpenClLaunch) -> tuple[int, int, int]:
    x, y, z = (*launch.global_size, 1, 1)[:3]
    return x, y, z


def _bits(value: Any) -> int:  # noqa: ANN401 - a NumPy scalar of any type
    return int.from_bytes(value.tobytes(), "little")


def _source(kinds: Sequence[KernelIdentity], examples: Mapping[KernelIdentity, OpenClLaunch]) -> str:
    """Return a program with each kernel as a function, called by its number."""
    cases = []
    for number, kind in enumerate(kinds):
        arguments = ", ".join(
            _argument(argument, place) for place, argument in enumerate(examples[kind].arguments)
        )
        cases.append(f"  case {number}: kernel_{number}(task_group, task_groups, {arguments}); break;")
    dispatch = "static void run_task(int kind, const uint *task_group, const uint *task_groups, "
    dispatch += "__global const ulong *arguments) {\n  switch (kind) {\n" + "\n".join(cases) + "\n  }\n}\n"
    functions = [_as_function(number, kind) for number, kind in enumerate(kinds)]
    return "\n".join(
        [read_sources(("merged_begin.h",)), *functions, dispatch, read_sources(("merged_end.h",))]
    )


def _argument(value: Any, place: int) -> str:  # noqa: ANN401 - an argument of a launch
    word = f"arguments[{place}]"
    if not isinstance(value, np.generic):
        return f"(__global void *){word}"
    if value.dtype.kind == "f":
        return f"as_float((uint){word})"
    return word if value.dtype.itemsize == 8 else f"(int){word}"


def _as_function(number: int, kind: KernelIdentity) -> str:
    """Return a kernel's source with unique names, and with all its macros undefined at the end."""
    files, name, defines = kind
    text = read_sources(files)
    own = [first or second for first, second in TYPE.findall(text)] + FUNCTION.findall(text)
    kernels = KERNEL.findall(text)
    lines = [f"#define {key} {value}" for key, value in defines]
    lines += [f"#define {word} {word}_{number}" for word in dict.fromkeys(own)]
    # Kernels become functions of their work-group; other kernels of the file stay unused.
    lines += [
        f"#define {word}(...) {'kernel' if word == name else word}_{number}"
        "(const uint *task_group, const uint *task_groups, __VA_ARGS__)"
        for word in kernels
    ]
    lines.append(text)
    macros = [*(key for key, _ in defines), *MACRO.findall(text), *own, *kernels]
    lines += [f"#undef {word}" for word in dict.fromkeys(macros)]
    return "\n".join(lines)

"""Waits of the processors for each other: the choices of ``LLM.load``, and the default of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from heterollm.kernels.gpu import SyncChoice

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.kernels.gpu import Strategy
    from heterollm.solver import PhaseSync

Sync: TypeAlias = Literal["auto", SyncChoice]
"""A strategy in place of the plan's; ``auto`` is the plan's."""

SYNC_OPTIONS: Final[tuple[Sync, ...]] = get_args(Sync)


def default_sync(device: Device, measured: Strategy | None = None) -> PhaseSync:
    """Return the default strategies of a device.

    The default is the best measured strategy, or else the driver's wait for a marker, which needs no core.
    The exception is a coherent device whose processors have separate cores, as ``host`` usually has: the
    engine thread's core is idle during a wait, and decode has many short waits. So decode polls, a flag if
    the device supports it and else the marker.

    Args:
        device: The opened device, on the engine thread, since the query may run the litmus test.
        measured: The best measured strategy, if any.
    """
    # They bring NumPy, which the help of commands does without.
    from heterollm.kernels.sync import strategies_for
    from heterollm.solver import PhaseSync

    offered = strategies_for(device.gpu)
    if measured in offered:
        return PhaseSync(measured, measured)
    split = device.split
    own_cores = bool(split.npu_cores) and not set(split.npu_cores) & set(split.gpu_cores)
    if not (own_cores and device.gpu.traits.coherent):
        return PhaseSync("event", "event")
    return PhaseSync("event", "flag" if "flag" in offered else "poll")

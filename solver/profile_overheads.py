"""Times of syncs and submissions, the best way to wait, and the power, of a profiled device."""

from __future__ import annotations

import math
import statistics
from typing import Final

from heterollm.kernels.gpu import STRATEGIES, Strategy
from heterollm.profiler.records import CopyKey, FenceKey, LaunchKey, PowerKey, Profile
from heterollm.solver.costs import Overheads
from heterollm.solver.objective import Power

MAPPED_BUFFERS: Final = 2
"""Buffers that are mapped for an NPU graph: its input and its output."""

RETURN_VALUE: Final = "return_us"
"""Name of the value of a hand-over record with the time of the way back, where that takes time."""

LEAST_HIDDEN_FRACTION: Final = 0.25
"""Fraction of a small graph's time; a smaller gain of a graph behind a wait may be noise."""


def best_strategy(profile: Profile) -> Strategy | None:
    """Return the strategy with the least latency from the end of a kernel to the host; None without times.

    Of strategies within a tenth, or two microseconds, of the fastest, it is the one with the least processor
    time.
    """
    latencies: dict[str, list[float]] = {}
    burnt: dict[str, list[float]] = {}
    for key, record in profile.of_kind(FenceKey):
        latencies.setdefault(key.strategy, []).append(record.median_us)
        burnt.setdefault(key.strategy, []).append(record.values.get("processor_fraction", 1.0))
    if not latencies:
        return None
    medians = {strategy: statistics.median(values) for strategy, values in latencies.items()}
    fastest = min(medians.values())
    near = [name for name, value in medians.items() if value <= max(1.1 * fastest, fastest + 2.0)]
    least = min(near, key=lambda name: (statistics.median(burnt[name]), name))
    return next(strategy for strategy in STRATEGIES if strategy == least)


def overheads_of(profile: Profile) -> Overheads:
    """Return the times that syncs and submissions add on the profiled device, with its best strategy."""
    best = best_strategy(profile)
    records = [record for key, record in profile.of_kind(FenceKey) if key.strategy == best]
    latencies = [record.median_us for record in records]
    returns = [record.values.get(RETURN_VALUE, 0.0) for record in records]
    refill_us = median_us(profile, LaunchKey("npu_to_gpu")) - median_us(profile, LaunchKey("npu_to_gpu_busy"))
    mapped = not profile.description.get("coherent", True)
    map_us, map_us_per_value = _map_costs(profile) if mapped else (0.0, 0.0)
    submission, hidden_us = LaunchKey("enqueue_busy"), _hidden_start_us(profile)
    return Overheads(
        hand_over_us=(statistics.median(latencies) if latencies else 0.0) - hidden_us,
        refill_us=max(0.0, refill_us),
        map_us=map_us,
        return_us=statistics.median(returns) if returns else 0.0,
        # The driver's wait and most maps wait for the whole queue: the GPU's shard is enqueued behind them.
        empties_queue=(mapped and not profile.description.get("maps_beside_kernels")) or best == "finish",
        submit_us=median_us(profile, submission) if submission in profile.records else math.inf,
        hidden_us=hidden_us,
        map_us_per_value=map_us_per_value,
    )


def _map_costs(profile: Profile) -> tuple[float, float]:
    """Return the mean time to map and to unmap a graph's two buffers, and that of each value in them."""
    times_us: dict[int, float] = {}
    for key, record in profile.of_kind(CopyKey):
        if key.method in ("acquire", "release"):
            times_us[key.size_bytes] = times_us.get(key.size_bytes, 0.0) + record.median_us / 2
    if not times_us:
        return 0.0, 0.0
    small, large = min(times_us), max(times_us)
    us_per_byte = max(0.0, times_us[large] - times_us[small]) / max(1, large - small)
    fixed_us = max(0.0, times_us[small] - us_per_byte * small)
    item_bytes = 4 if profile.description.get("activation_dtype") == "float32" else 2
    return MAPPED_BUFFERS * fixed_us, us_per_byte * item_bytes


def _hidden_start_us(profile: Profile) -> float:
    """Return the time that a graph saves behind a wait of the host for its input; 0 within noise.

    Measured times of graphs include their whole start.
    """
    record = profile.records.get(LaunchKey("npu_to_gpu"))
    if record is None or record.failed:
        return 0.0
    alone_us = record.values.get("graph_us", 0.0)
    hidden_us = alone_us - record.values.get("graph_behind_wait_us", alone_us)
    return hidden_us if hidden_us > LEAST_HIDDEN_FRACTION * alone_us else 0.0


def graph_start_us(profile: Profile) -> float:
    """Return the time of a small graph, nearly all of which is the start of any graph; 0 if unknown."""
    record = profile.records.get(LaunchKey("npu_to_gpu"))
    return 0.0 if record is None or record.failed else record.values.get("graph_us", 0.0)


def power_of(profile: Profile) -> Power | None:
    """Return the power of the device; None if the profile has none."""
    watts: dict[str, float] = {}
    source = next((key.source for key, _ in profile.of_kind(PowerKey)), None)
    for key, record in profile.of_kind(PowerKey):
        if key.source == source:
            watts[key.load] = record.values["watts"]
    if not {"idle", "gpu", "npu"} <= watts.keys():
        return None
    idle = watts["idle"]
    return Power(idle, max(0.0, watts["gpu"] - idle), max(0.0, watts["npu"] - idle))


def median_us(profile: Profile, key: LaunchKey | CopyKey) -> float:
    """Return the median time of a measurement; 0 where it is missing or failed."""
    record = profile.records.get(key)
    return 0.0 if record is None or record.failed else record.median_us

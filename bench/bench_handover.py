"""How late does the host see the end of a GPU kernel by each hand-over strategy, and what does waiting cost?

The laboratory of kernels/sync/fence.py. Kernels of about 0.1, 0.3, 1 and 5 ms, strategies in turns.
The latency is the time from the kernel's end, by the device's own timestamp, until the hand-over returns;
`processor` is the waiting thread's processor time as a share of the wait. Batches during which other
processes computed are repeated; those that stay disturbed are kept and counted.

    python bench/bench_handover.py --out bench/results/handover.jsonl
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any, Final

from conditions import append_rows, conditions, script_parser

from heterollm.benchmarks.conditions import busy_s, undisturbed, wait_until_idle

REPEATS: Final = 25


def batch(device: Any, kernel_us: int, patience_s: float) -> tuple[tuple[Any, ...], bool]:  # noqa: ANN401
    """Return one batch of measurements, and whether others computed meanwhile until patience ran out."""
    from heterollm.profiler.measure import fence_latencies

    give_up = time.monotonic() + patience_s
    while True:
        wait_until_idle(give_up)
        busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
        found = fence_latencies(device.gpu, kernels_us=(kernel_us,), repeats=REPEATS)
        others_s = busy_s() - busy - (time.process_time() - own)
        quiet = undisturbed(others_s, time.perf_counter() - begin)
        if quiet or time.monotonic() > give_up:
            return found, not quiet


def measure_kernel(device: Any, kernel_us: int, batches: int, patience_s: float) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return a row for each strategy with all samples of its batches."""
    samples: dict[str, list[float]] = defaultdict(list)
    values: dict[str, list[dict[str, float]]] = defaultdict(list)
    disturbed = 0
    for _ in range(batches):
        found, noisy = batch(device, kernel_us, patience_s)
        disturbed += noisy
        for entry in found:
            samples[entry.key.strategy] += entry.samples_us
            values[entry.key.strategy].append(dict(entry.values))
    return [
        {
            "strategy": strategy,
            "kernel_us": kernel_us,
            "disturbed_batches": disturbed,
            "batches": batches,
            **{name: statistics.median(row[name] for row in values[strategy]) for name in values[strategy][0]
               if name != "kernel_us"},
            "measured_kernel_us": statistics.median(row["kernel_us"] for row in values[strategy]),
            "samples_us": [round(sample, 2) for sample in samples[strategy]],
        }
        for strategy in samples
    ]  # fmt: skip


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print one kernel's table."""
    first = rows[0]
    print(
        f"\nkernel of {first['measured_kernel_us']:.0f} us ({first['disturbed_batches']} of "
        f"{first['batches']} batches disturbed; clocks within {first['clock_uncertainty_us']:.1f} us)\n"
    )
    print("| strategy | latency us: min | median | p90 | p99 | wait us | processor us | processor |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        cuts = statistics.quantiles(row["samples_us"], n=100, method="inclusive")
        numbers = (min(row["samples_us"]), cuts[49], cuts[89], cuts[98], row["wait_us"], row["processor_us"])
        cells = " | ".join(f"{number:.1f}" for number in numbers)
        print(f"| {row['strategy']} | {cells} | {row['processor_fraction']:.0%} |", flush=True)


def main() -> None:
    """Measure every strategy and kernel, print a table each and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("--device", default="host")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--patience", type=float, default=10.0, help="seconds to wait for a quiet batch")
    parser.add_argument(
        "--litmus", type=int, default=100_000, help="rounds of the flag's litmus test; 0 for none"
    )
    options = parser.parse_args()
    from heterollm.kernels.devices import open_device
    from heterollm.kernels.gpu.waiting import sleep_overshoot_us
    from heterollm.kernels.sync import flag_litmus, refused_strategies
    from heterollm.profiler.measure import KERNELS_US

    device = open_device(options.device)
    device.pin()
    rows: list[dict[str, Any]] = []
    print(f"{device.gpu.traits.name} ({device.gpu.traits.platform} {device.gpu.traits.driver})")
    print(f"a short sleep comes back {sleep_overshoot_us():.0f} us late")
    for strategy, reason in refused_strategies(device.gpu).items():
        print(f"not offered: {strategy}: {reason}")
    if options.litmus and device.gpu.flag is not None:
        begin = time.perf_counter()
        found = flag_litmus(device.gpu, options.litmus)
        taken_s = time.perf_counter() - begin
        rows.append({"litmus_rounds": found.rounds, "litmus_stale": found.stale, "litmus_s": taken_s})
        print(f"litmus test: {found.stale} of {found.rounds} rounds stale or lost, {taken_s:.1f} s")
    for kernel_us in KERNELS_US:
        found_rows = measure_kernel(device, kernel_us, options.batches, options.patience)
        print_rows(found_rows)
        rows += found_rows
    append_rows(options.out, *({**conditions(), **row} for row in rows))


if __name__ == "__main__":
    main()

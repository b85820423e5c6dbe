"""Does a GPU compute right, and how fast? The parts of the report of bench/gpu_check.sh.

    python bench/gpu_check.py expect FILE            writes the logits of transformers in float64
    python bench/gpu_check.py packages [NAME ...]    prints the distributions to carry, but for these
    python bench/gpu_check.py report FOLDER GPU SECONDS
    python bench/gpu_check.py doctor|parity|rates|tuning|device FOLDER GPU

Each part runs in a process of its own: a driver that crashes or hangs ends that part alone. A runtime for the
CPU is taken for a GPU with memory of its own, and the report says so.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from heterollm.kernels.gpu import OpenClRuntime
    from heterollm.llm import LLM
    from heterollm.solver import Plan

# Neither transformers nor what fits a profile: no part loads a tokenizer or makes a profile.
PACKAGES: Final = (
    *(
        "numpy",
        "ml-dtypes",
        "onnx",
        "protobuf",
        "typing-extensions",
        "onnxruntime",
        "flatbuffers",
        "packaging",
    ),
    *("pyopencl", "pytools", "siphash24", "platformdirs", "filelock", "lazy-loader", "msgspec", "psutil"),
    *("safetensors", "pyyaml", "pytest", "iniconfig", "pluggy", "pygments", "pytest-xdist", "execnet"),
    *("hypothesis", "sortedcontainers"),
)
PROMPT: Final = 70
IDS: Final = 96
LEVELS: Final = ("gpu", "npu", "layer", "tensor")
SHAPES: Final = {"qkv": (2560, 2048), "gate, up": (11264, 2048), "down": (2048, 5632)}
"""Rows and inputs of TinyLlama-1.1B's linear layers."""

TOKENS: Final = (1, 4, 8, 16, 64, 256)
PART_S: Final = {"device": 20.0, "doctor": 60.0, "parity": 50.0, "rates": 35.0, "tuning": 30.0}
RATES_S: Final = 25.0
TUNING_S: Final = 15.0
RESULT: Final = re.compile(r"^\[gw\d+\].* (PASSED|FAILED|SKIPPED|ERROR) ")
LAST_S: Final = 10.0
"""Time in which pytest ends once it is interrupted."""


def packages(*without: str) -> None:
    """Print the distributions to carry, with this environment's versions."""
    for name in PACKAGES:
        if name not in without:
            print(f"{name}=={importlib.metadata.version(name)}")


# -- the expected logits -----------------------------------------------------------------------------


def token_ids() -> list[int]:
    """Return ids of the bundled model's vocabulary; any ids will do."""
    import numpy as np

    return [int(each) for each in np.random.default_rng(11).integers(1, 2048, IDS)]


def expect(file: str) -> None:
    """Write the logits of transformers in float64 on the weights that the runtime computes with."""
    import numpy as np
    import torch
    import transformers

    from heterollm.data import bundled_model
    from heterollm.llm import LLM

    config = transformers.AutoConfig.from_pretrained(bundled_model())
    with LLM.load(bundled_model(), device="host", plan="gpu") as llm:
        state = {name: torch.from_numpy(value.copy()) for name, value in llm.reference_state_dict()}
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        np.savez_compressed(file, logits=model(torch.tensor([token_ids()])).logits[0].numpy())


# -- parts of the report -----------------------------------------------------------------------------


def device(_folder: Path) -> None:
    """Print what the GPU says of itself."""
    from heterollm.kernels.devices import open_device

    opened = open_device("opencl")
    runtime = opened.gpu
    traits = runtime.traits
    offered = (
        ("half", traits.has_half),
        ("subgroups", traits.has_subgroups),
        ("integer dot product", traits.has_integer_dot),
    )
    rows = {
        "name": traits.name,
        "platform": traits.platform,
        "version": traits.version,
        "driver": traits.driver,
        "compute units": traits.compute_units,
        "memory": f"{traits.global_bytes / 2**30:.1f} GiB, {runtime.shared_memory}",
        "maps beside kernels": "yes" if runtime.maps_beside_kernels else "no",
        "offers": ", ".join(name for name, is_offered in offered if is_offered)
        or "none of half, subgroups, dot",
        "second processor": f"ONNX Runtime on {len(opened.split.npu_cores)} cores",
    }
    print("| | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")
    opened.close()


def doctor(_folder: Path) -> None:
    """Print how many operators pass, and those that do not."""
    from heterollm.doctor.case import run_case
    from heterollm.doctor.checks import device_cases
    from heterollm.kernels.devices import open_device

    counts: Counter[str] = Counter()
    opened = open_device("opencl")
    try:
        for case in device_cases(opened):
            check = run_case(case, "fp32")
            counts[check.status] += 1
            if check.status == "fail":
                print(f"- {check}", flush=True)
    finally:  # interrupted, too
        print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())))
        print(*(f"- {note}" for note in opened.gpu.variants.notes), sep="\n", flush=True)


def halved(llm: LLM) -> Plan:
    """Return a plan that halves every group of linears by rows, as a plan of level tensor may."""
    from heterollm.solver import Plan, model_shape
    from heterollm.solver.placements import RowsPlacement
    from heterollm.solver.plan_records import PlanEntry

    specs, entries = llm._weights.specs, []  # noqa: SLF001
    ranges = ((1, 1), (2, 32), (33, 64), (65, 128))
    for spec, phase, (low, high) in itertools.product(specs, ("prefill", "decode"), ranges):
        placement = RowsPlacement(tuple(rows // 2 // 64 * 64 for rows in spec.member_rows), (high,))
        entries.append(PlanEntry(phase, (low, high), (spec.layer, spec.layer), spec.group, placement))
    return Plan("tensor", "opencl", llm.plan.precision, model_shape(specs), 128, tuple(entries))


def parity(folder: Path) -> None:
    """Print the decibels of the bundled model's logits at each level of plans."""
    import numpy as np

    from heterollm import loading
    from heterollm.data import bundled_model
    from heterollm.kernels.formats.tolerances import sqnr_db
    from heterollm.llm import LLM

    # Ids go in and logits come out; a tokenizer would need transformers.
    loading.load_tokenizer = lambda *_: None  # type: ignore[assignment, return-value]
    expected, ids = np.load(folder / "expected.npz")["logits"], token_ids()
    plans: dict[str, str | Plan] = {level: level for level in LEVELS}
    print("| plan | logits, dB | worst position, dB | same token | two runs |\n|---|---|---|---|---|")
    for level in LEVELS:
        with LLM.load(bundled_model(), device="opencl", plan=plans[level]) as llm:
            if level == "gpu":
                plans["tensor"] = halved(llm)
            found = []
            for _ in range(2):
                session = llm.session()
                prompt = session.prefill(ids[:PROMPT], all_logits=True)
                found.append(np.stack([*prompt, *map(session.decode, ids[PROMPT:])]))
        worst = min(sqnr_db(*rows) for rows in zip(found[0], expected, strict=True))
        same = (found[0].argmax(1) == expected.argmax(1)).mean()
        bits = "equal bits" if np.array_equal(*found) else "other bits"
        print(
            f"| {level} | {sqnr_db(found[0], expected):.1f} | {worst:.1f} | {same:.0%} | {bits} |", flush=True
        )


def rates(_folder: Path) -> None:
    """Print times of linear layers by the device's clock: GB/s of weights up to 8 tokens, TFLOP/s above."""
    import numpy as np

    from heterollm.kernels.formats import QuantizedTensor
    from heterollm.kernels.gpu import GpuLinear
    from heterollm.kernels.operators.data import fill_slot

    runtime = the_gpu().profiling_twin()
    random = np.random.default_rng(0)
    ends_s = time.monotonic() + RATES_S
    print(f"| rows x inputs | inputs | {' | '.join(map(str, TOKENS))} |\n|---|---|{'---|' * len(TOKENS)}")
    for (name, (rows, columns)), rounded in itertools.product(SHAPES.items(), (False, True)):
        codes = random.integers(0, 256, (rows, columns // 32, 16), np.uint8)
        scales = random.uniform(0.01, 0.02, (rows, columns // 32)).astype(np.float16)
        weight = QuantizedTensor(codes, scales, None, 4, 32)
        layer = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=rounded)
        cells = []
        for tokens in TOKENS:
            if time.monotonic() > ends_s:
                cells.append("no time")
                continue
            x = fill_slot(runtime, random.standard_normal((tokens, columns)).astype(np.float32))
            y = runtime.shared((tokens, rows), np.float32)
            shortest_us = shortest_time_us(runtime, layer.launch(x, y, tokens=tokens, label="rate"))
            weight_bytes = rows * columns * 9 / 16
            flops = 2 * tokens * rows * columns
            rate = (
                f"{weight_bytes / shortest_us / 1e3:.0f} GB/s"
                if tokens <= 8
                else f"{flops / shortest_us / 1e6:.3g} T"
            )
            cells.append(f"{shortest_us:.0f} us, {rate}")
        precision = "w4a8" if rounded else "w4a16"
        print(f"| {name} {rows} x {columns} | {precision} | {' | '.join(cells)} |", flush=True)


def shortest_time_us(runtime: OpenClRuntime, launch: Callable[[], Any]) -> float:
    """Return the shortest of up to ten times of the last kernel of a launch, after two runs."""
    from heterollm.kernels.gpu import kernel_times_ns

    found: list[float] = []
    ends_s = time.monotonic() + 1.0
    while len(found) < 3 or (len(found) < 12 and time.monotonic() < ends_s):
        event = launch()
        runtime.finish()
        times = kernel_times_ns(event)
        found.append((times.end - times.start) / 1e3)
    return min(found[2:])


def tuning(_folder: Path) -> None:
    """Print whether other parameters of the linear kernels are faster than the default ones."""
    from heterollm.profiler.tune import default_jobs, tune

    gains = []
    for outcome in tune(the_gpu(), default_jobs(half=False), budget_s=TUNING_S):
        row = outcome.to_dict()
        if "winner_us" not in row:
            print(f"- {row['shape']}: {row['error']}")
            continue
        gains.append(row["default_us"] / row["winner_us"])
        print(f"- {row['shape']}: {gains[-1]:.2f} times as fast, {row['tried']} tried: {row['winner']}")
        print(*(f"  - quarantined: {each}" for each in row["quarantined"]), sep="\n")
    print(f"\nTuning pays: {'yes' if any(gain > 1.05 for gain in gains) else 'no'}.")


def the_gpu() -> OpenClRuntime:
    """Open the GPU as the device ``opencl`` does, alone."""
    from heterollm.kernels.devices.choice import find_gpus
    from heterollm.kernels.devices.gpu import open_gpu
    from heterollm.kernels.devices.kind import Opening

    return open_gpu(find_gpus()[0], Opening())


# -- the report --------------------------------------------------------------------------------------

PARTS: Final = {
    "device": (device, "The device"),
    "doctor": (doctor, "heterollm doctor --device opencl"),
    "parity": (parity, "Logits of the bundled model against transformers in float64"),
    "rates": (rates, "Rates of linear layers, 4 bits in blocks of 32, float32 activations"),
    "tuning": (tuning, "Tuning of the linear kernels"),
}


def report(folder: Path, gpu: str, limit_s: float) -> None:
    """Write the report part by part, the tests of the kernels last: they get the time that is left."""
    from named_gpu import use_gpu

    ends_s = time.monotonic() + limit_s
    file = folder / "report.md"
    note = "**This is no GPU: a runtime for the CPU, taken for one with memory of its own.**\n\n"
    file.write_text(f"# GPU check\n\n{note if use_gpu(gpu) else ''}", encoding="utf-8")
    calls = [
        (title, [sys.executable, "-P", __file__, name, str(folder), gpu], PART_S[name])
        for name, (_, title) in PARTS.items()
    ]
    workers = str(max(1, min(8, len(os.sched_getaffinity(0)))))
    tests = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-v",
        "--gpu",
        gpu,
        "-n",
        workers,
        "-p",
        "no:cacheprovider",
    ]
    calls.append(("Tests of the kernels", [*tests, "--tb=line", "tests/kernels"], limit_s))
    for title, command, part_s in calls:
        begin_s = time.monotonic()
        lines = output_of(command, folder, max(5.0, min(part_s, ends_s - begin_s - LAST_S)))
        text = summed_up(lines) if "pytest" in command else "\n".join(lines)
        with file.open("a", encoding="utf-8") as out:
            out.write(f"## {title}\n\n{text.strip()}\n\n({time.monotonic() - begin_s:.0f} s)\n\n")
    print(file.read_text(encoding="utf-8"))


def summed_up(lines: Iterable[str]) -> str:
    """Return the counts of pytest's results, also of a run that was stopped, and what else is of use."""
    counts: Counter[str] = Counter()
    others = []
    for line in lines:
        if found := RESULT.search(line):
            counts[found[1].lower()] += 1
        elif (
            line.startswith(("FAILED", "ERROR", "E  ", "SKIPPED", "Stopped", "Ended")) or " in " in line[-40:]
        ):
            others.append(line[:300])
    total = ", ".join(f"{count} {result}" for result, count in sorted(counts.items()))
    return "\n".join([f"{total or 'no result'}\n", *others])


def output_of(command: list[str], folder: Path, limit_s: float) -> Iterator[str]:
    """Yield the lines that a command prints, and how it ended if not well."""
    log = folder / "part.log"
    with log.open("w") as out:
        child = subprocess.Popen(  # noqa: S603
            command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            child.send_signal(signal.SIGINT)  # it says what it has found
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LAST_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # pytest's workers too
            child.wait()
    yield from log.read_text(errors="replace").splitlines()
    if code is None:
        yield f"Stopped after {limit_s:.0f} s."
    elif code:
        yield f"Ended with {code}."


def main(name: str, *arguments: str) -> None:
    """Run one part, or all."""
    if name in PARTS:
        from named_gpu import use_gpu

        use_gpu(arguments[1])
        with contextlib.suppress(KeyboardInterrupt):  # at the limit, of which the report tells
            PARTS[name][0](Path(arguments[0]))
    elif name == "report":
        report(Path(arguments[0]), arguments[1], float(arguments[2]))
    else:
        {"expect": expect, "packages": packages}[name](*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])

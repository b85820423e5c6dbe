"""What do merged launches, kernel tuning and re-solving exact lengths at run time gain on `host`?

Each is measured with and without in one run. Merged launches (kernels/merged.py): decode. Tuned parameters of
the linear kernels (kernels/tuning.py): decode and prefill of 256 tokens, at `w4a8` prefill alone, as decode
is not tuned there. Re-solving (heterollm/planning.py): prefill at lengths without an entry of their own, with
the placements that are solved at run time; with the entries of the same plan and the same waits; and with the
file that `heterollm plan -o` writes, which is loaded without the profile's waits. All other samples have
everything on.

The bundled model, and TinyLlama-1.1B's shape with four layers and random weights; level `gpu` on all cores,
`gpu` and `tensor` with half of them for each part. First the kernels are tuned for both splits and the models
profiled, all anew; every plan is solved from that. Then come sittings: in each every way is a new process,
and all take turns, a round of samples after the other. Processes differ by where their memory lies, so that a
sitting counts as one pair of medians, and the interval is that of the ratio of the pairs.

    python bench/bench_gains.py /tmp/four_layers --out bench/results/gains.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conditions import CORES, conditions
from gains_ways import APART, CONTEXT, DEFAULTS, ENTRIES, FILE, GAINS, ON, Process, output_of, tuned
from random_model import write_checkpoint

from heterollm.benchmarks.cases import Case, Configuration, Threads
from heterollm.benchmarks.conditions import versions
from heterollm.benchmarks.profile_first import profile_command
from heterollm.benchmarks.rows import Sample
from heterollm.benchmarks.shares import predicted_us, shares_of
from heterollm.benchmarks.significance import compare_times
from heterollm.benchmarks.turns import Watch
from heterollm.config import ModelConfig
from heterollm.demo import bundled_model
from heterollm.kernels.ops import Precision
from heterollm.layout import op_specs
from heterollm.planning import Planner, PlanRequest
from heterollm.profiler.profile import Profile

HALF: Final = max(1, CORES // 2)
WHOLE: Final[Threads] = (CORES, 0)
SPLIT: Final[Threads] = (HALF, CORES - HALF)
LAYERS: Final = 4
DEPTH: Final = 64
PREFILL: Final = Case(256, 0)
LENGTHS: Final = (5, 33, 100, 135, 300)

TOLD: Final = ("default", "winner", "default_us", "winner_us", "tried", "left_out", "error")
"""Of a search of kernel parameters, for the rows."""

SamplesOfWays = dict[str, list[Sample]]


@dataclass(frozen=True, slots=True)
class Test:
    """What is measured in all ways that matter to it.

    Args:
        folder: The checkpoint.
        threads: Threads of each part.
        level: The plan's.
        precision: Of weights and activations.
        case: What is run.
        ways: Those that are compared with `on`.
    """

    folder: Path
    threads: Threads
    level: str
    precision: Precision
    case: Case
    ways: tuple[str, ...]

    def configuration(self, plan: str) -> Configuration:
        """Return how it is loaded; ``plan`` is a level or a file."""
        return Configuration(plan_level=plan, precision=self.precision, threads=self.threads, device="host")


def tests_of(folder: Path, decoded: int) -> list[Test]:
    """Return the tests of a model; ``decoded`` tokens are one sample of decode."""
    decode = Case(0, decoded, DEPTH)
    found = []
    for threads, level in ((WHOLE, "gpu"), (SPLIT, "gpu"), (SPLIT, "tensor")):
        found.append(Test(folder, threads, level, "w4a16", decode, (APART, DEFAULTS)))
        found.append(Test(folder, threads, level, "w4a16", PREFILL, (DEFAULTS,)))
        if level == "gpu":
            found.append(Test(folder, threads, level, "w4a8", PREFILL, (DEFAULTS,)))
    odd = (Case(length, 0) for length in LENGTHS)
    return found + [Test(folder, SPLIT, "tensor", "w4a16", case, (ENTRIES, FILE)) for case in odd]


def sitting(
    tests: Sequence[Test], file: Path, rounds: int, watch: Watch
) -> tuple[dict[Test, SamplesOfWays], dict[str, Any]]:
    """Return samples of tests of one split from new processes, and the device's description.

    Args:
        tests: What to measure.
        file: The plan of level `tensor`.
        rounds: Samples of each; those of one more before them are dropped.
        watch: Takes the samples.
    """
    found: dict[Test, SamplesOfWays] = {test: defaultdict(list) for test in tests}
    description: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}
        for turn in range(rounds + 1):
            for test in tests:
                for way in (ON, *test.ways)[:: -1 if turn % 2 else 1]:
                    # A file is another plan, and no other process.
                    held = ON if way == FILE else way
                    if held not in processes:
                        processes[held] = Process(held)
                        stack.callback(processes[held].close)
                    process = processes[held]
                    how = test.configuration(str(file) if way == FILE else test.level)
                    vocabulary = ModelConfig.from_folder(test.folder).vocab_size
                    name, description = process.load(test.folder, how, vocabulary)
                    sample = watch.take(functools.partial(process.sample, name, test.case))
                    if turn:
                        found[test][way].append(sample)
    return found, description


def rows_of(test: Test, sittings: Sequence[SamplesOfWays]) -> list[dict[str, Any]]:
    """Return a row of what each way of a test lacks: how many times as fast it is with it."""
    rows = []
    for way in test.ways:
        times = {
            one: [[round(sample.time_us, 1) for sample in samples[one]] for samples in sittings]
            for one in (ON, way)
        }
        medians = {one: [statistics.median(own) for own in times[one]] for one in times}
        change = compare_times(medians[way], medians[ON], paired=True)
        disturbed = [sample.disturbed for samples in sittings for one in (ON, way) for sample in samples[one]]
        rows.append(
            {
                "gain": GAINS[way],
                "model": test.folder.name,
                "plan": test.level,
                "gpu_threads": test.threads[0],
                "npu_threads": test.threads[1],
                "precision": test.precision,
                "test": test.case.name,
                "ratio": change.ratio,
                "ratio_low": change.low,
                "ratio_high": change.high,
                "verdict": change.verdict,
                "with_tokens_per_s": test.case.tokens / statistics.median(medians[ON]) * 1e6,
                "without_tokens_per_s": test.case.tokens / statistics.median(medians[way]) * 1e6,
                "with_us": times[ON],
                "without_us": times[way],
                "disturbed_fraction": sum(map(bool, disturbed)) / len(disturbed),
            }
        )
    return rows


def planner_of(folder: Path, profile: Path) -> Planner:
    """Return the planner that a model is loaded with at level `tensor`."""
    config = ModelConfig.from_folder(folder)
    specs = op_specs(config, "w4a16", 32, True, float_bits=32)
    return Planner(Profile.load(profile), config, specs, "w4a16", PlanRequest(CONTEXT, level="tensor"))


def decisions(planner: Planner, case: Case) -> dict[str, Any]:
    """Return what the planner and its plan's entries do in a test, and what that should take."""
    found: dict[str, Any] = {}
    chunk = planner.plan.chunk_length
    for name, placed in (("with", planner), ("without", planner.plan)):
        shares = shares_of(placed, planner.specs, case, chunk=chunk)
        found[f"{name}_gpu_share"] = shares.gpu_share
        found[f"{name}_padded_tokens"] = shares.padded_tokens
        found[f"{name}_cut_groups"] = shares.cut_groups
        found[f"{name}_predicted_us"] = predicted_us(planner, placed, case, chunk=chunk)
    return found


class Measuring:
    """One run of everything.

    Args:
        options: What was asked for.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._tuned: dict[Threads, dict[str, Any]] = {}
        arguments = {name: value for name, value in vars(options).items() if isinstance(value, int | float)}
        # The load is what others did before.
        self._common = {**conditions(), "versions": versions(), "arguments": arguments}
        self._watch = Watch(options.patience)

    def tune(self) -> None:
        """Tune the kernels of both splits."""
        budget_s = self._options.tuning_budget
        for threads in (WHOLE, SPLIT):
            outcomes = tuned(threads, budget_s)["outcomes"]
            self._tuned[threads] = {one["shape"]: {name: one.get(name) for name in TOLD} for one in outcomes}
            say(f"Tuned {threads[0]}+{threads[1]}: {json.dumps(self._tuned[threads], indent=1)}")

    def profile(self, folder: Path) -> Path:
        """Profile the split for a model and return the file."""
        arguments = profile_command(
            folder,
            Configuration(threads=SPLIT, device="host"),
            budget_s=self._options.profile_budget,
        )
        found = output_of(["-P", "-m", "heterollm", *arguments, "--no-tune", "--json"])
        say(f"Profiled {folder.name}: {found['run']}")
        return Path(found["path"])

    def measure(self, folder: Path, profile: Path, *, decoded: int, rounds: int) -> list[dict[str, Any]]:
        """Return the rows of a model.

        Args:
            folder: The checkpoint.
            profile: The file in which its split was profiled.
            decoded: Tokens of a sample of decode.
            rounds: Samples of a sitting.
        """
        options = self._options
        planner = planner_of(folder, profile)
        taken: dict[Test, list[SamplesOfWays]] = defaultdict(list)
        descriptions: dict[Threads, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory() as temporary:
            file = Path(temporary) / "plan.json"
            planner.plan.save(file)
            for _ in range(options.sittings):
                for threads in (WHOLE, SPLIT):
                    tests = [test for test in tests_of(folder, decoded) if test.threads == threads]
                    found, descriptions[threads] = sitting(tests, file, rounds, self._watch)
                    for test, samples in found.items():
                        taken[test].append(samples)
        rows = []
        for test, sittings in taken.items():
            known = {**self._common, "device": descriptions[test.threads]}
            if test.level == "tensor":
                known["decisions"] = decisions(planner, test.case)
            for row in rows_of(test, sittings):
                own = {"tuned": self._tuned[test.threads]} if row["gain"] == GAINS[DEFAULTS] else {}
                rows.append({**row, **own, **known})
        return rows


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="where the checkpoint is, or is written")
    add("--out", type=Path, help="JSON lines are appended here")
    add("--sittings", type=int, default=5, help="how often all processes are new")
    add("--rounds", type=int, default=3, help="samples of a sitting; of the bundled model four times as many")
    add("--patience", type=float, default=0.0, help="seconds to wait for an idle machine a sample")
    add("--tuning-budget", type=float, default=40.0, help="seconds for the kernels of a split")
    add("--profile-budget", type=float, default=75.0, help="seconds for the profile of a model")
    return parser.parse_args()


def main() -> None:
    """Measure, print a table and append JSON lines."""
    options = parse_options()
    begin_s = time.monotonic()
    large, small = write_checkpoint(options.folder, layers=LAYERS), bundled_model()
    models = {large: (16, options.rounds), small: (64, 4 * options.rounds)}
    measuring = Measuring(options)
    measuring.tune()
    profiles = {folder: measuring.profile(folder) for folder in models}
    say(f"Tuned and profiled after {time.monotonic() - begin_s:.0f} s.")
    print("| gain of | model | plan | threads | precision | test | tokens/s without | with | ratio | |")
    print("|---|---|---|---|---|---|---:|---:|---|---|")
    for folder, (decoded, rounds) in models.items():
        for row in measuring.measure(folder, profiles[folder], decoded=decoded, rounds=rounds):
            cells = [row[name] for name in ("gain", "model", "plan")]
            cells += [f"{row['gpu_threads']}+{row['npu_threads']}", row["precision"], row["test"]]
            cells += [f"{row[name]:.1f}" for name in ("without_tokens_per_s", "with_tokens_per_s")]
            cells += [f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})"]
            print(f"| {' | '.join([*cells, row['verdict']])} |", flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        say(f"{folder.name} is done after {time.monotonic() - begin_s:.0f} s.")


if __name__ == "__main__":
    main()

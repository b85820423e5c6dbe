"""Runs a bench: loads models, compares logits, warms up, takes samples in round-robin rounds."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from heterollm.base import GIB, HeteroLLMError, OptionError, Progress, labelled, round_up, silent
from heterollm.benchmarks.assemble import Loaded, State, make_row, run_of
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.child import TimedRun, random_ids
from heterollm.benchmarks.children import Child, ChildDiedError
from heterollm.benchmarks.options import BenchOptions
from heterollm.benchmarks.profile_first import profile_command
from heterollm.benchmarks.quality import DECODED_TOKENS, PROMPT_TOKENS, judge
from heterollm.benchmarks.rows import BenchRow, LogitsCheck
from heterollm.benchmarks.stopping import Stop, TimeUpError
from heterollm.benchmarks.turns import UndisturbedSampler, schedule
from heterollm.benchmarks.worker_pool import WorkerPool
from heterollm.engine import available_bytes
from heterollm.model import ModelConfig, checkpoint_folder

Test: TypeAlias = tuple[Configuration, Case]
OnRow: TypeAlias = Callable[[BenchRow], None]

logger = logging.getLogger(__name__)

MEMORY_FRACTION: Final = 0.8
"""Default limit for all models together, as a fraction of the available memory."""
UNKNOWN_MEMORY: Final = 8 * GIB
CONTEXT_STEP: Final = 64
LONGEST_NAME: Final = 120
DEATHS_ALLOWED: Final = 1
"""Deaths of a configuration's process that fail one test each; the next one fails all of its tests."""

LOADING: Final = "Loading and comparing logits"
"""A stage in which nothing is measured."""

PROFILE_COMMAND: Final = "heterollm profile"
"""Part of the error of a configuration that needs a profile."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Result of a bench.

    Args:
        rows: One for each test and configuration, tests first; after an early stop only those with a sample
            or an error.
        notes: Remarks on all of them.
        stop: Reason of an early end; None if all samples were taken.
    """

    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...]
    stop: Stop | None = None


class _Bench:
    """One run."""

    def __init__(
        self,
        options: BenchOptions,
        pool: WorkerPool,
        sampler: UndisturbedSampler,
        progress: Progress,
        on_row: OnRow,
    ) -> None:
        self._options = options
        self._pool = pool
        self._sampler = sampler
        self._progress = progress
        self._on_row = on_row
        self._run = run_of(_model_name(options.model), options.seed)
        self.states = {
            (configuration, case): State()
            for case in options.cases
            for configuration in options.configurations
        }
        self.quality: dict[Configuration, LogitsCheck] = {}
        self.loads: dict[Configuration, int] = dict.fromkeys(options.configurations, 0)
        self.stop: Stop | None = None
        self._warm: set[Test] = set()
        self._handed_on: set[Test] = set()
        self._deaths: Counter[Configuration] = Counter()
        limit_s = options.time_limit_s
        self._deadline = math.inf if limit_s is None else time.monotonic() + limit_s

    def run(self) -> None:
        """Run all stages; after an early stop the samples so far stay."""
        try:
            self._check_quality()
            for turn in range(self._options.repetitions):
                # Before the last round, so that a row is whole with its last sample.
                if self._options.trace and turn == self._options.repetitions - 1:
                    self._trace()
                self._round(turn)
        except (KeyboardInterrupt, TimeUpError) as error:
            self.stop = Stop.of(error)
        for test in self.states:
            self._hand_on(test)

    def rows(self) -> tuple[BenchRow, ...]:
        """Return the rows; after an early stop only those with a sample or an error."""
        return tuple(
            self._row(test)
            for test, state in self.states.items()
            if self.stop is None or state.samples or state.error is not None
        )

    def _round(self, turn: int) -> None:
        options = self._options
        total = options.repetitions * len(self.states)
        alive = [one for one in options.configurations if self._alive(one)]
        for test in schedule(alive, options.cases, turn, all_loaded=not self._pool.in_turns):
            self._progress("Taking samples", sum(len(one.samples) for one in self.states.values()), total)
            self._check_time()
            if self.states[test].error is None:
                self._guarded(*test, self._sample)
            for other in self.states:
                if self._is_whole(other):
                    self._hand_on(other)
        if turn == options.repetitions - 1:
            self._progress("Taking samples", total, total)

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise TimeUpError(f"the time limit of {self._options.time_limit_s:.0f} s")

    def _is_whole(self, test: Test) -> bool:
        state = self.states[test]
        return state.error is not None or len(state.samples) >= self._options.repetitions

    def _hand_on(self, test: Test) -> None:
        """Pass a row with a sample or an error to the caller, once."""
        state = self.states[test]
        if test not in self._handed_on and (state.samples or state.error is not None):
            self._handed_on.add(test)
            self._on_row(self._row(test))

    def _row(self, test: Test) -> BenchRow:
        configuration, case = test
        stop = None if self._is_whole(test) else self.stop
        load = Loaded(
            loads=self.loads[configuration],
            memory_bytes=self._pool.need_bytes.get(configuration),
            repetitions=self._options.repetitions,
            interrupted=None if stop is None else stop.reason,
        )
        return make_row(
            configuration,
            case,
            self.states[test],
            self._run,
            load,
            facts=self._pool.facts.get(configuration),
            quality=self.quality.get(configuration),
        )

    def _trace(self) -> None:
        """Run each test of heterollm's own configurations once more, in a model loaded for tracing."""
        own = [one for one in self._options.configurations if one.engine == "self" and self._alive(one)]
        for done, configuration in enumerate(own):
            self._progress("Tracing", done, len(own))
            self._check_time()
            cases = [
                case for case in self._cases(configuration) if self.states[configuration, case].error is None
            ]
            try:
                files = [self._trace_file(configuration, case) for case in cases]
                found = self._pool.trace(configuration, cases, files) if cases else []
            except HeteroLLMError as error:
                logger.warning("%s is not traced: %s", configuration.label, error)
                continue
            for case, fields in zip(cases, found, strict=True):
                self.states[configuration, case].traced = fields
        self._progress("Tracing", len(own), len(own))

    def _trace_file(self, configuration: Configuration, case: Case) -> Path | None:
        folder = self._options.traces
        if folder is None:
            return None
        name = re.sub(r"[^A-Za-z0-9+.]+", "-", f"{case.name} {configuration.label}")
        path = folder.resolve() / f"{name[-LONGEST_NAME:].strip('-.')}.json"
        facts = self._pool.facts.get(configuration)
        return labelled(path, simulated=facts is not None and facts.time_kind == "simulated")

    def _check_quality(self) -> None:
        logits = {}
        configurations = self._options.configurations
        for done, configuration in enumerate(configurations):
            self._progress(LOADING, done, len(configurations))
            self._check_time()
            try:
                for soon in configurations[done : done + 2]:
                    self._pool.begin(soon)
                self._load(configuration)
                if not self._pool.facts[configuration].computes:
                    continue
                logits[configuration] = self._pool.ask(configuration, "logits", PROMPT_TOKENS, DECODED_TOKENS)
            except HeteroLLMError as error:
                self._fail(configuration, error)
        self._progress(LOADING, len(configurations), len(configurations))
        self.quality = judge(logits, self._pool.facts)

    def _sample(self, configuration: Configuration, case: Case) -> None:
        state = self.states[configuration, case]
        self._load(configuration)

        def run() -> TimedRun:
            measured: TimedRun = self._pool.ask(configuration, "sample", case)
            return measured

        if (configuration, case) not in self._warm:
            run()
            self._warm.add((configuration, case))
        if not state.fields:
            state.fields = self._pool.ask(configuration, "account", case)
        if not state.test_time:
            state.test_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        sample, measured = self._sampler.take(run)
        if self._pool.facts[configuration].time_kind == "simulated":
            # Other processes do not disturb a virtual clock, and the energy is the modelled device's.
            sample = replace(sample, disturbed=None, energy_j=measured.modelled_j)
        state.samples.append(sample)

    def _load(self, configuration: Configuration) -> None:
        if not self._pool.use(configuration):
            self.loads[configuration] += 1
            # A model that is loaded again compiles its passes again.
            self._warm = {test for test in self._warm if test[0] != configuration}

    def _guarded(
        self, configuration: Configuration, case: Case, call: Callable[[Configuration, Case], None]
    ) -> None:
        try:
            call(configuration, case)
        except ChildDiedError as error:
            self._deaths[configuration] += 1
            told = HeteroLLMError(
                f"While {configuration.label} ran {case.name}: {error.message}", fix=error.fix
            )
            if self._deaths[configuration] > DEATHS_ALLOWED:
                self._fail(configuration, told)
            else:
                logger.warning("%s", told)
                self.states[configuration, case].error = str(told)
        except HeteroLLMError as error:
            self.states[configuration, case].error = str(error)

    def _fail(self, configuration: Configuration, error: HeteroLLMError) -> None:
        logger.warning("%s: %s", configuration.label, error)
        for case in self._cases(configuration):
            state = self.states[configuration, case]
            if not self._is_whole((configuration, case)):
                state.error = str(error)

    def _cases(self, configuration: Configuration) -> list[Case]:
        return [case for one, case in self.states if one == configuration]

    def _alive(self, configuration: Configuration) -> bool:
        return any(self.states[configuration, case].error is None for case in self._cases(configuration))


def run_bench(
    options: BenchOptions,
    *,
    progress: Progress | None = None,
    start: Callable[[Configuration], Child] | None = None,
    sampler: UndisturbedSampler | None = None,
    on_row: OnRow | None = None,
) -> BenchResult:
    """Run every test with every configuration, in round-robin rounds.

    A configuration that fails has its error in its rows; the others continue. Ctrl-C, a time limit, or a
    signal under :func:`heterollm.benchmarks.signals_interrupt` ends the run; the rows with samples are the
    result.

    Args:
        options: Model, configurations and tests.
        progress: Called with a stage's name, steps done and steps in all.
        start: Makes the process of a configuration; by default a child of this one.
        sampler: Takes samples; by default one with the options' patience.
        on_row: Called with each row as soon as it is whole, and at the end with the others that have samples.

    Raises:
        HeteroLLMError: The model or an option is not usable.
    """
    folder = checkpoint_folder(options.model, progress=progress or silent)
    config = ModelConfig.from_folder(folder)
    longest = max(*(case.end for case in options.cases), PROMPT_TOKENS + DECODED_TOKENS)
    context = min(config.max_positions, round_up(longest, CONTEXT_STEP))
    if longest > config.max_positions:
        raise OptionError(
            f"A test needs {longest} positions, and the model has only {config.max_positions}.",
            fix="Lower -p, -n or -d.",
        )
    limit = options.memory_gib
    free = available_bytes() or UNKNOWN_MEMORY
    memory_bytes = int(MEMORY_FRACTION * free if limit is None else limit * GIB)
    ids = random_ids(options.seed, config.vocab_size, context)
    start = start or (lambda configuration: Child(configuration.label))
    pool = WorkerPool(start, folder, ids, memory_bytes, options.profile)
    sampler = sampler or UndisturbedSampler(options.patience_s)
    bench = _Bench(options, pool, sampler, progress or silent, on_row or (lambda _row: None))
    try:
        bench.run()
        return BenchResult(bench.rows(), _notes(options, bench, pool, folder), bench.stop)
    finally:
        pool.close()


def _model_name(model: str | Path) -> str:
    """Return the name of a folder, or of a model on the hub."""
    return Path(model).resolve().name if Path(model).exists() else str(model)


def _notes(options: BenchOptions, bench: _Bench, pool: WorkerPool, folder: Path) -> tuple[str, ...]:
    held = sum(pool.need_bytes.values())
    notes = [
        f"{len(options.configurations)} configuration(s) took turns, each in its own process; "
        f"their models take {held / GIB:.1f} GiB of {pool.memory_bytes / GIB:.1f} GiB allowed."
    ]
    if pool.in_turns:
        notes.append("Not all models fit into this memory at once, so they were loaded again in turns.")
    for configuration in options.configurations:
        errors = [state.error or "" for (one, _), state in bench.states.items() if one == configuration]
        if any(PROFILE_COMMAND in error for error in errors):
            command = " ".join(("heterollm", *profile_command(folder, configuration)))
            notes.append(f"{configuration.label} needs a profile: add --profile-first, or run `{command}`.")
    fractions = [
        sample.disturbed
        for state in bench.states.values()
        for sample in state.samples
        if sample.disturbed is not None
    ]
    if bench.stop is not None:
        whole = sum(len(state.samples) for state in bench.states.values())
        notes.append(f"Interrupted by {bench.stop.reason} after {whole} samples; incomplete rows are marked.")
    if any(fractions):
        notes.append(
            f"Other processes computed during {sum(fractions)} of {len(fractions)} samples; they are marked."
        )
    return tuple(notes)

"""Runs a bench: loads, checks that all compute the same, warms up, takes samples in turns, makes rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from heterollm.benchmarks.assemble import State, common_fields, make_row
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.child import decode_floats
from heterollm.benchmarks.children import Child, ChildDiedError, Worker
from heterollm.benchmarks.crew import Crew, Loading, Process
from heterollm.benchmarks.profile_first import profile_command
from heterollm.benchmarks.quality import DECODED_TOKENS, PROMPT_TOKENS, Quality, judge
from heterollm.benchmarks.rows import BenchRow
from heterollm.benchmarks.turns import Watch, schedule
from heterollm.checkpoint import checkpoint_folder
from heterollm.config import ModelConfig
from heterollm.errors import HeteroLLMError, OptionError
from heterollm.memory import available_bytes
from heterollm.progress import Progress, silent
from heterollm.units import GIB, round_up

__all__ = ["BenchOptions", "BenchResult", "run_bench"]

logger = logging.getLogger(__name__)

MEMORY_FRACTION: Final = 0.8
"""Of what is available, what all models may take together by default."""
UNKNOWN_MEMORY: Final = 8 * GIB
CONTEXT_STEP: Final = 64
PROFILE_COMMAND: Final = "heterollm profile"
"""In errors of what cannot run without one."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to run, and how.

    Args:
        model: A local folder or a hub name.
        configurations: What the tests are run with.
        cases: The tests.
        repetitions: Samples of each.
        seed: Of the token ids.
        patience_s: How long to wait for an idle machine before each sample, and to take it again.
        memory_gib: What all models may take together; by default 0.8 of what is available.
        trace: Whether to run every test once more in a traced model, for overlap and hand-overs.
    """

    model: str | Path
    configurations: tuple[Configuration, ...]
    cases: tuple[Case, ...]
    repetitions: int = 5
    seed: int = 0
    patience_s: float = 0.0
    memory_gib: float | None = None
    trace: bool = True

    def __post_init__(self) -> None:
        if not self.configurations or not self.cases:
            raise OptionError("There is nothing to measure.", fix="Give configurations and tests.")
        if self.repetitions < 1 or self.seed < 0 or not self.patience_s >= 0:
            raise OptionError(
                f"Cannot repeat {self.repetitions} times with seed {self.seed} and {self.patience_s} s "
                "of patience.",
                fix="Repeat at least once; seed and patience are not negative.",
            )
        if self.memory_gib is not None and not self.memory_gib > 0:
            raise OptionError(f"A limit of {self.memory_gib} GiB holds no model.", fix="Raise --memory-gib.")


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a bench found.

    Args:
        rows: One for each test and configuration, tests first.
        notes: What to know about all of them.
    """

    rows: tuple[BenchRow, ...]
    notes: tuple[str, ...]


class _Bench:
    """One run."""

    def __init__(self, options: BenchOptions, crew: Crew, watch: Watch, progress: Progress) -> None:
        self._options = options
        self._crew = crew
        self._watch = watch
        self._progress = progress
        self.states = {
            (configuration, case): State()
            for case in options.cases
            for configuration in options.configurations
        }
        self.quality: dict[Configuration, Quality] = {}
        self.loads: dict[Configuration, int] = dict.fromkeys(options.configurations, 0)
        self.always_resident = True
        self._warm: set[tuple[Configuration, Case]] = set()

    def run(self) -> None:
        """Do everything, in order."""
        self._check_quality()
        done, total = 0, self._options.repetitions * len(self.states)
        for turn in range(self._options.repetitions):
            alive = [one for one in self._options.configurations if self._alive(one)]
            resident = all(map(self._crew.is_resident, alive))
            self.always_resident &= resident
            for configuration, case in schedule(alive, self._options.cases, turn, all_resident=resident):
                self._progress("Taking samples", done, total)
                done += 1
                if self.states[configuration, case].error is None:
                    self._guarded(configuration, case, self._sample)
        self._progress("Taking samples", total, total)
        if self._options.trace:
            self._trace()

    def _trace(self) -> None:
        """Run each test of heterollm's own configurations once more, in a model loaded to be traced."""
        own = [one for one in self._options.configurations if one.engine == "self" and self._alive(one)]
        for done, configuration in enumerate(own):
            self._progress("Tracing", done, len(own))
            cases = [case for case in self._options.cases if self.states[configuration, case].error is None]
            try:
                found = self._crew.trace(configuration, cases)
            except HeteroLLMError as error:
                logger.warning("%s is not traced: %s", configuration.label, error)
                continue
            for case, fields in zip(cases, found, strict=True):
                self.states[configuration, case].fields |= fields
        self._progress("Tracing", len(own), len(own))

    def _check_quality(self) -> None:
        logits, dtypes = {}, {}
        configurations = self._options.configurations
        for done, configuration in enumerate(configurations):
            self._progress("Loading and comparing logits", done, len(configurations))
            try:
                self._load(configuration)
                if not self._crew.facts[configuration].computes:
                    continue
                answer = self._crew.ask(configuration, "logits", prompt=PROMPT_TOKENS, decoded=DECODED_TOKENS)
            except HeteroLLMError as error:
                self._fail(configuration, error)
                continue
            logits[configuration] = decode_floats(answer["logits"])
            description = self._crew.facts[configuration].description
            dtypes[configuration] = str(description.get("activation_dtype", "float32"))
        self._progress("Loading and comparing logits", len(configurations), len(configurations))
        self.quality = judge(logits, dtypes)

    def _sample(self, configuration: Configuration, case: Case) -> None:
        state = self.states[configuration, case]
        self._load(configuration)
        test = {"n_prompt": case.n_prompt, "n_gen": case.n_gen, "n_depth": case.n_depth}

        def ask() -> dict[str, Any]:
            return self._crew.ask(configuration, "sample", case=test)

        if (configuration, case) not in self._warm:
            ask()
            self._warm.add((configuration, case))
        if not state.fields:
            state.fields = self._crew.ask(configuration, "account", case=test)["fields"]
        if not state.test_time:
            state.test_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        sample = self._watch.take(ask)
        if self._crew.facts[configuration].time_kind == "simulated":
            sample = replace(sample, disturbed=None)  # a virtual clock minds nobody
        state.samples.append(sample)

    def _load(self, configuration: Configuration) -> None:
        if not self._crew.use(configuration):
            self.loads[configuration] += 1
            # A model that is loaded again compiles its passes again.
            self._warm = {pair for pair in self._warm if self._crew.is_resident(pair[0])}
            self._warm = {pair for pair in self._warm if pair[0] != configuration}

    def _guarded(
        self, configuration: Configuration, case: Case, call: Callable[[Configuration, Case], None]
    ) -> None:
        try:
            call(configuration, case)
        except ChildDiedError as error:
            # Whatever else the process held is loaded again by another one; this one is not tried again.
            self._fail(configuration, error)
        except HeteroLLMError as error:
            self.states[configuration, case].error = str(error)

    def _fail(self, configuration: Configuration, error: HeteroLLMError) -> None:
        logger.warning("%s: %s", configuration.label, error)
        for case in self._options.cases:
            state = self.states[configuration, case]
            state.error = state.error or str(error)

    def _alive(self, configuration: Configuration) -> bool:
        return any(self.states[configuration, case].error is None for case in self._options.cases)


def run_bench(
    options: BenchOptions,
    *,
    progress: Progress | None = None,
    start: Callable[[Process], Worker] | None = None,
    watch: Watch | None = None,
) -> BenchResult:
    """Run every test with every configuration, in turns.

    A configuration that fails has its error in its rows; the others go on.

    Args:
        options: What to run.
        progress: Called with a stage's name, steps done and steps in all.
        start: Makes a process; a child of this one by default.
        watch: Takes samples; by default one with the options' patience.

    Raises:
        HeteroLLMError: The model or an option is not usable at all.
    """
    folder = checkpoint_folder(options.model)
    config = ModelConfig.from_folder(folder)
    longest = max(*(case.end for case in options.cases), PROMPT_TOKENS + DECODED_TOKENS)
    context = min(config.max_positions, round_up(longest, CONTEXT_STEP))
    if longest > config.max_positions:
        raise OptionError(
            f"A test needs {longest} positions, and the model was made for {config.max_positions}.",
            fix="Lower -p, -n or -d.",
        )
    limit = options.memory_gib
    free = available_bytes() or UNKNOWN_MEMORY
    loading = Loading(
        folder,
        sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        context,
        options.seed,
        config.vocab_size,
        int(MEMORY_FRACTION * free if limit is None else limit * GIB),
    )
    crew = Crew(start or (lambda process: Child(_process_name(process))), loading)
    watch = watch or Watch(options.patience_s)
    bench = _Bench(options, crew, watch, progress or silent)
    try:
        bench.run()
        common = common_fields(folder, options.seed, options.repetitions)
        rows = tuple(
            make_row(
                configuration,
                case,
                state,
                common,
                facts=crew.facts.get(configuration),
                quality=bench.quality.get(configuration),
                others={
                    "loads": bench.loads[configuration],
                    "memory_bytes": crew.need_bytes.get(configuration),
                },
            )
            for (configuration, case), state in bench.states.items()
        )
        return BenchResult(rows, _notes(options, bench, crew, loading))
    finally:
        crew.close()


def _process_name(process: Process) -> str:
    engine, threads = process
    split = "" if threads is None else f" with {threads[0]}+{threads[1]} threads"
    return f"engine {engine!r}{split}"


def _notes(options: BenchOptions, bench: _Bench, crew: Crew, loading: Loading) -> tuple[str, ...]:
    held = sum(crew.need_bytes.values())
    notes = [
        f"{len(options.configurations)} configuration(s) in {crew.processes} process(es) took turns; "
        f"their models take {held / GIB:.1f} GiB of {loading.memory_bytes / GIB:.1f} GiB allowed."
    ]
    if not bench.always_resident:
        notes.append("Not all models fit into it at once, so they were loaded again in turns.")
    for configuration in options.configurations:
        error = bench.states[configuration, options.cases[0]].error or ""
        if PROFILE_COMMAND in error:
            command = " ".join(("heterollm", *profile_command(loading.model, configuration)))
            notes.append(f"{configuration.label} needs a profile: add --profile-first, or run `{command}`.")
    fractions = [
        sample.disturbed
        for state in bench.states.values()
        for sample in state.samples
        if sample.disturbed is not None
    ]
    if any(fractions):
        notes.append(
            f"Other processes computed during {sum(fractions)} of {len(fractions)} samples; they are marked."
        )
    elif not fractions:
        notes.append("The system does not say whether other processes computed meanwhile.")
    return tuple(notes)

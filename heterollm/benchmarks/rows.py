"""A row of results: llama-bench's field names where it has them, ours beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, get_type_hints

from heterollm.base import InputError
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.row_fields import CaseFields, TimeFields
from heterollm.benchmarks.row_types import fits, neutral

__all__ = ["FIELD_NAMES", "BenchRow", "Sample", "timings"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a test.

    Args:
        time_us: How long it took.
        disturbed: Whether others computed meanwhile; None where the system does not say.
        energy_j: Energy of the whole package meanwhile; None where nothing can be read.
    """

    time_us: float
    disturbed: bool | None = None
    energy_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """What a test came to with a configuration. Fields that are None have a word in ``reasons``.

    The first block is llama-bench's; times are of whole tests, in nanoseconds there.
    """

    build_commit: str
    cpu_info: str
    model_filename: str
    model_type: str | None
    model_size: int | None
    model_n_params: int | None
    n_threads: int | None
    n_prompt: int
    n_gen: int
    n_depth: int
    test: str
    test_time: str
    avg_ns: float | None
    stddev_ns: float | None
    avg_ts: float | None
    stddev_ts: float | None
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]

    median_ts: float | None
    samples_disturbed: tuple[bool | None, ...]
    disturbed_fraction: float | None
    engine: str
    engine_version: str | None
    label: str
    plan_level: str
    asked_level: str
    baseline: bool
    device: str | None
    time_kind: str | None
    fingerprint: str | None
    precision: str
    group_size: int
    length_policy: str
    sync: str
    gpu_threads: int | None
    npu_threads: int | None
    seed: int
    repetitions: int
    heterollm_version: str
    versions: Mapping[str, str]
    description: Mapping[str, Any]
    load_average: float | None
    gpu_share: float | None
    cut_groups: tuple[str, ...] | None
    padded_tokens: int | None
    predicted_ms: float | None
    measured_ms: float | None
    traced_ms: float | None
    gpu_busy_ms: float | None
    npu_busy_ms: float | None
    overlap_ms: float | None
    overlap_fraction: float | None
    hand_over_ms: float | None
    hand_overs: int | None
    operators: tuple[Mapping[str, Any], ...] | None
    achieved_gbps: float | None
    achieved_gflops: float | None
    ceiling_gbps: float | None
    ceiling_gflops: float | None
    gbps_fraction: float | None
    gflops_fraction: float | None
    bound: str | None
    energy: str
    energy_j: float | None
    quality_reference: str | None
    logits_sqnr_db: float | None
    quality_gate_db: float | None
    top_1_agreement: float | None
    quality_passed: bool | None
    memory_bytes: int | None
    loads: int
    notes: tuple[str, ...]
    reasons: Mapping[str, str]
    error: str | None
    interrupted: str | None
    """Why fewer samples are here than were asked for; None where all are, or an error is why."""
    run: str | None
    """The same in all rows whose samples were taken in turns, and in no others."""

    @property
    def times_us(self) -> tuple[float, ...]:
        """The samples in microseconds."""
        return tuple(sample / 1e3 for sample in self.samples_ns)

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.n_prompt + self.n_gen

    @property
    def phase(self) -> str:
        """What the test measures: ``prefill``, ``decode`` or ``both``."""
        return "both" if self.n_prompt and self.n_gen else "prefill" if self.n_prompt else "decode"

    @property
    def usable(self) -> bool:
        """Whether its speed may be compared: it was measured, and computes the right thing."""
        return bool(self.samples_ns) and self.error is None and self.quality_passed is not False

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, in the order of the fields."""
        found: dict[str, Any] = {}
        for name in FIELD_NAMES:
            value = getattr(self, name)
            if isinstance(value, tuple):
                value = list(value)
            found[name] = dict(value) if isinstance(value, Mapping) else value
        return found

    @classmethod
    def from_dict(cls, data: object) -> BenchRow:
        """Read a row of a result file; fields that a later version added may be missing.

        Rates and means are computed again from the samples.

        Raises:
            InputError: It is no row.
        """
        if not isinstance(data, dict) or not data.keys() >= REQUIRED:
            raise InputError("A line is no row of `heterollm bench`.", fix="Give a file that -o wrote.")
        hints = get_type_hints(cls)
        known: dict[str, Any] = {}
        for name in FIELD_NAMES:
            value = data.get(name, neutral(hints[name]))
            if not fits(value, hints[name]):
                raise InputError(
                    f"A row of `heterollm bench` has {name} {value!r:.60}.",
                    fix="Give a file that -o wrote.",
                )
            known[name] = tuple(value) if name in TUPLES and value is not None else value
        _check(known)
        disturbed = (*known["samples_disturbed"], *(None for _ in known["samples_ns"]))
        pairs = zip(known["samples_ns"], disturbed, strict=False)
        samples = [Sample(time_ns / 1e3, own) for time_ns, own in pairs]
        known.update(timings(samples, known["n_prompt"] + known["n_gen"]))
        return cls(**known)


FIELD_NAMES: Final = tuple(field.name for field in fields(BenchRow))
TUPLES: Final = ("samples_ns", "samples_ts", "samples_disturbed", "cut_groups", "operators", "notes")
BEHIND_A_BOUND: Final = ("achieved_gbps", "ceiling_gbps", "achieved_gflops", "ceiling_gflops")
REQUIRED: Final = {"engine", "label", "test", "n_prompt", "n_gen", "n_depth", "samples_ns", "precision"}


def _check(known: Mapping[str, Any]) -> None:
    """Check what fields must be together.

    Raises:
        InputError: They are not.
    """
    wrong = ""
    if not all(value > 0 for value in known["samples_ns"]) or known["n_prompt"] + known["n_gen"] < 1:
        wrong = "samples that are no times"
    elif known["bound"] is not None and None in [known[name] for name in BEHIND_A_BOUND]:
        wrong = f"the bound {known['bound']!r:.40} and no rates behind it"
    elif known["quality_passed"] is False and known["quality_gate_db"] is None:
        wrong = "quality_passed false without quality_gate_db"
    elif not all({"part", "operator", "time_ms"} <= item.keys() for item in known["operators"] or ()):
        wrong = "operators without a part, a name or a time"
    if wrong:
        raise InputError(f"A row has {wrong}.", fix="Give a file that -o wrote.")


NO_TIMES: Final[TimeFields] = {
    "avg_ns": None,
    "stddev_ns": None,
    "avg_ts": None,
    "stddev_ts": None,
    "median_ts": None,
    "measured_ms": None,
    "samples_ns": (),
    "samples_ts": (),
    "samples_disturbed": (),
    "disturbed_fraction": None,
}


def timings(samples: Sequence[Sample], tokens: int) -> TimeFields:
    """Return the fields that samples come to."""
    if not samples:
        return NO_TIMES
    times_ns = tuple(round(sample.time_us * 1e3) for sample in samples)
    rates = tuple(tokens / time_ns * 1e9 for time_ns in times_ns)
    several = len(samples) > 1
    known = [sample.disturbed for sample in samples if sample.disturbed is not None]
    median_ns = statistics.median(times_ns)
    return {
        "avg_ns": statistics.fmean(times_ns),
        "stddev_ns": statistics.stdev(times_ns) if several else 0.0,
        "avg_ts": statistics.fmean(rates),
        "stddev_ts": statistics.stdev(rates) if several else 0.0,
        "median_ts": tokens / median_ns * 1e9,
        "measured_ms": median_ns / 1e6,
        "samples_ns": times_ns,
        "samples_ts": rates,
        "samples_disturbed": tuple(sample.disturbed for sample in samples),
        "disturbed_fraction": sum(known) / len(known) if known else None,
    }


def identity(configuration: Configuration, case: Case) -> CaseFields:
    """Return the fields that say what was asked for."""
    split = configuration.threads
    own = configuration.engine == "self"
    return {
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "n_depth": case.n_depth,
        "test": case.name,
        "n_threads": configuration.n_threads,
        "engine": configuration.engine,
        "label": configuration.label,
        "asked_level": configuration.plan_level,
        "baseline": configuration.baseline,
        "precision": configuration.precision,
        "group_size": configuration.group_size,
        "length_policy": configuration.length_policy,
        "sync": configuration.sync,
        "gpu_threads": split[0] if split is not None and own else None,
        "npu_threads": split[1] if split is not None and own else None,
    }

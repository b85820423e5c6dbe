"""A row of results: nested records, a line of JSON in a file, with llama-bench's names of fields."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from heterollm.base import Amount, Count, InputError, Number, Positive, PositiveNumber, decode
from heterollm.benchmarks.cases import Case, Configuration


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a test.

    Args:
        time_us: Duration.
        disturbed: Whether other processes computed during it; None on simulated devices.
        energy_j: Energy of the whole package during it; None without a readable counter.
    """

    time_us: float
    disturbed: bool | None = None
    energy_j: float | None = None


class Asked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The test and the options of a configuration."""

    n_prompt: Count
    n_gen: Count
    n_depth: Count
    asked_level: str = ""
    length_policy: str = ""
    sync: str = ""
    group_size: Count = 0
    scales: Literal["", "free", "stepped"] = ""
    power: str = ""
    technique: str = ""
    experts_gib: Amount | None = None
    n_threads: Count | None = None
    gpu_threads: Count | None = None
    npu_threads: Count | None = None
    baseline: bool = False
    seed: Count = 0
    repetitions: Count = 0

    def __post_init__(self) -> None:
        if self.n_prompt + self.n_gen < 1:
            raise ValueError("a test has no tokens")

    @property
    def threads(self) -> str:
        """Threads of GPU and NPU, such as ``1+1``, or of another engine; empty if unknown."""
        if self.gpu_threads is not None:
            return f"{self.gpu_threads}+{self.npu_threads}"
        return "" if self.n_threads is None else str(self.n_threads)


class Setup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine, the libraries, and facts of engine and model."""

    build_commit: str = ""
    heterollm_version: str = ""
    cpu_info: str = ""
    load_average: Amount | None = None
    versions: dict[str, str] = {}
    test_time: str = ""
    engine_version: str | None = None
    device: str | None = None
    fingerprint: str | None = None
    calibration: str | None = None
    model_filename: str = ""
    model_type: str | None = None
    model_size: Count | None = None
    model_n_params: Count | None = None
    description: dict[str, Any] = {}

    def __post_init__(self) -> None:
        json.dumps(self.description, allow_nan=False)


class Times(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The samples, each of a whole test, and statistics of them."""

    samples_ns: tuple[Positive, ...]
    samples_disturbed: tuple[bool | None, ...] = ()
    samples_ts: tuple[Amount, ...] = ()
    avg_ns: Amount | None = None
    stddev_ns: Amount | None = None
    avg_ts: Amount | None = None
    stddev_ts: Amount | None = None
    median_ts: Amount | None = None
    measured_ms: Amount | None = None
    disturbed_fraction: Amount | None = None

    def __post_init__(self) -> None:
        if len(self.samples_disturbed) > len(self.samples_ns):
            raise ValueError("samples_disturbed has more items than samples_ns")


class Account(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of a sample: the GPU's share, predicted time, rates and their ceilings, energy, memory."""

    gpu_share: Amount | None = None
    cut_groups: tuple[str, ...] | None = None
    padded_tokens: Count | None = None
    predicted_ms: Amount | None = None
    achieved_gbps: Amount | None = None
    achieved_gflops: Amount | None = None
    ceiling_gbps: Amount | None = None
    ceiling_gflops: Amount | None = None
    gbps_fraction: Amount | None = None
    gflops_fraction: Amount | None = None
    bound: Literal["memory", "compute", "overhead"] | None = None
    energy: Literal["absent", "measured", "modelled"] = "absent"
    energy_j: Amount | None = None
    memory_bytes: Count | None = None
    loads: Count = 0

    def __post_init__(self) -> None:
        rates = (self.achieved_gbps, self.ceiling_gbps, self.achieved_gflops, self.ceiling_gflops)
        if self.bound is not None and None in rates:
            raise ValueError(f"the bound {self.bound!r} has no rates")


class OperatorRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator of a traced run."""

    part: str
    operator: str
    time_ms: Amount
    count: Count | None = None
    gbps: Amount | None = None
    gflops: Amount | None = None


class TraceTimes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One more run of the test, with tracing; all None without a trace."""

    traced_ms: Amount | None = None
    gpu_busy_ms: Amount | None = None
    npu_busy_ms: Amount | None = None
    overlap_ms: Amount | None = None
    overlap_fraction: Amount | None = None
    hand_over_ms: Amount | None = None
    hand_overs: Count | None = None
    operators: tuple[OperatorRow, ...] | None = None


class LogitsCheck(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Distance of the logits from the reference's; all None if they were not compared."""

    quality_reference: str | None = None
    logits_sqnr_db: Number | None = None
    quality_gate_db: Number | None = None
    top_1_agreement: Amount | None = None
    quality_passed: bool | None = None

    def __post_init__(self) -> None:
        if self.quality_passed is False and self.quality_gate_db is None:
            raise ValueError("quality_passed is false without quality_gate_db")


class Modelled(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions and results of a simulated case: a prompt and the tokens after it, on a virtual clock.

    Where the case failed, its results are None. The conditions are those of
    :class:`heterollm.simulate.SimulationRequest`.
    """

    soc: str
    plan_for: str
    in_flight: Literal["auto"] | Count = 1
    gpu_load: str | None = None
    what_if: dict[str, float] = {}
    head_bits: Count
    every_form: bool
    calibrated: bool = False
    attention: dict[str, Any] | None = None
    overflow: str | None = None
    imbalance: Amount | None = None
    head_imbalance: Amount | None = None
    pruned: Amount
    outlier_share: Amount | None = None
    lanes: Count | None = None
    chunk_tokens: Count | None = None
    npu_graphs: Count | None = None
    npu_gib: Amount | None = None
    npu_limit_gib: PositiveNumber | None = None
    npu_opening_s: Amount | None = None
    ttft_ms: PositiveNumber | None = None
    prefill_tokens_per_second: PositiveNumber | None = None
    decode_tokens_per_second: PositiveNumber | None = None
    prefill_joules: PositiveNumber | None = None
    decode_joules_per_token: PositiveNumber | None = None
    average_watts: PositiveNumber | None = None
    prefill: dict[str, Any] | None = None
    decode: dict[str, Any] | None = None
    predicted_npu_idle_fraction: Amount | None = None
    in_order: dict[str, Any] | None = None
    slowdown: dict[str, float] | None = None
    experts: dict[str, Any] | None = None
    cuts: dict[str, dict[str, str]] = {}
    tokens: tuple[int, ...] = ()


class BenchRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Results of a test with a configuration.

    Args:
        label: Short name of the configuration.
        test: Name of the test in llama-bench's form.
        engine: ``self`` or another engine.
        plan_level: Level of the plan that ran.
        precision: Precision of weights and activations.
        time_kind: ``real``, ``emulated`` or ``simulated``; None if the engine never loaded.
        run: Name of the run; the rows of one run took samples in the same rounds.
        asked: The test and the options.
        setup: Machine, libraries, engine and model.
        times: The samples.
        account: Work of a sample.
        trace: Times of one traced run.
        quality: Distance of the logits from the reference's.
        modelled: Conditions and results of a case of `heterollm simulate`; None for others.
        error: Why there are no more samples.
        interrupted: Why samples are missing, if no error is the cause.
        notes: Remarks on the numbers.
        reasons: Why fields are None, by their names.
    """

    label: str
    test: str
    engine: str
    plan_level: str = ""
    precision: str
    time_kind: str | None = None
    run: str | None = None
    asked: Asked
    setup: Setup = Setup()
    times: Times
    account: Account = Account()
    trace: TraceTimes = TraceTimes()
    quality: LogitsCheck = LogitsCheck()
    modelled: Modelled | None = None
    error: str | None = None
    interrupted: str | None = None
    notes: tuple[str, ...] = ()
    reasons: dict[str, str] = {}

    @property
    def times_us(self) -> tuple[float, ...]:
        """The samples in microseconds."""
        return tuple(sample / 1e3 for sample in self.times.samples_ns)

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.asked.n_prompt + self.asked.n_gen

    @property
    def phase(self) -> str:
        """Phase of the test: ``prefill``, ``decode`` or ``both``."""
        asked = self.asked
        return "both" if asked.n_prompt and asked.n_gen else "prefill" if asked.n_prompt else "decode"

    @property
    def usable(self) -> bool:
        """Whether reports may compare its speed: it has samples, no error, and correct logits."""
        return bool(self.times.samples_ns) and self.error is None and self.quality.quality_passed is not False

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, in the order of the fields."""
        found: dict[str, Any] = json.loads(msgspec.json.encode(self))
        return found

    @classmethod
    def from_dict(cls, data: object, *, source: str = "A line") -> BenchRow:
        """Read a row of a result file.

        Rates and means are recomputed from the samples.

        Args:
            data: A line of the file.
            source: Name of the line in errors.

        Raises:
            InputError: A field is missing, unknown, of the wrong type or out of range, with its path.
        """
        fix = "Give a file that -o wrote."
        if isinstance(data, dict) and isinstance(asked := data.get("asked"), dict) and "pass_name" in asked:
            former = dict(asked)
            data = {**data, "asked": {"technique": former.pop("pass_name"), **former}}
        row = decode(data, cls, source=f"{source} is no row of `heterollm bench`", error=InputError, fix=fix)
        known = row.times.samples_disturbed
        disturbed = (*known, *(None for _ in row.times.samples_ns[len(known) :]))
        pairs = zip(row.times.samples_ns, disturbed, strict=False)
        samples = [Sample(time_ns / 1e3, own) for time_ns, own in pairs]
        return msgspec.structs.replace(row, times=times_of(samples, row.tokens))


GROUPS: Final = {"asked": Asked, "setup": Setup, "times": Times, "account": Account, "trace": TraceTimes} | {
    "quality": LogitsCheck,
    "modelled": Modelled,
}


def flat(row: BenchRow) -> dict[str, Any]:
    """Return all values by the names of their fields, without the names of records; all are different."""
    found: dict[str, Any] = {}
    for name, value in row.to_dict().items():
        group = GROUPS.get(name)
        found |= {name: value} if group is None else value or dict.fromkeys(group.__struct_fields__)
    return found


def times_of(samples: Sequence[Sample], tokens: int) -> Times:
    """Return samples with their statistics.

    Args:
        samples: Samples in the order of the rounds.
        tokens: Tokens of each sample.
    """
    if not samples:
        return Times(samples_ns=())
    times_ns = tuple(round(sample.time_us * 1e3) for sample in samples)
    rates = tuple(tokens / time_ns * 1e9 for time_ns in times_ns)
    several = len(samples) > 1
    known = [sample.disturbed for sample in samples if sample.disturbed is not None]
    median_ns = statistics.median(times_ns)
    return Times(
        samples_ns=times_ns,
        samples_disturbed=tuple(sample.disturbed for sample in samples),
        samples_ts=rates,
        avg_ns=statistics.fmean(times_ns),
        stddev_ns=statistics.stdev(times_ns) if several else 0.0,
        avg_ts=statistics.fmean(rates),
        stddev_ts=statistics.stdev(rates) if several else 0.0,
        median_ts=tokens / median_ns * 1e9,
        measured_ms=median_ns / 1e6,
        disturbed_fraction=sum(known) / len(known) if known else None,
    )


def asked_of(configuration: Configuration, case: Case, *, seed: int, repetitions: int) -> Asked:
    """Return the options of a configuration and a test."""
    split = configuration.threads if configuration.engine == "self" else None
    return Asked(
        n_prompt=case.n_prompt,
        n_gen=case.n_gen,
        n_depth=case.n_depth,
        asked_level=configuration.plan_level,
        length_policy=configuration.length_policy,
        sync=configuration.sync,
        group_size=configuration.group_size,
        scales=configuration.scales,
        power=configuration.power,
        technique=configuration.technique_label,
        experts_gib=configuration.experts_gib,
        n_threads=configuration.n_threads,
        gpu_threads=None if split is None else split[0],
        npu_threads=None if split is None else split[1],
        baseline=configuration.baseline,
        seed=seed,
        repetitions=repetitions,
    )

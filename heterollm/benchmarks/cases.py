"""Tests of a bench, in llama-bench's words, and configurations that run them.

The words are those of llama-bench (https://github.com/ggml-org/llama.cpp/tree/master/tools/llama-bench):
``pp`` is a prompt, ``tg`` single tokens, ``pg`` a prompt and tokens after it, all at depth ``d``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast, get_args

from heterollm.base import Effect, OptionError, idle_options, refuse_idle, refuse_idle_everywhere
from heterollm.benchmarks.plugins import check_engine
from heterollm.engine import SYNC_OPTIONS, Sync
from heterollm.kernels.devices import shares_cores
from heterollm.kernels.ops import Power, Precision, Scales
from heterollm.kernels.threads import split_threads
from heterollm.planning import LOAD_EFFECTS, LOAD_OPTIONS, LoadKeywords, LoadOptions, Threads, load_facts
from heterollm.solver import (
    LENGTH_POLICIES,
    LLM_NPU,
    NPU_ATTENTION,
    NPU_EXPERTS,
    SHADOW_ATTENTION,
    TECHNIQUES,
    ExpertsRequest,
    LengthPolicy,
    Overflow,
    PlanRequest,
    Technique,
)

if TYPE_CHECKING:
    from heterollm.simulate import SimulationRequest

LEVEL_NAMES: Final = ("auto", "gpu", "npu", "layer", "tensor", "block", "fused")
COVERED: Final = ("npu", "layer")
"""Levels at which the NPU computes whole groups, so that a length policy has an effect."""

LARGEST_GRID: Final = 100_000
Base = TypeVar("Base", bound="Configuration | SimulationRequest")

NONE: Final = "none"
AXES: Final = ("engine", "precision", "threads", "plan_level", "length_policy", "sync", "technique")
"""Fields of a configuration that a grid varies, the slowest first."""

LEGAL: Final[Mapping[str, Sequence[str]]] = {
    "length_policy": LENGTH_POLICIES,
    "sync": SYNC_OPTIONS,
    "precision": get_args(Precision),
    "technique": (NONE, *TECHNIQUES),
    "plan_level": LEVEL_NAMES,
}
FOREIGN: Final = Effect(
    "plan length_policy sync device scales calibration techniques overflow power experts_gib",
    lambda _: False,
    "only heterollm itself takes it",
    "Add --engine self",
)
"""Options that other engines do not take."""

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
LLM_NPU_LEVELS: Final = ("auto", "tensor")
"""Levels whose plan llm.npu makes."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One test.

    Args:
        n_prompt: Tokens of the prompt, in one call.
        n_gen: Tokens after it, one at a time.
        n_depth: Tokens in the KV cache before.
    """

    n_prompt: int
    n_gen: int
    n_depth: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.n_prompt + self.n_gen

    @property
    def end(self) -> int:
        """Positions that a session needs."""
        return self.n_depth + self.tokens

    @property
    def name(self) -> str:
        """Name as llama-bench writes it, such as ``pp256 @ d512``."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")


@dataclass(frozen=True, slots=True)
class Configuration:
    """Engine and options of a test: all fields that distinguish two rows of one test.

    Args:
        engine: ``self`` or the name of a plug-in.
        plan_level: A level, ``auto``, or the file of a plan; empty for other engines.
        precision: Precision of weights and activations; other engines have ``w4a16`` for all 4-bit weights.
        length_policy: How levels ``npu`` and ``layer`` run lengths without a graph; ``auto`` at other levels.
        sync: How the processors wait for each other; empty for other engines.
        threads: Threads of GPU and NPU; other engines get the sum. None leaves them to the device.
        device: Name of the device; empty for other engines.
        group_size: Weights that share a scale.
        scales: Scales of 4-bit weights.
        power: Clocks and cores asked for; empty for other engines.
        calibration: File of a calibration; empty without NPU graphs of integers and techniques.
        technique: A technique over the plan, such as ``llm.npu``; empty for none.
        experts_gib: Memory of a mixture's experts in GiB; None for all of them.
        overflow: Fate of tokens beyond an expert's capacity, with ``npumoe``.
        baseline: Whether the bench added the configuration for comparison.
    """

    engine: str = "self"
    plan_level: str = "auto"
    precision: Precision = "w4a16"
    length_policy: str = "padding"
    sync: str = "auto"
    threads: Threads | None = None
    device: str = "auto"
    group_size: int = 32
    scales: Scales = "free"
    power: Power | Literal[""] = "burst"
    calibration: str = ""
    technique: Technique | Literal[""] = ""
    experts_gib: float | None = None
    overflow: Overflow = "gpu"
    baseline: bool = False

    @property
    def n_threads(self) -> int | None:
        """Threads of GPU and NPU together."""
        return None if self.threads is None else sum(self.threads)

    @property
    def label(self) -> str:
        """Short name for reports."""
        if self.engine != "self":
            weights = "4-bit" if self.precision == "w4a16" else self.precision
            threads = "" if self.threads is None else f", {self.n_threads} threads"
            return f"{self.engine} {weights}{threads}"
        parts = [self.plan_level, *([self.technique_label] if self.technique else [])]
        if self.plan_level in COVERED:
            parts.append(self.length_policy)
        if self.sync != "auto":
            parts.append(f"sync {self.sync}")
        split = "" if self.threads is None else f", {self.threads[0]}+{self.threads[1]}"
        if self.power != "burst":
            parts.append(f"power {self.power}")
        if self.experts_gib is not None:
            parts.append(f"experts {self.experts_gib:g} GiB")
        kind = "" if self.scales == "free" else f" {self.scales}"
        return f"{' '.join(parts)} {self.precision}{kind}{split}"

    @property
    def technique_label(self) -> str:
        """Name of the technique, with the fate of tokens beyond capacities unless the GPU has them."""
        return self.technique if self.overflow == "gpu" else f"{self.technique} {self.overflow}"

    @property
    def load_keywords(self) -> LoadKeywords:
        """Options of a load of heterollm itself."""
        gpu_threads, npu_threads = self.threads or (None, None)
        policy = "padding" if self.length_policy == "auto" else self.length_policy
        request = None
        if self.technique:
            request = PlanRequest(techniques=(self.technique,), experts=ExpertsRequest(self.overflow))
        return {
            "device": self.device,
            "plan": self.plan_level,
            "request": request,
            "precision": self.precision,
            "group_size": self.group_size,
            "scales": self.scales,
            "calibration": self.calibration or None,
            "gpu_threads": gpu_threads,
            "npu_threads": npu_threads,
            "sync": cast("Sync", self.sync),
            "power": self.power or "burst",
            "length_policy": cast("LengthPolicy", policy),
            "experts_gib": self.experts_gib,
            # Options of a grid have an effect in some of its configurations.
            "defaults": LOAD_OPTIONS,
        }


def cases_of(
    prompts: Iterable[int],
    gens: Iterable[int],
    pairs: Iterable[tuple[int, int]] = (),
    depths: Sequence[int] = (0,),
) -> tuple[Case, ...]:
    """Return the tests of a grid: prompts, tokens and pairs of both, each at every depth, in that order.

    Raises:
        OptionError: The grid is empty.
    """
    shapes = [(prompt, 0) for prompt in prompts if prompt] + [(0, gen) for gen in gens if gen]
    shapes += [pair for pair in pairs if any(pair)]
    found = tuple(dict.fromkeys(Case(prompt, gen, depth) for depth in depths for prompt, gen in shapes))
    if not found:
        raise OptionError("There is nothing to measure.", fix="Give prompt lengths (-p) or tokens (-n).")
    return found


def parse_threads(text: str) -> list[Threads]:
    """Return splits of the cores, from a text such as ``1+1,2+0``: GPU first.

    Raises:
        OptionError: The text has another form, or the cores do not suffice.
    """
    found: list[Threads] = []
    for part in text.split(","):
        gpu, plus, npu = part.strip().partition("+")
        if not (plus and gpu.isascii() and npu.isascii() and gpu.isdigit() and npu.isdigit()):
            raise OptionError(
                f"--threads is {text!r:.80}.", fix="Give GPU and NPU threads with a plus: 1+1,2+0."
            )
        split_threads(int(gpu), int(npu))  # raises where the cores do not suffice
        found.append((int(gpu), int(npu)))
    return found


def grid_of(base: Base, lists: Mapping[str, Sequence[Any]]) -> list[Base]:
    """Return a record with each combination of values of its fields; those of the first list change last.

    Raises:
        OptionError: There are too many, or a value is not legal.
    """
    if (count := math.prod(map(len, lists.values()))) > LARGEST_GRID:
        raise OptionError(
            f"The grid has {count} cases, more than {LARGEST_GRID}.",
            fix="Give shorter lists, or several grids.",
        )
    every = itertools.product(*lists.values())
    return [replace(base, **dict(zip(lists, values, strict=True))) for values in every]


def expand(
    base: Configuration = Configuration(), given: Mapping[str, Any] = NOTHING, **lists: Sequence[Any]
) -> tuple[Configuration, ...]:
    """Return the configurations of a grid, each once.

    Options that do not apply to a configuration stay at their defaults, so that no two are equal: length
    policies apply to ``npu`` and ``layer`` only, the default split of the cores to all levels but ``auto``,
    syncs to levels that use the NPU (``operator`` to all), a calibration to integers on the NPU and to
    ``shadowattn``, ``llm.npu`` to ``auto`` and ``tensor`` at ``w8a8``, ``shadowattn`` to all levels at
    ``w8a8`` and stepped ``w4a16``, ``npumoe`` and
    ``npu-attention`` to all levels but ``gpu`` (``none`` is no technique), and none
    of them to other engines. Levels that need an NPU skip splits without one.

    Args:
        base: Values of the other fields.
        given: Values of options by name that must have an effect in some configuration.
        lists: Values of fields among :data:`AXES`.

    Raises:
        OptionError: A value is not legal, an option has no effect, or no configuration is left.
    """
    for engine in lists.get("engine", ()):
        check_engine(engine)
    for name, legal in LEGAL.items():
        for value in lists.get(name, ()):
            if value not in legal and not (name == "plan_level" and _is_file(value)):
                what = "plan level or plan file" if name == "plan_level" else name.replace("_", " ")
                raise OptionError(
                    f"There is no {what} {value!r:.200}.", fix=f"Choose among {', '.join(legal)}."
                )
    is_split = bool(lists.get("threads"))
    default = _default_threads() if shares_cores(base.device) else None
    axes: dict[str, Sequence[Any]] = {name: (getattr(base, name),) for name in AXES} | lists
    axes |= {} if is_split else {"threads": (default,)}
    every = grid_of(base, axes)
    found = [_foreign(one) if one.engine != "self" else _own(one, is_split=is_split) for one in every]
    unique = tuple(dict.fromkeys(one for one in found if one is not None))
    if not unique:
        raise OptionError(
            f"No configuration is left: {', '.join(axes['plan_level'])} with threads "
            f"{_words(axes['threads'])}.",
            fix="Levels other than gpu need at least one NPU thread.",
        )
    techniques = lists.get("technique", ())
    if set(techniques) - {NONE} - {one.technique for one in unique}:
        raise OptionError(
            f"No configuration has the technique {', '.join(techniques)}.",
            fix="Give --calibration FILE. llm.npu needs --plan auto or tensor, --precision w8a8 and "
            f"an NPU thread; {SHADOW_ATTENTION} needs a level, and --precision w8a8 or --scales stepped; "
            "npumoe and npu-attention need a level other than gpu, and an NPU thread.",
        )
    own = [LoadOptions(**one.load_keywords) for one in unique if one.engine == "self"]
    refuse_idle(() if own else (FOREIGN,), given, given)
    refuse_idle_everywhere(
        [dict(idle_options(LOAD_EFFECTS, given, load_facts(one)[0])) for one in own], given
    )
    return unique


def with_baseline(configurations: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """Add ``gpu`` on all cores for each precision if some configurations split the cores.

    On ``host`` one CPU is GPU and NPU: splitting it pays only if it beats that row.
    """
    added: list[Configuration] = []
    for one in configurations:
        threads = one.threads or (_default_threads() if one.plan_level == "auto" else None)
        if one.engine != "self" or threads is None or threads[1] == 0:
            continue
        alone = one.plan_level == "gpu" and len(configurations) == 1
        if not shares_cores(one.device) or alone:
            continue
        whole = replace(
            one,
            plan_level="gpu",
            length_policy="auto",
            sync="auto",
            calibration="",
            technique="",
            overflow="gpu",
            threads=(sum(threads), 0),
            baseline=True,
        )
        known = {replace(other, baseline=True) for other in (*configurations, *added)}
        if whole not in known:
            added.append(whole)
    return (*configurations, *added)


def _own(one: Configuration, *, is_split: bool) -> Configuration | None:
    """Return a configuration of heterollm itself with the options that apply; None where it lacks an NPU.

    Args:
        one: The configuration.
        is_split: Whether the split of the cores is asked for.
    """
    level, technique = one.plan_level, one.technique
    # Level auto chooses the split of the cores, too, unless one is named.
    threads = one.threads if is_split or level != "auto" else None
    without_npu = threads is not None and threads[1] == 0
    if without_npu and level not in ("gpu", "auto"):
        return None
    uses_npu = level != "gpu" and not without_npu
    scales: Scales = "free" if one.precision in ("fp16", "w8a8") else one.scales
    int8 = one.precision == "w8a8"
    calibrated = int8 or (one.precision == "w4a16" and scales == "stepped")
    routed = technique == NPU_EXPERTS
    if technique == SHADOW_ATTENTION:
        passable = calibrated and level in LEVEL_NAMES
    elif routed or technique == NPU_ATTENTION:
        passable = uses_npu and level in LEVEL_NAMES
    else:
        passable = technique == LLM_NPU and uses_npu and int8 and level in LLM_NPU_LEVELS
    integers = calibrated and (level != "gpu" or (passable and technique == SHADOW_ATTENTION))
    return replace(
        one,
        threads=threads,
        scales=scales,
        length_policy=one.length_policy if level in COVERED else "auto",
        sync=one.sync if uses_npu or one.sync == "operator" else "auto",
        calibration=one.calibration if integers or (routed and passable) else "",
        technique=technique if passable else "",
        overflow=one.overflow if routed and passable else "gpu",
    )


def _foreign(one: Configuration) -> Configuration:
    # Other engines do not split threads, so equal totals are one row; w4a8 has the weights of w4a16.
    return Configuration(
        one.engine,
        plan_level="",
        precision="w4a16" if one.precision == "w4a8" else one.precision,
        length_policy="",
        sync="",
        threads=None if one.threads is None else (sum(one.threads), 0),
        device="",
        group_size=one.group_size,
        power="",
    )


def _default_threads() -> Threads:
    split = split_threads()
    return len(split.gpu_cores), len(split.npu_cores)


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:
        return False


def _words(splits: Sequence[Threads | None]) -> str:
    return ", ".join("default" if split is None else f"{split[0]}+{split[1]}" for split in splits)

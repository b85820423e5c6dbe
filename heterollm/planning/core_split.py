"""The split of the cores on ``host``, chosen by the profiles of this machine before the device is opened.

OpenCL on a CPU fixes its threads with its first call, so that the choice cannot wait for the device. A
profile is of one split. Without one of all cores for the GPU, nothing shows that another split is faster, and
the GPU gets all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

from msgspec import structs

from heterollm.base import CacheError, ProfileError
from heterollm.kernels.device import Device
from heterollm.kernels.devices import opens_host
from heterollm.kernels.npu import STANDARD_LENGTHS
from heterollm.kernels.threads import allowed_cores, processor_model, split_threads, whole_cores
from heterollm.model import ModelConfig
from heterollm.planning.auto import Candidate, Threads, compared, predicted, weights_of, words
from heterollm.planning.inputs import inputs_of_file
from heterollm.planning.load_options import LoadOptions
from heterollm.planning.plan import make_plan, read_plan
from heterollm.profiler.predict import checked
from heterollm.profiler.records import Profile, stored_profiles
from heterollm.solver import LEVELS, SOLVED_LEVELS, PlanRequest

HOST: Final = "host"
SPLIT_MARGIN: Final = 0.5
"""Fraction of the time by which cores for both processors must be predicted faster than all for the GPU. It
compares sums of kernels from two profiles: for SmolLM2-135M the predicted ratio of decode was 2.1 times too
good, that of prompts 1.4 to 1.7 times (bench/results/auto_choice.jsonl)."""
SAME: Final = ("gpu", "gpu_driver", "coherent", "cache_bytes", "activation_dtype")
"""Parts of a description that profiles of one machine share, whatever their split."""


def other_splits(
    device: str, gpu_threads: int | None = None, npu_threads: int | None = None
) -> list[Threads]:
    """Return the splits that ``auto`` compares beside the default one, where a profile names no split.

    Those are all cores for the GPU, on ``host``. A machine that may open ``snapdragon`` has none.
    """
    named = gpu_threads is not None or npu_threads is not None
    if named or not opens_host(device) or len(whole_cores()) < 2:
        return []
    return [(len(whole_cores()), 0)]


@dataclass(slots=True)
class CoreSplit:
    """Chooses the threads of ``host`` for a load, and remembers the reason.

    Args:
        options: Of the load.
        config: The model.
        context: Positions of a session.
    """

    options: LoadOptions
    config: ModelConfig
    context: int
    chosen: Candidate | None = None
    reason: str = ""

    def __call__(self, gpu_threads: int | None) -> tuple[int | None, int | None]:
        """Return the threads of GPU and NPU; None leaves a number to the device.

        Args:
            gpu_threads: Threads that OpenCL has already in this process; None if it was not opened.

        Raises:
            OptionError: The plan is neither a level nor a file.
            PlanError: The file of the plan is damaged.
        """
        if self.options.plan in (*LEVELS, *SOLVED_LEVELS):
            return None, None
        if self.options.plan != "auto":
            threads = read_plan(self.options.plan).threads
            return threads if threads is not None and gpu_threads in (None, threads[0]) else (None, None)
        candidates = list(self._candidates(gpu_threads))
        if not candidates or (gpu_threads is None and not self._compared_with_all_cores(candidates)):
            # Little is known: the GPU's kernels run everything, and no core shall idle. The device itself
            # refuses threads that do not fit the cores, and says more.
            if gpu_threads is None:
                return len(whole_cores()), 0
            return (gpu_threads, None) if gpu_threads <= len(allowed_cores()) else (None, None)
        ranked = compared(candidates, self._weights, SPLIT_MARGIN)
        self.chosen = ranked[0][1]
        self.reason = words(ranked) + self._doubts(ranked)
        assert self.chosen.threads is not None
        return self.chosen.threads

    def reason_for(self, device: Device) -> str:
        """Return the reason of the choice; empty if the opened device is not the one it was made for."""
        split = len(device.split.gpu_cores), len(device.split.npu_cores)
        ours = self.chosen is not None and device.name == HOST and split == self.chosen.threads
        return self.reason if ours else ""

    @property
    def _weights(self) -> dict[int, float]:
        request = structs.replace(self.options.request or PlanRequest(), context=self.context)
        return weights_of(request, STANDARD_LENGTHS)

    def _candidates(self, gpu_threads: int | None) -> Iterator[Candidate]:
        """Yield the plan of each split whose profile can predict it, most threads of the GPU first."""
        for threads, profile in sorted(profiles_here().items(), key=lambda entry: -entry[0][0]):
            if gpu_threads not in (None, threads[0]):
                continue
            try:
                found = self._candidate(profile, threads)
            except ProfileError:  # the load itself reports what the profile lacks, if it uses it
                continue
            if found.known:
                yield found

    @staticmethod
    def _compared_with_all_cores(candidates: Sequence[Candidate]) -> bool:
        known = {one.threads for one in candidates}
        return all(threads in known for threads in other_splits(HOST))

    def _doubts(self, ranked: Sequence[tuple[float, Candidate]]) -> str:
        """Return what the comparison lacks, in words: splits without a profile, and machines that drift."""
        known = {one.threads for _, one in ranked}
        split = split_threads()
        splits = [(len(split.gpu_cores), len(split.npu_cores)), *other_splits(HOST)]
        left = [f"{gpu}+{npu}" for gpu, npu in splits if (gpu, npu) not in known]
        if left:
            return f"; {', '.join(left)} cores are not profiled: `heterollm profile MODEL` measures them"
        if ranked[0][0] > min(time for time, _ in ranked):
            needed = f"{1.0 / (1.0 - SPLIT_MARGIN):.1f} x as fast, as predictions are rough"
            return f"; another split of the cores must be predicted {needed}"
        drift = max(map(_drift, profiles_here().values()), default=0.0)
        margin = ranked[1][0] / ranked[0][0] - 1.0 if len(ranked) > 1 else math.inf
        return "" if drift <= margin else f"; within the machine's drift while it was profiled, {drift:.0%}"

    def _candidate(self, profile: Profile, threads: Threads) -> Candidate:
        inputs = inputs_of_file(self.options, self.config, self.context, profile)
        planned = make_plan(inputs)
        assert planned.model is not None
        return predicted(planned.model, planned.plan, self._weights, threads)


def profiles_here() -> dict[Threads, Profile]:
    """Return the newest usable profile of this machine for each split of its cores.

    The device is not open, so that its fingerprint is not known: profiles of this processor's name come
    before others, newer before older, and all that are returned are of one GPU and driver.
    """
    cores, model = len(allowed_cores()), processor_model()
    runtime = metadata.version("onnxruntime")
    found: list[tuple[tuple[bool, float], Threads, Mapping[str, Any], Profile]] = []
    try:
        paths = stored_profiles()
    except CacheError:  # the load goes on without a cache, or reports it
        return {}
    for path in paths:
        if not path.name.startswith(f"{HOST}-"):
            continue
        try:
            profile = checked(Profile.load(path))
        except ProfileError:  # damaged; the load reports the one that it uses
            continue
        described = profile.description
        if profile.device != HOST or not {"gpu_threads", "npu_threads", *SAME} <= set(described):
            continue  # a profile of another program's making
        threads = int(described["gpu_threads"]), int(described["npu_threads"])
        fits = sum(threads) <= max(2, cores) and max(threads) <= cores
        same_runtime = threads[1] == 0 or described["npu_versions"].get("onnxruntime") == runtime
        finished = any(run["finished"] for run in profile.runs.values())
        if fits and same_runtime and finished:
            rank = bool(model) and model in described["gpu"], path.stat().st_mtime
            found.append((rank, threads, described, profile))
    found.sort(key=lambda entry: entry[0], reverse=True)
    ours = [entry for entry in found if all(entry[2][name] == found[0][2][name] for name in SAME)]
    return {threads: profile for _, threads, _, profile in reversed(ours)}


def _drift(profile: Profile) -> float:
    """Return how far the machine's speed drifted in the last run of a profile, as a fraction."""
    last = max(profile.runs.values(), key=lambda run: run["started_s"], default={})
    return max(last.get("drift_fraction", {}).values(), default=0.0)

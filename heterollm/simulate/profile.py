"""Profiles of simulated devices, measured on their virtual clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from heterollm.base import LABEL, Progress, cache_name, own_folder
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import kernel_source_hash, source_hash
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim import SIMULATED, clock_of, soc_of
from heterollm.model import ModelConfig, shape_of_specs
from heterollm.profiler import SessionOptions, profile_device, profile_for
from heterollm.profiler.records import FenceKey, Key, Profile, Record
from heterollm.solver import NPU_EXPERTS, RETURN_VALUE, SHADOW_ATTENTION, Technique, expert_technique

if TYPE_CHECKING:
    from heterollm.kernels.gpu import Strategy


def profile_of(
    device: Device,
    model: str,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    progress: Progress,
    techniques: Sequence[Technique] = (),
) -> Profile:
    """Return the profile of a simulated device with a model's shapes; measure it unless the cache has it.

    Args:
        device: The device.
        model: Name of the model.
        config: Its configuration.
        specs: All its groups.
        progress: Called with a stage's name, steps done and steps in all.
        techniques: Techniques whose operators are measured, too.

    Raises:
        CacheError: The profile cannot be written.
    """
    shape = shape_of_specs(config, specs, model)
    # A file for each model, purpose and version of what measures and is measured: predictors are fitted to
    # all records of a file.
    measuring = [source_hash(f"heterollm.{name}", (".py",)) for name in ("profiler.measure", "kernels.sim")]
    made_by = (shape.specs, kernel_source_hash(), *measuring)
    key = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
    sparse, experts = SHADOW_ATTENTION in techniques, expert_technique(techniques) is not None
    measured = [name for name, asked in ((SHADOW_ATTENTION, sparse), (NPU_EXPERTS, experts)) if asked]
    words = " ".join((model, *measured, LABEL, device.name.removeprefix(SIMULATED)))
    path = own_folder("profiles") / LABEL / f"{cache_name(words, device.fingerprint() + key)}.json"
    profile = profile_for(device, path)[0]
    if any(run["finished"] for run in profile.runs.values()):
        return profile
    options = SessionOptions.of(budget_s=None, update=True, sparse_attention=sparse, expert_graphs=experts)
    return profile_device(device, [shape], options, path=path, progress=progress)[0]


def with_one_strategy(profile: Profile, device: Device, strategy: Strategy) -> Profile:
    """Return a profile as if the processors could wait for each other by one strategy only.

    The driver's wait and copy cost the same on the way back, whether or not the GPU is busy.

    Args:
        profile: The profile.
        device: The device.
        strategy: The strategy.
    """
    costs = clock_of(device).costs
    copies = strategy == "finish" and bool(soc_of(device).hand_over.driver_copies)
    back_us = costs.finish_us + costs.write_us if copies else 0.0
    records: dict[Key, Record] = {}
    for key, record in profile.records.items():
        if not isinstance(key, FenceKey):
            records[key] = record
        elif key.strategy == strategy:
            records[key] = replace(record, values={**record.values, RETURN_VALUE: back_us})
    return Profile(profile.description, records, profile.runs)

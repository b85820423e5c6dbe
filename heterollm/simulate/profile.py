"""Profiles of simulated devices, measured on their virtual clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from heterollm.base import LABEL, Progress, cache_name, locked, own_folder
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import kernel_source_hash, source_hash
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim import SIMULATED
from heterollm.model import ModelConfig, shape_of_specs
from heterollm.profiler import SessionOptions, profile_device, profile_for
from heterollm.profiler.records import Profile
from heterollm.solver import NPU_ATTENTION, NPU_EXPERTS, SHADOW_ATTENTION, Technique


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
    measured = [name for name in (SHADOW_ATTENTION, NPU_EXPERTS, NPU_ATTENTION) if name in techniques]
    words = " ".join((model, *measured, LABEL, device.name.removeprefix(SIMULATED)))
    path = own_folder("profiles") / LABEL / f"{cache_name(words, device.fingerprint() + key)}.json"
    # Parallel cases that lack the same profile would each measure it; the profile's own lock is for a write.
    with locked(path.with_suffix(".measured")):
        profile = profile_for(device, path)[0]
        if any(run["finished"] for run in profile.runs.values()):
            return profile
        options = SessionOptions.of(
            budget_s=None,
            update=True,
            sparse_attention=SHADOW_ATTENTION in measured,
            expert_graphs=NPU_EXPERTS in measured,
            attention_graphs=NPU_ATTENTION in measured,
        )
        return profile_device(device, [shape], options, path=path, progress=progress)[0]

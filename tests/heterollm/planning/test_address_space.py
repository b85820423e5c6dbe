"""The plan of a large model keeps within the memory that the NPU can address, and serves every length."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from heterollm.base import GIB, silent
from heterollm.kernels.device import NPU_MEMORY, fingerprint_of
from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import fits_domains
from heterollm.kernels.ops import GraphMemory, Phase, Precision, ffn_specs
from heterollm.kernels.sim import Simulation
from heterollm.model import find_model, op_specs
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solve_plan
from heterollm.simulate.profile import profile_of
from heterollm.solver import Plan, PlanRequest

PROMPTS = (32, 64, 100, 128, 256, 300, 512, 1024)
PRECISION: Precision = "w4a16"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ProfiledModel:
    """Llama-3-8B on a simulated SoC that addresses 4 GiB."""
    found = find_model("llama-3-8b")
    specs = op_specs(found.config, PRECISION, 128, True)
    overrides = {"npu.address_space_gib": 4.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        device = open_device("sim:snapdragon-8gen3-paper", simulation=Simulation(overrides=overrides))
        profile = profile_of(device, "llama-3-8b", found.config, specs, silent)
    return ProfiledModel(profile, found.config, specs, PRECISION)


@pytest.fixture(scope="module")
def rate(model: ProfiledModel) -> Callable[[Plan, int], float]:
    """Return tokens a second of a prompt, or of decode at 1 token."""

    def tokens_per_s(plan: Plan, prompt: int) -> float:
        if prompt == 1:
            token = model.predict(plan, "decode", 1)
            assert token is not None
            return token.tokens_per_s
        passes = [
            model.predict(plan, "prefill", tokens, position=first) for first, tokens in plan.chunks(prompt)
        ]
        return prompt / sum(found.time_us for found in passes if found is not None)

    return tokens_per_s


def test_the_default_plan_fits_and_serves_all_lengths(
    model: ProfiledModel, rate: Callable[[Plan, int], float]
) -> None:
    assert model.profile.addressable_bytes == 4 * GIB
    everything = solve_plan(model, PlanRequest(npu_gib=1000.0)).plan
    assert model.npu_bytes(everything) > 4 * GIB
    plan = solve_plan(model, PlanRequest()).plan
    assert 2 * GIB < model.npu_bytes(plan) <= 4 * GIB
    # A plan for prompts of 256 tokens alone is worse for most prompts, and no better at decode.
    narrow = solve_plan(model, PlanRequest(histogram={1: 16.0, 256: 1.0})).plan
    gains = {prompt: rate(plan, prompt) / rate(narrow, prompt) for prompt in (1, *PROMPTS)}
    assert math.prod(gains[prompt] for prompt in PROMPTS) > 1.0, gains
    assert min(gains.values()) > 0.9, gains
    # Decode takes little memory, so the limit costs it nothing.
    assert rate(plan, 1) == pytest.approx(rate(everything, 1), rel=1e-3)
    # With a graph for every length and no limit no prompt is more than twice as fast.
    assert all(rate(everything, prompt) < 2.0 * rate(plan, prompt) for prompt in (1, *PROMPTS))


@pytest.mark.parametrize(("domain_gib", "domains"), [(3.5, 2), (2.0, 2), (1.25, 4), (0.75, 3), (0.25, 3)])
def test_each_context_lies_in_a_process_domain(model: ProfiledModel, domain_gib: float, domains: int) -> None:
    domain_bytes = int(domain_gib * GIB)
    memory = {"npu_addressable_bytes": domain_bytes, NPU_MEMORY: domains * domain_bytes}
    described = {**model.profile.description, **memory}
    own = replace(model, profile=replace(model.profile, description=described))
    assert own.profile.addressable_bytes == domains * domain_bytes
    plan = solve_plan(own, PlanRequest()).plan
    sizes = own.context_sizes(plan)
    assert fits_domains(sizes, domains * domain_bytes, domain_bytes)
    if domain_gib > 1.0:
        assert sum(sizes) > domain_bytes  # more than one of them is used
    # A profile is that of the same device, whatever its NPU was found to hold.
    assert own.profile.fingerprint == fingerprint_of({**described, NPU_MEMORY: domain_bytes})


def test_lengths_that_share_weights_leave_room_for_more(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Weights count once for a slice, inputs and outputs for each of its lengths."""
    found = find_model("llama-3-8b")
    specs = op_specs(found.config, PRECISION, 128, True)
    plans, held = {}, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        for shared in (0, 1):
            simulation = Simulation(overrides={"npu.shared_contexts": float(shared)})
            device = open_device("sim:snapdragon-8gen3", simulation=simulation)
            profile = profile_of(device, "llama-3-8b", found.config, specs, silent)
            assert profile.graph_memory.copies_by_length is not bool(shared)
            assert profile.graphs_by_length
            model = ProfiledModel(profile, found.config, specs, PRECISION)
            plan = plans[shared] = solve_plan(model, PlanRequest()).plan
            by_group: dict[str, int] = {}
            io_bytes = 0
            for slice_ in plan.slices:
                for spec in (*specs, *ffn_specs(specs)):
                    if spec.group == slice_.group and slice_.layers[0] <= spec.layer <= slice_.layers[1]:
                        copies = 1 if shared else len(slice_.lengths)
                        weights = spec.slice_bytes(slice_.npu_rows) * copies
                        by_group[spec.group] = by_group.get(spec.group, 0) + weights
                        outputs = sum(slice_.npu_rows) if spec.then is None else spec.then.rows
                        io_bytes += sum(slice_.lengths) * (spec.columns + outputs) * 2
            assert model.npu_bytes(plan) == sum(by_group.values()) + io_bytes <= 3.5 * GIB
            held[shared] = sum(
                len(slice_.lengths) * (slice_.layers[1] - slice_.layers[0] + 1) for slice_ in plan.slices
            )
    assert held[1] > held[0]
    # The plan with shared weights would not fit with a copy for each length.
    assert plans[1].npu_bytes(specs, GraphMemory(True, 2)) > 3.5 * GIB


@pytest.mark.parametrize("gib", [0.0, 0.5, 3.0, 3.5, 8.0])
def test_every_limit_is_kept_and_no_pass_is_slower_than_on_the_gpu_alone(
    model: ProfiledModel, gib: float
) -> None:
    plan = solve_plan(model, PlanRequest(npu_gib=gib)).plan
    assert model.npu_bytes(plan) <= gib * GIB
    assert plan.uses_npu is bool(gib)
    gpu = plan.without_npu()
    passes: list[tuple[Phase, int]] = [("decode", tokens) for tokens in range(1, 17)]
    passes += [("prefill", tokens) for tokens in (*range(2, 64, 7), *range(64, 1025, 61), *PROMPTS)]
    for phase, tokens in passes:
        own, alone = (model.predict(one, phase, tokens) for one in (plan, gpu))
        assert own is not None
        assert alone is not None
        assert own.time_us <= alone.time_us * (1.0 + 1e-9), (phase, tokens)

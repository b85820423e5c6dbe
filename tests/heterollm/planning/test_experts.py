"""The technique npumoe in plans: only asked for, by calibrated loads, within memory, and where it pays."""

import dataclasses

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import CalibrationError, OptionError
from heterollm.calibration import RoutingCalibration
from heterollm.kernels.devices import open_device
from heterollm.model import ModelConfig, op_specs
from heterollm.planning import LoadOptions, ProfiledModel, expert_loads
from heterollm.planning.techniques import experts
from heterollm.planning.techniques.experts import ON_GPU, UNMEASURED, npu_bytes_left
from heterollm.planning.techniques.llm_npu import check_technique
from heterollm.profiler.records import Profile
from heterollm.report import console
from heterollm.report.plan_experts import experts_report
from heterollm.solver import (
    EXPERTS_ON_GPU,
    ExpertPrices,
    ExpertsRequest,
    Plan,
    PlannedExperts,
    PlanRequest,
    check_plan,
    estimate_experts,
    level_plan,
    model_shape,
)

EXPERTS, CHOSEN, CHUNK = 8, 2, 256
REQUEST = PlanRequest(techniques=("npumoe",))
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "norm_topk_prob": True,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}


def experts_in(plan):
    return plan.technique(PlannedExperts)


def prices(tokens, *, launch_us=30.0, npu_row_us=0.2):
    rows = np.arange(1024.0)
    return ExpertPrices(
        lambda size, capacity: launch_us + size * capacity * npu_row_us,
        np.where(rows > 0, 20.0 + 1.5 * rows, 0.0),
        (32, 64, 128, 256),
        expert_bytes=27_648,
        row_bytes=1024,
        gpu_base_us=float(tokens),
        hand_over_us=20.0,
    )


@dataclasses.dataclass(frozen=True)
class Priced(ProfiledModel):
    """A model whose experts have prices without a measurement."""

    measured: bool = True

    def expert_prices(self, tokens):
        return prices(tokens) if self.measured else None


@pytest.fixture(scope="module")
def model():
    config = ModelConfig.from_dict(CONFIG)
    device = open_device("sim:snapdragon-8gen3")
    profile = Profile.of(device)
    return Priced(profile, config, op_specs(config, "w4a16", 32, True), "w4a16")


@pytest.fixture(scope="module")
def linears(model):
    plan = level_plan(
        "layer",
        model.specs,
        device="d",
        precision="w4a16",
        standard_lengths=(32, 64, 128, 256),
        chunk_length=CHUNK,
    )
    return structs.replace(plan, shape=model_shape(model.every_spec))


def routing(seed=0, layers=2, chunks=4, experts=EXPERTS):
    """Loads of windows of 256 tokens; some experts are far more popular."""
    draw = np.random.default_rng(seed)
    found = []
    for layer in range(layers):
        popularity = np.log(0.9 * draw.dirichlet(np.full(experts, 0.4)) + 0.1 / experts)
        scores = popularity + draw.gumbel(size=(4, chunks, 64, experts))
        counts = (scores.argsort(axis=-1).argsort(axis=-1) >= experts - CHOSEN).sum(axis=2)
        windows = tuple(tuple(tuple(chunk) for chunk in window) for window in counts.tolist())
        found.append(RoutingCalibration(layer, windows))
    return tuple(found)


def placed(model, linears, request=REQUEST, seed=0):
    return experts.placed(model, linears, request, routing(seed))


def groups_of(plan, tokens=CHUNK):
    return [
        {
            expert: group.capacity
            for group in experts_in(plan).of(tokens, layer).groups
            for expert in group.experts
        }
        for layer in range(2)
    ]


@pytest.mark.parametrize("tokens", [1, 40, 64, 100, 192, 256, 700])
def test_loads_of_any_length_keep_the_shares(tokens):
    for own, loads in zip(routing(), expert_loads(routing(), tokens).values(), strict=True):
        assert (loads <= tokens).all()
        assert loads.sum(axis=1) == pytest.approx(tokens * CHOSEN, abs=EXPERTS)
        if tokens in (64, 192, 256):
            assert (loads == own.loads(tokens)).all()


def test_without_the_technique_nothing_changes(model, linears):
    request = PlanRequest()
    assert experts.placed(model, linears, request, routing()) is linears
    assert experts.calibrated("no file", model.config, request) is None


@pytest.mark.parametrize("seed", range(4))
def test_experts_are_placed_where_they_gain(model, linears, seed):
    plan = placed(model, linears, seed=seed)
    assert experts_in(plan).is_active
    assert plan.with_technique(PlannedExperts(())) == linears
    assert Plan.from_json(plan.to_json()) == plan
    check_plan(plan, model.every_spec, open_device("sim:snapdragon-8gen3").npu, longest=1024, head_rows=1)
    for layer, entry in [
        (layer, e) for layer in range(2) for e in experts_in(plan).entries if e.holds(layer)
    ]:
        for tokens in entry.lengths:
            loads = expert_loads(routing(seed), tokens)[layer]
            own, alone = (
                estimate_experts(one, loads, prices(tokens)).time_us
                for one in (entry.placement, EXPERTS_ON_GPU)
            )
            assert own < 0.9 * alone


def test_shorter_passes_run_the_experts_of_whole_chunks_or_none(model, linears):
    plan = placed(model, linears)
    whole = groups_of(plan)
    seen = set()
    for tokens in range(1, CHUNK + 1):
        for layer, own in enumerate(groups_of(plan, tokens)):
            assert own.keys() in (set(), whole[layer].keys())
            assert all(capacity <= whole[layer][expert] for expert, capacity in own.items())
            seen.add(tuple(own.values()))
    assert () in seen  # the shortest passes gain nothing
    assert len(seen) > 3  # and longer ones run smaller graphs


def test_the_budget_counts_linear_layers_first_and_graphs_of_all_lengths(model, linears):
    free = placed(model, linears)
    for share in (0.0, 0.3, 0.7, 1.0):
        taken = model.npu_bytes(linears)
        wanted = experts_in(free).npu_bytes(model.every_spec, model.profile.graph_memory)
        request = structs.replace(REQUEST, npu_gib=(taken + share * wanted) / 2**30)
        plan = placed(model, linears, request)
        left = npu_bytes_left(model, linears, request)
        assert left == pytest.approx(share * wanted, abs=2)
        assert experts_in(plan).npu_bytes(model.every_spec, model.profile.graph_memory) <= left
        assert experts_in(plan).is_active is (share > 0)


def test_padded_capacities_hold_all_calibrated_loads(model, linears):
    request = structs.replace(REQUEST, experts=ExpertsRequest("pad"))
    plan = placed(model, linears, request)
    for tokens in (CHUNK, 192, 128, 64):
        for own, loads in zip(groups_of(plan, tokens), expert_loads(routing(), tokens).values(), strict=True):
            assert all(loads[:, expert].max() <= capacity for expert, capacity in own.items())


def test_notes_say_why_experts_are_not_on_the_npu(model, linears):
    unmeasured = dataclasses.replace(model, measured=False)
    note = UNMEASURED.format("w4a16")
    assert experts.notes(unmeasured, placed(unmeasured, linears), REQUEST) == (note,)
    (note,) = experts.notes(model, linears, REQUEST)
    assert "gains too little in passes of up to 256 tokens" in note
    assert experts.notes(model, placed(model, linears), REQUEST) == ()
    drop = structs.replace(REQUEST, experts=ExpertsRequest("drop"))
    (note,) = experts_in(placed(model, linears, drop)).notes
    assert "dropped" in note
    if model.limits is not None:
        assert experts.notes(model, linears, PlanRequest()) == (ON_GPU,)


@pytest.mark.parametrize("overflow", ["gpu", "drop"])
def test_the_report_says_which_experts_live_where_and_why(model, linears, overflow):
    request = structs.replace(REQUEST, experts=ExpertsRequest(overflow))
    free = placed(model, linears, request)
    half = experts_in(free).npu_bytes(model.every_spec, model.profile.graph_memory) / 2
    tight = structs.replace(request, npu_gib=(model.npu_bytes(linears) + half) / 2**30)
    for asked, fits in ((request, True), (tight, False)):
        plan = structs.replace(placed(model, linears, asked), request=asked)
        parts = experts_report(model, plan, routing(), explain=True)
        text = " ".join(" ".join(console.render(part, width=200).split()) for part in parts)
        for layer in range(2):
            for group in experts_in(plan).of(CHUNK, layer).groups:
                assert f"{', '.join(map(str, group.experts))} @ {group.capacity}" in text
        assert ("dropped" in text) is (overflow == "drop")
        assert ("all experts that pay fit" in text or "there is no limit" in text) is fits
        assert ("Without the limit" in text) is not fits


def test_the_technique_needs_a_calibration_and_a_level_with_the_npu():
    for level in ("auto", "tensor", "block", "layer", "npu"):
        check_technique(REQUEST, "w4a16", level, calibrated=False, routed=True)
        with pytest.raises(OptionError, match="needs calibrated loads of experts") as caught:
            check_technique(REQUEST, "w4a16", level, calibrated=False)
        assert "heterollm calibrate" in caught.value.fix
    for level in ("gpu", "of a file"):
        with pytest.raises(OptionError, match="uses the NPU, and plan"):
            check_technique(REQUEST, "w4a16", level, calibrated=True, routed=True)


def test_loads_of_experts_need_no_stepped_scales():
    options = LoadOptions(request=REQUEST, calibration="file")
    assert options.weights_calibration is None
    assert LoadOptions(request=REQUEST, calibration="file", scales="stepped").weights_calibration == "file"
    for techniques in ((), ("npumoe", "shadowattn")):
        with pytest.raises(OptionError, match="stepped scales"):
            LoadOptions(request=PlanRequest(techniques=techniques), calibration="file")


def test_dense_layers_have_no_experts_to_place(model, monkeypatch):
    """Layers 0 and 2 are sparse; records of layers 0 and 1 are another model's."""
    config = ModelConfig.from_dict({**CONFIG, "num_hidden_layers": 3, "mlp_only_layers": [1]})
    model = dataclasses.replace(model, config=config, specs=op_specs(config, "w4a16", 32, True))
    given = {"device": "d", "precision": "w4a16", "standard_lengths": (32, 64, 128, 256)}
    linears = level_plan("layer", model.specs, chunk_length=CHUNK, **given)
    records = tuple(structs.replace(one, layer=2 * one.layer) for one in routing())
    plan = experts.placed(model, linears, REQUEST, records)
    assert {layer for entry in experts_in(plan).entries for layer in entry.layers} == {0, 2}
    plan = structs.replace(plan, shape=model_shape(model.every_spec), request=REQUEST)
    check_plan(plan, model.every_spec, open_device("sim:snapdragon-8gen3").npu, longest=1024, head_rows=1)
    parts = experts_report(model, plan, records, explain=True)
    assert "experts of 2 of 2 layers" in " ".join(console.render(parts[0], width=200).split())
    monkeypatch.setattr("heterollm.planning.techniques.experts.routing_of", lambda _path: records)
    assert experts.calibrated("file", config, REQUEST) == records
    monkeypatch.setattr("heterollm.planning.techniques.experts.routing_of", lambda _path: routing())
    with pytest.raises(CalibrationError, match="8 experts in 2 layers"):
        experts.calibrated("file", config, REQUEST)


@pytest.mark.parametrize(
    ("changes", "found", "error", "message"),
    [
        ({}, (), CalibrationError, "has no loads of this model's 8 experts in 2 layers"),
        ({}, routing(layers=1), CalibrationError, "has no loads of this model's 8 experts in 2 layers"),
        ({}, routing(experts=4), CalibrationError, "has no loads of this model's 8 experts in 2 layers"),
        ({"num_experts": 0}, (), OptionError, "is for mixtures of experts"),
    ],
)
def test_a_calibration_of_another_model_is_refused(monkeypatch, changes, found, error, message):
    monkeypatch.setattr("heterollm.planning.techniques.experts.routing_of", lambda _path: found)
    config = dict(CONFIG)
    if changes:
        words = ("moe", "expert", "topk")
        dense = {key: value for key, value in CONFIG.items() if not any(word in key for word in words)}
        config = {**dense, "model_type": "qwen3"}
    with pytest.raises(error, match=message):
        experts.calibrated("file", ModelConfig.from_dict(config), REQUEST)

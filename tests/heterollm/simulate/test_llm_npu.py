"""The technique llm.npu on simulated SoCs: its assumptions, and what it refuses."""

import json

import pytest

from heterollm.base import OptionError
from heterollm.cli import main
from heterollm.model import find_model, op_specs
from heterollm.simulate import SimulationRequest, simulate
from heterollm.simulate.inputs import assumed_shadows
from heterollm.solver import Plan, level_plan, with_shadows

SMALL, PAPER = "qwen1.5-0.5b", "snapdragon-8gen3-paper"


def case(name, **options):
    return SimulationRequest(
        SMALL, soc=PAPER, **({"prompt": 512, "decode": 0, "level": "layer", "techniques": (name,)} | options)
    )


def test_pruning_makes_shadows_cheaper():
    times = [simulate(case("llm.npu", prompt=256, pruned=share)).prefill.elapsed_us for share in (0, 0.5, 1)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_the_outermost_layers_keep_their_shadows():
    specs = op_specs(find_model("qwen1.5-1.8b").config, "w8a8", 128, True)
    found = assumed_shadows(specs, case("llm.npu"))
    assert {layer for layer, _ in found} == {0, 1, 22, 23}
    assert {group for _, group in found} == {"qkv", "o", "gate_up", "down"}
    assert not assumed_shadows(specs, case("llm.npu", pruned=1.0))
    assert len(assumed_shadows(specs, case("llm.npu", pruned=0.0))) == 24 * 4
    # Channels with outliers are a share of the inputs.
    wide = assumed_shadows(specs, case("llm.npu", outlier_share=0.01))
    assert (wide[0, "qkv"].hot, wide[0, "down"].hot) == (20, 55)


def test_only_integer_graphs_of_the_named_operators_get_a_shadow():
    specs = op_specs(find_model(SMALL).config, "w8a8", 128, True)
    plan = level_plan("layer", specs, device="d", precision="w8a8", standard_lengths=(256,), chunk_length=256)
    shadowed = {(0, "qkv"), (3, "qkv"), (23, "down")}
    found = with_shadows(plan, shadowed)
    for phase in ("prefill", "decode"):
        for spec, placement in found.operators(phase, 100, specs):
            assert placement.shadow == (phase == "prefill" and (spec.layer, spec.group) in shadowed)
    assert with_shadows(plan, ()) == plan


def test_splits_of_heterollm_run_with_integers_of_llm_npu():
    result = simulate(case("llm.npu", level="tensor", prompt=1024, plan_for="prompt"))
    forms = {
        entry.placement.form
        for entry in result.plan.placed
        if entry.phase == "prefill" and entry.group != "head"
    }
    assert forms <= {"static_int8", None}
    assert "static_int8" in forms
    assert any(sum(entry.placement.npu_rows) > 0 for entry in result.plan.placed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"level": "gpu"}, "none of level gpu"),
        ({"level": "block"}, "none of level block"),
        ({"calibrated": True}, "assumes weights"),
        ({"in_flight": 4}, "number of chunks in flight"),
        ({"pruned": 1.5}, "is pruned"),
        ({"outlier_share": -0.1}, "of the channels has outliers"),
        ({"techniques": ("llm.npu", "npumoe")}, "do not combine"),
        ({"techniques": ("other",)}, "no technique 'other'"),
    ],
)
def test_what_a_technique_cannot_have_is_refused(changed, message):
    with pytest.raises(OptionError, match=message):
        case("llm.npu", **changed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--technique", "llm.npu"], "needs weights of precision w8a8"),
        (["--technique", "llm.npu", "--precision", "w8a8"], "needs calibrated ranges"),
    ],
)
@pytest.mark.parametrize("command", [["plan", "MODEL"], ["generate", "MODEL", "text"]])
def test_commands_refuse_a_technique_by_name(command, options, message, capsys):
    assert main([*command, "--device", "host", *options]) != 0
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown.replace(" │ │ ", " ")


def test_a_plan_of_an_older_version_keeps_its_technique():
    plan = simulate(case("llm.npu", prompt=64)).plan
    data = json.loads(plan.to_json())
    data["request"]["passes"] = data["request"].pop("techniques")
    assert data["request"]["passes"] == ["llm.npu"]
    assert Plan.from_json(json.dumps(data)) == plan


def test_the_chunk_length_follows_the_prompts():
    """Short prompts have short chunks, and prompts of all lengths the 256 tokens of the paper."""
    lengths = [
        simulate(case("llm.npu", prompt=prompt, plan_for="prompt")).plan.chunk_length
        for prompt in (64, 128, 1024)
    ]
    assert lengths == sorted(set(lengths))
    assert simulate(case("llm.npu")).plan.chunk_length == 256


def test_chunks_are_no_longer_than_the_memory_of_the_npu_allows():
    """Graphs of 1024 tokens of Gemma-2B exceed a process domain, and those of 512 fit."""
    request = SimulationRequest(
        "gemma-2b", prompt=1024, decode=0, level="layer", techniques=("llm.npu",), plan_for="prompt"
    )
    found = simulate(request)
    assert found.plan.chunk_length == 512
    assert found.graphs.held_gib < found.graphs.limit_gib

"""A plan is the same with and without the records that ``profile --characterise`` adds."""

from heterollm.kernels.devices import open_device
from heterollm.model import find_model, op_specs, shape_of_specs
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solve_plan
from heterollm.profiler import SessionOptions, profile_device
from heterollm.profiler.records import Profile, SweepKey
from heterollm.solver import PlanRequest


def test_plans_do_not_read_what_characterises_the_device(monkeypatch, tmp_path):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    config = find_model("qwen2.5-0.5b").config
    specs = op_specs(config, "w4a16", 32, True, float_bits=16)
    options = SessionOptions(45.0, quick=True, tune=False, characterise=True)
    device = open_device("sim:snapdragon-8gen3")
    shape = shape_of_specs(config, specs, "qwen")
    profile, _ = profile_device(device, [shape], options, path=tmp_path / "profile.json")
    sweeps = {key for key in profile.records if isinstance(key, SweepKey)}
    assert sweeps
    plain = {key: record for key, record in profile.records.items() if key not in sweeps}
    first, second = (
        solve_plan(ProfiledModel(found, config, specs, "w4a16"), PlanRequest(context=64)).plan
        for found in (profile, Profile(profile.description, plain, profile.runs))
    )
    assert first == second
    assert first.uses_npu

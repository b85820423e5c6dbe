from types import SimpleNamespace

import pytest

from heterollm.base import OptionError
from heterollm.engine import check_emulation
from heterollm.engine.emulation import step_seconds
from heterollm.model import ModelConfig, op_specs
from heterollm.solver import level_plan


@pytest.fixture
def large(model_fields):
    """The specs of a model of 0.1 billion weights."""
    fields = model_fields(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=32000)
    return SimpleNamespace(specs=op_specs(ModelConfig.from_dict(fields), "w4a16", 32, True))


def plan_of(weights, level):
    return level_plan(
        level,
        weights.specs,
        device="emulator",
        precision="w4a16",
        standard_lengths=(1, 32),
        chunk_length=32,
    )


def test_the_estimate_counts_what_the_plan_places_on_the_npu(large):
    assert step_seconds(large, plan_of(large, "gpu")) == 0
    head = next(spec for spec in large.specs if spec.group == "head")
    difference = step_seconds(large, plan_of(large, "npu")) - step_seconds(large, plan_of(large, "layer"))
    assert difference == pytest.approx(head.rows * head.columns * 1.3e-7)


def test_a_large_model_needs_a_flag_only_where_the_npu_is_emulated(large):
    emulated = SimpleNamespace(time_kind="emulated")
    with pytest.raises(OptionError, match=r"about \d+ s.*allow-slow"):
        check_emulation(emulated, large, plan_of(large, "layer"), allow_slow=False)
    check_emulation(emulated, large, plan_of(large, "layer"), allow_slow=True)
    check_emulation(emulated, large, plan_of(large, "gpu"), allow_slow=False)
    check_emulation(SimpleNamespace(time_kind="real"), large, plan_of(large, "npu"), allow_slow=False)

"""Precision w4a8 on the host: the weights of w4a16, activations rounded to int8, the same on both parts."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heterollm.base import DeviceError, PlanError
from heterollm.engine import check_precision
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import GraphShape
from heterollm.kernels.ops import WeightFormat
from heterollm.llm import LLM

TO_FLOAT_DB = 28.0
BETWEEN_PARTS_DB = 40.0
"""Measured 48 dB and more. Equal inputs give both parts equal codes (tests/kernels/npu/test_host.py), but a
difference in the last bit of a float moves a value that lies at a half to the other code, one step of 127."""
EQUAL_CODES_DB = 90.0
PERPLEXITY_COST = 0.02
WINDOWS = 4


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "bench" / "perplexity.py"
    spec = importlib.util.spec_from_file_location("bench_perplexity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def logits(bundled_model: Path, host_llm: Callable[..., LLM], bench: ModuleType) -> Callable[..., Any]:
    def compute(**options: Any) -> NDArray[np.float32]:
        llm = host_llm(bundled_model, **options)
        ids = bench.windows(llm, 1)[0][:90]
        session = llm.session()
        first = session.prefill(ids[:70], all_logits=True)
        return np.concatenate([first, *(session.decode(token)[np.newaxis] for token in ids[70:])])

    return compute


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group_size": 128, "symmetric": False},
        pytest.param({"group_size": 64, "symmetric": False}, marks=pytest.mark.slow),
        pytest.param({"group_size": 128}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_logits_stay_close_to_those_of_float_activations(
    logits: Callable[..., Any], options: dict[str, Any]
) -> None:
    floats = logits(precision="w4a16", **options)
    rounded = logits(precision="w4a8", **options)
    assert TO_FLOAT_DB <= sqnr_db(rounded, floats) < 70, "nothing was rounded"
    for plan in ("npu", "layer"):
        other = logits(precision="w4a8", plan=plan, **options)
        assert sqnr_db(other, rounded) >= BETWEEN_PARTS_DB
        assert max(map(sqnr_db, other, rounded)) >= EQUAL_CODES_DB


def test_perplexity_stays_within_two_percent(
    bench: ModuleType, bundled_model: Path, host_llm: Callable[..., LLM]
) -> None:
    values = {}
    for precision, plan in (("w4a16", "gpu"), ("w4a8", "gpu"), ("w4a8", "npu")):
        llm = host_llm(bundled_model, plan=plan, precision=precision)
        values[precision, plan] = bench.perplexity(llm, bench.windows(llm, WINDOWS))
    exact = values["w4a16", "gpu"]
    for key in (("w4a8", "gpu"), ("w4a8", "npu")):
        assert abs(values[key] / exact - 1) <= PERPLEXITY_COST
        assert values[key] != exact


def test_every_linear_rounds_its_inputs_and_weights_are_those_of_w4a16(
    bundled_model: Path, host_llm: Callable[..., LLM]
) -> None:
    rounded, floats = (host_llm(bundled_model, precision=name)._weights for name in ("w4a8", "w4a16"))
    assert all(spec.integer_inputs for spec in rounded.specs)
    assert not any(spec.integer_inputs for spec in floats.specs)
    assert rounded.specs[-1].weight == WeightFormat(8, 32)
    assert rounded.content_key == floats.content_key
    assert [spec.weight for spec in rounded.specs] == [spec.weight for spec in floats.specs]


def test_a_plan_for_other_activations_is_refused(bundled_model: Path, host_llm: Callable[..., LLM]) -> None:
    plan = host_llm(bundled_model, precision="w4a16").plan
    with pytest.raises(PlanError, match="w4a16"):
        LLM.load(bundled_model, device="host", precision="w4a8", plan=plan)


class FloatOnlyNpu:
    """What Hexagon offers: no form with rounded activations."""

    name = "Hexagon"
    standard_lengths = (1, 32)

    def forms(self, shape: GraphShape, length: int) -> tuple[str, ...]:
        return () if shape.integer_inputs else ("matmul_nbits",)


def test_a_device_that_rounds_nothing_is_refused_by_name(
    bundled_model: Path, host_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = host_llm(bundled_model, precision="w4a8")
    monkeypatch.setattr(llm.device, "npu", FloatOnlyNpu())
    monkeypatch.setattr(llm.device, "name", "emulator")
    with pytest.raises(DeviceError, match=r"emulator cannot run precision w4a8: Hexagon computes int4"):
        check_precision(llm.device, "w4a8", llm._weights.specs)
    plain = host_llm(bundled_model, precision="w4a16")
    check_precision(llm.device, "w4a16", plain._weights.specs)

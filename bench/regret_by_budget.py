"""What do plans lose by predicted times, by the seconds that profiling took?

On simulated devices the true time of every shard is known. Each is profiled on its virtual clock with some
budgets, and each model of the NPU's times predicts from what was measured, as in use: a measured time answers
for itself, and between two measured widths a straight line does. Then each linear layer takes the row split
that the predictions call fastest. Regret is the share by which the true time of that split exceeds that of
the best one, over layers and lengths of the profiled model, and of another whose shapes nobody measured.

Models are those of the product; the interpolation that HeteroLLM's later version has; and boosted trees and a
Gaussian process by scikit-learn, which the product does not have. All times are simulated.

    python bench/regret_by_budget.py --out bench/results/regret_by_budget.jsonl
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self
from unittest import mock

import numpy as np
from conditions import append_rows, origin, script_parser
from numpy.typing import NDArray
from simulated_regret import cuts

from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim import Simulation, soc_of
from heterollm.kernels.sim.soc.gpu_model import gpu_time, linear_work
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.model import find_model, op_specs, shape_of_specs
from heterollm.profiler import SessionOptions, runner, session
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.predictor import Predictor, ProcessorFit, ProcessorPredictor
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import ShapeModel, TimeModel
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.records import LinearPoint, Profile
from heterollm.solver import ProfileCosts
from heterollm.solver.placements import RowsPlacement

SOCS: Final = ("snapdragon-8gen3", "snapdragon-8elite", "snapdragon-x-elite")
PROFILED: Final = "llama-3.2-3b"
UNSEEN: Final = "qwen2-1.5b"
BUDGETS_S: Final = ("quick", 5, 15, 60, 240)
TOKENS: Final = (1, 8, 32, 48, 64, 100, 128, 200, 256, 300, 400, 512, 1024)
FORM: Final = "matmul_nbits"
EPOCH_S: Final = 1e9
"""Begin of the virtual clock, after which records are taken."""

Row = dict[str, Any]


def sizes(points: Sequence[LinearPoint]) -> NDArray[np.float64]:
    """Return the logarithms of tokens, rows, columns and work of shards, ``[n, 4]``."""
    logs = np.log2([(point.tokens, point.rows, point.columns) for point in points])
    return np.column_stack([logs, logs.sum(axis=1)])


@dataclass(frozen=True)
class Fitted:
    """A regression of scikit-learn on logarithms, which the product does not use."""

    name: ClassVar[str]
    model: Any
    before: float

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit the logarithms of times to those of sizes."""
        logs = np.log(times_us)
        return cls(cls.regression(len(points)).fit(sizes(points), logs - logs.mean()), float(logs.mean()))

    @staticmethod
    def regression(count: int) -> Any:  # noqa: ANN401 - scikit-learn is not typed
        """Return the regression for so many points."""
        raise NotImplementedError

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time of a shard."""
        return math.exp(float(self.model.predict(sizes([point]))[0]) + self.before)


class Boosted(Fitted):
    """Boosted trees."""

    name: ClassVar[str] = "boosted trees"

    @staticmethod
    def regression(_count: int) -> Any:  # noqa: ANN401
        """Return 300 small trees."""
        from sklearn.ensemble import GradientBoostingRegressor

        return GradientBoostingRegressor(n_estimators=300, max_depth=3, learning_rate=0.1, random_state=0)


class Gaussian(Fitted):
    """A Gaussian process."""

    name: ClassVar[str] = "Gaussian process"

    @staticmethod
    def regression(_count: int) -> Any:  # noqa: ANN401
        """Return a process with a Matern kernel and a length for each size."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

        kernel = ConstantKernel(1.0) * Matern([2.0] * 4, nu=1.5) + WhiteKernel(1e-4)
        return GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)


MODELS: Final[tuple[type[ShapeModel], ...]] = (StageLinear, Tree, Interpolation, Boosted, Gaussian)


def profiled(soc: str, budget: int | str, folder: Path) -> tuple[Device, Profile]:
    """Return a device and its profile, measured in a budget of its virtual clock."""
    device, found = open_device(f"sim:{soc}", simulation=Simulation()), find_model(PROFILED)
    shape = shape_of_specs(found.config, op_specs(found.config, "w4a16", 128, True), found.name)
    quick = budget == "quick"
    options = SessionOptions.of(budget_s=None if quick else float(budget), quick=quick)
    clock = SimpleNamespace(monotonic=device.now_s, time=lambda: EPOCH_S + device.now_s())
    with (
        mock.patch.object(session, "time", clock),
        mock.patch.object(runner, "time", clock),
        mock.patch.object(session, "run_tasks", partial(runner.run_tasks, clock=device.now_s)),
    ):
        profile, _ = session.profile_device(device, [shape], options, path=folder / f"{soc}.{budget}.json")
    return device, profile


def predicted_by(fitted: Predictor, model: type[ShapeModel]) -> Predictor:
    """Return a predictor whose times of the NPU come from a model."""
    measured = fitted.processors["npu"].measured
    times_us = {point.comparable: found.us for point, found in measured.items()}
    own = ProcessorPredictor(ProcessorFit(TimeModel.fit(model, times_us), ()), measured)
    return Predictor({**fitted.processors, "npu": own}, fitted.layers, fitted.sparse)


def losses(device: Device, costs: ProfileCosts, specs: Sequence[OpSpec]) -> Iterator[float]:
    """Yield the share of time lost in each layer's groups at each length by choosing by predicted times."""
    soc = soc_of(device)

    def true_us(spec: OpSpec, rows: tuple[int, ...], tokens: int, length: int) -> float:
        block, left = spec.weight.block, spec.rows - sum(rows)
        gpu_us = gpu_time(soc, linear_work(left, spec.columns, tokens, block=block)).alone_us if left else 0.0
        if not sum(rows):
            return gpu_us
        return max(gpu_us, npu_time(soc, NpuWork(sum(rows), spec.columns, length, 4, block)).alone_us)

    def seen_us(spec: OpSpec, rows: tuple[int, ...], tokens: int, length: int) -> float:
        left = tuple(all_rows - own for all_rows, own in zip(spec.member_rows, rows, strict=True))
        gpu_us = costs.gpu_us(spec, left, tokens) if sum(left) else 0.0
        return max(gpu_us, costs.npu_us(spec, rows, length, FORM)) if sum(rows) else gpu_us

    for spec, tokens in itertools.product(specs, TOKENS):
        length = next(own for own in device.standard_lengths if own >= tokens)
        placed = (own.npu_rows for own in cuts(spec, length) if isinstance(own, RowsPlacement))
        offered = {rows or (0,) * len(spec.members) for rows in placed}
        cases = [(spec, rows, tokens, length) for rows in sorted(offered)]
        best_us = min(itertools.starmap(true_us, cases))
        yield true_us(*min(cases, key=lambda case: seen_us(*case))) / best_us - 1.0


def rows_of(soc: str, budget: int | str, folder: Path) -> Iterator[Row]:
    """Yield the regret of each model."""
    device, profile = profiled(soc, budget, folder)
    fitted = Predictor.fit(profile)
    used = fitted.processors["npu"].fit.model.name
    for model in MODELS:
        predictor = predicted_by(fitted, model)
        found: Row = {}
        for words, name in (("regret", PROFILED), ("unseen_regret", UNSEEN)):
            config = find_model(name).config
            shape = shape_of_specs(config, op_specs(config, "w4a16", 128, True), name)
            costs = ProfileCosts(profile, shape, predictor=predictor)
            own = list(losses(device, costs, shape.layer))
            found |= {words: statistics.fmean(own), f"{words}_worst": max(own), f"{words}_choices": len(own)}
        yield {
            "soc": soc,
            "budget_s": budget,
            "spent_s": round(device.now_s(), 1),
            "npu_points": len(fitted.processors["npu"].measured),
            "npu_model": model.name,
            "used": model.name == used,
            **found,
        }


def main() -> None:
    """Print and write the rows."""
    out = script_parser(__doc__).parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        for soc, budget in itertools.product(SOCS, BUDGETS_S):
            for row in rows_of(soc, budget, Path(folder)):
                print(json.dumps(row), flush=True)
                append_rows(out, {**origin("regret_by_budget"), **row})


if __name__ == "__main__":
    main()

"""Shows the compiled steps of passes: ``heterollm plan --steps``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterollm.engine import Step
    from heterollm.kernels.ops import Phase
    from heterollm.planning import LoadOptions, Planned


def show_steps(
    model: str,
    planned: Planned,
    prompts: Sequence[int],
    options: LoadOptions,
    *,
    decode: bool,
    as_json: bool,
) -> None:
    """Compile the passes of prompts and of a decoded token, and print their steps.

    A simulated device needs no weights; for a real one the model is loaded.

    Args:
        model: The model argument of the command.
        planned: The plan.
        prompts: Lengths of prompts; long ones run in several passes.
        options: Options that the plan was made with.
        decode: Whether to show a decoded token.
        as_json: Whether to print every step of every layer as JSON.

    Raises:
        HeteroLLMError: The device or the weights are missing.
    """
    from heterollm.base import write_json
    from heterollm.kernels.sim import is_simulated
    from heterollm.report import PassSteps, console, steps_json, steps_report

    plan = planned.plan
    lengths = {tokens for prompt in prompts for _, tokens in plan.chunks(prompt)}
    wanted: list[tuple[Phase, int]] = [("prefill", tokens) for tokens in sorted(lengths)]
    wanted += [("decode", 1)] if decode else []
    if is_simulated(plan.device):
        compiled = _simulated(planned, wanted)
    else:
        compiled = _loaded(model, planned, options, wanted)
    passes = [PassSteps(*one, steps) for one, steps in zip(wanted, compiled, strict=True)]
    if as_json:
        write_json(steps_json(passes))
    else:
        heading = f"{plan.device}, {plan.precision}, level {plan.level}"
        console.present(steps_report(passes, heading))


def _simulated(planned: Planned, wanted: Sequence[tuple[Phase, int]]) -> list[tuple[Step, ...]]:
    from heterollm.base import silent
    from heterollm.engine import Engine
    from heterollm.kernels.devices import open_device
    from heterollm.model import shape_only_weights

    assert planned.model is not None
    assert planned.plan.request is not None
    weights = shape_only_weights(planned.model.config, planned.model.specs)
    device = open_device(planned.plan.device)
    engine = Engine(device, weights, planned.plan, planned.plan.request.context, silent)
    try:
        return [engine.steps(*one) for one in wanted]
    finally:
        engine.close()


def _loaded(
    model: str, planned: Planned, options: LoadOptions, wanted: Sequence[tuple[Phase, int]]
) -> list[tuple[Step, ...]]:
    from heterollm.llm import LLM

    with LLM.load(
        model,
        device=planned.plan.device,
        plan=planned.plan,
        precision=options.precision,
        group_size=options.group_size,
        symmetric=options.symmetric,
        scales=options.scales,
        calibration=options.calibration,
        context=options.context,
        gpu_threads=options.gpu_threads,
        npu_threads=options.npu_threads,
        power=options.power,
    ) as llm:
        return [llm.steps(*one) for one in wanted]

"""Sweeps over simulations: a grid of cases, each on its own, in as many processes as are wanted.

joblib hands out the work, so that a cluster takes a large sweep without new code::

    with joblib.parallel_config(backend="dask"):  # or "ray", once its backend is registered
        rows = run_sweep(requests)

Work items are requests, results are plain rows, and both are the same whoever computes them: the clock is
virtual. Profiles and plans are kept in the cache, which processes of one machine share.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from heterollm.base import HeteroLLMError, OptionError, Progress, silent
from heterollm.kernels.sim import GpuLoad
from heterollm.simulate.request import LengthChoice, SimulatedSync, SimulationRequest
from heterollm.simulate.row import SimulatedRow
from heterollm.simulate.run import needs_profile, profile_ahead, simulate

__all__ = ["LARGEST_SWEEP", "expand", "run_case", "run_sweep"]

LARGEST_SWEEP: Final = 100_000
COVERED: Final = ("npu", "layer")
"""Levels at which the NPU computes whole groups, so that a length policy means something."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def expand(
    base: SimulationRequest,
    *,
    models: Sequence[str] = (),
    socs: Sequence[str] = (),
    prompts: Sequence[int] = (),
    decodes: Sequence[int] = (),
    levels: Sequence[str] = (),
    policies: Sequence[LengthChoice] = (),
    syncs: Sequence[SimulatedSync] = (),
    loads: Sequence[GpuLoad | None] = (),
) -> tuple[SimulationRequest, ...]:
    """Return the cases of a grid, each once, models first.

    Of several length policies only the first is kept for levels that have none, and of several ways to wait
    only the first for ``gpu``, which waits for nobody.

    Args:
        base: What the lists leave open.
        models: Known models, folders or files.
        socs: SoCs that are known by name, or YAML files.
        prompts: Tokens of the prompt.
        decodes: Tokens made after the first.
        levels: Of the plan.
        policies: How lengths without a graph run.
        syncs: How the parts wait for each other.
        loads: Games beside the model.

    Raises:
        OptionError: A value is not legal, or there are too many cases.
    """
    models, socs, levels = models or (base.model,), socs or (base.soc,), levels or (base.level,)
    prompts, decodes, loads = prompts or (base.prompt,), decodes or (base.decode,), loads or (base.load,)
    policies, syncs = policies or (base.length_policy,), syncs or (base.sync,)
    lists = models, socs, prompts, decodes, levels, policies, syncs, loads
    if (cases := math.prod(map(len, lists))) > LARGEST_SWEEP:
        raise OptionError(
            f"The sweep has {cases} cases, more than {LARGEST_SWEEP}.",
            fix="Give shorter lists, or several sweeps.",
        )
    ways = _ways(levels, policies, syncs)
    runs = dict.fromkeys(itertools.product(models, socs, prompts, decodes, ways, loads))
    return tuple(
        replace(
            base,
            model=model,
            soc=soc,
            prompt=prompt,
            decode=decode,
            level=level,
            length_policy=policy,
            sync=sync,
            load=load,
        )
        for model, soc, prompt, decode, (level, policy, sync), load in runs
    )


def _ways(
    levels: Sequence[str], policies: Sequence[LengthChoice], syncs: Sequence[SimulatedSync]
) -> list[tuple[str, LengthChoice, SimulatedSync]]:
    """Return each way to run once: where a choice means nothing, the first value stands for all."""
    found = (
        (level, policy if level in COVERED else policies[0], sync if level != "gpu" else syncs[0])
        for level, policy, sync in itertools.product(levels, policies, syncs)
    )
    return list(dict.fromkeys(found))


def run_case(request: SimulationRequest) -> SimulatedRow:
    """Simulate one case; a failure becomes a row that says why."""
    try:
        return SimulatedRow.of(request, simulate(request))
    except HeteroLLMError as error:
        return SimulatedRow.of(request, error=str(error))
    except Exception as error:  # noqa: BLE001 - one case must not end a sweep of hours; its row is no result
        return SimulatedRow.of(request, error=f"Unexpected {type(error).__name__}: {error}. This is a bug.")


def run_sweep(
    requests: Sequence[SimulationRequest],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    keep: Callable[[SimulatedRow], object] | None = None,
) -> list[SimulatedRow]:
    """Simulate many cases and return their rows in the order of the cases.

    Args:
        requests: The cases.
        jobs: Processes; None leaves it to joblib's context, which means one outside of any.
        progress: Called with a stage's name, steps done and steps in all.
        keep: Called with each row as soon as it and all before it are there, so that a sweep that is
            interrupted leaves them.

    Raises:
        OptionError: The number of processes is not legal, or a case is to be traced.
    """
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise OptionError(f"{jobs!r:.40} processes cannot simulate.", fix="Give at least 1.")
    if any(request.trace for request in requests):
        raise OptionError("A sweep keeps no timelines.", fix="Simulate one case for a timeline.")
    report = progress or silent
    # Profiles come first: cases side by side that lack the same one would each make it.
    _in_parallel(_profiled, _profiled_first(requests), jobs, "profiling", report)
    return _in_parallel(run_case, requests, jobs, "simulating", report, keep)


def _profiled_first(requests: Iterable[SimulationRequest]) -> list[SimulationRequest]:
    """Return one request for each profile that plans need."""
    found: dict[tuple[object, ...], SimulationRequest] = {}
    for request in requests:
        if needs_profile(request):
            overrides = tuple(sorted(request.overrides.items()))
            how = request.head_bits, request.forms, request.left_out
            key = request.model, request.soc, how, overrides
            found.setdefault(key, request)
    return list(found.values())


def _profiled(request: SimulationRequest) -> None:
    """Make a profile; if that fails, the cases that need it say why."""
    try:
        profile_ahead(request)
    except Exception:  # noqa: BLE001, S110 - each case fails on its own, with its reason in its row
        pass


def _in_parallel(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int | None,
    stage: str,
    report: Progress,
    keep: Callable[[Result], object] | None = None,
) -> list[Result]:
    """Return what ``work`` makes of every item, in their order."""
    if not items:
        return []
    from joblib import Parallel, delayed

    # Arrays are never handed over through files, which joblib would pickle.
    try:
        parallel = Parallel(n_jobs=jobs, max_nbytes=None, return_as="generator")
    except ValueError:  # a backend that cannot say when an item is done, such as Ray's
        parallel = Parallel(n_jobs=jobs, max_nbytes=None)
    found: list[Result] = []
    report(stage, 0, len(items))
    for result in parallel(delayed(work)(item) for item in items):
        found.append(result)
        if keep is not None:
            keep(result)
        report(stage, len(found), len(items))
    return found

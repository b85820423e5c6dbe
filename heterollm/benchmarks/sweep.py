"""Sweeps over simulations: a grid of independent cases, in this process, in several, or on a cluster.

A case is a request and its result is a plain row. The clock is virtual, so the rows do not depend on the
machine that computes them. Processes of one machine share the profiles and plans in the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias, TypeVar, get_args

from heterollm.base import HeteroLLMError, OptionError, Progress, silent
from heterollm.benchmarks.modelled import modelled_row
from heterollm.benchmarks.rows import BenchRow
from heterollm.kernels.sim import GpuLoad
from heterollm.simulate import (
    PlanOf,
    SimulatedLengthPolicy,
    SimulatedSync,
    SimulationRequest,
    check_grid,
    needs_profile,
    planned,
    profile_ahead,
    simulated,
    without_idle,
)
from heterollm.solver import NPU_EXPERTS, SHADOW_ATTENTION, Technique

Cluster: TypeAlias = Literal["dask", "ray"]
CLUSTERS: Final[tuple[Cluster, ...]] = get_args(Cluster)

LARGEST_SWEEP: Final = 100_000
Result = TypeVar("Result")

_Map: TypeAlias = Callable[[Callable[[SimulationRequest], Any], Sequence[SimulationRequest]], Iterator[Any]]
"""Calls a function with each request, and yields the results in the order of the requests."""


def expand_simulated(
    base: SimulationRequest,
    *,
    models: Sequence[str] = (),
    socs: Sequence[str] = (),
    prompts: Sequence[int] = (),
    decodes: Sequence[int] = (),
    levels: Sequence[str] = (),
    policies: Sequence[SimulatedLengthPolicy] = (),
    syncs: Sequence[SimulatedSync] = (),
    loads: Sequence[GpuLoad | None] = (),
    techniques: Sequence[tuple[Technique, ...]] = (),
    given: Collection[str] = (),
) -> tuple[SimulationRequest, ...]:
    """Return the cases of a grid, each once, models first.

    Options without effect in a case have their defaults there, such as a length policy at a level that needs
    none.

    Args:
        base: Values of the fields whose list is empty.
        models: Known models, folders or files.
        socs: Names of known SoCs, or YAML files.
        prompts: Tokens of the prompt.
        decodes: Tokens decoded after the first.
        levels: Levels of the plan.
        policies: How lengths without a graph run.
        syncs: How the processors wait for each other.
        loads: Games that use the GPU at the same time.
        techniques: Techniques of a paper over the plan.
        given: Names of options that must have an effect in some case.

    Raises:
        OptionError: A value is not legal, an option has no effect, or there are too many cases.
    """
    models, socs, levels = models or (base.model,), socs or (base.soc,), levels or (base.level,)
    prompts, decodes, loads = prompts or (base.prompt,), decodes or (base.decode,), loads or (base.load,)
    policies, syncs = policies or (base.length_policy,), syncs or (base.sync,)
    techniques = techniques or (base.techniques,)
    lists = models, socs, prompts, decodes, levels, policies, syncs, loads, techniques
    if (cases := math.prod(map(len, lists))) > LARGEST_SWEEP:
        raise OptionError(
            f"The sweep has {cases} cases, more than {LARGEST_SWEEP}.",
            fix="Give shorter lists, or several sweeps.",
        )
    grid = [
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
            techniques=own,
        )
        for model, soc, prompt, decode, level, policy, sync, load, own in itertools.product(*lists)
    ]
    check_grid(grid, given)
    found: list[SimulationRequest] = []
    for request in map(without_idle, grid):
        if request not in found:
            found.append(request)
    return tuple(found)


def run_case(request: SimulationRequest, plan_of: PlanOf = planned) -> BenchRow:
    """Simulate one case; a failure becomes a row that says why."""
    try:
        return modelled_row(request, simulated(request, plan_of=plan_of))
    except HeteroLLMError as error:
        return modelled_row(request, error=str(error))
    except Exception as error:  # noqa: BLE001 - one case must not end a sweep of hours; its row is no result
        return modelled_row(request, error=f"Unexpected {type(error).__name__}: {error}. This is a bug.")


def run_sweep(
    requests: Sequence[SimulationRequest],
    *,
    jobs: int = 1,
    cluster: Cluster | None = None,
    progress: Progress | None = None,
    keep: Callable[[BenchRow], object] | None = None,
    run: Callable[[Any], BenchRow] = run_case,
) -> list[BenchRow]:
    """Simulate many cases and return their rows in the order of the cases.

    Args:
        requests: The cases.
        jobs: Processes of this machine; 1 simulates in this process. A script that asks for more runs the
            sweep under ``if __name__ == "__main__":``.
        cluster: Run the cases on this cluster instead. Its address is in ``DASK_SCHEDULER_ADDRESS`` or
            ``RAY_ADDRESS``; without an address both start workers on this machine.
        progress: Called with a stage's name, steps done and steps in all.
        keep: Called with each row, in order, as soon as it is known, so that an interrupted sweep keeps its
            rows.
        run: Simulates a case.

    Raises:
        OptionError: The number of processes is not legal, a case asks for a trace, or a package is missing.
        HeteroLLMError: A process of the sweep died.
    """
    if type(jobs) is not int or jobs < 1:
        raise OptionError(f"{jobs!r:.40} processes cannot simulate.", fix="Give at least 1.")
    if any(request.trace for request in requests):
        raise OptionError("A sweep keeps no timelines.", fix="Simulate one case for a timeline.")
    report = progress or silent
    # Profiles come first: parallel cases that lack the same profile would each measure it.
    first = _profiled_first(requests)
    with _workers(jobs, cluster) as hand_out:
        _collect(hand_out(_profiled, first), len(first), "profiling", report)
        return _collect(hand_out(run, requests), len(requests), "simulating", report, keep)


def _profiled_first(requests: Iterable[SimulationRequest]) -> list[SimulationRequest]:
    """Return one request for each profile that plans need."""
    found: dict[tuple[object, ...], SimulationRequest] = {}
    for request in requests:
        if needs_profile(request):
            overrides = tuple(sorted(request.overrides.items()))
            how = request.head_bits, request.forms, request.calibrated, request.precision
            measured = [name in request.techniques for name in (SHADOW_ATTENTION, NPU_EXPERTS)]
            key = request.model, request.soc, how, overrides, *measured
            found.setdefault(key, request)
    return list(found.values())


def _profiled(request: SimulationRequest) -> None:
    """Measure a profile; if that fails, the cases that need it say why."""
    try:
        profile_ahead(request)
    except Exception:  # noqa: BLE001, S110 - each case fails on its own, with its reason in its row
        pass


@contextlib.contextmanager
def _workers(jobs: int, cluster: Cluster | None) -> Iterator[_Map]:
    """Yield the function that hands cases to this process, to several processes or to a cluster."""
    if cluster is not None:
        with _on_cluster(cluster) as hand_out:
            yield hand_out
    elif jobs == 1:
        yield map
    else:
        # A spawned process inherits no open device, and this signal handler ends it silently on Ctrl-C.
        pool = ProcessPoolExecutor(
            jobs,
            multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            yield pool.map
        except BrokenProcessPool as error:
            raise HeteroLLMError(
                "A process of the sweep ended before its case was simulated.",
                fix='Give fewer jobs if memory is short; a script needs `if __name__ == "__main__":`.',
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _on_cluster(cluster: Cluster) -> Iterator[_Map]:
    """Yield the function that hands cases to a cluster through joblib.

    Raises:
        OptionError: There is no such cluster, or a package is missing.
    """
    if cluster not in CLUSTERS:
        raise OptionError(f"There is no cluster {cluster!r:.40}.", fix=f"Choose {', '.join(CLUSTERS)}.")
    with contextlib.ExitStack() as stack:
        try:
            from joblib import Parallel, delayed, parallel_config

            if cluster == "dask":
                from distributed import Client

                stack.enter_context(Client())
            else:
                from ray.util.joblib import register_ray

                register_ray()
        except ImportError as error:
            package = "distributed" if cluster == "dask" else "ray"
            raise OptionError(
                f"A sweep on a {cluster.capitalize()} cluster needs {error.name}, which is not installed.",
                fix=f"Run `pip install 'heterollm[cluster]' {package}`.",
            ) from error
        stack.enter_context(parallel_config(backend=cluster))
        # Without a limit joblib would pickle large arrays into files. Ray's backend returns all rows at once.
        parallel = Parallel(max_nbytes=None, return_as="generator" if cluster == "dask" else "list")
        yield lambda work, items: iter(parallel(delayed(work)(item) for item in items))


def _collect(
    found: Iterator[Result],
    count: int,
    stage: str,
    report: Progress,
    keep: Callable[[Result], object] | None = None,
) -> list[Result]:
    """Return the results; report each and pass it to ``keep``."""
    results: list[Result] = []
    if count:
        report(stage, 0, count)
    for result in found:
        results.append(result)
        if keep is not None:
            keep(result)
        report(stage, len(results), count)
    return results

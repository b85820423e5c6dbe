"""Sweeps over simulations: a grid of independent cases, in this process, in several, or on a cluster.

A case is a request and its result is a plain row. The clock is virtual, so the rows do not depend on the
machine that computes them. Processes of one machine share the profiles and plans in the cache.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Final, Literal, TypeAlias, get_args

from heterollm.base import HeteroLLMError, OptionError, OptionFacts, Progress, silent
from heterollm.benchmarks.cases import NOTHING, grid_of
from heterollm.benchmarks.modelled import modelled_row
from heterollm.benchmarks.rows import BenchRow
from heterollm.simulate import PlanOf, SimulationRequest, planned, simulated, without_idle

Cluster: TypeAlias = Literal["dask", "ray"]
CLUSTERS: Final[tuple[Cluster, ...]] = get_args(Cluster)

STAGE: Final = "simulating"

_Map: TypeAlias = Callable[[Callable[[SimulationRequest], Any], Sequence[SimulationRequest]], Iterator[Any]]
"""Calls a function with each request, and yields the results in the order of the requests."""


def expand_simulated(
    base: SimulationRequest, given: OptionFacts = NOTHING, **lists: Sequence[Any]
) -> tuple[SimulationRequest, ...]:
    """Return the cases of a grid, each once; the values of the first list change last.

    Options without effect in a case have their defaults there, such as a length policy at a level that needs
    none.

    Args:
        base: Values of the other fields.
        given: Values of options by name that must have an effect in some case.
        lists: Values of fields of the request.

    Raises:
        OptionError: A value is not legal, an option has no effect, or there are too many cases.
    """
    return without_idle(grid_of(base, lists), given)


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
    with _workers(jobs, cluster) as hand_out:
        return _collect(hand_out(run, requests), len(requests), progress or silent, keep)


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
    found: Iterator[BenchRow], count: int, report: Progress, keep: Callable[[BenchRow], object] | None
) -> list[BenchRow]:
    """Return the rows; report each and pass it to ``keep``."""
    rows: list[BenchRow] = []
    if count:
        report(STAGE, 0, count)
    for row in found:
        rows.append(row)
        if keep is not None:
            keep(row)
        report(STAGE, len(rows), count)
    return rows

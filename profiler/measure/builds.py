"""Build times of NPU graphs: a prior, corrected by the builds of a run.

Time follows the number of weights and hardly the tokens. The prior of QNN was measured with its compiler on
x86-64 (1024 x 1024 to 4096 x 14336, float16 and 4 bits alike), that of ``host`` on one of its cores. Another
processor is faster or slower by a factor, which the first builds of a run give.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.device import Device
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import GraphKey, Record

QNN_GRAPH_S: Final = 0.03
QNN_WEIGHT_S: Final = 3e-8
HOST_GRAPH_S: Final = 0.01
HOST_WEIGHT_S: Final = 4.3e-9


def build_prior_s(device: Device, weights: int) -> float:
    """Return about how long a graph of so many weights takes to build; 0 where none is built in real time."""
    if device.is_simulated or device.npu is None:
        return 0.0
    if device.split.npu_cores and device.npu.time_kind != "emulated":
        return HOST_GRAPH_S + HOST_WEIGHT_S * weights
    return QNN_GRAPH_S + QNN_WEIGHT_S * weights


@dataclass(slots=True)
class BuildPace:
    """Build times of a run beside the prior.

    Attributes:
        graphs: Graphs built so far.
        seconds: Their build time.
        prior_s: Their build time by the prior.
    """

    graphs: int = 0
    seconds: float = 0.0
    prior_s: float = 0.0

    def learn(self, task: Task, records: Iterable[Record]) -> None:
        """Take in the builds of a task, if it had any."""
        built = [
            record.values["build_us"] / 1e6
            for record in records
            if isinstance(record.key, GraphKey) and "build_us" in record.values
        ]
        if built and task.build_s:
            self.graphs += len(built)
            self.seconds += sum(built)
            self.prior_s += task.build_s

    def estimate_s(self, task_s: float, build_s: float) -> float:
        """Return how long work takes with its builds: by the prior before the first, by this run's after it.

        Args:
            task_s: Of the work without builds.
            build_s: Of the builds by the prior.
        """
        return task_s + build_s * (self.seconds / self.prior_s if self.prior_s else 1.0)

"""Votes for the clocks of a Hexagon: high while there is work, none while there is not.

Without a vote the processor sleeps between graphs and wakes for each. A vote holds for all of the processor,
and with a high one the provider polls for answers, so one small session votes for all graphs of the process.
Whether polling reaches the other sessions is unverified. A vote costs a call, so the token loop makes none.
"""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any, Final

import numpy as np

from heterollm.base import HeteroLLMError, scratch_folder
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
from heterollm.kernels.npu.session import runtime_errors
from heterollm.kernels.ops import Power

logger = logging.getLogger(__name__)

DYNAMIC_OPTION: Final = "ep.dynamic.qnn_htp_performance_mode"
MODES: Final[dict[Power, str]] = {"burst": "burst", "balanced": "balanced"}
REST: Final = "low_power_saver"
"""Mode while nothing runs: ``default`` would leave an earlier vote in place."""

SESSION_OPTIONS: Final[dict[Power, dict[str, str]]] = {
    "burst": {"rpc_control_latency": "100"},
    "balanced": {},
    "default": {},
}
"""Options of every session that runs graphs; they are no part of a compiled graph. The latency, in
microseconds, is the one of Qualcomm's own examples."""

ELEMENTS: Final = 32


class QnnPower:
    """The vote of one process; a refused vote is logged once and changes nothing.

    Args:
        target: The Hexagon or its emulator, which accepts votes and has no clocks.
        power: ``burst`` or ``balanced``.

    Attributes:
        problem: Why votes fail; empty if they do not.
    """

    def __init__(self, target: QnnTarget, power: Power) -> None:
        self._target = target
        self._mode = MODES[power]
        self._session: Any = None
        self.problem = ""

    def wake(self) -> None:
        """Vote for the clocks; the first call opens the session."""
        self._vote(self._mode)

    def rest(self) -> None:
        """Take the vote back, if there is one."""
        if self._session is not None:
            self._vote(REST)

    def close(self) -> None:
        """Take the vote back and drop the session. May be called twice."""
        if self._session is not None:
            self.rest()
            self._session = None

    def run_us(self, runs: int) -> float:
        """Return the median microseconds of a graph of one small operator, each run after a pause.

        Args:
            runs: At least 1; the session is open since :meth:`wake`.
        """
        x = np.ones((1, ELEMENTS), np.float16)
        took = []
        for _ in range(runs):
            time.sleep(0.002)
            begin_ns = time.perf_counter_ns()
            self._session.run(None, {"x": x})
            took.append((time.perf_counter_ns() - begin_ns) / 1000)
        return statistics.median(took)

    def _vote(self, mode: str) -> None:
        if self.problem:
            return
        errors: tuple[type[Exception], ...] = (
            AttributeError,
            *runtime_errors(),
        )  # an old ONNX Runtime has no such method
        try:
            if self._session is None:
                self._session = _small_session(self._target)
            self._session.set_ep_dynamic_options({DYNAMIC_OPTION: mode})
        except HeteroLLMError as error:
            self._refused(error.message)
        except errors as error:
            self._refused(str(error))

    def _refused(self, reason: str) -> None:
        self.problem = reason
        logger.warning("The NPU's clocks are left to the system: %s", reason)


def _small_session(target: QnnTarget) -> Any:  # noqa: ANN401 - onnxruntime ships no types
    import onnx

    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT16, [1, ELEMENTS]) for name in "xy"
    )
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "power", [x], [y])
    opset = onnx.helper.make_opsetid("", 21)
    with scratch_folder("heterollm-power-") as folder:
        path = folder / "power.onnx"
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), path)
        return open_session(path, target, "power")

"""Code that all ONNX Runtime backends share: session options, errors, and binding arrays in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError
from heterollm.kernels.npu.linear_graphs import INPUT, OUTPUT
from heterollm.kernels.npu.protocol import check_arrays
from heterollm.kernels.npu.shards import NpuShard

__all__ = ["SessionGraph", "runtime_errors", "session_options"]


@functools.cache
def runtime_errors() -> tuple[type[Exception], ...]:
    """Return all exception types of ONNX Runtime, which share no base class of their own."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    own = [value for value in vars(onnxruntime_pybind11_state).values() if isinstance(value, type)]
    return (RuntimeError, *(kind for kind in own if issubclass(kind, Exception)))


def session_options(threads: int) -> Any:  # noqa: ANN401 - onnxruntime ships no types
    """Return session options without log output; errors raise, waiting threads sleep."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


class SessionGraph:
    """A shard's graph at one length, run by an ONNX Runtime session.

    Args:
        session: An ``InferenceSession`` of a graph from :mod:`heterollm.kernels.npu.graphs`.
        shard: The shard that the graph computes.
        length: Tokens of one run.
        dtype: Element type of the activations.
    """

    __slots__ = ("_dtype", "_label", "_session", "columns", "length", "rows")

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - onnxruntime ships no types
        shard: NpuShard,
        length: int,
        dtype: np.dtype[Any],
    ) -> None:
        self._session = session
        self._label = shard.label
        self._dtype = dtype
        self.length = length
        self.rows = shard.rows
        self.columns = shard.columns

    def bind(self, x: NDArray[Any], y: NDArray[Any]) -> Callable[[], None]:
        """Return a call that runs the graph in place; see :meth:`heterollm.kernels.npu.NpuGraph.bind`."""
        check_arrays(x, y, self, self._label, self._dtype)
        binding = self._session.io_binding()
        binding.bind_ortvalue_input(INPUT, self._shared(x, "input"))
        binding.bind_ortvalue_output(OUTPUT, self._shared(y, "output"))
        # The public method costs 0.3 us more than the private one beneath it, of at least 10.
        run, errors, label = self._session.run_with_iobinding, runtime_errors(), self._label

        def call() -> None:
            try:
                run(binding)
            except errors as error:
                raise GraphError(f"The graph of {label} failed while running: {error}") from error

        return call

    def _shared(self, array: NDArray[Any], what: str) -> Any:  # noqa: ANN401 - onnxruntime ships no types
        import onnxruntime

        value = onnxruntime.OrtValue.ortvalue_from_numpy(array[np.newaxis])
        if value.data_ptr() != array.ctypes.data:
            raise GraphError(
                f"ONNX Runtime copied the {what} of {self._label} instead of sharing its memory."
            )
        return value

"""Code that all ONNX Runtime backends share: session options, errors, and binding arrays in place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from heterollm.base import GraphError
from heterollm.kernels.npu.shards import GraphShard
from heterollm.kernels.npu.tensors import NamedArrays, check_arrays, graph_tensors


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


class HeldSession:
    """An ``InferenceSession`` that its backend may close; it opens again when a graph of it runs.

    Args:
        session: The session, open.
        open_again: Opens it again; None where its backend never closes it.
    """

    __slots__ = ("_bound", "_open_again", "_session")

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - onnxruntime ships no types
        open_again: Callable[[], Any] | None = None,
    ) -> None:
        self._session = session
        self._open_again = open_again
        self._bound: weakref.WeakSet[_BoundGraph] = weakref.WeakSet()

    @property
    def is_open(self) -> bool:
        """Whether the session is open."""
        return self._session is not None

    def session(self) -> Any:  # noqa: ANN401 - onnxruntime ships no types
        """Return the session; open it first if it is closed."""
        if self._session is None:
            assert self._open_again is not None
            self._session = self._open_again()
        return self._session

    def adopt(self, session: Any) -> None:  # noqa: ANN401 - onnxruntime ships no types
        """Take a session that was opened elsewhere."""
        self._session = session

    def close(self) -> None:
        """Close the session; graphs that are bound to it open it again when they run."""
        self._session = None
        for bound in self._bound:
            bound.close()

    def bind(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> _BoundGraph:
        """Return the graph bound to the ``OrtValue`` of each input and output."""
        bound = _BoundGraph(self, inputs, outputs)
        self._bound.add(bound)
        return bound


class _BoundGraph:
    """A graph with its inputs and outputs; while the session is open, :attr:`run` needs no look-up."""

    __slots__ = ("__weakref__", "_held", "_values", "run")

    def __init__(self, held: HeldSession, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        self._held = held
        self._values = inputs, outputs
        self.run: Callable[[], object] = self._open_and_run
        self._open()

    def close(self) -> None:
        """Let go of the session."""
        self.run = self._open_and_run

    def _open(self) -> None:
        session = self._held.session()
        binding = session.io_binding()
        inputs, outputs = self._values
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
        # The public method costs 0.3 us more than the private one beneath it, of at least 10.
        self.run = functools.partial(session.run_with_iobinding, binding)

    def _open_and_run(self) -> None:
        self._open()
        self.run()


class SessionGraph:
    """A shard's graph at one length, run by an ONNX Runtime session.

    Args:
        held: The session of a graph from :mod:`heterollm.kernels.npu.graphs`.
        shard: The shard that the graph computes.
        length: Tokens of one run.
        dtype: Element type of inputs and outputs.
    """

    __slots__ = ("_held", "_label", "tensors")

    def __init__(
        self,
        held: HeldSession,
        shard: GraphShard,
        length: int,
        dtype: np.dtype[Any],
    ) -> None:
        self._held = held
        self._label = shard.label
        self.tensors = graph_tensors(shard, length, dtype)

    def bind(self, inputs: NamedArrays, outputs: NamedArrays) -> Callable[[], None]:
        """Return a call that runs the graph in place; see :meth:`heterollm.kernels.npu.NpuGraph.bind`."""
        check_arrays(inputs, outputs, self.tensors, self._label)
        bound = self._held.bind(self._shared(inputs), self._shared(outputs))
        errors, label = runtime_errors(), self._label

        def call() -> None:
            try:
                bound.run()
            except errors as error:
                raise GraphError(f"The graph of {label} failed while running: {error}") from error

        return call

    def _shared(self, arrays: NamedArrays) -> dict[str, Any]:
        import onnxruntime

        values = {}
        for name, array in arrays.items():
            value = values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array[np.newaxis])
            if value.data_ptr() != array.ctypes.data:
                raise GraphError(
                    f"ONNX Runtime copied {name} of {self._label} instead of sharing its memory."
                )
        return values

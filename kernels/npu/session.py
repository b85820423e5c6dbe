"""Code that all ONNX Runtime backends share: session options, errors, and binding arrays in place."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError
from heterollm.kernels.npu.shards import GraphShard
from heterollm.kernels.npu.tensors import NamedArrays, check_arrays, graph_tensors

QUALCOMM: Final = 0x5143
HOST_ACCESSIBLE: Final = 5
"""Vendor and type of the processors' shared memory, of which ONNX Runtime has no public name."""


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


@functools.cache
def shared_device() -> Any:  # noqa: ANN401 - onnxruntime ships no types
    """Return ONNX Runtime's name of the memory that Qualcomm's processors share."""
    from onnxruntime.capi import _pybind_state

    return _pybind_state.OrtDevice(_pybind_state.OrtDevice.cpu(), HOST_ACCESSIBLE, QUALCOMM, 0)


class InPlace:
    """Shared memory as an input or output of a graph: the NPU uses it where it is.

    Args:
        array: Its view.
    """

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def bind(self, bind: Callable[..., None], name: str) -> None:
        """Call ONNX Runtime's method that binds an address by name."""
        array = self.array
        bind(name, shared_device(), array.dtype.type, [1, *array.shape], array.ctypes.data)


class Handles(Protocol):
    """Shared memory as the context of a session knows it."""

    def in_place(self, array: NDArray[Any], *, is_input: bool) -> InPlace | None:
        """Return an array as it is bound in place; None for one that is bound as the host's memory."""

    def refuse(self, reason: str) -> None:
        """Bind all arrays as the host's memory from now on, after a graph refused another."""


class HeldSession:
    """An ``InferenceSession`` that its backend may close; it opens again when a graph of it runs.

    Args:
        session: The session, open.
        open_again: Opens it again; None where its backend never closes it.
        handles: Shared memory as its context knows it; None where all memory is the host's.
    """

    __slots__ = ("_bound", "_open_again", "_session", "handles")

    def __init__(
        self,
        session: Any,  # noqa: ANN401 - onnxruntime ships no types
        open_again: Callable[[], Any] | None = None,
        handles: Handles | None = None,
    ) -> None:
        self._session = session
        self._open_again = open_again
        self.handles = handles
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
        """Return the graph bound to the ``OrtValue`` or :class:`InPlace` of each input and output."""
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
            if isinstance(value, InPlace):
                value.bind(binding._iobinding.bind_input, name)  # noqa: SLF001 - public ones know no such memory
            else:
                binding.bind_ortvalue_input(name, value)
        for name, value in outputs.items():
            if isinstance(value, InPlace):
                value.bind(binding._iobinding.bind_output, name)  # noqa: SLF001
            else:
                binding.bind_ortvalue_output(name, value)
        # The public method costs 0.3 us more than the private one beneath it, of at least 10.
        self.run = functools.partial(session.run_with_iobinding, binding)
        if any(isinstance(value, InPlace) for value in (*inputs.values(), *outputs.values())):
            self.run = functools.partial(self._try, self.run)

    def _try(self, run: Callable[[], object]) -> None:
        """Run for the first time with shared memory; copy it from now on if the provider refuses it."""
        try:
            run()
        except runtime_errors() as error:
            assert self._held.handles is not None  # nothing else is in place
            self._held.handles.refuse(str(error))
            self._values = tuple(map(_copied, self._values))  # type: ignore[assignment]
            self._open()
            self.run()
        else:
            self.run = run

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

    def __init__(self, held: HeldSession, shard: GraphShard, length: int, dtype: np.dtype[Any]) -> None:
        self._held = held
        self._label = shard.label
        self.tensors = graph_tensors(shard, length, dtype)

    def bind(self, inputs: NamedArrays, outputs: NamedArrays) -> Callable[[], None]:
        """Return a call that runs the graph in place; see :meth:`heterollm.kernels.npu.NpuGraph.bind`."""
        check_arrays(inputs, outputs, self.tensors, self._label)
        bound = self._held.bind(self._values(inputs, is_input=True), self._values(outputs, is_input=False))
        errors, label = runtime_errors(), self._label

        def call() -> None:
            try:
                bound.run()
            except errors as error:
                raise GraphError(f"The graph of {label} failed while running: {error}") from error

        return call

    def _values(self, arrays: NamedArrays, *, is_input: bool) -> dict[str, Any]:
        """Return arrays as they are bound: in place where the context knows them, else by copy on the NPU."""
        handles, values = self._held.handles, dict[str, Any]()
        for name, array in arrays.items():
            own = None if handles is None else handles.in_place(array, is_input=is_input)
            values[name] = own or _host_value(array, f"{name} of {self._label}")
        return values


def _host_value(array: NDArray[Any], what: str) -> Any:  # noqa: ANN401 - onnxruntime ships no types
    import onnxruntime

    value = onnxruntime.OrtValue.ortvalue_from_numpy(array[np.newaxis])
    if value.data_ptr() != array.ctypes.data:
        raise GraphError(f"ONNX Runtime copied {what} instead of sharing its memory.")
    return value


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return bound values with those of the host in place of shared memory."""
    return {
        name: _host_value(value.array, name) if isinstance(value, InPlace) else value
        for name, value in values.items()
    }

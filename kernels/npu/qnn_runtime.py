"""ONNX Runtime's QNN execution provider: its availability, its versions, and sessions on it.

Every session refuses CPU fallback, the most frequent complaint of this provider's users, and its provider is
checked. Nothing heavy is imported before the first session.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from heterollm.base import DeviceError, GraphError, see
from heterollm.kernels.npu.session import runtime_errors, session_options

PROVIDER = "QNNExecutionProvider"

EMULATOR_PLATFORMS = {("Linux", "x86_64")}
HEXAGON_PLATFORMS = {("Linux", "aarch64"), ("Android", "aarch64"), ("Windows", "ARM64")}

LIBRARY_VARIABLE: Final = "HETEROLLM_QNN_LIBRARY"
"""Names the library of the provider where no wheel has it, as on Android; QNN's libraries lie beside it."""

SKEL_VARIABLE: Final = "ADSP_LIBRARY_PATH"
"""Names the folders in which a Hexagon looks for its own libraries."""

UNPLACED = "assigned to the default CPU EP"
"""Text in ONNX Runtime's refusal of a graph that the provider did not take as a whole."""


BACKEND_FAILURE: Final = re.compile(r"SetupBackend failed (.*?)(?:\x1b\[m)?\n")
"""The provider's words in the log where no graph could run, as without a driver."""


MEMORY_REFUSAL: Final = re.compile(
    r"(?i)create(?: context )?from.?binary.{0,80}?(?:MEM_ALLOC|LOADING_BINARIES|\b1002\b|\b1009\b)"
)
"""The provider's words where a context has no room: QNN's errors 1002, in no process domain
(executorch#18862), and 1009, a further domain that the platform does not give (QCM6490)."""


class NoRoomError(GraphError):
    """QNN refused to load a context because no process domain has room for it."""


@dataclass(frozen=True, slots=True)
class QnnTarget:
    """Target of sessions: the emulator or a real Hexagon, with the provider's options.

    Args:
        emulator: Whether to use the emulator in the x86-64 Linux wheel.
        options: Options of the QNN execution provider, which a compiled graph depends on.
        session_options: Further options of the provider, which no compiled graph depends on.
    """

    emulator: bool
    options: dict[str, str] = field(default_factory=dict)
    session_options: dict[str, str] = field(default_factory=dict)


def qnn_available(*, emulator: bool) -> tuple[bool, str, str]:
    """Return whether QNN is available, the version found or the reason, and a fix.

    Only a loaded provider shows a real Hexagon, so that check takes a moment on supported platforms.
    """
    machine = (platform.system(), platform.machine())
    where = " ".join(machine)
    if emulator and machine not in EMULATOR_PLATFORMS:
        text = f"The HTP emulator exists for x86-64 Linux only, not {where}."
        return False, text, "Use the host device."
    if not emulator and machine not in HEXAGON_PLATFORMS:
        text = f"Hexagon NPUs are reached from Windows on Arm, 64-bit Arm Linux or Android, not {where}."
        return False, text, "Use the emulator or host device here."
    try:
        library = stated_library()
    except DeviceError as error:
        return False, error.message, error.fix
    for package in ("onnxruntime",) if library else ("onnxruntime", "onnxruntime_qnn"):
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            command = _install_command() if package == "onnxruntime_qnn" else f"pip install {name}"
            return False, f"{name} is not installed.", f"Run `{command}` (CPython 3.11 to 3.14)."
    version = library or importlib.metadata.version("onnxruntime-qnn")
    if not emulator:
        try:
            _provider_device(emulator=False)
        except DeviceError as error:
            return False, error.message, error.fix
    return True, f"onnxruntime-qnn {version} {'HTP emulator' if emulator else 'on a Hexagon NPU'}", ""


def _install_command() -> str:
    """Return the command that installs onnxruntime-qnn here: an extra, except where it runs a Hexagon."""
    hexagon = (platform.system(), platform.machine()) in HEXAGON_PLATFORMS
    return "pip install onnxruntime-qnn" if hexagon else "pip install 'heterollm[emulator]'"


def stated_library() -> Path | None:
    """Return the library of the provider that the environment names; None for that of onnxruntime-qnn.

    Raises:
        DeviceError: There is no such file.
    """
    stated = os.environ.get(LIBRARY_VARIABLE)
    if not stated:
        return None
    path = Path(stated).expanduser().absolute()
    if not path.is_file():
        raise DeviceError(
            f"{LIBRARY_VARIABLE} names {stated}, which is no file.",
            fix="Name libonnxruntime_providers_qnn.so, with QNN's libraries beside it, or unset it.",
        )
    return path


def _libraries_digest(provider: Path) -> str:
    """Return what changes with the provider's library, or with those beside it by name and size."""
    beside = sorted((own.name, own.stat().st_size) for own in provider.parent.iterdir() if own.is_file())
    return hashlib.sha256(provider.read_bytes() + repr(beside).encode()).hexdigest()[:16]


@functools.cache
def qnn_versions() -> dict[str, str]:
    """Return the versions of ONNX Runtime, of the QNN provider and of the SDK that it was built with.

    A library that the environment names tells neither; its bytes stand for both.

    Raises:
        DeviceError: A package cannot be imported, or there is no such library.
    """
    library = stated_library()
    with _importing():
        import onnxruntime
    if library is not None:
        digest = f"library {_libraries_digest(library)}"
        return {"onnxruntime": onnxruntime.__version__, "onnxruntime-qnn": digest, "qairt": "unknown"}
    with _importing():
        from onnxruntime_qnn import build_and_package_info

    return {
        "onnxruntime": onnxruntime.__version__,
        "onnxruntime-qnn": importlib.metadata.version("onnxruntime-qnn"),
        "qairt": str(getattr(build_and_package_info, "qnn_version", "unknown")),
    }


def open_session(
    model: Path,
    target: QnnTarget,
    label: str,
    *,
    context: Path | None = None,
    log_severity: int = 4,
    sharing: Literal["more", "last"] | None = None,
) -> Any:  # noqa: ANN401 - onnxruntime ships no types
    """Open a session whose every node runs on HTP.

    Args:
        model: A model with static shapes, or the wrapper of a context binary.
        target: Target of the session.
        label: Name of the graph in messages.
        context: Path for the compiled graph (``.onnx``, with ``_qnn.bin`` beside it); None writes none.
        log_severity: 4 is silent; 0 makes the provider log to stderr why it rejects a node.
        sharing: Whether the session shares one context binary with those opened before and, unless it is the
            last one, with those opened next; see :func:`open_context`.

    Raises:
        DeviceError: The provider or its device is missing.
        GraphError: The graph does not compile, load, or run on HTP as a whole.
    """
    import onnxruntime

    device = _provider_device(emulator=target.emulator)
    options = session_options(1)
    options.log_severity_level = log_severity
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if context is not None:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", str(context))
    if sharing is not None:
        options.add_session_config_entry("ep.share_ep_contexts", "1")
        if sharing == "last":
            options.add_session_config_entry("ep.stop_share_ep_contexts", "1")
    options.add_provider_for_devices([device], target.options | target.session_options)
    try:
        with _quiet_stdout(target.emulator):
            session = onnxruntime.InferenceSession(str(model), options, enable_fallback=False)
    except runtime_errors() as error:
        if UNPLACED in str(error) and (reason := _backend_failure(model, options)) is not None:
            raise DeviceError(
                f"QNN cannot set up its backend: {reason}.",
                fix="Check the driver of the NPU and who may open it. " + see("the-hexagon-is-not-found"),
            ) from error
        raise _session_error(label, str(error)) from error
    if PROVIDER not in session.get_providers():
        raise GraphError(f"{label} runs on {session.get_providers()} instead of the NPU.")
    return session


_opening_context = threading.Lock()
"""Held while a context opens: another thread's sessions would take its graphs from the provider's list."""


def open_context(models: Sequence[Path], target: QnnTarget, label: str) -> list[Any]:
    """Open one session for each graph of a context binary; close them last to first.

    The first session loads the binary with all its graphs and leaves those that it does not need in a list of
    the process, from which the next sessions take theirs. So all graphs must be opened at once: one that
    stays in the list makes the provider refuse the binary from then on ("Duplicate graph names"). The graphs
    belong to the first session; once it is closed they fail ("No valid QNN context").

    Args:
        models: The wrappers of all graphs of the binary.
        target: Target of the sessions.
        label: Name of the graphs in messages.

    Raises:
        DeviceError: The provider or its device is missing.
        GraphError: The binary does not load; the process can then not load it again.
    """
    if len(models) == 1:
        return [open_session(models[0], target, label)]
    sessions: list[Any] = []
    with _opening_context:
        try:
            sessions.extend(open_session(model, target, label, sharing="more") for model in models)
        except BaseException:
            while sessions:
                sessions.pop()
            raise
    return sessions


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Turn a failed import of the block into an error that says what to install."""
    try:
        yield
    except ImportError as error:
        raise DeviceError(
            f"onnxruntime-qnn cannot be imported: {error}.",
            fix=f"Run `{_install_command()} --force-reinstall`. {see('the-hexagon-is-not-found')}",
        ) from error


def _backend_failure(model: Path, options: Any) -> str | None:  # noqa: ANN401 - onnxruntime ships no types
    """Return why QNN's backend cannot be set up, which only the log says; None if the graph is the reason."""
    import onnxruntime

    options.log_severity_level = 3
    with tempfile.TemporaryFile() as log:
        with _stderr_into(log.fileno()), contextlib.suppress(*runtime_errors()):
            onnxruntime.InferenceSession(str(model), options, enable_fallback=False)
        log.seek(0)
        text = log.read().decode(errors="replace")
    found = BACKEND_FAILURE.search(text)
    return None if found is None else found[1].strip().rstrip(".")


@contextlib.contextmanager
def _stderr_into(descriptor: int) -> Iterator[None]:
    """Send what native code writes to standard error elsewhere."""
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _session_error(label: str, text: str) -> GraphError:
    if UNPLACED in text:
        return GraphError(
            f"{label} does not run on the NPU as a whole: {text}",
            fix=see("a-graph-does-not-run-on-the-npu-as-a-whole"),
        )
    kind = NoRoomError if MEMORY_REFUSAL.search(text) else GraphError
    return kind(
        f"QNN refused {label}: {text}",
        fix="Run `heterollm doctor`; a context binary must come from the same SDK and SoC. "
        + see("qnn-refuses-a-context-binary"),
    )


def provider_metadata() -> tuple[str, ...]:
    """Return what ONNX Runtime states on this machine's Hexagon; on Windows the driver's name for the chip.

    Raises:
        DeviceError: The provider or its device is missing.
    """
    device = _provider_device(emulator=False)
    stated = {**device.ep_metadata, **device.device.metadata}
    return tuple(text for key, text in stated.items() if key != "library_path")


@functools.cache
def _provider_device(*, emulator: bool) -> Any:  # noqa: ANN401 - onnxruntime ships no types
    """Register the provider once per process and return the device to run on."""
    library = stated_library()
    with _importing():
        import onnxruntime

        if library is None:
            import onnxruntime_qnn

            library = Path(onnxruntime_qnn.get_library_path())
        elif not emulator:
            os.environ.setdefault(SKEL_VARIABLE, str(library.parent))

    onnxruntime.set_default_logger_severity(4)
    try:
        if not any(device.ep_name == PROVIDER for device in onnxruntime.get_ep_devices()):
            onnxruntime.register_execution_provider_library(PROVIDER, str(library))
        devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    except runtime_errors() as error:
        raise DeviceError(
            f"The QNN library does not load: {error}",
            fix="Reinstall onnxruntime-qnn, or install the libraries that it names. "
            + see("the-hexagon-is-not-found"),
        ) from error
    kinds = onnxruntime.OrtHardwareDeviceType
    wanted = kinds.CPU if emulator else kinds.NPU
    for device in devices:
        if device.device.type == wanted:
            return device
    raise DeviceError(
        f"QNN offers {len(devices)} device(s), but no {'emulator' if emulator else 'Hexagon NPU'}.",
        fix="Use the host device."
        if emulator
        else f"Install or update Qualcomm's NPU driver. {see('the-hexagon-is-not-found')}",
    )


_stdout_is_dirty = True


@contextlib.contextmanager
def _quiet_stdout(emulator: bool) -> Iterator[None]:
    """Keep the line that the emulator's native code prints at the first session off standard output."""
    global _stdout_is_dirty
    if not (emulator and _stdout_is_dirty):
        yield
        return
    _stdout_is_dirty = False
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
    except OSError:  # standard output is closed, so nothing can be printed there
        yield
        return
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # the line sits in the C library's buffer, not in Python's
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)

"""Checks of the NPUs' installed software, which open nothing."""

from __future__ import annotations

import importlib.util

from heterollm.base import DeviceError


def require_onnxruntime() -> str:
    """Return the version of ONNX Runtime.

    Raises:
        DeviceError: It is missing, or cannot be imported.
    """
    if importlib.util.find_spec("onnxruntime") is None:
        raise DeviceError("onnxruntime is not installed.", fix="Run `pip install onnxruntime`.")
    try:
        import onnxruntime
    except ImportError as error:
        raise DeviceError(
            f"onnxruntime cannot be imported: {error}.",
            fix="Reinstall it: `pip install --force-reinstall onnxruntime`.",
        ) from error
    return f"onnxruntime {onnxruntime.__version__} CPU provider"


def require_qnn(*, emulator: bool) -> str:
    """Return the version of QNN, with the Hexagon or its emulator.

    Raises:
        DeviceError: It is missing, or finds no Hexagon.
    """
    from heterollm.kernels.npu import qnn_available

    usable, text, fix = qnn_available(emulator=emulator)
    if not usable:
        raise DeviceError(text, fix=fix)
    return text

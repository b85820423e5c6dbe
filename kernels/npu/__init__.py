"""Builds and runs NPU graphs: the backend protocol, the graph builder, ONNX Runtime and QNN."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

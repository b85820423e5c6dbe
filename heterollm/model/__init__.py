"""Describes a model: its configuration, families, operators and weights, read from a checkpoint.

It knows no device, profile or plan; the profiler and all above it ask it for operators.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

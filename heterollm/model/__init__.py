"""Describes a model: its configuration, family, operators and weights, read from a checkpoint.

The profiler and all rooms above it use this room, which knows no device, profile or plan.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

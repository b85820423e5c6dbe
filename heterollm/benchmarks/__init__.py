"""Compares configurations and engines: processes that take turns, and rows with all that happened."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

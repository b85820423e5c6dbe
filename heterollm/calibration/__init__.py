"""Calibrates static ranges: runs a model over text and records the magnitudes at its linears."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

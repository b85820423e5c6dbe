"""Compares configurations and engines: tests in round-robin rounds, and their results as rows."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Operators between linears, a file each: launch, work, oracle, cases, and the sizes to measure."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

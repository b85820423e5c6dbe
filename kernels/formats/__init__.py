"""Defines number formats: quantised tensors, how they are made, and how far results may be off."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Measures a device, keeps the measurements as a profile, and predicts other times from them."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

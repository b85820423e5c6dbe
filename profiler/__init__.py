"""Measures how fast a device is, keeps that as a profile, and predicts what was not measured."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

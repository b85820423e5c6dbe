"""Runs a plan: compiles passes to steps, owns slots and KV caches, and runs the steps' calls."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Runs a plan: compiles passes into prepared calls, owns slots and KV caches, and calls the lists."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

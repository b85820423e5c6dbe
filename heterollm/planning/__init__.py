"""Finds the profile, asks the solver for a model's plan, and keeps it; compiles NPU graphs ahead."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Renders tools and past calls, holds calls to the schemas of their tools, and reads them in answers."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

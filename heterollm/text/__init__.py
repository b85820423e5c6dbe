"""Turns text into tokens and back, samples tokens, and holds the token loop and dialogues."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""Tokenizes and decodes text, measures its likelihood, samples tokens, and runs the token loop of answers."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

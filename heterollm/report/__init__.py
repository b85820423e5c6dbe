"""Renders results for people: tables and panels on a terminal, pages and pictures in files.

Data in, renderables out: nothing here measures, plans or decides.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

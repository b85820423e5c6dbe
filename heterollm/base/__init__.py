"""Holds what every room may import: errors, units, progress, durations, tables and files.

Only the standard library, platform paths and msgspec are imported here.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

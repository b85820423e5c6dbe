"""Tables of the fields of a checkpoint's files: those that are read, have no effect here, or are refused.

A reader checks a file against its table before it reads a field, so that no file is half understood.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

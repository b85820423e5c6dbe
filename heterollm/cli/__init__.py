"""The command line: one module a command, options in, one call, a result on stdout.

A command parses its options; the rooms below do the work, and :mod:`heterollm.report` shows the result.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""The command line: one module a command, options in, one call, a result on stdout.

A command parses and delegates: :mod:`heterollm.report` makes what it shows, the rooms below what it does.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

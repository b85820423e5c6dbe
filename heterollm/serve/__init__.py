"""Serves a loaded model over HTTP: OpenAI's endpoints, a page for a browser, health and metrics.

The event loop reads requests and writes answers; the engine thread computes all of them in turns. Between the
two are bounded buffers. Starlette, uvicorn and prometheus-client are imported here and nowhere else.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

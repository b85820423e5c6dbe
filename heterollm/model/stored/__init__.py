"""Reads weights that a checkpoint stores quantised: GGUF files, and GPTQ, AWQ and compressed-tensors linears.

A stored tensor gives its values in float32, bit for bit those of the format's own reader, and the canonical
quantised tensor, with the same values wherever the number format can hold them.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

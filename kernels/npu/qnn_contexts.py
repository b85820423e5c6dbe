"""The number of layers that share a context, which the compiler ahead and the device must agree on."""

from __future__ import annotations

import os
from typing import Final

from heterollm.base import OptionError

CONTEXT_LAYERS: Final = 1
"""Layers that share a context by default: all lengths of a slice have one context."""

LAYERS_VARIABLE: Final = "HETEROLLM_CONTEXT_LAYERS"


def chosen_context_layers() -> int:
    """Return the number of layers that share a context, by ``$HETEROLLM_CONTEXT_LAYERS``; 0 for none.

    Raises:
        OptionError: The variable is no such number.
    """
    text = os.environ.get(LAYERS_VARIABLE, str(CONTEXT_LAYERS))
    if not (text.isascii() and text.isdigit() and len(text) < 4):
        raise OptionError(
            f"{LAYERS_VARIABLE} is {text!r:.80}.",
            fix="Give the number of layers that share a context, or 0 for contexts of one graph.",
        )
    return int(text)

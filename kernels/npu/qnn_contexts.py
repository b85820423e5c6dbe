"""Numbers of contexts and of process domains, which the compiler ahead and the device must agree on."""

from __future__ import annotations

import os
from typing import Final

from heterollm.base import OptionError

CONTEXT_LAYERS: Final = 1
"""Layers that share a context by default."""

LAYERS_VARIABLE: Final = "HETEROLLM_CONTEXT_LAYERS"

DOMAINS_VARIABLE: Final = "HETEROLLM_NPU_DOMAINS"


def chosen_context_layers() -> int:
    """Return the number of layers that share a context, by ``$HETEROLLM_CONTEXT_LAYERS``; 0 for none.

    Raises:
        OptionError: The variable is no such number.
    """
    return _number(
        *(LAYERS_VARIABLE, CONTEXT_LAYERS, 0),
        "Give the number of layers that share a context, or 0 for contexts of one graph.",
    )


def chosen_process_domains() -> int:
    """Return the number of process domains that QNN may open, by ``$HETEROLLM_NPU_DOMAINS``, else 1.

    Raises:
        OptionError: The variable is no such number.
    """
    return _number(DOMAINS_VARIABLE, 1, 1, "Give the number of process domains of the NPU, at least 1.")


def _number(variable: str, default: int, least: int, fix: str) -> int:
    text = os.environ.get(variable, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 4 and int(text) >= least):
        raise OptionError(f"{variable} is {text!r:.80}.", fix=fix)
    return int(text)

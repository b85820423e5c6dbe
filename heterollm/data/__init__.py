"""Holds data shipped with the package: the bundled model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

BUNDLED_NAME: Final = "tiny-python-lm"
"""The name that commands take for the bundled model."""


def bundled_model() -> Path:
    """Return the folder of the model that comes with the package."""
    return Path(str(resources.files("heterollm.data.tiny_python_lm")))

"""heterollm: language models on a phone-class GPU and NPU at the same time.

    from heterollm import LLM

    with LLM.load("path/or/hub-name") as llm:
        print(llm.generate("import os", max_new_tokens=32).text)

Names are loaded on first use, so importing the package is quick and needs no device.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heterollm.base import HeteroLLMError
    from heterollm.engine import Session
    from heterollm.kernels.open import list_devices
    from heterollm.llm import LLM
    from heterollm.solver import Plan
    from heterollm.text import GenerationResult, GenerationStep

__all__ = [
    "LLM",
    "GenerationResult",
    "GenerationStep",
    "HeteroLLMError",
    "Plan",
    "Session",
    "__version__",
    "list_devices",
]

__version__ = version("heterollm")

_HOMES = {
    "LLM": "heterollm.llm",
    "GenerationResult": "heterollm.text.generation",
    "GenerationStep": "heterollm.text.generation",
    "HeteroLLMError": "heterollm.base.errors",
    "Plan": "heterollm.solver.plan",
    "Session": "heterollm.engine.session",
    "list_devices": "heterollm.kernels.open",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the public names
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'heterollm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__

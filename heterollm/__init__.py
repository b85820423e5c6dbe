"""heterollm: language models on a phone-class GPU and NPU at the same time.

    from heterollm import LLM

    with LLM.load("path/or/hub-name") as llm:
        print(llm.generate("import os", max_new_tokens=32).text)

The package loads names on first use, so that importing it is quick and needs no device.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import lazy_loader

# ONNX Runtime reads this variable at its first import, here or in a child process. Without it the library
# keeps a device id and a queue of events for its vendor under the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]

__version__ = version("heterollm")

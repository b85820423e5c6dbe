"""heterollm: language models on a phone-class GPU and NPU at the same time.

    from heterollm import LLM

    with LLM.load("path/or/hub-name") as llm:
        print(llm.generate("import os", max_new_tokens=32).text)

Names are loaded on first use, so importing the package is quick and needs no device.
"""

from __future__ import annotations

import os
from importlib.metadata import version

import lazy_loader

# ONNX Runtime reads this when it is first imported, here or in a child process, and else keeps a device id
# and a queue of events for its vendor under the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]

__version__ = version("heterollm")

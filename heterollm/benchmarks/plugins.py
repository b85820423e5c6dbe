"""Finds engines other than heterollm itself.

A plug-in is an entry point of the group ``heterollm.engines``: a callable that takes a ``Job`` and returns a
``BenchEngine``, both of :mod:`heterollm.benchmarks.engine`. Those in the checkout's ``bench/engines`` need
no installation: their ``pyproject.toml`` names the entry points, and pip records where the checkout is.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, distribution, entry_points
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

from heterollm.base import DeviceError, OptionError


def _checkout() -> Path:
    """Return the folder that heterollm runs in, or that `pip install .` installed it from."""
    beside = Path(__file__).resolve().parents[2]
    record = json.loads(distribution("heterollm").read_text("direct_url.json") or "{}")
    origin = urlsplit(record.get("url", ""))
    return Path(url2pathname(origin.path)) if origin.scheme == "file" else beside


GROUP: Final = "heterollm.engines"
CHECKOUT: Final = _checkout() / "bench" / "engines"
"""The project's own plug-ins, if heterollm was installed from a checkout."""


def check_engine(name: str) -> None:
    """Refuse an unknown engine, without loading any.

    Raises:
        OptionError: There is no such engine.
    """
    names = ("self", *_plugins())
    if name not in names:
        raise OptionError(
            f"There is no engine {name!r:.80} here; known engines: {', '.join(names)}.",
            fix="llama.cpp and transformers are in the project's repository: run "
            "`pip install ./bench/engines` in a clone of it.",
        )


def load_plugin(name: str) -> Callable[..., Any]:
    """Import the engine of a name.

    Raises:
        OptionError: There is no such engine.
        DeviceError: It cannot be imported.
    """
    check_engine(name)
    point = _plugins()[name]
    if point.dist is None and str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    try:
        found: Callable[..., Any] = point.load()
    except (ImportError, AttributeError) as error:
        raise DeviceError(
            f"Engine {name!r} cannot be imported from {point.value}: {error}.", fix="Install it again."
        ) from error
    return found


def _plugins() -> dict[str, EntryPoint]:
    """Return the plug-ins by name; an installed one comes before the checkout's."""
    found: dict[str, EntryPoint] = {}
    file = CHECKOUT / "pyproject.toml"
    if file.is_file():
        named = tomllib.loads(file.read_text("utf-8"))["project"]["entry-points"][GROUP]
        found = {name: EntryPoint(name, value, GROUP) for name, value in named.items()}
    return found | {point.name: point for point in entry_points(group=GROUP)}

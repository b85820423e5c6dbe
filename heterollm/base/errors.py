"""Every error that heterollm raises on purpose.

All derive from :class:`HeteroLLMError`. A message says what failed, with which values, and what to do
next; the command line shows it as one panel, without a traceback.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

__all__ = [
    "CacheError",
    "CheckpointError",
    "DeviceError",
    "EngineError",
    "GraphError",
    "HandOverError",
    "HeteroLLMError",
    "InputError",
    "KernelError",
    "OptionError",
    "PlanError",
    "ProfileError",
    "TraceError",
    "UnsupportedModelError",
    "see",
]


@functools.cache
def page_url(name: str) -> str:
    """Return the URL of a page of the documents: the installed one, or that of the checkout.

    Args:
        name: File name of the page.
    """
    beside = Path(__file__).resolve().parents[2]  # the checkout, or what `pip install --target` named
    user = sysconfig.get_path("data", sysconfig.get_preferred_scheme("user"))
    installed = [Path(root, "share/doc/heterollm") for root in (beside, sysconfig.get_path("data"), user)]
    pages = (folder / name for folder in (*installed, beside / "docs"))
    page = next((path for path in pages if path.is_file()), None)
    return f"docs/{name}" if page is None else page.as_uri()


def see(section: str) -> str:
    """Return a sentence with the URL of a section of the documents.

    Args:
        section: A heading of the troubleshooting page as an anchor, such as ``the-emulator-is-slow``; a test
            checks that each one that a message names is there.
    """
    return f"See {page_url('troubleshooting.md')}#{section}."


class HeteroLLMError(Exception):
    """Base class of all errors raised on purpose.

    Args:
        message: What failed, with the values that matter.
        fix: What to do next, one sentence or command; empty when there is nothing to do.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message} {fix}" if fix else message)
        self.message = message
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        # The keyword argument is lost by the default pickling, which worker processes rely on.
        return (_rebuild, (type(self), self.message, self.fix))


def _rebuild(kind: type[HeteroLLMError], message: str, fix: str) -> HeteroLLMError:
    return kind(message, fix=fix)


class OptionError(HeteroLLMError):
    """An option or argument has a value that is not legal."""


class InputError(HeteroLLMError):
    """A prompt, token id or position is outside what the model takes."""


class CheckpointError(HeteroLLMError):
    """A checkpoint is missing, damaged, or disagrees with its own configuration."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but heterollm does not run its kind."""


class CacheError(HeteroLLMError):
    """A cache file cannot be written, read or locked."""


class DeviceError(HeteroLLMError):
    """A device or one of its parts is missing or unusable."""


class KernelError(DeviceError):
    """An OpenCL program does not build or a kernel does not run."""


class GraphError(DeviceError):
    """An NPU graph does not compile, load, or land where it was placed."""


class PlanError(HeteroLLMError):
    """A plan file is damaged, does not fit the model or the device, or asks for the impossible."""


class ProfileError(HeteroLLMError):
    """A profile is damaged, of another schema version, or of another device."""


class TraceError(HeteroLLMError):
    """The file of a trace is damaged, or is none."""


class EngineError(HeteroLLMError):
    """The engine is closed, busy beyond recovery, or lost a signal."""


class HandOverError(EngineError):
    """One processor waited for another's signal, and it did not come."""

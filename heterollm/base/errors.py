"""The errors that heterollm raises on purpose, all of them subclasses of :class:`HeteroLLMError`.

A message names the failure, the values and the next step; the command line shows it without a traceback.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path


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
        section: The heading as an anchor, such as ``the-emulator-is-slow``; a test checks that it exists.
    """
    return f"See {page_url('troubleshooting.md')}#{section}."


class HeteroLLMError(Exception):
    """Base class of all errors raised on purpose.

    Args:
        message: The failure, with the values that matter.
        fix: The next step, one sentence or command; empty when there is none.
    """

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(f"{message} {fix}" if fix else message)
        self.message = message
        self.fix = fix

    def __reduce__(self) -> tuple[object, ...]:
        # Default pickling, which worker processes use, loses the keyword argument.
        return (_rebuild, (type(self), self.message, self.fix), vars(self))


def _rebuild(kind: type[HeteroLLMError], message: str, fix: str) -> HeteroLLMError:
    return kind(message, fix=fix)


class OptionError(HeteroLLMError):
    """An option or argument has an illegal value."""


class InputError(HeteroLLMError):
    """The model does not accept a prompt, token id or position."""


class GrammarError(InputError):
    """A schema or grammar of an answer is illegal, or too large or complex."""


class ContextError(InputError):
    """A prompt is longer than the context."""


class CalibrationError(HeteroLLMError):
    """A calibration file is damaged, incomplete, or of another model."""


class CheckpointError(HeteroLLMError):
    """A checkpoint is missing, damaged, or disagrees with its own configuration."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is sound, but heterollm does not support its architecture."""


class CacheError(HeteroLLMError):
    """A cache file cannot be written, read or locked."""


class ExportError(HeteroLLMError):
    """The folder of an exported model is unfinished, damaged, or of other versions, options or devices."""


class DeviceError(HeteroLLMError):
    """A device or one of its processors is missing or unusable."""


class KernelError(DeviceError):
    """An OpenCL program does not build or a kernel does not run."""


class GraphError(DeviceError):
    """An NPU graph does not compile, load, or land where it was placed."""


class PlanError(HeteroLLMError):
    """A plan file is damaged, does not fit the model or the device, or asks for the impossible."""


class ProfileError(HeteroLLMError):
    """A profile is damaged, of another schema version, or of another device."""


class TraceError(HeteroLLMError):
    """A trace file is damaged, or not a trace."""


class EngineError(HeteroLLMError):
    """The engine is closed, busy beyond recovery, or lost a signal."""


class FenceError(EngineError):
    """A processor's signal did not arrive in time."""

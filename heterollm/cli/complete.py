"""Shell completion of options and arguments that have no fixed choices."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PLANS = ("auto", "gpu", "npu", "layer", "tensor", "block", "fused")
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
PROTOCOL = "_HETEROLLM_COMPLETE"
"""Variable by which a shell's script asks the program."""

WORD_BREAKS = ":="
"""Characters at which bash breaks words: it passes ``sim:sn`` as three, and completes only the last."""


def devices(incomplete: str) -> list[str]:
    """Return names of devices, simulated ones included."""
    from heterollm.kernels.devices import DEVICE_NAMES
    from heterollm.kernels.sim import soc_names

    simulated = (f"sim:{name}" for name in soc_names())
    return beginning(incomplete, ("auto", *DEVICE_NAMES, *simulated))


def plans(incomplete: str) -> list[str]:
    """Return the levels of plans; a shell offers files by itself."""
    return beginning(incomplete, PLANS)


def socs(incomplete: str) -> list[str]:
    """Return the names of the known SoCs."""
    from heterollm.kernels.sim import soc_names

    return beginning(incomplete, soc_names())


def known_models(incomplete: str) -> list[str]:
    """Return the bundled model, the known models, and folders."""
    return [*_bundled(incomplete), *_known(incomplete), *_folders(incomplete)]


def profiled(incomplete: str) -> list[str]:
    """Return the commands under ``profile``, and models."""
    commands = ("list", "show", "compare", "export", "import")
    return [*beginning(incomplete, commands), *known_models(incomplete), *_hub(incomplete)]


def models(incomplete: str) -> list[str]:
    """Return the bundled model, known models, folders, GGUF files, and the models in the hub's cache."""
    return [*known_models(incomplete), *_hub(incomplete)]


def drafts(incomplete: str) -> list[str]:
    """Return the ways to guess tokens: from the text, or by a model."""
    return [*beginning(incomplete, ("lookup",)), *models(incomplete)]


def stored_models(incomplete: str) -> list[str]:
    """Return the names of the models on this machine."""
    from heterollm.base import CacheError
    from heterollm.model import stored_models as every

    try:
        return beginning(incomplete, sorted({model.name for model in every()}))
    except CacheError:
        return []


def profiles(incomplete: str) -> list[str]:
    """Return the fingerprints of the profiles in the cache."""
    from heterollm.base import CacheError, own_folder

    try:
        folder = own_folder("profiles")
    except CacheError:
        return []
    return beginning(incomplete, sorted(path.stem.rpartition("-")[2] for path in folder.glob("*.json")))


@contextlib.contextmanager
def named_shell(words: Sequence[str]) -> Iterator[list[str]]:
    """Make ``--show-completion SHELL`` print the script of that shell; yield the words that are left.

    Without a name Typer takes the shell that runs.
    """
    named = list(words[:1]) == ["--show-completion"] and len(words) == 2 and words[1] in SHELLS
    if not named:
        yield list(words)
        return
    before = os.environ.get(PROTOCOL)
    os.environ[PROTOCOL] = f"source_{words[1]}"
    try:
        yield []
    finally:
        os.environ.pop(PROTOCOL)
        if before is not None:
            os.environ[PROTOCOL] = before


@contextlib.contextmanager
def whole_words() -> Iterator[None]:
    """Join the words that bash broke at a colon, and offer only the text after the break.

    Other shells do not break words, nor does bash if its ``COMP_WORDBREAKS`` has no colon.
    """
    begun = _join_words() if os.environ.get(PROTOCOL) == "complete_bash" else ""
    if not begun:
        yield
        return
    offered = io.StringIO()
    try:
        with contextlib.redirect_stdout(offered):
            yield
    finally:
        for line in offered.getvalue().splitlines():
            sys.stdout.write(f"{line.removeprefix(begun)}\n")


def _join_words() -> str:
    """Join broken words in bash's own variables; return the beginning of the last, which bash keeps."""
    try:
        place = int(os.environ["COMP_CWORD"])
    except (KeyError, ValueError):
        return ""
    # Words behind the cursor do not matter.
    words = os.environ.get("COMP_WORDS", "").split("\n")[: place + 1]
    if len(words) <= place:
        return ""
    joined: list[str] = []
    begun = ""
    broken = False
    for word in words:
        is_break = bool(word) and not word.strip(WORD_BREAKS)
        begun = joined.pop() if joined and (broken or is_break) else ""
        joined.append(begun + word)
        if is_break:
            begun += word
        broken = is_break
    os.environ["COMP_WORDS"] = "\n".join(joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)
    # Of `--device=sim:sn` only the value is completed.
    return begun.partition("=")[2] if begun.startswith("-") else begun


def beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    """Return the names that begin with the typed text."""
    return [name for name in names if name.startswith(incomplete)]


def _bundled(incomplete: str) -> list[str]:
    from heterollm.data import BUNDLED_NAME

    return beginning(incomplete, (BUNDLED_NAME,))


def _known(incomplete: str) -> list[str]:
    from heterollm.model import KNOWN_REPOSITORIES

    return beginning(incomplete, KNOWN_REPOSITORIES)


def _folders(incomplete: str) -> Iterator[str]:
    typed, begun = os.path.split(incomplete)
    try:
        entries = sorted(os.scandir(Path(typed or ".").expanduser()), key=lambda entry: entry.name)
        for entry in entries:
            hidden = entry.name.startswith(".") and not begun
            if entry.name.startswith(begun) and not hidden and entry.is_dir():
                whole = os.path.join(typed, entry.name)  # noqa: PTH118 - keeps the typed form
                yield whole if Path(entry.path, "config.json").is_file() else f"{whole}/"
    except OSError:
        return  # no such folder, or no permission


def _hub(incomplete: str) -> list[str]:
    return beginning(incomplete, sorted(_hub_names()))


def _hub_names() -> Iterator[str]:
    """Yield names of repositories, by the documented layout of the hub's cache."""
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    for path in hub.glob("models--*"):
        yield path.name.removeprefix("models--").replace("--", "/")

"""The files of a repository of the hub that a model needs: safetensors with settings, or one GGUF file."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from heterollm.base import CheckpointError, OptionError, is_plain_name
from heterollm.model.stored import part_names, whole_name

HUB_FILES: Final = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")
HUB_IGNORED: Final = ("*/*", "consolidated*")

LISTED: Final = 12
"""Most GGUF files that a message lists."""

USUAL_QUANT: Final = "Q4_K_M"
"""The quantisation that a name without one means, as in Ollama and llama.cpp."""

QUANT: Final = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q|TQ|BF|FP?|MXFP|NVFP)\d+(?:_[A-Z0-9]+)*)$", re.IGNORECASE
)
"""The quantisation at the end of a file's name: of ``Qwen3-0.6B-UD-Q4_K_XL.gguf`` it is ``UD-Q4_K_XL``."""

NO_LANGUAGE: Final = "mmproj"
"""In the names of GGUF files that read pictures for a model beside them."""


def plain_files(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the files whose names stay in a folder, on every system."""
    return {file: size for file, size in sizes.items() if all(map(is_plain_name, file.split("/")))}


def needed_files(name: str, files: Sequence[str], gguf: str | None, quant: str | None = None) -> list[str]:
    """Return the files of a model that a load needs: safetensors with settings and tokenizer, or one GGUF.

    All parts of a split GGUF file are one.

    Args:
        name: The hub name, for messages.
        files: All files of the repository.
        gguf: A pattern of the GGUF file.
        quant: Its quantisation. Without both, a model without safetensors has its only GGUF file, or
            ``Q4_K_M``.

    Raises:
        OptionError: No GGUF file or several match.
        CheckpointError: The model has neither kind of files.
    """
    ggufs = sorted(file for file in files if file.endswith(".gguf") and NO_LANGUAGE not in file.lower())
    plain = [file for file in files if _matches(file, HUB_FILES) and not _matches(file, HUB_IGNORED)]
    if gguf is None and quant is None and any(file.endswith(".safetensors") for file in plain):
        # Settings first: what a load refuses by them costs no download of weights.
        return sorted(plain, key=lambda file: (file.endswith(".safetensors"), file))
    if not ggufs:
        raise CheckpointError(
            f"{name} has no GGUF files."
            if gguf or quant
            else f"{name} has neither safetensors nor GGUF files.",
            fix="Only these are read: no .bin and no .pth files. Look for another repository of the model.",
        )
    if gguf is not None:
        found, said = [file for file in ggufs if _matches(file, (gguf, f"*/{gguf}"))], f" like {gguf!r:.80}"
    elif quant is not None:
        found, said = _of_quant(ggufs, quant), f" of quantisation {quant:.80}"
    else:
        found, said = ggufs, ""
        if not _is_one(found) and _is_one(usual := _of_quant(ggufs, USUAL_QUANT)):
            found = usual
    if _is_one(found):
        return [file for file in part_names(found[0]) if file in ggufs]
    raise _unclear(name, ggufs, found, said)


def _is_one(found: Sequence[str]) -> bool:
    """Return whether files are one, or parts of one."""
    return bool(found) and set(found) <= {*part_names(found[0])}


def _of_quant(ggufs: Sequence[str], quant: str) -> list[str]:
    """Return the files whose quantisation is the one asked for; else those whose names end in it."""
    own = [file for file in ggufs if quantisation(file).lower() == quant.lower()]
    ending = re.compile(rf"(?:^|[-._/]){re.escape(quant)}$", re.IGNORECASE)
    return own or [file for file in ggufs if ending.search(whole_name(file))]


def quantisation(file: str) -> str:
    """Return the quantisation that a GGUF file's name or folder states; empty without one."""
    stem = whole_name(file)
    for place in (stem, stem.rpartition("/")[0]):
        if found := QUANT.search(place):
            return found[1]
    return ""


def _unclear(name: str, ggufs: Sequence[str], found: Sequence[str], said: str) -> OptionError:
    """Return the error of a choice that means no file or several; it lists those that there are."""
    quants = sorted({quantisation(file) for file in ggufs} - {""})
    shown = [*found] or quants or [*ggufs]
    listed = ", ".join(shown) if len(shown) <= LISTED else f"{len(shown)} files"
    message = f"{name} has {len(found) or 'no'} GGUF files{said}"
    if found:
        fix = f"Choose one: --gguf '*Q4_K_M*', for example, or https://huggingface.co/{name}/blob/main/{found[0]}"
        return OptionError(f"{message}: {listed}.", fix=f"{fix} as the model.")
    return OptionError(
        f"{message}; it has {listed}.", fix=f"Choose one: {name}:{quants[0]}, for example." if quants else ""
    )


def _matches(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(file.lower(), pattern.lower()) for pattern in patterns)

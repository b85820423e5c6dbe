"""The folder of a checkpoint: a local one, that of a GGUF file, the bundled model's, or one from the hub."""

from __future__ import annotations

import difflib
from pathlib import Path

from heterollm.base import CheckpointError, OptionError, Progress, is_exported, silent
from heterollm.data import BUNDLED_NAME, bundled_model
from heterollm.model.hub_names import is_ollama_name, parse_hub_name
from heterollm.model.stored import foreign_format, gguf_folder, is_gguf

ALIKE = 0.85
"""Likeness from which on a name is a misspelt one of the bundled model."""


def checkpoint_folder(name: Path | str, *, weights: bool = True, progress: Progress = silent) -> Path:
    """Return the folder of a local checkpoint, of a GGUF file, of the bundled model, or of one from the hub.

    Args:
        name: A folder, a GGUF file, a hub name, or the name of the bundled or a known model; a folder of that
            name comes first.
        weights: Whether to fetch all files, or only the model's configuration.
        progress: Called with the bytes done and the total while files are fetched.

    Raises:
        OptionError: The name is empty or no text.
        CheckpointError: There is no such folder, and the hub did not deliver it; or the file is damaged.
        CacheError: The folder of a GGUF file cannot be written.
    """
    if not isinstance(name, str | Path) or not str(name):
        raise OptionError(f"The model is {name!r}.", fix="Give a folder or a hub name.")
    try:
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        if is_gguf(folder):
            return gguf_folder(folder)
        if folder.exists():
            raise no_checkpoint(folder, "is a file.", "Name the folder that holds config.json.")
    except (OSError, RuntimeError) as error:  # too long, no permission, or the home of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"Cannot look for a checkpoint at {name!s:.200}: {reason}.") from error
    if str(name) == BUNDLED_NAME:
        return bundled_model()
    if difflib.get_close_matches(str(name), (BUNDLED_NAME,), cutoff=ALIKE):
        raise CheckpointError(f"There is no model {name}.", fix=f"Did you mean {BUNDLED_NAME}?")
    named = parse_hub_name(str(name))
    if named is None:
        if is_ollama_name(str(name)):
            raise CheckpointError(
                f"{name} is a name of Ollama's library.",
                fix="Take OWNER/NAME of the Hugging Face hub, or OWNER/NAME:Q4_K_M for a GGUF file.",
            )
        raise CheckpointError(
            f"There is no folder {folder}.", fix="Name a checkpoint's folder, a GGUF file or a hub name."
        )
    # A folder needs no huggingface_hub.
    from heterollm.model.hub import hub_file, hub_folder

    if named.gguf is None and named.quant is None:
        found = hub_folder(named.name, weights=weights, progress=progress)
        if any(found.glob("*.safetensors" if weights else "config.json")):
            return found
    return gguf_folder(hub_file(named, progress))


def no_checkpoint(path: Path, lack: str, fix: str) -> CheckpointError:
    """Return the error of a file, or of a folder without weights; it names another format found there."""
    if is_exported(path):
        return CheckpointError(
            f"{path} is an exported model, which has no weights of a checkpoint.",
            fix="Give the checkpoint that it was made from; `generate`, `chat` and `serve` take the folder.",
        )
    return foreign_format(path) or CheckpointError(f"{path} {lack}", fix=fix)

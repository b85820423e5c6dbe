"""Files of dialogues: ``{"messages": [{"role": …, "content": …}, …]}``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct, structs

from heterollm.base import InputError, check_target, decode, decode_json, read_file, save_file
from heterollm.text.tokenizer import Message

FIX: Final = "Name a file that /save wrote."
LARGEST_FILE_BYTES: Final = 1 << 26


class SavedMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a dialogue."""

    role: Literal["system", "user", "assistant"]
    content: str


class SavedDialogue(Struct, frozen=True, forbid_unknown_fields=True):
    """The messages of a dialogue, oldest first."""

    messages: tuple[SavedMessage, ...]


def save_dialogue(path: Path, messages: Sequence[Message]) -> None:
    """Write a dialogue; an earlier dialogue in the file is replaced.

    Raises:
        InputError: The file has something other than a dialogue.
        OptionError: The file cannot be written.
    """
    check_target(path, "dialogue")
    if path.exists():
        load_dialogue(path)
    text = json.dumps({"messages": [dict(message) for message in messages]}, ensure_ascii=False, indent=1)
    save_file(path, f"{text}\n".encode())


def load_dialogue(path: Path) -> tuple[Message, ...]:
    """Return the messages of a dialogue's file.

    Raises:
        InputError: The file cannot be read, or has no dialogue.
    """
    source = str(path)
    try:
        text = read_file(path, LARGEST_FILE_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{source!r:.200} cannot be read: {reason}.", fix=FIX) from error
    data = decode_json(text, source=source, error=InputError, fix=FIX)
    found = decode(data, SavedDialogue, source=f"{source} is no dialogue", error=InputError, fix=FIX)
    if any(message.role == "system" for message in found.messages[1:]):
        raise InputError(f"{source} is no dialogue: a message of the system is not the first.", fix=FIX)
    return tuple(structs.asdict(message) for message in found.messages)

"""Names of models as people copy them from the hub, llama.cpp and Ollama."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from heterollm.model.known_names import known_repository

HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
ADDRESS: Final = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://", re.IGNORECASE)
FILE: Final = re.compile(r"/(?:blob|resolve|tree)/[\w.-]+(?:/(.+))?$")
TAG: Final = re.compile(r":([\w.-]+)$")
OLLAMA_NAME: Final = re.compile(r"[a-z0-9][\w.-]*:[\w.-]+", re.IGNORECASE)


class HubName(NamedTuple):
    """A model on the hub.

    Args:
        name: ``OWNER/NAME``.
        gguf: The GGUF file that an address states.
        quant: The quantisation of a GGUF file that the name states, such as ``Q4_K_M``.
    """

    name: str
    gguf: str | None = None
    quant: str | None = None


def is_hub_name(name: object) -> bool:
    """Return whether a text is a legal repository name on the Hugging Face hub."""
    return HUB_NAME.fullmatch(str(name)) is not None


def is_ollama_name(text: str) -> bool:
    """Return whether a text looks like a name of Ollama's library, such as ``llama3.2:1b``."""
    return OLLAMA_NAME.fullmatch(text) is not None


def parse_hub_name(text: str) -> HubName | None:
    """Return the model that a name or an address of the hub means; None for other texts.

    ``OWNER/NAME``, ``hf.co/OWNER/NAME:Q4_K_M``, addresses of a model's page, files and one file, and the
    names of known models.
    """
    if known := known_repository(text):
        return HubName(known)
    name = ADDRESS.sub("", text.partition("?")[0], count=1).rstrip("/")
    file = quant = None
    if found := FILE.search(name):
        name = name[: found.start()]
        file = found[1] if (found[1] or "").endswith(".gguf") else None
    elif (tag := TAG.search(name)) and "/" in name:
        name = name[: tag.start()]
        quant = None if tag[1] == "latest" else tag[1]
    return HubName(name, file, quant) if is_hub_name(name) and (name == text or "/" in name) else None

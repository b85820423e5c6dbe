"""The pooling that a checkpoint declares: how the states of a text's tokens become its embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from heterollm.base import CheckpointError, UnsupportedModelError, parse_json, read_file
from heterollm.model.json_fields import read_json_object

MODULES: Final = "modules.json"
"""The list of a model's modules, by sentence-transformers."""

PoolingMode: TypeAlias = Literal["last", "mean"]
MODES: Final[Mapping[str, PoolingMode]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
"""The supported modes by the names in a pooling's file, there also behind ``pooling_mode_``."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """The way from states to an embedding.

    Args:
        mode: The state of the last token, or the mean of all tokens'.
        normalized: Whether embeddings have the Euclidean length 1.
        most_tokens: Tokens of a text at most; None if the checkpoint does not say.
        prompt: Text before every text.
    """

    mode: PoolingMode
    normalized: bool
    most_tokens: int | None = None
    prompt: str = ""


def read_pooling(folder: Path | str) -> Pooling | None:
    """Return the pooling that a checkpoint declares; None if it declares none.

    Raises:
        CheckpointError: A file is missing or damaged.
        UnsupportedModelError: The checkpoint has another module, or another mode.
    """
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        return None
    modules = _modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{folder / MODULES} has the modules {', '.join(kinds)}, of which the runtime has no such chain.",
            fix="Use a model of Transformer and Pooling, with or without Normalize.",
        )
    (_, own), (_, pooling), *_ = modules
    prompt = _prompt(folder)
    if prompt and not pooling.get("include_prompt", True):
        raise UnsupportedModelError(
            f"{folder} leaves its prompt out of the mean, which the runtime does not."
        )
    return Pooling(_mode(folder, pooling), "Normalize" in kinds, _most_tokens(folder, own), prompt)


def _modules(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and settings of each module."""
    path = folder / MODULES
    try:
        content = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    made = []
    for module in content if isinstance(content, list) else [None]:
        kind, place = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or ".." in Path(place).parts:
            raise CheckpointError(f"{path} is no list of modules with type and path.")
        name = kind.rpartition(".")[2]
        file = folder / place / ("sentence_bert_config.json" if name == "Transformer" else "config.json")
        needed = name == "Pooling"
        made.append((name, read_json_object(file) if needed or file.is_file() else {}))
    return made


def _mode(folder: Path, settings: Mapping[str, Any]) -> PoolingMode:
    prefix = "pooling_mode_"
    chosen = [name.removeprefix(prefix) for name in settings if name.startswith(prefix) and settings[name]]
    if isinstance(stated := settings.get("pooling_mode"), str):
        chosen = [stated]
    if len(chosen) != 1 or chosen[0] not in MODES:
        raise UnsupportedModelError(
            f"{folder} pools by {', '.join(chosen) or 'nothing'}; the runtime by last token or mean."
        )
    return MODES[chosen[0]]


def _most_tokens(folder: Path, settings: Mapping[str, Any]) -> int | None:
    stated = settings.get("max_seq_length")
    if stated is not None and (type(stated) is not int or stated < 1):
        raise CheckpointError(f"max_seq_length is {stated!r:.40} in {folder}, but must be at least 1.")
    return stated


def _prompt(folder: Path) -> str:
    """Return the text before every text, which few checkpoints have."""
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return ""
    settings = read_json_object(path)
    prompts, name = settings.get("prompts"), settings.get("default_prompt_name")
    prompt = prompts.get(name, "") if isinstance(prompts, dict) and isinstance(name, str) else ""
    if not isinstance(prompt, str):
        raise CheckpointError(f"The prompt {name!r:.40} of {path} is no text.")
    return prompt

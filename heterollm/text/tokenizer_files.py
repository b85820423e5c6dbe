"""Reads a tokenizer, its special tokens and its chat template from the files of a checkpoint.

`tokenizer.json` and the library tokenizers are enough, by the rules of transformers 5: the special tokens of
`tokenizer_config.json` are added, older files count where it states no added tokens, and the prefix that
`tokenizer.json` adds to a text takes precedence over `add_bos_token`. Checkpoints without `tokenizer.json`
need transformers' `AutoTokenizer`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from heterollm.base import CheckpointError, parse_json, read_file
from heterollm.text.stream_decoder import FIX, LIBRARY
from heterollm.text.tokenizer_check import check_tokenizer_file

if TYPE_CHECKING:
    import tokenizers

_FORMATS: Final = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_NAMED: Final = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_EXTRA: Final = ("extra_special_tokens", "additional_special_tokens")
_FOR_TRANSFORMERS: Final = frozenset({"fast_tokenizer_files", "fix_mistral_regex"})
"""Fields of `tokenizer_config.json` by which transformers reads another file, or changes it."""

_ADVICE: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The contents of the files.

    Args:
        backend: The tokenizer, with all added tokens.
        special: Spelling of each special token by its name, such as ``eos_token``.
        chat_template: The chat template, or several by name; None if there is none.
    """

    backend: tokenizers.Tokenizer
    special: Mapping[str, str]
    chat_template: str | dict[str, str] | None


def tokenizer_file(folder: Path) -> str | None:
    """Return the name of the file to load a tokenizer from; None if it is missing."""
    complete = (names for names in _FORMATS if all((folder / name).is_file() for name in names))
    return next(complete, (None,))[0]


def read_tokenizer(folder: Path, name: str) -> TokenizerParts:
    """Return the tokenizer of a checkpoint, without downloads and without remote code.

    Args:
        folder: The checkpoint.
        name: The file, by :func:`tokenizer_file`.

    Raises:
        CheckpointError: A file is damaged, or needs transformers, which is not installed.
    """
    config, specials, added = (
        _read_object(folder / f"{other}.json")
        for other in ("tokenizer_config", "special_tokens_map", "added_tokens")
    )
    template = _chat_template(folder, config)
    if name == "tokenizer.json":
        check_tokenizer_file(folder / name)
    with LIBRARY:
        try:
            if name != "tokenizer.json" or any(map(config.get, _FOR_TRANSFORMERS)):
                return _by_transformers(folder, name, template)
            return _by_tokenizers(folder / name, config, specials, added, template)
        except CheckpointError:
            raise
        except Exception as error:
            # The tokenizers library raises bare exceptions for damaged files.
            raise CheckpointError(f"{folder / name} cannot be loaded: {error}.", fix=FIX) from error


def _by_tokenizers(
    path: Path,
    config: dict[str, Any],
    specials: dict[str, Any],
    added: Mapping[str, int],
    template: str | dict[str, str] | None,
) -> TokenizerParts:
    import tokenizers

    backend = tokenizers.Tokenizer.from_file(str(path))
    held = backend.get_added_tokens_decoder()
    stated = config.get("added_tokens_decoder")
    older = {name: _surely_special(name, value) for name, value in specials.items() if stated is None}
    extra = [fields.get(name) for fields in (config, older) for name in _EXTRA]
    listed: list[Any] = next((one for one in extra if isinstance(one, list) and one), [])
    own = {name: value for name, value in _others(config).items() if isinstance(value, str)}
    own |= next((one for one in extra if isinstance(one, dict)), {})
    # In this order tokens without an id get theirs.
    config = {name: value for name, value in config.items() if name not in own} | older
    if backend.padding:
        config.setdefault("pad_token", backend.padding["pad_token"])
    named = {name: config.get(name) for name in _NAMED} | _others(config)
    named |= own or config.get("model_specific_special_tokens") or {}
    special = {name: _spelling(value) for name, value in named.items() if isinstance(value, str | dict)}
    if stated is None:
        without_text = {*map(special.get, _NAMED), *map(_spelling, listed)}
        stated = {
            index: {"content": text, "special": text in without_text, "normalized": text not in without_text}
            for text, index in added.items()
        }
        stated |= held
    tokens = [_token(stated[index]) for index in sorted(stated, key=int)]
    spelled = {token.content for token in (*held.values(), *tokens)}
    # Of two equal values the first counts: a normalization that is not stated follows from `special`, below.
    further: list[Any] = []
    for value in (*(named[name] for name in special), *listed):
        token = value if isinstance(value, str) else _token(value)
        if _spelling(value) not in spelled and token not in further:
            further.append(token)
    tokens += map(_token, further)
    # The library takes a token again to change its kind.
    for token in tokens:
        token.special |= token.content in special.values()
    backend.add_tokens(tokens)
    return TokenizerParts(backend, special, template)


def _others(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the special tokens of a model's own, such as ``image_token``."""
    return {name: value for name, value in fields.items() if name.endswith("_token") and name not in _NAMED}


def _surely_special(name: str, value: Any) -> Any:  # noqa: ANN401 - as the file has it
    return value | {"special": True} if isinstance(value, dict) and name not in _EXTRA else value


def _token(value: str | Mapping[str, Any] | tokenizers.AddedToken) -> tokenizers.AddedToken:
    from tokenizers import AddedToken

    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{name: field for name, field in value.items() if name != "__type"})


def _spelling(value: str | Mapping[str, Any]) -> str:
    text = value if isinstance(value, str) else value["content"]
    if not isinstance(text, str):
        raise TypeError(f"a special token is {text!r:.80}")
    return text


def _chat_template(folder: Path, config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - as the file has it
    """Return the template in a file of its own, else that of the configuration; several by name."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    texts = {}
    for name, path in files.items():
        try:
            if path.exists():
                texts[name] = read_file(path).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.", fix=FIX) from error
    if texts:
        return texts["default"] if set(texts) == {"default"} else texts
    found = config.get("chat_template")
    if isinstance(found, list) and all(isinstance(one, dict) for one in found):
        found = {one.get("name"): one.get("template") for one in found}
    if not isinstance(found, str | dict | None):
        raise CheckpointError(f"The chat template in {folder} is not text.", fix=FIX)
    return found


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if the file is missing."""
    try:
        value = parse_json(read_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", fix=FIX) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object.", fix=FIX)
    return value


def _by_transformers(folder: Path, name: str, template: str | dict[str, str] | None) -> TokenizerParts:
    try:
        with _quiet_transformers() as transformers:
            kind = transformers.PreTrainedTokenizerFast
            if name != "tokenizer.json":
                kind = transformers.AutoTokenizer  # two seconds more where PyTorch is installed
            wrapper = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise CheckpointError(
            f"{folder / name} needs the library transformers: {error}.",
            fix="Run `pip install 'heterollm[older-tokenizers]'`, or use a checkpoint with tokenizer.json.",
        ) from error
    if not hasattr(wrapper, "backend_tokenizer"):
        raise CheckpointError(
            f"{folder / name} is a tokenizer of a kind without a fast form ({type(wrapper).__name__}).",
            fix="Convert it to tokenizer.json with transformers' save_pretrained.",
        )
    return TokenizerParts(wrapper.backend_tokenizer, wrapper.special_tokens_map, template)


@contextmanager
def _quiet_transformers() -> Iterator[Any]:
    """Import transformers, without its warnings about its own models and about a missing PyTorch."""
    given = _ADVICE in os.environ
    os.environ.setdefault(_ADVICE, "1")
    try:
        import transformers
    finally:
        if not given:
            del os.environ[_ADVICE]
    verbosity = transformers.utils.logging
    before = verbosity.get_verbosity()
    verbosity.set_verbosity(logging.ERROR)
    try:
        yield transformers
    finally:
        verbosity.set_verbosity(before)

"""Commands and options of llama.cpp, Ollama and vLLM: taken where they mean the same, else answered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from heterollm.base import OptionError

COMMANDS: Final[Mapping[str, str]] = {
    "ls": "list",
    "server": "serve",
    "cli": "chat",
    "run": "chat",
    "download": "pull",
    "remove": "rm",
    "delete": "rm",
    "quantize": "convert",
    "perplexity": "eval",
}
"""Commands by the names of others; ``run`` with a prompt is ``generate``."""

UNLIKE_COMMANDS: Final[Mapping[str, str]] = {
    "show": "`heterollm plan MODEL` shows the shapes and the split of a model, `heterollm list` the models",
    "ps": "Each process holds one model; `GET /health` of a server names it",
    "stop": "Ctrl-C ends a server",
    "create": "`heterollm convert MODEL -o FOLDER` writes a quantised model; `--system` gives instructions",
    "cp": "A model is a folder or a GGUF file: copy that",
    "push": "`hf upload` takes a folder that `heterollm convert` wrote",
    "login": "`hf auth login` keeps a token for the hub",
    "embedding": "It computes no embeddings",
}
"""Answers to other commands."""

OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("-n", "--n-predict", "--predict", "--num-predict", "--max-tokens"), "--max-new-tokens"),
    **dict.fromkeys(("-c", "--ctx-size", "--num-ctx", "--n-ctx", "--max-model-len"), "--context"),
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-s", "--rng-seed"), "--seed"),
    **dict.fromkeys(("-md", "--model-draft"), "--speculative"),
    **dict.fromkeys(("-a", "--alias", "--served-model-name"), "--name"),
    "--grammar-file": "--grammar",
    "-j": "--json-schema",
    "--pass": "--technique",  # the former name
}
"""Options by the names of others; all take a value."""

POSITIONAL: Final[Mapping[str, str]] = {
    **dict.fromkeys(("-m", "--model", "-hf", "-hfr", "--hf-repo"), "MODEL"),
    **dict.fromkeys(("-p", "--prompt"), "PROMPT"),
}
"""Options of others for words that stand alone here."""

UNLIKE_OPTIONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("-t", "--threads"), "--gpu-threads and --npu-threads, on the host device"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers", "-ot"), "--plan, which places every operator"),
    **dict.fromkeys(("-dev", "--tensor-parallel-size", "-ts"), "--device and --plan"),
    **dict.fromkeys(("-ctk", "-ctv", "--cache-type-k", "--cache-type-v"), "--kv-bits"),
    **dict.fromkeys(("--dtype", "--quantization"), "--precision"),
    **dict.fromkeys(("-np", "--parallel", "--max-num-seqs"), "`serve`, which takes several requests at once"),
    **dict.fromkeys(("-cnv", "-i", "--interactive", "--conversation"), "`heterollm chat MODEL`"),
    **dict.fromkeys(
        ("-fa", "--flash-attn", "--mlock", "--no-mmap", "-b", "--batch-size", "-ub"), "no such option"
    ),
    **dict.fromkeys(("-v", "--verbose"), "--debug"),
    **dict.fromkeys(("-mm", "--mmproj"), "no images, only text"),
}
"""Answers to other options: heterollm's word for the matter."""


def own_words(words: Sequence[str], program: Any) -> list[str]:  # noqa: ANN401 - of typer's own click
    """Return a command's words with heterollm's names for those of other programs.

    A model in place of a command is that of ``run``: with a prompt it answers that, without it talks.

    Args:
        words: Words after the program's name.
        program: The group of all commands, whose own names come first.

    Raises:
        OptionError: A command or an option means something that heterollm has another word for.
    """
    place = next((at for at, word in enumerate(words) if not word.startswith("-")), None)
    if place is None:
        return list(words)
    name, rest = words[place], words[place + 1 :]
    if name not in program.commands:
        if name in UNLIKE_COMMANDS:
            raise OptionError(f"heterollm has no command {name!r}.", fix=f"{UNLIKE_COMMANDS[name]}.")
        if name not in COMMANDS:
            return (
                own_words([*words[:place], "run", *words[place:]], program) if is_model(name) else list(words)
            )
    command = program.commands.get(COMMANDS.get(name, name)) or program.commands[name]
    if not hasattr(command, "commands"):  # a group's own commands have their own options
        rest = list(_own_options(rest, command))
    own = COMMANDS.get(name, name) if name not in program.commands else name
    if name == "run" and own == "chat" and _positional(rest, command) > 1:
        own = "generate"
    return [*words[:place], own, *rest]


def is_model(word: str) -> bool:
    """Return whether a word in place of a command means a model: a file, a folder, or a name."""
    from heterollm.base import is_exported

    try:
        path = Path(word).expanduser()
        if path.is_dir():
            return (path / "config.json").is_file() or is_exported(path)
        if path.is_file() or path.suffix.lower() == ".gguf":
            return path.suffix.lower() == ".gguf"
    except (OSError, RuntimeError, ValueError):  # too long, a null character, or the home of nobody
        return False
    if set(word) & {"/", "\\"}:  # the loader says whether a hub's name or a path is meant
        return True
    from heterollm.data import BUNDLED_NAME
    from heterollm.model import KNOWN_MODELS, is_ollama_name

    return word == BUNDLED_NAME or word.lower() in KNOWN_MODELS or is_ollama_name(word)


def _own_options(words: Sequence[str], command: Any) -> Iterator[str]:  # noqa: ANN401
    own = _options(command)
    named = {one.name.upper() for one in command.params if one.param_type_name == "argument"}
    first: list[str] = []
    last: list[str] = []
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--":
            last = [word, *rest, *last[1:]]
            break
        name, equals, value = word.partition("=")
        if not word.startswith("-") or name in own:
            kept.append(word)
            if name in own and not equals and not own[name].is_flag:
                kept += itertools.islice(rest, 1)
            continue
        if name in UNLIKE_OPTIONS:
            raise OptionError(f"heterollm has no option {name}.", fix=f"It has {UNLIKE_OPTIONS[name]}.")
        if name in OPTIONS and OPTIONS[name] in own:
            kept.append(OPTIONS[name] + equals + value)
        elif name in POSITIONAL and POSITIONAL[name] in named:
            given = value if equals else next(rest, "")
            if POSITIONAL[name] == "MODEL":
                first.append(given)
            else:
                last = ["--", given]
        else:
            kept.append(word)
    yield from (*first, *kept, *last)


def _positional(words: Sequence[str], command: Any) -> int:  # noqa: ANN401
    """Return the number of words that are no options and no values of options."""
    own = _options(command)
    count, rest = 0, iter(words)
    for word in rest:
        if word == "--":
            return count + len(list(rest))
        if not word.startswith("-"):
            count += 1
        elif "=" not in word and (word not in own or not own[word].is_flag):
            next(rest, None)
    return count


def _options(command: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the options of a command by their names."""
    options = (one for one in command.params if one.param_type_name == "option")
    return {name: option for option in options for name in (*option.opts, *option.secondary_opts)}

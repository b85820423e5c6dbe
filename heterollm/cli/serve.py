"""The command ``serve``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from heterollm.cli.load import load_model
from heterollm.cli.options import ModelArgument, ModelOptions, RunOptions, command_group
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.serve import ServeOptions

commands = command_group()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of answers to requests that do not have them; by default the checkpoint's, or llama.cpp's."""

    temperature: Annotated[float | None, typer.Option(help="Temperature of requests without one.")] = None
    top_k: Annotated[int | None, typer.Option(help="top_k of requests without it; 0: all.")] = None
    top_p: Annotated[float | None, typer.Option(help="top_p of requests without it.")] = None
    min_p: Annotated[float | None, typer.Option(help="min_p of requests without it.")] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="repetition_penalty of requests without it.")
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="presence_penalty of requests without it.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="frequency_penalty of requests without it.")
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of requests without one.")] = None
    max_tokens: Annotated[
        int | None, typer.Option(help="Length of answers to requests without it. Default: the context.")
    ] = None


@commands.command()
@takes_records
def serve(
    model: Annotated[list[str], ModelArgument],
    options: ModelOptions,
    run: RunOptions,
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free one.")] = 8080,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Default: the last part of MODEL.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Key that requests must have; repeatable.", envvar="HETEROLLM_API_KEY"),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin of pages that may use the server; repeatable."),
    ] = None,
    sessions_gib: Annotated[
        float | None,
        typer.Option(help="Memory of all sessions in GiB. Default: a quarter of the available memory."),
    ] = None,
    prefixes_gib: Annotated[
        float,
        typer.Option(
            help="Disk in GiB that keeps the beginnings of prompts which requests share, for the next start."
        ),
    ] = 0.0,
    idle_minutes: Annotated[
        float,
        typer.Option(help="Minutes without a request until one of several models is unloaded; 0: never."),
    ] = 10.0,
    gaps: Annotated[
        float,
        typer.Option(
            help="Times its usual gap between two tokens that an answer may wait while prompts are read."
        ),
    ] = 4.0,
    queue: Annotated[int, typer.Option(help="Requests of each tier that may wait.")] = 64,
    connections: Annotated[int, typer.Option(help="Connections at most; idle ones make room.")] = 512,
    no_exact: Annotated[
        bool,
        typer.Option(
            "--no-exact",
            help="Let answers with a seed or temperature 0 share passes that may change their last bits.",
        ),
    ] = False,
    requests: RequestOptions,
    live: Annotated[
        bool, typer.Option("--live", help="Trace all passes; the page shows how busy GPU and NPU are.")
    ] = False,
) -> None:
    """Serve models to a browser and to clients of OpenAI, Anthropic and Ollama, on 127.0.0.1 by default.

    Of several models, or a folder of them, each has a process that a request for it starts.
    """
    from heterollm.base import OptionError
    from heterollm.report import console as report

    try:
        from heterollm.serve import ListedModel, ServeOptions, listen, serve, serve_several
    except ImportError as error:
        raise OptionError(
            f"The server needs {error.name}, which is not installed.",
            fix="Run `pip install 'heterollm[serve]'`.",
        ) from error
    models = _models_in(model)
    if name is not None and len(models) > 1:
        raise OptionError("--name is for one model.", fix="Leave it out: their folders name several models.")
    sampling = {name: value for name, value in asdict(requests).items() if value is not None}
    max_tokens = sampling.pop("max_tokens", None)
    options_of_server = ServeOptions(
        host=host,
        port=port,
        name=name or Path(models[0]).name or models[0],
        api_keys=tuple(api_key or ()),
        cors=tuple(cors or ()),
        sessions_gib=sessions_gib,
        prefixes_gib=prefixes_gib,
        idle_s=60 * idle_minutes,
        gaps=gaps,
        queue=queue,
        connections=connections,
        sampling=sampling,
        max_tokens=max_tokens,
        exact=not no_exact,
        live=live,
    )
    say, note = (lambda text, show=show: report.show(show(text)) for show in (report.message, report.note))
    if len(models) == 1:
        with listen(options_of_server) as bound, load_model(models[0], options, run, trace=live) as llm:
            serve(llm, options_of_server, bound, say=say, note=note)
        return
    listed = [
        ListedModel(
            named,
            _memory_bytes(path, options.weights.precision),
            partial(_serve_in_process, path, options, run, replace(options_of_server, name=named)),
        )
        for named, path in _named(models).items()
    ]
    with listen(options_of_server) as bound:
        serve_several(listed, options_of_server, bound, say=say, note=note)


def _serve_in_process(
    model: str,
    options: ModelOptions,
    run: RunOptions,
    served: ServeOptions,
    pipe: Connection,
    sessions_bytes: int,
) -> None:
    """Load a model and serve it on a free port of this machine; see ``Run``."""
    from heterollm.base import GIB
    from heterollm.report import console as report
    from heterollm.serve import listen, serve, session_places

    own = replace(served, host="127.0.0.1", port=0, cors=(), sessions_gib=max(1, sessions_bytes) / GIB)
    with listen(own) as bound, load_model(model, options, run, trace=own.live) as llm:
        taken_bytes = session_places(own, llm.session_bytes) * llm.session_bytes
        serve(
            *(llm, own, bound),
            say=lambda _text: pipe.send((bound.getsockname()[1], taken_bytes)),
            note=lambda text: report.show(report.note(f"{own.name}: {text}")),
        )


PARTS: Final = {"fp16": 1.0, "w8a8": 0.6}
"""Memory of weights over the bytes of their files, by precision; 4 bits take less than 0.4."""


def _memory_bytes(model: str, precision: str) -> int:
    """Return the memory that the weights of a model take; 0 of one that is not on this machine."""
    from heterollm.base import is_exported

    path = Path(model)
    files = [*path.glob("*.safetensors")] if path.is_dir() else [path] if path.is_file() else []
    exported = [*path.glob("weights/*.safetensors")] if is_exported(path) else []
    files += exported
    part = 1.0 if exported or path.suffix == ".gguf" else PARTS.get(precision, 0.4)
    return int(part * sum(file.stat().st_size for file in files))


def _models_in(given: Sequence[str]) -> list[str]:
    """Return the models that a user names, and in place of a folder of models those in it."""
    found: list[str] = []
    for model in given:
        folder = Path(model)
        inside = sorted(path.parent for path in folder.glob("*/config.json")) if folder.is_dir() else []
        whole = not inside or (folder / "config.json").is_file()
        found += [model] if whole else map(str, inside)
    return found


def _named(models: Sequence[str]) -> dict[str, str]:
    """Return the models by their names in requests.

    Raises:
        OptionError: Two have the same name.
    """
    from heterollm.base import OptionError

    names = {Path(model).name or model: model for model in models}
    if len(names) < len(models):
        raise OptionError(
            f"Two of the models have the same name: {', '.join(models):.300}.",
            fix="Give models whose last parts differ.",
        )
    return names

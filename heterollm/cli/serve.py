"""The command ``serve``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from heterollm.cli.load import load_model
from heterollm.cli.options import Model, ModelOptions, RunOptions, command_group
from heterollm.cli.records import takes_records

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
    model: Model,
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
    queue: Annotated[int, typer.Option(help="Requests of each tier that may wait.")] = 64,
    connections: Annotated[int, typer.Option(help="Connections at most; idle ones make room.")] = 512,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact/--no-exact",
            help="Whether answers with a seed or temperature 0 depend on no other request.",
        ),
    ] = True,
    requests: RequestOptions,
    live: Annotated[
        bool, typer.Option("--live", help="Trace all passes; the page shows how busy GPU and NPU are.")
    ] = False,
) -> None:
    """Serve a model to a browser and to clients of OpenAI, Anthropic and Ollama, on 127.0.0.1 by default."""
    from heterollm.base import OptionError
    from heterollm.report import console as report

    try:
        from heterollm.serve import ServeOptions, listen, serve
    except ImportError as error:
        raise OptionError(
            f"The server needs {error.name}, which is not installed.",
            fix="Run `pip install 'heterollm[serve]'`.",
        ) from error
    sampling = {name: value for name, value in asdict(requests).items() if value is not None}
    max_tokens = sampling.pop("max_tokens", None)
    options_of_server = ServeOptions(
        host=host,
        port=port,
        name=name or Path(model).name or model,
        api_keys=tuple(api_key or ()),
        cors=tuple(cors or ()),
        sessions_gib=sessions_gib,
        prefixes_gib=prefixes_gib,
        queue=queue,
        connections=connections,
        sampling=sampling,
        max_tokens=max_tokens,
        exact=exact,
        live=live,
    )
    with listen(options_of_server) as bound, load_model(model, options, run, trace=live) as llm:
        serve(
            llm,
            options_of_server,
            bound,
            say=lambda text: report.show(report.message(text)),
            note=lambda text: report.show(report.note(text)),
        )

"""What processes of models run in tests: a new process imports it."""

import os
from multiprocessing.connection import Connection

from heterollm.base import GIB, CheckpointError


def serve_bundled(
    folder: str, name: str, keys: tuple[str, ...], pipe: Connection, sessions_bytes: int
) -> None:
    """Serve a checkpoint, as the command does, with kernels that are quick to compile."""
    from heterollm.kernels.gpu import OpenClRuntime
    from heterollm.llm import LLM
    from heterollm.serve import ServeOptions, listen, serve, session_places

    build = OpenClRuntime._build
    OpenClRuntime._build = lambda runtime, source, options, name: build(
        runtime, source, [*options, "-cl-opt-disable"], name
    )
    options = ServeOptions(port=0, name=name, api_keys=keys, sessions_gib=sessions_bytes / GIB)
    with listen(options) as bound, LLM.load(folder, device="host", plan="gpu", context=256) as llm:
        started = bound.getsockname()[1], session_places(options, llm.session_bytes) * llm.session_bytes
        serve(llm, options, bound, say=lambda _text: pipe.send(started), note=lambda _text: None)


def fail_to_load(pipe: Connection, sessions_bytes: int) -> None:
    del pipe, sessions_bytes
    raise CheckpointError("The file is damaged.", fix="Fetch it again.")


def lack_memory(pipe: Connection, sessions_bytes: int) -> None:
    del pipe
    from heterollm.serve.model_process import NoSessionError

    raise NoSessionError(f"{sessions_bytes} are too few.", needed_bytes=7, fix="Use a smaller --context.")


def die(pipe: Connection, sessions_bytes: int) -> None:
    del pipe, sessions_bytes
    os._exit(3)

"""What processes of models run in tests: a new process imports it."""

import os
from multiprocessing.connection import Connection

from heterollm.base import CheckpointError


def serve_bundled(folder: str, name: str, keys: tuple[str, ...], pipe: Connection) -> None:
    """Serve a checkpoint, as the command does, with kernels that are quick to compile."""
    from heterollm.kernels.gpu import OpenClRuntime
    from heterollm.llm import LLM
    from heterollm.serve import ServeOptions, listen, serve

    build = OpenClRuntime._build
    OpenClRuntime._build = lambda runtime, source, options, name: build(
        runtime, source, [*options, "-cl-opt-disable"], name
    )
    options = ServeOptions(port=0, name=name, api_keys=keys, sessions_gib=0.1)
    with listen(options) as bound, LLM.load(folder, device="host", plan="gpu", context=256) as llm:
        port = bound.getsockname()[1]
        serve(llm, options, bound, say=lambda _text: pipe.send(port), note=lambda _text: None)


def fail_to_load(pipe: Connection) -> None:
    del pipe
    raise CheckpointError("The file is damaged.", fix="Fetch it again.")


def die(pipe: Connection) -> None:
    del pipe
    os._exit(3)

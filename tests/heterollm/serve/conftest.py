"""A server of the bundled model in this process, and OpenAI's client for it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import uvicorn
from chat_models import CHATS, chat_folder

from heterollm.base import EngineError
from heterollm.llm import LLM
from heterollm.serve import ServeOptions, listen
from heterollm.serve.app import Server
from heterollm.serve.connections import ServerConfig
from heterollm.solver import Plan


@contextlib.contextmanager
def running(llm: LLM, places: int = 4, **options: Any) -> Iterator[str]:
    """Serve a model on a free port of this machine, and give the address."""
    chosen = ServeOptions(port=0, name="tiny", **options)
    with listen(chosen) as bound:
        made = Server(llm, chosen, places)
        llm.limit_sessions(places + 1)  # as the command does
        server = uvicorn.Server(ServerConfig(made.app, connections=chosen.connections))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            with contextlib.suppress(EngineError):  # a test has closed the model
                llm.limit_sessions(None)


@pytest.fixture(scope="session")
def serving() -> Callable[..., contextlib.AbstractContextManager[str]]:
    return running


@pytest.fixture(scope="module")
def llm(bundled_model: Path, half_rows_plan: Callable[..., Plan]) -> Iterator[LLM]:
    """The bundled model, split between both processors, with short chunks of a prompt."""
    with LLM.load(bundled_model, device="host", plan="gpu") as gpu:
        plan = half_rows_plan(gpu, 64)
    with LLM.load(bundled_model, device="host", plan=plan) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose prompt opens its reasoning, and whose marks are tokens, as Qwen3.5's."""
    folder = chat_folder(tmp_path_factory.mktemp("chat") / "model", *CHATS["thinking"])
    with LLM.load(folder, device="host", plan="gpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def thinking_address(thinker: LLM) -> Iterator[str]:
    with running(thinker) as found:
        yield found


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with running(llm) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as made:
        yield made

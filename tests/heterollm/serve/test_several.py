"""A server of several models, and the processes that it starts and ends."""

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ollama
import openai
import psutil
import pytest
import uvicorn
from model_processes import die, fail_to_load, lack_memory, serve_bundled

from heterollm.base import HeteroLLMError
from heterollm.cli import main
from heterollm.serve import ListedModel, ServeOptions, listen
from heterollm.serve.admission import BusyError
from heterollm.serve.connections import ServerConfig
from heterollm.serve.errors import RequestError
from heterollm.serve.fleet import Fleet
from heterollm.serve.front import Front
from heterollm.serve.model_process import ModelProcess, NoSessionError


@contextlib.contextmanager
def front(models: list[ListedModel], **options: Any) -> Iterator[tuple[str, Fleet]]:
    """Serve models on a free port, and give the address."""
    chosen = ServeOptions(port=0, **options)
    fleet = Fleet(models, idle_s=chosen.idle_s, sessions_bytes=200 << 20)
    with listen(chosen) as bound:
        server = uvicorn.Server(ServerConfig(Front(fleet, chosen).app, connections=64))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}", fleet
        finally:
            server.should_exit = True
            thread.join()


def get(address: str, path: str, key: str = "") -> tuple[int, Any]:
    request = urllib.request.Request(
        address + path, headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def client(address: str, key: str = "x") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def wait(condition: Any) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_models_are_loaded_on_demand_and_unloaded_when_idle(bundled_model: Path) -> None:
    models = [
        *(ListedModel(one, 0, partial(serve_bundled, str(bundled_model), one, ("k",))) for one in ("a", "b")),
        ListedModel("damaged", 0, fail_to_load),
        ListedModel("dead", 0, die),
    ]
    with front(models, idle_s=3600, api_keys=("k",)) as (address, fleet):
        mine = client(address, "k")
        assert [one.id for one in mine.models.list()] == ["a", "b", "damaged", "dead"]
        assert get(address, "/status", "k") == (200, {"model": "a", "loaded": False})
        assert get(address, "/props", "k")[0] == 404
        assert get(address, "/v1/models")[0] == 401
        assert fleet.loaded == ()

        def ask(name: str) -> str:
            return (
                mine.completions.create(model=name, prompt="def ", max_tokens=8, temperature=0)
                .choices[0]
                .text
            )

        with ThreadPoolExecutor(4) as pool:  # the first request loads it for all
            texts = list(pool.map(ask, ["a"] * 3 + ["b"]))
        assert len(set(texts)) == 1
        assert fleet.loaded == ("a", "b")
        parts = mine.completions.create(model="b", prompt="def ", max_tokens=8, temperature=0, stream=True)
        assert "".join(part.choices[0].text for part in parts if part.choices) == texts[0]
        assert get(address, "/status?model=b", "k")[1]["model"] == "b"
        assert get(address, "/props?model=a", "k")[0] == 200
        theirs = ollama.Client(host=address, headers={"Authorization": "Bearer k"})
        assert [one.model for one in theirs.list().models] == ["a", "b", "damaged", "dead"]
        assert [one.model for one in theirs.ps().models] == ["a", "b"]
        assert theirs.generate(
            "b:latest", "def ", raw=True, options={"num_predict": 4, "temperature": 0}
        ).response
        # A response of one model is found without its name.
        made = mine.responses.create(model="b", input="x", max_output_tokens=16)
        assert mine.responses.retrieve(made.id).id == made.id
        for name, words in (
            ("damaged", "Fetch it again"),
            ("dead", "exit code 3"),
            ("other", "Name one of a"),
        ):
            with pytest.raises(openai.APIStatusError, match=words):
                ask(name)
        assert fleet.loaded == ("a", "b")
        # A process that was killed is started again, at once for a request that comes before anybody knows.
        children = psutil.Process().children(recursive=True)
        servers = [child for child in children if child.net_connections("tcp")]
        for child in servers:
            child.send_signal(signal.SIGKILL)
        assert ask("a") == texts[0]
        fleet._idle_s = 0.5
        wait(lambda: fleet.loaded == ())
        assert ask("b") == texts[0]
    assert fleet.loaded == ()


def test_a_client_that_leaves_stops_its_answer(bundled_model: Path) -> None:
    model = ListedModel("a", 0, partial(serve_bundled, str(bundled_model), "a", ()))
    with front([model]) as (address, fleet):
        parts = client(address).completions.create(model="a", prompt="def ", max_tokens=200, stream=True)
        next(iter(parts))
        parts.response.close()
        wait(lambda: fleet.requests == 0)
        wait(lambda: get(address, "/status")[1]["running"] == 0)


class Process:
    """A process that needs memory and starts nothing."""

    port, is_alive = 1, True

    def __init__(self, log: list[str], name: str, sessions_bytes: int = 0, each: int = 1) -> None:
        self.log, self.name, self.each = log, name, each
        self.sessions_bytes = min(3, sessions_bytes // each) * each
        log.append(f"+{name}")

    def wait(self) -> None:
        if self.each > 1 and not self.sessions_bytes:
            raise NoSessionError(
                "One session takes more.", needed_bytes=self.each, fix="Use a smaller --context."
            )

    def close(self) -> None:
        self.log.append(f"-{self.name}")

    def kill(self) -> None:
        self.log.append(f"killed {self.name}")


def test_models_that_rest_for_longest_make_room() -> None:
    log: list[str] = []

    def available() -> int:
        return 1000 - 300 * sum(1 if entry[0] == "+" else -1 for entry in log)

    def start(name: str, _run: Any, _bytes: int) -> Any:
        return Process(log, name)

    models = [ListedModel(name, 240, fail_to_load) for name in "abcd"]
    fleet = Fleet(models, idle_s=0, sessions_bytes=0, start=start, available=available)

    async def use() -> None:
        for name in "abca":
            async with fleet.use(name):
                pass
        async with fleet.use("b"):
            # b is in use, c rested for longest.
            async with fleet.use("d"):
                assert fleet.loaded == ("a", "b", "d")
            async with fleet.use("c"):
                assert fleet.loaded == ("b", "c", "d")
        await fleet.close()

    asyncio.run(use())
    assert log[:5] == ["+a", "+b", "+c", "-c", "+d"]
    assert sorted(log[-3:]) == ["-b", "-c", "-d"]


def test_the_sessions_of_all_models_share_one_memory() -> None:
    log: list[str] = []
    each = {"a": 10, "b": 30, "c": 5, "d": 60, "e": 101}

    def start(name: str, _run: Any, sessions_bytes: int) -> Any:
        return Process(log, name, sessions_bytes, each[name])

    models = [ListedModel(name, 0, fail_to_load) for name in each]
    fleet = Fleet(models, idle_s=0, sessions_bytes=100, start=start, available=lambda: None)

    def taken() -> dict[str, int]:
        found = {name: entry.sessions_bytes for name, entry in fleet._entries.items() if entry.process}
        assert sum(found.values()) <= 100
        return found

    async def use(name: str) -> dict[str, int]:
        async with fleet.use(name):
            return taken()

    async def run() -> None:
        assert await use("a") == {"a": 30}  # three sessions are all that it wants
        assert await use("b") == {"a": 30, "b": 30}
        assert await use("c") == {"a": 30, "b": 30, "c": 15}
        async with fleet.use("b"):
            # One session of d fits into what a and c leave, which nobody uses.
            assert await use("d") == {"b": 30, "d": 60}
            async with fleet.use("d"), fleet.use("a"):
                assert taken() == {"a": 10, "b": 30, "d": 60}
                with pytest.raises(BusyError, match="Other models"):
                    await use("c")
            assert await use("c") == {"b": 30, "c": 5, "d": 60}
        with pytest.raises(NoSessionError, match="takes more"):
            await use("e")
        await fleet.close()
        assert taken() == {}

    asyncio.run(run())


def test_a_server_that_hurries_ends_the_answers_of_its_processes() -> None:
    log: list[str] = []

    def start(name: str, _run: Any, _bytes: int) -> Any:
        return Process(log, name)

    models = [ListedModel(name, 0, fail_to_load) for name in "ab"]
    fleet = Fleet(models, idle_s=0, sessions_bytes=0, start=start)

    async def use() -> None:
        async with fleet.use("b"):
            Front(fleet, ServeOptions()).stop()

    asyncio.run(use())
    assert log == ["+b", "killed b"]


def test_a_request_names_a_model_or_means_the_last_one() -> None:
    models = [ListedModel(name, 0, fail_to_load) for name in ("a", "b:1")]
    fleet = Fleet(models, idle_s=0, sessions_bytes=0)
    assert [fleet.find(name) for name in (None, "a", "a:latest", "b:1")] == ["a", "a", "a", "b:1"]
    with pytest.raises(RequestError, match="no model 'c'"):
        fleet.find("c")


def test_an_error_of_a_load_crosses_the_processes() -> None:
    process = ModelProcess("x", fail_to_load, 0)
    with pytest.raises(HeteroLLMError, match="damaged") as caught:
        process.wait()
    assert caught.value.fix == "Fetch it again."
    assert not process.is_alive
    process = ModelProcess("x", lack_memory, 3)
    with pytest.raises(NoSessionError, match="3 are too few") as lacking:
        process.wait()
    assert (lacking.value.needed_bytes, lacking.value.fix) == (7, "Use a smaller --context.")


def test_the_command_serves_a_folder_of_models(bundled_model: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(bundled_model, tmp_path / "models" / name)
    command = [sys.executable, "-P", "-m", "heterollm", "serve", "models", "--device", "host"]
    command += ["--plan", "gpu", "--port", "0", "--context", "256"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    said = ""
    while "/v1" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    threading.Thread(target=process.stderr.read, daemon=True).start()
    found = re.search(r"http://127\.0\.0\.1:\d+", said)
    assert found is not None
    address = found[0]
    assert [one.id for one in client(address).models.list()] == ["one", "two"]
    answer = client(address).completions.create(model="two", prompt="def ", max_tokens=4)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not psutil.wait_procs(children, timeout=30)[1]


@pytest.mark.parametrize(
    "arguments", [["a/x", "b/x"], ["a", "b", "--name", "c"], ["a", "b", "--idle-minutes", "-1"]]
)
def test_models_that_cannot_be_served_together(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 1
    assert "Traceback" not in capsys.readouterr().err

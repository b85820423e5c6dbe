"""The command in a process of its own: its address, its warning, and its end."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from heterollm.cli import main


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Serve with the command on all addresses; give the process, its port and its first messages."""
    command = [sys.executable, "-P", "-m", "heterollm", "serve", "tiny-python-lm", "--device", "host"]
    command += ["--plan", "gpu", "--host", "0.0.0.0", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stderr is not None
    said = ""
    while "HETEROLLM_API_KEY" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    found = re.search(r"http://0\.0\.0\.0:(\d+)/v1", said)
    assert found is not None
    yield process, found[1], said
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_running_answers_end_before_the_server_does(child: tuple[subprocess.Popen[str], str, str]) -> None:
    process, port, said = child
    assert "tiny-python-lm answers OpenAI's clients at" in said
    assert "Everybody who reaches this address" in said
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    options: Any = {"model": "tiny-python-lm", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    chunks = iter(client.completions.create(prompt="import ", stream=True, **options))
    next(chunks)
    process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert process.wait(600) == 0
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_a_second_signal_ends_running_answers_with_an_error(
    child: tuple[subprocess.Popen[str], str, str],
) -> None:
    process, port, _ = child
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0)
    options: Any = {"model": "tiny-python-lm", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    chunks = iter(client.completions.create(prompt="import ", n=8, stream=True, **options))
    next(chunks)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "Ctrl-C again" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="The server stops") as caught:
        list(chunks)
    assert caught.value.code == "server_stops"
    assert process.wait(600) == 0
    assert process.stderr.read() == ""


def test_a_server_without_its_libraries_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("heterollm.serve")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["serve", "tiny-python-lm"]) == 1
    assert "pip install 'heterollm[serve]'" in capsys.readouterr().err

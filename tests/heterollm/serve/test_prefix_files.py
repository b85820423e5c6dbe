"""Beginnings of prompts on disk: the next start of a server goes on from them."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from heterollm.base import cache_root
from heterollm.llm import LLM

Serving = Callable[..., contextlib.AbstractContextManager[str]]

SHARED = "def f(x):\n    return x\n" * 60
TWO = ("import os\n", "import sys\n")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def llm(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="gpu", context=1024) as loaded:
        yield loaded


def ask(address: str, end: str, key: str = "x") -> tuple[str, int]:
    """Return an answer, and the tokens of its prompt that were there."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
    found: Any = client.completions.create(model="tiny", prompt=SHARED + end, max_tokens=8, seed=1)
    return found.choices[0].text, found.usage.prompt_tokens_details.cached_tokens


def files() -> list[Path]:
    return sorted((cache_root() / "prefixes").glob("*.safetensors"))


def test_a_second_start_reads_what_requests_share(llm: LLM, serving: Serving) -> None:
    with serving(llm) as address:
        expected = [ask(address, end)[0] for end in TWO]
    assert not files()
    with serving(llm, prefixes_gib=1) as address:
        assert ask(address, TWO[0])[1] == 0
        assert not files()
        shared = ask(address, TWO[1])[1]
        assert shared >= 256
    assert len(files()) == 1
    with serving(llm, prefixes_gib=1) as address:
        assert [ask(address, end) for end in TWO] == [(text, shared) for text in expected]
        assert ask(address, TWO[0], key="another")[1] == 0
    with serving(llm) as address:
        assert ask(address, TWO[0])[1] == 0


def test_a_damaged_file_is_deleted_and_the_prompt_read(
    llm: LLM, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(llm, prefixes_gib=1) as address:
        expected = [ask(address, end)[0] for end in TWO]
    (path,) = files()
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)
    (path.parent / f"{'0' * 32}.safetensors").write_bytes(content[:50])
    with caplog.at_level(logging.WARNING), serving(llm, prefixes_gib=1) as address:
        assert len(files()) == 1
        assert ask(address, TWO[0]) == (expected[0], 0)
        assert not files()
        assert ask(address, TWO[1])[0] == expected[1]
    assert "damaged" in caplog.text
    assert len(files()) == 1


def test_the_oldest_files_make_room(llm: LLM, serving: Serving) -> None:
    with serving(llm, prefixes_gib=1) as address:
        for end in TWO:
            ask(address, end)
    (old,) = files()
    os.utime(old, (1, 1))
    gib = 1.5 * old.stat().st_size / 2**30
    with serving(llm, prefixes_gib=gib) as address:
        for end in TWO:
            ask(address, end, key="another")
    (new,) = files()
    assert new != old
    with serving(llm, prefixes_gib=gib / 3) as address:
        for end in TWO:
            ask(address, end, key="a third")
    assert files() == [new]

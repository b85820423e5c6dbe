"""Embeddings over HTTP, with the clients of OpenAI and Ollama, on a model in Qwen3-Embedding's form."""

import base64
import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from embedding_models import declare, end_with
from serve_http import ask, get, post

from heterollm.llm import LLM

TEXTS = ["def add(a, b):", "import os", "é漢"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory, checkpoint: Any) -> Iterator[LLM]:
    folder = Path(shutil.copytree(checkpoint("qwen3"), tmp_path_factory.mktemp("embedder") / "model"))
    end_with(folder, "<|endoftext|>")
    declare(folder, "Pooling", "Normalize", pooling_mode_lasttoken=True)
    with LLM.load(folder, device="host", plan="gpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def own_address(embedder: LLM, serving: Any) -> Iterator[str]:
    with serving(embedder) as address:
        yield address


@pytest.fixture(scope="module")
def own(own_address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{own_address}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_openais_client_gets_the_models_embeddings(own: openai.OpenAI, embedder: LLM) -> None:
    expected = embedder.embed(TEXTS)
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = own.embeddings.create(model="tiny", input=TEXTS, **form)  # type: ignore[arg-type]
        for index, (one, vector) in enumerate(zip(answer.data, expected, strict=True)):
            found: Any = one.embedding
            if isinstance(found, str):
                found = np.frombuffer(base64.b64decode(found), "<f4")
            assert np.array_equal(np.asarray(found, np.float32), vector)
            assert one.index == index
    tokens = sum(len(embedder.embedding_ids(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == tokens
    ids = [embedder.embedding_ids(text).tolist() for text in TEXTS]
    for given in (ids, ids[0], TEXTS[0]):
        first = own.embeddings.create(model="tiny", input=given, user="anna").data[0].embedding
        assert np.array_equal(np.asarray(first, np.float32), expected[0])
    short = own.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16).data[0].embedding
    assert np.allclose(short, embedder.embed(TEXTS[:1], dimensions=16)[0])


def test_ollamas_client_gets_them_too(own_address: str, embedder: LLM) -> None:
    client = ollama.Client(host=own_address)
    expected = embedder.embed(TEXTS)
    answer = client.embed(model="tiny", input=TEXTS)
    assert np.allclose(answer.embeddings, expected, atol=1e-6)
    assert (answer.model, answer.load_duration) == ("tiny", 0)
    assert answer.prompt_eval_count == sum(len(embedder.embedding_ids(text)) for text in TEXTS)
    assert np.allclose(client.embed(model="tiny", input=TEXTS[0], dimensions=8).embeddings, 0, atol=1)
    assert np.allclose(client.embeddings(model="tiny", prompt=TEXTS[0]).embedding, expected[0])
    long = "x " * 5000
    cut = embedder.embedding(embedder.embedding_ids(long, cut=True))
    assert np.allclose(client.embed(model="tiny", input=long).embeddings[0], cut, atol=1e-6)
    with pytest.raises(ollama.ResponseError, match="512"):
        client.embed(model="tiny", input=long, truncate=False)
    assert client.embed(model="tiny", input=[]).embeddings == []
    assert "embedding" in (client.show("tiny").capabilities or ())


def test_answers_and_embeddings_share_the_engine(own: openai.OpenAI, embedder: LLM) -> None:
    expected = embedder.embed(["x " * 400])
    asked: Any = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 40,
        "seed": 1,
        "extra_body": {"ignore_eos": True},
    }
    alone = own.completions.create(**asked).choices[0].text
    texts: list[str] = []
    beside = threading.Thread(
        target=lambda: texts.extend(own.completions.create(**asked).choices[0].text for _ in range(4))
    )
    beside.start()
    for _ in range(6):
        found = own.embeddings.create(model="tiny", input="x " * 400).data[0].embedding
        assert np.array_equal(np.asarray(found, np.float32), expected[0])
    beside.join()
    assert texts == [alone] * 4
    _, _, metrics = ask(str(own.base_url).removesuffix("/v1/"), "GET", "/metrics")
    assert 'path="/v1/embeddings",status="200"' in metrics


def test_a_client_that_leaves_ends_its_texts(own_address: str) -> None:
    connection = http.client.HTTPConnection(own_address.removeprefix("http://"))
    body = json.dumps({"model": "tiny", "input": ["x " * 400] * 1000})
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    while not get(own_address, "/health")[1]["running"]:
        time.sleep(0.01)
    connection.close()
    ends = time.monotonic() + 30
    while get(own_address, "/health")[1]["running"]:
        assert time.monotonic() < ends
        time.sleep(0.01)
    assert "heterollm_aborted_total 1.0" in ask(own_address, "GET", "/metrics")[2]


REFUSED: dict[str, tuple[dict[str, Any], str | None]] = {
    "no text": ({"input": []}, "input"),
    "no tokens": ({"input": [[]]}, "input[0]"),
    "mixed": ({"input": ["x", 5]}, "input"),
    "a number": ({"input": 5}, "input"),
    "outside": ({"input": [10**6]}, "input"),
    "too many": ({"input": ["x"] * 2049}, "input"),
    "form": ({"encoding_format": "int8"}, "encoding_format"),
    "dimensions": ({"dimensions": 4096}, "dimensions"),
    "no dimensions": ({"dimensions": 0}, "dimensions"),
    "unknown": ({"pooling": "mean"}, "pooling"),
    "too long": ({"input": "x " * 5000}, None),
    "another model": ({"model": "x"}, "model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_server_refuses_with_the_field(own_address: str, name: str) -> None:
    changed, param = REFUSED[name]
    status, answer = post(own_address, "/v1/embeddings", {"model": "tiny", "input": "x", **changed})
    assert status == (404 if name == "another model" else 400)
    assert answer["error"]["param"] == param, answer


def test_a_model_of_texts_refuses_in_both_forms(address: str) -> None:
    status, answer = post(address, "/v1/embeddings", {"model": "tiny", "input": "x"})
    assert (status, answer["error"]["code"]) == (400, "model_has_no_embeddings")
    status, answer = post(address, "/api/embed", {"model": "tiny", "input": "x"})
    assert (status, list(answer)) == (400, ["error"])
    assert "no embeddings" in answer["error"]

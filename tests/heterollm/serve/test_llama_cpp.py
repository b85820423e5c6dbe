"""Endpoints of llama.cpp's server: tokens of texts, properties and slots."""

import json
from typing import Any

import pytest
from serve_http import get, post

from heterollm.llm import LLM


@pytest.mark.parametrize("text", ["def add(a, b):", "", "é\U0001f600", "a<|endoftext|>b"])
def test_tokens_and_back(address: str, llm: LLM, text: str) -> None:
    for add, parse in ((False, True), (True, True), (False, False)):
        asked = {"content": text, "add_special": add, "parse_special": parse}
        status, answer = post(address, "/tokenize", asked)
        assert status == 200
        ids = answer["tokens"]
        if parse:
            assert ids == llm.tokenizer.encode(text, add)
        else:
            assert not set(ids) & set(llm.tokenizer.special_tokens)
        _, pieces = post(address, "/tokenize", {**asked, "with_pieces": True})
        assert [one["id"] for one in pieces["tokens"]] == ids
        own = (one["piece"] for one in pieces["tokens"])
        joined = b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in own)
        _, back = post(address, "/detokenize", {"tokens": ids})
        assert back["content"] == joined.decode()
        assert back["content"].endswith(text)


def test_properties_and_slots(address: str, llm: LLM) -> None:
    _, props = get(address, "/props")
    assert props["default_generation_settings"]["n_ctx"] == llm.context
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert (props["total_slots"], props["model_alias"]) == (4, "tiny")
    assert props["chat_template"] == llm.tokenizer.chat_template()
    status, slots = get(address, "/slots?fail_on_no_slot=1")
    assert status == 200
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in slots)


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "no text": ("/tokenize", {}, 400, "invalid_request_error"),
    "a number": ("/tokenize", {"content": 5}, 400, "invalid_request_error"),
    "unknown field": ("/tokenize", {"content": "x", "text": "y"}, 400, "invalid_request_error"),
    "no token": ("/detokenize", {"tokens": [10**9]}, 400, "invalid_request_error"),
    "below 0": ("/detokenize", {"tokens": [-1]}, 400, "invalid_request_error"),
    "no list": ("/detokenize", {"tokens": "x"}, 400, "invalid_request_error"),
    "no object": ("/detokenize", [], 400, "invalid_request_error"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_have_llama_cpps_form(address: str, name: str) -> None:
    path, body, expected, kind = REFUSED[name]
    status, answer = post(address, path, body)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (expected, expected, kind)
    assert answer["error"]["message"]
    assert "Traceback" not in json.dumps(answer)

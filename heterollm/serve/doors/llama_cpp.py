"""Endpoints of llama.cpp's server beside OpenAI's: tokens of a text, properties, and slots."""

from __future__ import annotations

import math
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request

from heterollm.serve.about import About
from heterollm.serve.bodies import BodyPart, decoded
from heterollm.serve.errors import RequestError


class _TokenizeBody(BodyPart, frozen=True, kw_only=True):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class _DetokenizeBody(BodyPart, frozen=True, kw_only=True):
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]


def tokenize(about: About, content: bytes) -> dict[str, Any]:
    """Return the tokens of a text, with their own texts if the body asks for these."""
    body = decoded(content, _TokenizeBody, about.llm.context)
    tokenizer = about.llm.tokenizer
    ids = tokenizer.encode(body.content, body.add_special, controls=body.parse_special)
    if not body.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": index, "piece": _piece(about, index)} for index in ids]}


def _piece(about: About, index: int) -> str | list[int]:
    """Return the text of a token, or its bytes if they are none."""
    own = about.llm.tokenizer.token_bytes.of(index)
    if own is None:  # a special token
        return about.llm.tokenizer.token_bytes.text(index)
    try:
        return own.decode()
    except UnicodeDecodeError:
        return list(own)


def detokenize(about: About, content: bytes) -> dict[str, Any]:
    """Return the text of tokens, special ones by their spelling.

    Raises:
        RequestError: The model has no such token.
    """
    body = decoded(content, _DetokenizeBody, about.llm.context)
    most = about.llm.config.vocab_size
    if (outside := next((index for index in body.tokens if index >= most), None)) is not None:
        raise RequestError(f"tokens has {outside}, but the model's last token is {most - 1}.", param="tokens")
    return {"content": about.llm.tokenizer.decode(body.tokens, controls=True)}


def props(about: About, _request: Request) -> dict[str, Any]:
    """Return the properties of the server and the sampling of requests that do not say otherwise."""
    from heterollm import __version__

    names = {"repetition_penalty": "repeat_penalty"}
    sampling = {names.get(name, name): value for name, value in about.defaults.sampling.items()}
    most = about.defaults.max_tokens or -1
    tokenizer, config = about.llm.tokenizer, about.llm.config
    return {
        "default_generation_settings": {
            "n_ctx": about.llm.context,
            "params": {"seed": -1, **sampling, "n_predict": most, "max_tokens": most},
        },
        "total_slots": about.admission.places,
        "model_alias": about.name,
        "chat_template": tokenizer.chat_template(),
        "bos_token": "".join(tokenizer.special_tokens.get(index, "") for index in config.bos_ids[:1]),
        "eos_token": "".join(tokenizer.special_tokens.get(index, "") for index in config.eos_ids[:1]),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"heterollm {__version__}",
        "is_sleeping": False,
    }


def slots(about: About, request: Request) -> list[dict[str, Any]]:
    """Return the places for sessions, those in use first: a request takes one or more.

    Raises:
        RequestError: All are in use, and the query has ``fail_on_no_slot``.
    """
    taken, places = math.ceil(about.admission.taken), about.admission.places
    if taken == places and request.query_params.get("fail_on_no_slot"):
        raise RequestError("All slots are in use.", status=503, code="no_slot")
    return [{"id": i, "n_ctx": about.llm.context, "is_processing": i < taken} for i in range(places)]

"""Requests to a server, without a client's own ideas."""

import contextlib
import http.client
import json
from typing import Any


def ask(address: str, method: str, path: str, body: object = None, **headers: str) -> tuple[int, str, str]:
    """Return status, type and text of an answer."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    with contextlib.closing(connection):
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        known = {"Content-Type": "application/json"} if method == "POST" else {}
        connection.request(
            method, path, content, {**known, **{k.replace("_", "-"): v for k, v in headers.items()}}
        )
        answer = connection.getresponse()
        return answer.status, answer.headers.get_content_type(), answer.read().decode()


def get(address: str, path: str, **headers: str) -> tuple[int, Any]:
    """Return status and JSON of an answer."""
    status, _, text = ask(address, "GET", path, **headers)
    return status, json.loads(text)


def post(address: str, path: str, body: object, **headers: str) -> tuple[int, Any]:
    """Return status and JSON of the answer to a body: JSON, or bytes as they are."""
    status, _, text = ask(address, "POST", path, body, **headers)
    return status, json.loads(text)

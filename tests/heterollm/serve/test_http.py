"""Requests that no client should send, and those of other origins."""

import base64
import contextlib
import hashlib
import http.client
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from heterollm.base import OptionError
from heterollm.llm import LLM
from heterollm.serve import ServeOptions, listen

GOOD = {"model": "tiny", "prompt": "import ", "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"


def send(
    address: str, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Return status, body and headers of the answer to one request."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    with contextlib.closing(connection):
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        content = answer.read()
        known = json.loads(content) if answer.headers.get_content_type() == "application/json" else content
        return answer.status, known, dict(answer.headers)


BODIES: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 400),
    "no JSON": (b"{", 400),
    "no object": (b"[1]", 400),
    "no text": (b"\xff\xfe{}", 400),
    "deep": (b"[" * 100_000, 400),
    "twice": (b'{"model": "tiny", "model": "tiny", "prompt": "x"}', 400),
    "half a character": (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
    "no number": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400),
    "no model": (b'{"prompt": "x"}', 400),
    "huge number": (b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 5000 + b"}", 400),
    "token outside": (b'{"model": "tiny", "prompt": [99999999]}', 400),
    "mixed": (b'{"model": "tiny", "prompt": [1, "x"]}', 400),
    "no prompt": (b'{"model": "tiny", "prompt": []}', 400),
    "large": (b'{"model": "' + b"x" * (9 << 20) + b'"}', 413),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_body_is_refused(address: str, name: str) -> None:
    body, expected = BODIES[name]
    status, answer, _ = send(address, "POST", COMPLETIONS, body, JSON)
    assert status == expected
    assert answer["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 600


def test_wrong_paths_methods_and_types_have_openais_form(address: str) -> None:
    good = json.dumps(GOOD).encode()
    for method, path, headers, expected in (
        ("GET", "/v2", {}, 404),
        ("GET", COMPLETIONS, {}, 405),
        ("POST", COMPLETIONS, {"Content-Type": "text/plain"}, 415),
        ("POST", COMPLETIONS, {**JSON, "Host": "evil.example"}, 421),
        ("POST", COMPLETIONS, {**JSON, "Host": "127.0.0.1.evil.example:80"}, 421),
        ("GET", "/v1/models/other", {}, 404),
    ):
        status, answer, _ = send(address, method, path, good if method == "POST" else b"", headers)
        assert (status, answer["error"]["type"]) == (expected, "invalid_request_error")
    for host in ("localhost", "[::1]", "[::1]:80", "127.0.0.1:1"):
        assert send(address, "GET", "/health", headers={"Host": host})[0] == 200


def test_a_key_is_needed_except_for_the_page_and_the_health(
    llm: LLM, serving: Callable[..., contextlib.AbstractContextManager[str]]
) -> None:
    with serving(llm, api_keys=("secret",), cors=("https://page.example",)) as address:
        for given, expected in ((None, 401), ("Bearer wrong", 401), ("Bearer secret", 200)):
            headers = {} if given is None else {"Authorization": given}
            status, answer, _ = send(address, "GET", "/v1/models", headers=headers)
            assert status == expected
            assert expected == 200 or answer["error"]["code"] == "invalid_api_key"
            assert send(address, "GET", "/metrics", headers=headers)[0] == expected
        assert send(address, "GET", "/health")[0] == send(address, "GET", "/")[0] == 200
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in (("https://page.example", True), ("https://other.example", False)):
            _, _, headers = send(address, "OPTIONS", COMPLETIONS, headers={"Origin": origin, **asked})
            assert ("access-control-allow-origin" in headers) == allowed


def test_no_other_origin_may_read_by_default(address: str) -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    _, _, headers = send(address, "OPTIONS", COMPLETIONS, headers=asked)
    assert not any(name.lower().startswith("access-control") for name in headers)


def test_the_page_loads_nothing_and_the_metrics_count(address: str) -> None:
    status, page, headers = send(address, "GET", "/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert b"http://" not in page.replace(b"http://www.w3.org", b"")
    assert b"https://" not in page
    send(address, "POST", COMPLETIONS, json.dumps(GOOD).encode(), JSON)
    text = send(address, "GET", "/metrics")[1].decode()
    assert 'heterollm_requests_total{path="/v1/completions",status="200"}' in text
    assert float(text.split("\nheterollm_generated_tokens_total ")[1].split()[0]) >= 2


def test_the_policy_allows_the_script_and_style_of_the_page(address: str) -> None:
    _, page, headers = send(address, "GET", "/")
    for tag in (b"script", b"style"):
        (content,) = re.findall(rb"<%s>(.+?)</%s>" % (tag, tag), page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}'" in headers["content-security-policy"]


@pytest.mark.skipif(
    shutil.which("node") is None, reason="checks JavaScript with node, which is not installed"
)
def test_the_script_of_the_page_is_javascript(address: str, tmp_path: Path) -> None:
    script = tmp_path / "page.js"
    script.write_bytes(send(address, "GET", "/")[1].partition(b"<script>")[2].partition(b"</script>")[0])
    subprocess.run(["node", "--check", script], check=True)


def test_markdown_is_drawn_and_its_html_stays_text(address: str) -> None:
    text = "<script>x()</script> **bold** ![image](http://a.b/c) [bad](javascript:x)\n\n```py\na < b\n```"
    status, body, _ = send(address, "POST", "/markdown", json.dumps({"text": text}).encode(), JSON)
    html = body["html"]
    assert status == 200
    assert "&lt;script&gt;" in html
    assert "<strong>bold</strong>" in html
    assert '<code class="language-py">a &lt; b' in html
    assert not re.search("<script|<img|href=.javascript", html)


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", 400), (b"[1]", 400), (b'{"text": 1}', 400), (json.dumps({"text": "[" * 9999}).encode(), 413)],
)
def test_no_other_text_is_drawn(address: str, body: bytes, status: int) -> None:
    found, answer, _ = send(address, "POST", "/markdown", body, JSON)
    assert found == status
    assert answer["error"]["message"]


def test_an_address_that_is_taken_is_an_error_before_a_model_is_loaded() -> None:
    with listen(ServeOptions(port=0)) as bound, pytest.raises(OptionError, match="Cannot listen") as caught:
        listen(ServeOptions(port=bound.getsockname()[1]))
    assert "--port 0" in caught.value.fix
    with pytest.raises(OptionError, match="--port"):
        ServeOptions(port=70000)


@pytest.mark.parametrize("gaps", [0.5, -1.0, float("nan"), float("inf")])
def test_streams_cannot_be_promised_less_than_their_usual_gap(gaps: float) -> None:
    with pytest.raises(OptionError, match="--gaps"):
        ServeOptions(gaps=gaps)

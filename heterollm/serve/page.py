"""The page: one file, whose own script and style are all that a browser runs."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from starlette.responses import Response


@functools.cache
def page() -> Response:
    """Return the page, with a policy that allows its script and style by their hashes and nothing else."""
    text = resources.files("heterollm.serve").joinpath("page.html").read_text("utf-8")
    policy = (
        f"default-src 'none'; script-src {_hash(text, 'script')}; style-src {_hash(text, 'style')}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(text, media_type="text/html", headers=headers)


def _hash(text: str, tag: str) -> str:
    content = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

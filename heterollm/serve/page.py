"""The page: one answer, whose own script and style are all that a browser runs."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from starlette.responses import Response


@functools.cache
def page() -> Response:
    """Return the page, with a policy that allows its script and style by their hashes and nothing else."""
    text, style, script = (_read(f"page.{kind}") for kind in ("html", "css", "js"))
    text = text.replace("<style></style>", f"<style>{style}</style>")
    text = text.replace("<script></script>", f"<script>{script}</script>")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(text, media_type="text/html", headers=headers)


def _read(name: str) -> str:
    return resources.files("heterollm.serve").joinpath(name).read_text("utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

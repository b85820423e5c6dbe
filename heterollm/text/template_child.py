"""Renders chat templates in a child process; only the child imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template


def render(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of a dialogue, or the kind of the failure and its message.

    Args:
        request: Arguments of transformers' ``render_jinja_template``.
    """
    try:
        rendered, _ = render_jinja_template(**request)
    except jinja2.TemplateSyntaxError as error:
        return {"damaged": str(error)}
    except jinja2.TemplateError as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the template does
        return {"failed": f"{type(error).__name__}: {error}".removesuffix(": ")}
    text: str = rendered[0]
    return {"text": text}

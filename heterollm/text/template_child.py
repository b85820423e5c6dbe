"""Renders chat templates in a child process; only the child imports this module.

Templates are written for transformers' environment, whose settings, functions and names these are
(``utils/chat_template_utils.py``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning: the first that a message has fills the two before it."""

_OPTIONS: Final = ("ensure_ascii", "indent", "separators", "sort_keys")
"""Options of JSON in a template, in order."""


def render(request: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of a dialogue, or the kind of the failure and its message.

    Args:
        request: The ``template``, and its ``variables``, the ``messages`` among them.
    """
    given = request["variables"]
    values = {"tools": None, "documents": None, **given, "messages": list(map(_named, given["messages"]))}
    try:
        return {"text": _compiled(request["template"]).render(values)}
    except jinja2.TemplateSyntaxError as error:
        return {"damaged": str(error)}
    except jinja2.TemplateError as error:
        return {"refused": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the template does
        return {"failed": f"{type(error).__name__}: {error}".removesuffix(": ")}


def _named(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning under the names that templates read."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


class _Generation(Extension):
    """The tag around the text of the assistant, by which training finds it; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    @staticmethod
    def _text(caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """Refuses the names of Python's own attributes."""

    def __init__(*args: Any, **fields: Any) -> None:  # noqa: ANN401 - ``self`` may be a field
        own, *rest = args
        values = dict(*rest, **fields)
        for name in values:
            _check_name(name)
        Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _to_json(value: object, *given: Any, **fields: Any) -> str:  # noqa: ANN401
    """Return JSON as it is: Jinja's own filter escapes HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **dict(zip(_OPTIONS, given, strict=False)), **fields})


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names = {"raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace}
    environment.globals.update(names)
    return environment.from_string(template)

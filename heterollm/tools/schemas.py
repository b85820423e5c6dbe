"""Tools, and the schemas of their arguments in the form that holds calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from heterollm.base import GrammarError

Schema: TypeAlias = Mapping[str, Any]

ANNOTATIONS: Final = {
    *("title", "description", "default", "examples", "$schema", "$defs", "definitions", "deprecated"),
    *("readOnly", "writeOnly", "$comment"),
}
"""Keywords that allow and forbid no value."""

INNER: Final = ("properties", "$defs", "definitions", "patternProperties")
"""Keywords whose value has a schema for each name."""

LISTED: Final = ("anyOf", "oneOf", "prefixItems")
MOST_REFERENCES: Final = 16


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    Args:
        name: Its name.
        description: For the model, if any.
        parameters: JSON Schema of its arguments, an object.
        strict: Whether a part of the schema that nothing enforces is an error.
    """

    name: str
    description: str | None = None
    parameters: Schema = field(default_factory=dict)
    strict: bool = False

    def declared(self) -> dict[str, Any]:
        """Return the declaration for a chat template."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}

    def held(self) -> dict[str, Any]:
        """Return the schema to hold arguments to: no object has further keys unless it asks for them.

        Raises:
            GrammarError: The arguments are no object, or nested too deeply.
        """
        own = dict(self.parameters)
        if own.get("type", "object") != "object":
            raise GrammarError(
                f"The parameters of {self.name!r:.80} have the type {own['type']!r:.40}, not object.",
                fix='Begin with {"type": "object", "properties": {…}}.',
            )
        if "$ref" not in own:
            own["type"] = "object"
        if not {"properties", "anyOf", "oneOf", "allOf", "$ref", "additionalProperties"} & own.keys():
            own["properties"] = {}
        try:
            # An object in several parts would exclude the keys of its other parts.
            return own if _in_parts(own) else _closed(own)
        except (RecursionError, TypeError) as error:
            kind = "nested too deeply" if isinstance(error, RecursionError) else "no JSON Schema"
            raise GrammarError(f"The parameters of {self.name!r:.80} are {kind}.") from None


def _in_parts(schema: object) -> bool:
    if isinstance(schema, Mapping):
        return len(schema.get("allOf") or ()) > 1 or any(_in_parts(one) for one in schema.values())
    return isinstance(schema, Sequence) and not isinstance(schema, str) and any(map(_in_parts, schema))


def _closed(schema: Any) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for name in INNER:
        if isinstance(made.get(name), Mapping):
            made[name] = {key: _closed(one) for key, one in made[name].items()}
    for name in LISTED:
        if isinstance(made.get(name), list):
            made[name] = [_closed(one) for one in made[name]]
    for name in ("items", "additionalProperties"):
        if name in made:
            made[name] = _closed(made[name])
    named = set(made.get("required", ())) <= set(made.get("properties", ()))
    if "properties" in made and "patternProperties" not in made and named:
        made.setdefault("additionalProperties", False)
    return made


def resolved(schema: Any, root: Schema) -> Any:  # noqa: ANN401 - JSON
    """Return a schema behind its references into the root's definitions; one of another kind stays."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        if set(schema) - {"$ref"} - ANNOTATIONS:
            break
        kind, _, name = schema["$ref"].removeprefix("#/").partition("/")
        target = root.get(kind, {}).get(name) if kind in ("$defs", "definitions") else None
        if target is None:
            break
        schema = target
    return schema


def is_text(schema: Any, root: Schema) -> bool:  # noqa: ANN401 - JSON
    """Return whether a schema allows texts and null alone, texts among them."""
    return _kinds(schema, root) in ({"string"}, {"string", "null"})


def allows_null(schema: Any, root: Schema) -> bool:  # noqa: ANN401 - JSON
    """Return whether a schema that allows texts allows null, too."""
    return "null" in _kinds(schema, root)


def _kinds(schema: Any, root: Schema, depth: int = 8) -> set[str]:  # noqa: ANN401 - JSON
    """Return the types of the values that a schema allows; "any" among them if it does not say."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth == 0:
        return {"any"}
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {"string" if isinstance(one, str) else "null" if one is None else "other" for one in values}
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return set(kind)
    parts = schema.get("anyOf")
    if isinstance(parts, list) and parts:
        return set().union(*(_kinds(one, root, depth - 1) for one in parts))
    return {"any"}

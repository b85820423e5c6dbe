"""Random schemas of tools, bounded so that random logits finish them."""

import random
from typing import Any

NAMES = ("city", "count", "größe", "unit", "when_at", "tags", "point", "note", "is_on", "ident")


def _value(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "enum", "text", "pattern", "null", "optional"]
    kind = chance.choice([*kinds, "array", "object", "reference"] if depth else kinds)
    match kind:
        case "integer":
            low = chance.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randrange(1000)}
        case "number":
            return {"type": "number", "minimum": -4, "maximum": 4, "description": "a number"}
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {"enum": chance.sample(["a b", "ä", 'q"q', "it's", 3, None, "x<y", "null"], 3)}
        case "text":
            return {"type": "string", "minLength": chance.randrange(3), "maxLength": chance.randrange(3, 9)}
        case "pattern":
            return {
                "type": "string",
                "pattern": chance.choice(["^[a-f]{2,4}$", "^\\d{3}-[A-Z]+$"]),
                "maxLength": 9,
            }
        case "optional":
            return {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "default": None}
        case "array":
            return {"type": "array", "items": _value(chance, depth - 1), "maxItems": 3}
        case "reference":
            return {"$ref": "#/$defs/Point"}
    return _object(chance, depth - 1)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randrange(1, 4))
    members = {name: _value(chance, depth) for name in names}
    needed = [name for name in names if chance.random() < 0.6]
    made: dict[str, Any] = {"type": "object", "properties": members, "required": needed}
    return made if chance.random() < 0.5 else {**made, "additionalProperties": False}


def parameters(seed: int) -> dict[str, Any]:
    """Return the schema of a tool's arguments."""
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}, "label": {"enum": ["n", "s"]}},
        "required": ["x"],
    }
    return {**_object(random.Random(seed), 2), "$defs": {"Point": point}}

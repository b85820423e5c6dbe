"""A field of a file, and a table of fields that a reader checks a file against."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

from heterollm.base import UnsupportedModelError

Effect = Literal["read", "none", "refused"]

ARCHITECTURE: Final = "{arch}"
"""The architecture of a file, at the begin of a field's name."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field that the format's own reader knows.

    Args:
        name: Name, with a dot before a field of a section; ``*`` stands for any characters, ``{arch}`` for
            the architecture of the file.
        effect: Whether it is read, has no effect on the results here, or is refused.
        meaning: Meaning of the field; for ``none`` and ``refused`` the reason.
        source: Place where the format's own reader defines it.
        neutral: Values with which a refused field changes nothing, as null, a missing one and a list
            of such.
        only: Model types or architectures whose reader knows the field; empty for all.
    """

    name: str
    effect: Effect
    meaning: str
    source: str
    neutral: tuple[object, ...] = ()
    only: frozenset[str] = frozenset()


def rows(
    effect: Effect,
    source: str,
    meanings: Mapping[str, str],
    *,
    neutral: tuple[object, ...] = (),
    only: frozenset[str] = frozenset(),
) -> tuple[Field, ...]:
    """Return fields with a common effect and source.

    Args:
        effect: Their effect.
        source: Place where the format's own reader defines them.
        meanings: Meaning of each field by name.
        neutral: Values with which they change nothing.
        only: Model types or architectures whose reader knows them; empty for all.
    """
    return tuple(Field(name, effect, text, source, neutral, only) for name, text in meanings.items())


@dataclass(frozen=True, slots=True, eq=False)
class FieldTable:
    """The fields of one format.

    Args:
        title: Name of the format.
        fields: Its fields.
    """

    title: str
    fields: tuple[Field, ...]

    def find(self, name: str, kind: str = "") -> Field | None:
        """Return the row of a field.

        Args:
            name: Name as in the file, with a dot before a field of a section.
            kind: Model type or architecture of the file.
        """
        named, of_kind, patterns = _index(self)
        places = {*named.get(name, ())}
        if name.startswith(kind):
            places.update(of_kind.get(name[len(kind) :], ()))
        for place in patterns:
            if fnmatchcase(name, self.fields[place].name.replace(ARCHITECTURE, kind)):
                places.add(place)
        known = (self.fields[place] for place in sorted(places))
        return next((one for one in known if not one.only or kind in one.only), None)

    def read(self, values: Mapping[str, Any], kind: str = "") -> dict[str, Any]:
        """Return a file's fields without those that the table does not read.

        Args:
            values: Content of the file.
            kind: Model type or architecture of the file.
        """
        known = ((name, self.find(name, kind)) for name in values)
        return {name: values[name] for name, row in known if row is None or row.effect == "read"}

    def check(self, values: Mapping[str, Any], where: str, kind: str = "") -> tuple[str, ...]:
        """Refuse a file with a field that would be computed wrongly; return a note about unknown fields.

        Args:
            values: Content of the file.
            where: Name of the file, for messages.
            kind: Model type or architecture of the file.

        Raises:
            UnsupportedModelError: A refused field has a value that is not neutral.
        """
        refused, notes = self.examine(values, where, kind)
        if refused:
            raise UnsupportedModelError(refused[0])
        return notes

    def examine(
        self, values: Mapping[str, Any], where: str, kind: str = ""
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return a sentence for each refused field, and a note about the unknown ones.

        Args:
            values: Content of the file.
            where: Name of the file, for messages.
            kind: Model type or architecture of the file.
        """
        unknown, refused = [], []
        for name, value in self._leaves(values, kind):
            row = self.find(name, kind)
            if row is None:
                unknown += [] if value is None else [name]
            elif row.effect == "refused" and value is not None and not _among(value, row.neutral):
                refused.append(f"{where}: {name} = {value!r:.40} is not supported: {row.meaning}.")
        listed = ", ".join(f"{name:.60}" for name in sorted(unknown))
        notes = (f"{where}: no table of heterollm has {listed}; ignored.",) if unknown else ()
        return tuple(refused), notes

    def _leaves(self, values: Mapping[str, Any], kind: str, prefix: str = "") -> Iterator[tuple[str, object]]:
        """Yield fields by name, and those of a section where the table has no row for the section itself."""
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and self.find(name, kind) is None:
                yield from self._leaves(value, kind, f"{name}.")
            else:
                yield name, value


@functools.cache
def _index(table: FieldTable) -> tuple[dict[str, list[int]], dict[str, list[int]], list[int]]:
    """Return the places of a table's rows: of whole names, of names behind that of the kind, of patterns."""
    named: dict[str, list[int]] = {}
    of_kind: dict[str, list[int]] = {}
    patterns = []
    for place, row in enumerate(table.fields):
        if "*" in row.name:
            patterns.append(place)
        elif row.name.startswith(ARCHITECTURE):
            of_kind.setdefault(row.name.removeprefix(ARCHITECTURE), []).append(place)
        else:
            named.setdefault(row.name, []).append(place)
    return named, of_kind, patterns


def _among(value: object, neutral: tuple[object, ...]) -> bool:
    """Return whether a value is one of those listed, or a list of them; true is not 1, but 1.0 is."""
    if isinstance(value, list) and value not in neutral:
        return all(_among(one, neutral) for one in value)
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral)

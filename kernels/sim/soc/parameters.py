"""The parameters of a modelled SoC, from a YAML file read strictly: no typing error changes a result.

A file names every parameter with its value, unit and source. One that says ``based_on`` gives only what
differs from that SoC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from textwrap import wrap
from typing import Any, Final, cast

import yaml
from msgspec import Struct

from heterollm.base import OptionError, decode
from heterollm.kernels.sim.options import SIMULATED
from heterollm.kernels.sim.soc.quantities import (
    SocParameters,
    Source,
    check_value,
    quantities,
    sections,
)

__all__ = ["TEMPLATE", "file_text", "load_soc", "parse_soc", "soc_names"]

VERSION: Final = 1
TEMPLATE: Final = "template"
"""Name of the file, beside those of the SoCs, that users copy."""

LARGEST_BYTES: Final = 100_000
DEEPEST: Final = 8
NUMBER: Final = re.compile(r"[+-]?\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?")
TOP_FIELDS: Final = frozenset({"soc", "version", "description", "based_on"})


class Leaf(Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter as a file states it, every text as it stands there."""

    value: Any
    unit: str
    source: Source
    meaning: str = ""
    note: str = ""


def soc_names() -> tuple[str, ...]:
    """Return the names of the SoCs whose parameters come with the package."""
    names = (entry.name for entry in resources.files("heterollm.kernels.sim.soc").iterdir())
    known = sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))
    return tuple(name for name in known if name != TEMPLATE)


def _template_path() -> str:
    """Return where a user finds the template."""
    return str(resources.files("heterollm.kernels.sim.soc") / f"{TEMPLATE}.yaml")


def load_soc(name_or_path: str | Path, overrides: Mapping[str, float] | None = None) -> SocParameters:
    """Return the parameters of a modelled SoC.

    Args:
        name_or_path: One of :func:`soc_names` in any case, or a path of the user's YAML file, as written;
            ``sim:`` may stand in front.
        overrides: Values by dotted name, such as ``npu.dequantize_gweights_per_s``, in place of the file's.

    Raises:
        OptionError: There is no such SoC or file, the file is not sound, or an override names no parameter or
            is out of range.
    """
    asked = str(name_or_path)
    if asked[: len(SIMULATED)].lower() == SIMULATED:
        asked = asked[len(SIMULATED) :]
    if (name := asked.lower()) in soc_names():
        return parse_soc(_own_text(name), f"{name}.yaml of this package", overrides)
    path = Path(asked)
    try:
        if not path.is_file():
            raise OptionError(
                f"There is no SoC or file {str(name_or_path)!r:.200}.",
                fix=f"SoCs: {', '.join(soc_names())}; or name a YAML file.",
            )
        if path.stat().st_size > LARGEST_BYTES:
            raise OptionError(f"{path} is no file of a SoC: it has more than {LARGEST_BYTES} bytes.")
        text = path.read_text("utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise OptionError(f"Cannot read {str(name_or_path)!r:.200}: {error}.") from error
    return parse_soc(text, str(path), overrides)


def parse_soc(text: str, where: str, overrides: Mapping[str, float] | None = None) -> SocParameters:
    """Return the parameters that a file's text states; see :func:`load_soc`.

    Args:
        text: YAML.
        where: What to call the file in messages.
        overrides: Values by dotted name.

    Raises:
        OptionError: The text is not sound.
    """
    tree = _tree(text, where)
    wrong = [key for key in TOP_FIELDS - {"based_on"} if key not in tree]
    if wrong:
        raise OptionError(f"{where} lacks {', '.join(sorted(wrong))}.", fix=f"Start from {_template_path()}.")
    if tree["version"] != str(VERSION):
        raise OptionError(f"{where} is of version {tree['version']!r:.40}; this program reads {VERSION}.")
    for key in ("soc", "description"):
        if not isinstance(tree[key], str) or not tree[key].strip():
            raise OptionError(f"{where}: {key} must be text, not {tree[key]!r:.80}.")
    values, sources = _based_on(tree.get("based_on"), where)
    for name, leaf in _leaves({key: tree[key] for key in tree if key not in TOP_FIELDS}, where):
        values[name], sources[name] = _leaf(name, leaf, where)
    missing = [name for name in quantities() if name not in values]
    if missing:
        raise OptionError(
            f"{where} lacks {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}.",
            fix="State all parameters, or a SoC that this one is based_on.",
        )
    for name, value in (overrides or {}).items():
        values[name], sources[name] = check_value(name, value), "user"
    return SocParameters(
        tree["soc"].strip(),
        " ".join(tree["description"].split()),
        **sections(values),
        sources=tuple((name, sources[name]) for name in quantities()),
        changed=tuple(sorted(overrides or {})),
    )


def file_text(
    name: str,
    description: str,
    values: Mapping[str, float],
    sources: Mapping[str, Source],
    notes: Mapping[str, str],
    *,
    head: str = "",
    based_on: str | None = None,
) -> str:
    """Return the text of a file, with unit and meaning beside each value.

    Args:
        name: Of the SoC.
        description: What it stands for.
        values: By dotted name; all of them, or with ``based_on`` what differs.
        sources: Where each comes from.
        notes: What to say about some, by dotted name.
        head: Comment above everything, one paragraph a line.
        based_on: SoC that gives the others.
    """
    lines = [f"# {part}".rstrip() for line in head.splitlines() for part in (wrap(line, 100) or [""])]
    lines += [f"soc: {name}", f"version: {VERSION}", *([f"based_on: {based_on}"] if based_on else [])]
    lines += _folded("description", description, "")
    opened: list[str] = []
    for dotted, quantity in quantities().items():
        if dotted not in values:
            continue
        *parents, last = dotted.split(".")
        for depth, parent in enumerate(parents):
            if opened[: depth + 1] != parents[: depth + 1]:
                lines += [*([""] if depth == 0 else []), f"{'  ' * depth}{parent}:"]
        opened = parents
        pad = "  " * len(parents)
        lines.append(f"{pad}{last}:")
        lines += [f"{pad}  value: {_number(values[dotted])}", f'{pad}  unit: "{quantity.unit}"']
        lines.append(f"{pad}  source: {sources[dotted]}")
        lines += _folded("meaning", quantity.meaning, f"{pad}  ")
        if dotted in notes:
            lines += _folded("note", notes[dotted], f"{pad}  ")
    return "\n".join(lines) + "\n"


def _parsed(value: object) -> object:
    """Return the number that a text is; anything else as it is."""
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _number(value: float) -> str:
    """Write a number that any reader of YAML takes as one: with a decimal point and no exponent."""
    if value == int(value):
        return str(int(value)) if isinstance(value, int) else f"{value:.1f}"
    return f"{value:.10f}".rstrip("0")


def _folded(key: str, text: str, pad: str) -> list[str]:
    return [f"{pad}{key}: >-", *wrap(text, 108, initial_indent=f"{pad}  ", subsequent_indent=f"{pad}  ")]


def _own_text(name: str) -> str:
    return (resources.files("heterollm.kernels.sim.soc") / f"{name}.yaml").read_text("utf-8")


class _StrictLoader(yaml.BaseLoader):  # type: ignore[misc]
    """YAML of texts only, which guesses no types and refuses a key given twice."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:  # noqa: ANN401 - PyYAML has no types
        self._depth += 1
        if self._depth > DEEPEST:
            raise yaml.YAMLError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _mapping(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key.value, str) and key.value in seen:
            raise yaml.YAMLError(f"it names {key.value!r:.80} twice, in line {key.start_mark.line + 1}")
        if isinstance(key.value, str):
            seen.add(key.value)
    return cast("dict[Any, Any]", loader.construct_mapping(node, deep=True))


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _tree(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _StrictLoader)  # noqa: S506 - makes texts, lists and mappings only
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise OptionError(f"{where} is no sound YAML: {problem:.300}.") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise OptionError(f"{where} is no file of a SoC.", fix=f"Start from {_template_path()}.")
    return cast("dict[str, Any]", tree)


def _based_on(base: object, where: str) -> tuple[dict[str, float], dict[str, Source]]:
    if base is None:
        return {}, {}
    if base not in soc_names():
        raise OptionError(f"{where} is based_on {base!r:.80}, which is none of {', '.join(soc_names())}.")
    soc = load_soc(str(base))
    return soc.values(), dict(soc.sources)


def _leaves(tree: Mapping[str, Any], where: str, prefix: str = "") -> list[tuple[str, Any]]:
    """Return what stands at the dotted names of parameters; anything elsewhere is an error."""
    found: list[tuple[str, Any]] = []
    for key, branch in tree.items():
        name = f"{prefix}{key}"
        if name in quantities():
            found.append((name, branch))
        elif any(known.startswith(f"{name}.") for known in quantities()):
            if not isinstance(branch, dict):
                raise OptionError(f"{where}: {name} must hold parameters, not {branch!r:.80}.")
            found += _leaves(branch, where, f"{name}.")
        else:
            try:
                check_value(name, None)
            except OptionError as error:
                raise OptionError(f"{where}: {error.message}", fix=error.fix) from None
    return found


def _leaf(name: str, leaf: object, where: str) -> tuple[float, Source]:
    if not isinstance(leaf, dict):
        raise OptionError(
            f"{where}: {name} must state value, unit, source, not only {leaf!r:.80}.",
            fix=f"See {_template_path()}.",
        )
    stated = decode(leaf, Leaf, source=f"{where}: {name}", error=OptionError, fix=f"See {_template_path()}.")
    if stated.unit != quantities()[name].unit:
        raise OptionError(f"{where}: {name} is in {quantities()[name].unit}, not in {stated.unit!r:.40}.")
    try:
        return check_value(name, _parsed(stated.value)), stated.source
    except OptionError as error:
        raise OptionError(f"{where}: {error.message}", fix=error.fix) from error

"""The parameters of a modelled SoC, from a YAML file read strictly: no typing error changes a result.

A file names every parameter with its value, unit and source. One that says ``based_on`` gives only what
differs from that SoC.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_type_hints

import msgspec
import yaml
from msgspec import UNSET, Meta, Struct, UnsetType

from heterollm.base import OptionError, decode, read_file
from heterollm.kernels.sim.options import SIMULATED
from heterollm.kernels.sim.soc.quantities import SocParameters, Source, quantities, soc_parameters, unit_of

VERSION: Final = 1
TEMPLATE: Final = "template"
"""Name of the file, beside those of the SoCs, that users copy."""

LARGEST_BYTES: Final = 100_000
DEEPEST: Final = 8
NUMBER: Final = re.compile(r"[+-]?\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?$")

Text = Annotated[str, Meta(pattern=r"\S")]


@functools.cache
def soc_file() -> type[Struct]:
    """Return the type of a SoC's file: every parameter of :class:`SocParameters` with its unit and source."""
    version: Any = Literal[VERSION]
    based_on: Any = Literal[soc_names()]
    head = [("soc", Text), ("version", version), ("description", Text)]
    return _record("SocFile", [*head, ("based_on", based_on | UnsetType, UNSET), *_stated(SocParameters)])


@functools.cache
def _section(kind: type[Struct]) -> type[Struct]:
    return _record(kind.__name__, list(_stated(kind)))


def _stated(kind: type[Struct]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of a file that state the parameters of a record; each may be left out."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if hasattr(hint, "__metadata__"):
            unit: Any = Literal[unit_of(hint.__metadata__[0])]
            stated: list[Any] = [("value", hint), ("unit", unit), ("source", Source)]
            stated += [("meaning", str, ""), ("note", str, "")]
            yield name, _record(f"{kind.__name__}_{name}", stated) | UnsetType, UNSET
        elif isinstance(hint, type) and issubclass(hint, Struct):
            yield name, _section(hint) | UnsetType, UNSET


def _record(name: str, fields: list[Any]) -> type[Struct]:
    return msgspec.defstruct(name, fields, frozen=True, forbid_unknown_fields=True, module=__name__)


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
        text = read_file(path, LARGEST_BYTES).decode()
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
    file = _file(text, where)
    base = None if file.based_on is UNSET else load_soc(file.based_on)
    values = {} if base is None else base.values()
    sources = {} if base is None else dict(base.sources)
    for name in quantities():
        if (stated := _at(file, name)) is not UNSET:
            values[name], sources[name] = stated.value, stated.source
    if missing := [name for name in quantities() if name not in values]:
        raise OptionError(
            f"{where} lacks {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}.",
            fix="State all parameters, or a SoC that this one is based_on.",
        )
    for name, value in (overrides or {}).items():
        _check_name(name)
        values[name], sources[name] = value, "user"
    description = " ".join(file.description.split())
    return soc_parameters(file.soc.strip(), description, values, sources, sorted(overrides or {}))


def _at(file: Struct, dotted: str) -> Any:  # noqa: ANN401 - a record that soc_file() made
    """Return what a file states about a parameter; ``UNSET`` where it states nothing."""
    found: Any = file
    for name in dotted.split("."):
        found = UNSET if found is UNSET else getattr(found, name)
    return found


def _check_name(name: str) -> None:
    """Check that there is a parameter of this dotted name.

    Raises:
        OptionError: There is none; the message names the near ones.
    """
    if name in quantities():
        return
    section, _, last = name.rpartition(".")
    near = [known for known in quantities() if known.rpartition(".")[2] == last]
    listed = [known for known in quantities() if known.startswith(f"{section}.")] or list(quantities())
    raise OptionError(
        f"A modelled SoC has no parameter {name!r:.80}.",
        fix=f"Did you mean {', '.join(near)}?" if near else f"Known: {', '.join(listed)}.",
    )


def _own_text(name: str) -> str:
    return (resources.files("heterollm.kernels.sim.soc") / f"{name}.yaml").read_text("utf-8")


class _StrictLoader(yaml.BaseLoader):  # type: ignore[misc]
    """YAML of texts and plain decimal numbers only, which refuses a key given twice."""

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


def _decimal(_loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    value = float(node.value)
    return int(value) if value.is_integer() else value


DECIMAL_TAG: Final = "!decimal"
_StrictLoader.add_implicit_resolver(DECIMAL_TAG, NUMBER, None)
_StrictLoader.add_constructor(DECIMAL_TAG, _decimal)
_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


@functools.lru_cache(maxsize=8)
def _file(text: str, where: str) -> Any:  # noqa: ANN401 - a record that soc_file() made
    """Return a file as a record; each use of a SoC parses it and those that it is based on."""
    advice = f"See {_template_path()}."
    return decode(_tree(text, where), soc_file(), source=where, error=OptionError, fix=advice)


def _tree(text: str, where: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _StrictLoader)  # noqa: S506 - makes texts, lists and mappings only
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise OptionError(f"{where} is no sound YAML: {problem:.300}.") from error
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise OptionError(f"{where} is no file of a SoC.", fix=f"Start from {_template_path()}.")
    return cast("dict[str, Any]", tree)

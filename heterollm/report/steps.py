"""The steps of passes on the terminal, read from top to bottom like a decoder layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterollm.engine import Buffer, Step
from heterollm.kernels.ops import Phase
from heterollm.report.console import table

COLUMNS: Final = ("layer", "on", "step", "shard", "reads", "writes")
_LayerLines: TypeAlias = "tuple[int | None, list[_Line]]"

MOST_DIFFERENCES: Final = 2
"""A layer that differs from the last shown one in more steps is shown as a whole."""


@dataclass(frozen=True, slots=True)
class PassSteps:
    """A pass and its steps, those of the head included."""

    phase: Phase
    tokens: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class _Line:
    """A step as a line of the table; each kernel of a merged launch has one, and ``launch`` brackets them."""

    step: Step
    launch: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The columns after the layer's."""
        step = self.step
        if step.processor == "host":
            what = step.action.replace("_", " ")
            if step.wait is not None:
                return "host", what, f"by {step.wait.strategy}", step.wait.buffer, ""
            return "host", what, "", _names(step.reads), _names(step.writes)
        shard = step.label.removeprefix(step.name).strip()
        on = f"{self.launch}{step.processor.upper()}"
        return on, step.operator, shard, _names(step.reads), _names(step.writes)


def steps_report(passes: Sequence[PassSteps], heading: str) -> RenderableType:
    """Return a table of each pass, which shows equal layers once.

    Args:
        passes: The passes.
        heading: Device, precision and level of the plan.
    """
    parts: list[RenderableType] = [Text(heading)]
    for one in passes:
        parts += [Text(), _pass_table(one)]
    if any(step.merged for one in passes for step in one.steps):
        parts.append(Text("The kernels of a bracket are one launch."))
    return Group(*parts)


def steps_json(passes: Sequence[PassSteps]) -> list[dict[str, Any]]:
    """Return passes with all of their steps as JSON values."""
    return [
        {"phase": one.phase, "tokens": one.tokens, "steps": [_record(step) for step in one.steps]}
        for one in passes
    ]


def _record(step: Step) -> dict[str, Any]:
    wait = None if step.wait is None else {"buffer": step.wait.buffer, "strategy": step.wait.strategy}
    return {
        "operator": step.operator,
        "layer": step.layer,
        "tokens": step.tokens,
        "processor": step.processor,
        "action": step.action,
        "reads": list(map(str, step.reads)),
        "writes": list(map(str, step.writes)),
        "label": step.label,
        "wait": wait,
        "merged": [_record(part) for part in step.merged],
    }


def _pass_table(one: PassSteps) -> RenderableType:
    made = table(*COLUMNS, title=f"{one.phase} of {one.tokens} token{'s' if one.tokens > 1 else ''}")
    shown: list[_Line] = []
    name = ""
    for layers, lines in _runs(_layers(one.steps)):
        differences = _differences(lines, shown) if layers[0] is not None else None
        if differences is None:
            behind = "head" if shown else ""
            _add(made, behind if layers[0] is None else str(layers[0]), lines)
            shown, name = lines, str(layers[0])
            continue
        span = f"{layers[0]}" if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
        made.add_row(span, "", Text(f"as layer {name}{', but' if differences else ''}", "dim"))
        _add(made, "", differences)
    return made


def _add(made: Table, layer: str, lines: Sequence[_Line]) -> None:
    """Add lines to a table, the first of them with their layer."""
    for place, line in enumerate(lines):
        made.add_row("" if place else layer, *line.cells)


def _runs(found: Sequence[_LayerLines]) -> Iterator[tuple[list[int | None], list[_Line]]]:
    """Yield runs of consecutive equal layers, with the lines of the first."""
    for _, run in itertools.groupby(found, key=lambda item: [line.cells for line in item[1]]):
        first, *others = run
        yield [first[0], *(layer for layer, _ in others)], first[1]


def _layers(steps: Iterable[Step]) -> list[_LayerLines]:
    """Return each layer with its lines; steps before and after the layers are under None."""
    lines = itertools.groupby(_lines(steps), key=lambda line: line.step.layer)
    return [(layer, list(own)) for layer, own in lines]


def _lines(steps: Iterable[Step]) -> Iterable[_Line]:
    for step in steps:
        for place, part in enumerate(step.merged):
            yield _Line(part, "┌ " if place == 0 else "└ " if place + 1 == len(step.merged) else "│ ")
        if not step.merged:
            yield _Line(step, "")


def _differences(lines: Sequence[_Line], shown: Sequence[_Line]) -> list[_Line] | None:
    """Return the lines in which a layer differs from the shown one; None if it must be shown as a whole."""
    if len(lines) != len(shown):
        return None
    found = [line for line, other in zip(lines, shown, strict=True) if line.cells != other.cells]
    return found if len(found) <= MOST_DIFFERENCES else None


def _names(buffers: Sequence[Buffer]) -> str:
    return ", ".join(dict.fromkeys(buffer.name for buffer in buffers))

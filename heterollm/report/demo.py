"""The demonstration on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from heterollm.data import BUNDLED_NAME
from heterollm.report.console import note, table

if TYPE_CHECKING:
    from heterollm.benchmarks import DemoResult, DemoRow

NEXT: Final = (
    "Next, with a checkpoint of your own (a folder, a hub name or a GGUF file): `heterollm profile MODEL` "
    "measures this machine for it once, and `heterollm chat MODEL` talks to it."
)


def demo_heading(device: Mapping[str, Any], parameters: int, prompt: str) -> Group:
    """Return what the machine stands in for, the size of the model, and the prompt."""
    gpu, npu = (f"{device[name]}{_threads(device[f'{name}_threads'])}" for name in ("gpu", "npu"))
    if device["time"] == "simulated":
        stands = f"{device['device']} is a modelled phone: this machine computes, and the clock is virtual."
    elif device["device"] == "snapdragon":
        stands = f"This machine has both processors. GPU: {gpu}. NPU: {npu}."
    else:
        stands = (
            "This machine stands in for a phone with a GPU and an NPU, which run the same kernels and graphs "
            f"here at other speeds. GPU: {gpu}, {device['gpu_driver']}. NPU: {npu}."
        )
    return Group(
        Text(stands),
        Text(),
        Text(f"{BUNDLED_NAME}, {parameters / 1e6:.1f} million parameters, gets this prompt:"),
        Padding(Text(prompt.rstrip(), style="dim"), (1, 0, 1, 4)),
        Text("and continues:"),
        Text(),
    )


def demo_report(result: DemoResult) -> Group:
    """Return the two tables, when splitting pays, the notes and the next command."""
    parts: list[RenderableType] = []
    if result.measured:
        title = f"This machine ({result.device['device']}), measured: one layer of TinyLlama-1.1B, tokens/s"
        parts += [_table(title, result.measured), *(Text(f"• {text}") for text in result.sentences), Text()]
    title = f"{result.phone}, SIMULATED, nothing measured: {result.phone_model}, tokens/s"
    parts.append(_table(title, result.simulated))
    same = "write the same text" if result.same_text else "do NOT write the same text"
    parts.append(Text(f"• GPU and NPU {same}, token by token, when they take the likeliest token."))
    parts += [Padding(note(text), (0, 0, 0, 2)) for text in result.notes]
    return Group(*parts, Text(), Text(NEXT))


def _threads(count: object) -> str:
    """Return the threads of a processor in words; only cores of a CPU have any."""
    return f", {count} thread(s)" if count else ""


def _table(title: str, rows: Sequence[DemoRow]) -> RenderableType:
    made = table("", ">prefill 256", ">decode", title=title)
    for row in rows:
        made.add_row(row.processors, *(_rate(value) for value in (row.prefill, row.decode)))
    return made


def _rate(value: float | None) -> str:
    return "failed" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"

"""Everything that is shown to a person: data in, rich renderables out."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from heterollm.base import HeteroLLMError, Progress, format_bytes

if TYPE_CHECKING:
    from heterollm.base import CacheKind, Section
    from heterollm.kernels.device import DeviceStatus
    from heterollm.planning import Precompiled
    from heterollm.text import GenerationResult

__all__ = [
    "bug_panel",
    "cache_table",
    "devices_table",
    "error_panel",
    "note",
    "precompile_report",
    "progress_bars",
    "render",
    "section_table",
    "show",
    "statistics_lines",
    "table",
]

PIPE_WIDTH: Final = 110
"""Columns where there is no terminal to ask."""

LEAST_TEXT_WIDTH: Final = 6
"""Of a table's columns of words, before numbers are broken."""


@functools.cache
def stderr_console() -> Console:
    """Return the one console on stderr, which keeps what is shown clear of progress bars."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def show(renderable: RenderableType) -> None:
    """Show something beside the result, on stderr."""
    console = stderr_console()
    # A log keeps a line of text whole; on a terminal it wraps between words.
    console.print(renderable, soft_wrap=isinstance(renderable, Text) and not console.is_terminal)


def render(renderable: RenderableType, *, like: TextIO | None = None, width: int | None = None) -> str:
    """Return a renderable as text.

    Args:
        renderable: What to render.
        like: Where the text will go; colours and width are those that suit it. Plain text by default.
        width: Columns; by default those of the terminal, or enough for a table in a file.
    """
    terminal = like is not None and like.isatty()
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        force_terminal=terminal,
        no_color=None if terminal else True,
        width=width or (None if terminal else PIPE_WIDTH),
        highlight=False,
    )
    console.print(renderable)
    return buffer.getvalue()


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show one bar for each stage that is reported, on a terminal only.

    A bar vanishes when its stage is done, so that a result can be written between two stages.
    """
    console = stderr_console()
    bars = RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done, total=total, visible=done < total)
        if done < total:
            bars.start()
        elif bars.finished:
            bars.stop()

    try:
        yield report
    finally:
        bars.stop()


# -- errors and notes --------------------------------------------------------------------------------


def error_panel(error: HeteroLLMError) -> Panel:
    """Return the panel of an error that was raised on purpose."""
    parts = [Text(error.message)]
    if error.fix:
        parts.append(Text(error.fix, "bold"))
    return Panel(Group(*parts), title="Error", title_align="left", border_style="red")


def bug_panel(error: BaseException) -> Panel:
    """Return the panel of an error that nobody expected."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    advice = "This is a bug in heterollm. Run the command again with --debug and report what it prints."
    parts = Group(Text(text), Text(advice, "bold"))
    return Panel(parts, title="Unexpected error", title_align="left", border_style="red")


def note(text: str) -> Text:
    """Return a remark."""
    return Text(text, "dim")


def statistics_lines(
    result: GenerationResult, *, device: str, time_kind: str, plan: str, precision: str
) -> Text:
    """Return what an answer cost: tokens, times and rates, and where it was computed."""
    parts = [f"{result.prompt_tokens} prompt tokens", f"{result.generated_tokens} new tokens"]
    if result.ttft_s is not None:
        parts.append(f"first after {result.ttft_s * 1e3:.0f} ms")
    if result.prefill_tokens_per_s is not None:
        parts.append(f"prefill {result.prefill_tokens_per_s:.1f} tokens/s")
    if result.decode_tokens_per_s is not None:
        parts.append(f"decode {result.decode_tokens_per_s:.1f} tokens/s")
    parts.append(f"ended by {result.stop_reason}")
    where = f"device {device} ({time_kind} time), plan {plan}, {precision}"
    return note(f"{', '.join(parts)}\n{where}")


# -- tables ------------------------------------------------------------------------------------------


class _WholeWords(Table):
    """A table that breaks no word while there is room, and then no number; rich would break any."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield its lines, with columns as wide as their longest words and as the room allows."""
        least, widths, numbers = [], [], []
        for column in self.columns:
            column.width = None
            sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            right = column.justify == "right"
            # A number stays with its unit.
            whole = column.no_wrap or right
            small = [sizes[0].minimum, *(size.maximum if whole else size.minimum for size in sizes[1:])]
            least.append(max(small))
            widths.append(max(size.maximum for size in sizes))
            numbers.append(max(small[1:], default=1) if right else min(max(small), LEAST_TEXT_WIDTH))
        if self._taken(console, options) + sum(least) > options.max_width:
            self.collapse_padding, self.pad_edge = True, False
        room = options.max_width - self._taken(console, options)
        for floor in (least, numbers, [1] * len(widths)):
            while sum(widths) > room:
                slack = [width if width > low else 0 for width, low in zip(widths, floor, strict=True)]
                if not any(slack):
                    break
                widths[slack.index(max(slack))] -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _taken(self, console: Console, options: ConsoleOptions) -> int:
        """Return the columns of the terminal that lines and padding take."""
        empty = Table(box=self.box, pad_edge=self.pad_edge, collapse_padding=self.collapse_padding)
        for _ in self.columns:
            empty.add_column(width=0)
        return empty.__rich_measure__(console, options).minimum


def table(*columns: str, title: str = "") -> Table:
    """Return an empty table in the project's style; columns that begin with ``>`` are right-aligned."""
    heading = Text(title) if title else None  # text, since names of models and files are no markup
    made = _WholeWords(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return made


def section_table(section: Section) -> Table:
    """Return a section's title and table."""
    made = table(*section.columns, title=section.title)
    for row in section.rows:
        made.add_row(*map(Text, row))
    return made


def devices_table(statuses: Sequence[DeviceStatus]) -> Group:
    """Return what devices there are, and for the others why not and what to install."""
    made = table("device", "usable", "GPU part", "NPU part")
    lines: list[Text] = []
    for status in statuses:
        yes = "yes" if status.time == "real" else status.time
        usable = Text(yes, "green") if status.usable else Text("no", "red")
        made.add_row(status.name, usable, Text(status.gpu), Text(status.npu))
        if status.reason or status.fix:
            lines.append(Text(f"{status.name}: {status.reason} {status.fix}".rstrip()))
    return Group(made, *lines)


def cache_table(kinds: Sequence[CacheKind]) -> Table:
    """Return what each kind of the cache takes."""
    made = table("kind", "content", ">files", ">size", "folder")
    for kind in kinds:
        size = format_bytes(kind.size_bytes)
        made.add_row(kind.name, kind.content, str(kind.files), size, Text(str(kind.path)))
    total = sum(kind.size_bytes for kind in kinds)
    made.add_section()
    made.add_row("all", "", str(sum(kind.files for kind in kinds)), format_bytes(total), "")
    return made


def precompile_report(result: Precompiled) -> Group:
    """Return what was compiled for a chip, and how it gets there."""
    made = table("group", ">tokens", ">graphs", ">compiled", ">size", ">time", "loads in the emulator")
    for build in result.builds:
        loads = "yes" if build.loadable == build.graphs else f"{build.loadable} of {build.graphs}"
        made.add_row(
            build.group,
            str(build.length),
            str(build.graphs),
            str(build.compiled),
            format_bytes(build.size_bytes),
            f"{build.build_s:.1f} s",
            Text(f"{loads}: {build.refusal}" if build.refusal else loads),
        )
    made.add_section()
    counts = (sum(build.graphs for build in result.builds), sum(build.compiled for build in result.builds))
    size = format_bytes(result.size_bytes)
    made.add_row("all", "", str(counts[0]), str(counts[1]), size, f"{result.build_s:.1f} s", "")
    versions = result.versions
    return Group(
        Text(f"{result.chip} (SoC {result.soc}), plan {result.plan}, {result.precision}"),
        made,
        Text(f"Copy the files in {result.folder} into the same folder of the device's cache,"),
        Text("which `heterollm cache path` names there, and load the same checkpoint with the same options."),
        note(
            f"The device needs onnxruntime-qnn {versions['onnxruntime-qnn']} (QAIRT {versions['qairt']}), or "
            "it compiles again. Not verified on hardware."
        ),
    )

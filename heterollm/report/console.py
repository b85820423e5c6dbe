"""The console: tables, panels, notes and progress bars of rich."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from heterollm.base import (
    HeteroLLMError,
    Progress,
    format_bytes,
    format_duration,
    silent,
    visible,
    write,
    write_json,
)
from heterollm.report.stage_lines import stage_lines

if TYPE_CHECKING:
    from heterollm.base import CacheKind, Section
    from heterollm.benchmarks import Evaluation
    from heterollm.engine import ExpertReads
    from heterollm.export_files import Exported
    from heterollm.kernels.device import Device, DeviceStatus
    from heterollm.model import Conversion, StoredModel
    from heterollm.planning import Precompiled
    from heterollm.solver import Plan
    from heterollm.text import GenerationResult, GenerationStep, SpeculationResult

T = TypeVar("T")

PIPE_WIDTH: Final = 110
"""Columns of a pipe or a file, unless COLUMNS says otherwise."""

LEAST_WIDTH: Final = 40


PACE_S: Final = 1.0
"""Time after which a task's pace predicts the time left."""

PATIENCE_S: Final = 1.0
"""Time after which a wait shows itself."""

FOLDED_WIDTH: Final = 24
"""A longer word, such as a path, may wrap in its cell."""


class SafeConsole(Console):
    """A console that ignores markup in texts, and shows control characters instead of obeying them."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - those of rich's Console
        # rich takes any Unicode digits of COLUMNS for a number.
        stated = os.environ.get("COLUMNS", "0")
        legal = dict(os.environ) if stated.isascii() else dict(os.environ, COLUMNS="")
        super().__init__(markup=False, emoji=False, highlight=False, _environ=legal, **options)

    def on_broken_pipe(self) -> None:
        """End the command as a closed stdout does."""
        self.quiet = True
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render with the control characters of a text made visible."""
        if isinstance(renderable, Text) and (shown := visible(renderable.plain)) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = shown
        return super().render(renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 - those of rich's Console
        """Return a text with its control characters made visible."""
        return super().render_str(visible(text), **options)


@functools.cache
def stderr_console() -> Console:
    """Return the console on stderr; it writes messages above the progress bars."""
    console = SafeConsole(stderr=True)
    if not console.is_terminal:
        console.width = pipe_width()
    return console


def pipe_width() -> int:
    """Return the columns of a pipe: those of COLUMNS, as other programs have it, or a default."""
    stated = os.environ.get("COLUMNS", "")
    return max(LEAST_WIDTH, int(stated)) if stated.isascii() and stated.isdigit() else PIPE_WIDTH


def show_reasoning(text: str) -> None:
    """Show the next piece of a model's reasoning on stderr, which ends no line by itself."""
    stderr_console().print(note(text), end="", soft_wrap=True)


def show(renderable: RenderableType) -> None:
    """Show a message on stderr, apart from the result."""
    console = stderr_console()
    # A log keeps a line of text whole; on a terminal it wraps between words.
    console.print(renderable, soft_wrap=isinstance(renderable, Text) and not console.is_terminal)


def render(renderable: RenderableType, *, like: TextIO | None = None, width: int | None = None) -> str:
    """Return a renderable as text.

    Args:
        renderable: The report.
        like: The stream whose colours and width the text takes; plain text by default.
        width: Columns; by default those of the terminal, or :func:`pipe_width`.
    """
    terminal = like is not None and like.isatty()
    buffer = io.StringIO()
    console = SafeConsole(
        file=buffer,
        force_terminal=terminal,
        no_color=None if terminal else True,
        width=width or (None if terminal else pipe_width()),
    )
    console.print(renderable)
    return buffer.getvalue()


def present(renderable: RenderableType) -> None:
    """Write a result to stdout, with its colours and width."""
    write(render(renderable, like=sys.stdout), styled=True)


class TimeColumn(ProgressColumn):
    """The time that a task has taken, and the time left at its pace."""

    def render(self, task: Task) -> Text:
        """Return both times; at first only the former."""
        elapsed_s = task.elapsed or 0.0
        spent = format_duration(elapsed_s)
        if not (task.total and task.completed and elapsed_s >= PACE_S):
            return Text(spent)
        return Text(f"{spent}, {format_duration(elapsed_s * (task.total / task.completed - 1))} left")


def bars_with(last: ProgressColumn) -> RichProgress:
    """Return progress bars on stderr; they appear on a terminal only.

    Args:
        last: Column after the percentage.
    """
    console = stderr_console()
    return RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        last,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )


def answer(shown: RenderableType, data: object, *, as_json: bool) -> None:
    """Write a result to stdout: its data as JSON, or the report for a person."""
    if as_json:
        write_json(data)
    else:
        present(shown)


@contextlib.contextmanager
def progress_bars() -> Iterator[Progress]:
    """Show one bar for each reported stage; without a terminal, a line for each stage that takes long.

    A bar vanishes with its stage, so that a result can be written between two stages.
    """
    bars = bars_with(TimeColumn())
    if bars.disable:
        with stage_lines(lambda text: show(note(text))) as lines:
            yield lines
        return
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


class Waiting:
    """A bar for the wait for the first of several items, after a moment; lines where no terminal shows it.

    Args:
        stage: The name of the work.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._bars = bars_with(TimeColumn())
        self._task = self._bars.add_task(stage, total=1)
        self._lines: Progress = silent

    def progress(self, _stage: str, done: int, total: int) -> None:
        """Take the progress of the work."""
        self._bars.update(self._task, completed=done, total=total)
        self._lines(self._stage, done, total)

    def until_first(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; the bar vanishes with the first."""
        rest = iter(items)
        first = self._first_with_lines(rest) if self._bars.disable else self._first_with_bar(rest)
        if first is not None:
            yield first
            yield from rest

    def _first_with_lines(self, rest: Iterator[T]) -> T | None:
        with stage_lines(lambda text: show(note(text))) as lines:
            self._lines = lines
            lines(self._stage, 0, 1)
            first = next(rest, None)
        self._lines = silent
        return first

    def _first_with_bar(self, rest: Iterator[T]) -> T | None:
        timer = threading.Timer(PATIENCE_S, self._bars.start)
        timer.start()
        try:
            return next(rest, None)
        finally:
            timer.cancel()
            timer.join()
            self._bars.stop()


# -- errors and notes --------------------------------------------------------------------------------


def error_line(error: HeteroLLMError) -> Text:
    """Return an error of heterollm, with the next step."""
    return _line("Error", error.message, error.fix)


def bug_line(error: BaseException) -> Text:
    """Return an unexpected error."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    advice = "This is a bug in heterollm. Run the command again with --debug and report what it prints."
    return _line("Unexpected error", f"{text.rstrip('.')}.", advice)


def _line(title: str, message: str, advice: str) -> Text:
    # Messages of some libraries point at a place in several lines.
    between = "\n" if "\n" in message else " "
    return Text.assemble((f"{title}: ", "red"), message, (f"{between}{advice}" if advice else "", "bold"))


def message(text: str) -> Text:
    """Return a line that a user waits for."""
    return Text(text)


def note(text: str) -> Text:
    """Return a remark."""
    return Text(text, "dim")


def statistics_lines(
    result: GenerationResult, device: Device, plan: Plan, experts: ExpertReads | None = None
) -> Text:
    """Return tokens, times and rates of an answer, and the device, plan, precision and reads of experts."""
    parts = [f"{result.prompt_tokens} prompt tokens", f"{result.generated_tokens} new tokens"]
    if result.ttft_s is not None:
        parts.append(f"first after {result.ttft_s * 1e3:.0f} ms")
    if result.prepared_s:
        parts.append(f"prepared in {result.prepared_s:.1f} s")
    if result.prefill_tokens_per_s is not None:
        parts.append(f"prefill {result.prefill_tokens_per_s:.1f} tokens/s")
    if result.decode_tokens_per_s is not None:
        parts.append(f"decode {result.decode_tokens_per_s:.1f} tokens/s")
    parts.append(f"ended by {result.stop_reason}")
    where = f"device {device.name} ({device.time_kind} time), plan {plan.level}, {plan.precision}"
    lines = [", ".join(parts), where, *([] if experts is None else [f"experts: {experts}"])]
    if result.speculation is not None:
        lines.append(f"speculative: {_guesses(result.speculation)}")
    return note("\n".join(lines))


def token_table(steps: Sequence[GenerationStep], text_of: Callable[[int], str]) -> Table:
    """Return the tokens of an answer beside the likeliest ones at their places, with probabilities.

    Args:
        steps: The tokens, with their log-probabilities.
        text_of: Returns the text of a token.
    """
    made = table("token", ">probability", "likeliest")
    for step in steps:
        likeliest = ", ".join(
            f"{text_of(token)!r} {math.exp(value):.3f}" for token, value in step.top_log_probabilities or ()
        )
        own = math.exp(step.log_probability or 0.0)
        made.add_row(repr(text_of(step.token_id)), f"{own:.3f}", likeliest)
    return made


def _guesses(counts: SpeculationResult) -> str:
    """Return the guesses of an answer, and their gain."""
    if not counts.passes:
        return "no pass after the first token"
    text = (
        f"{counts.passes} passes, {counts.accepted} of {counts.guesses} guesses right, "
        f"{counts.tokens_per_pass:.2f} tokens a pass"
    )
    gain = counts.estimated_gain
    return text if gain is None else f"{text}, estimated {gain:.2f} times as fast as without"


# -- tables ------------------------------------------------------------------------------------------


class _FittingTable(Table):
    """A table that breaks no word and no number; on a narrow terminal each cell of a row gets a line.

    Args:
        heading: Text above the table.
    """

    def __init__(self, heading: str = "") -> None:
        super().__init__(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        self.heading = heading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the heading and the table, or the rows one below the other."""
        if self.heading:
            yield Text(self.heading, "bold")
        least, widths = [], []
        for column in self.columns:
            column.width = 1
            sizes = [Measurement.get(console, options, cell) for cell in (column.header, *column.cells)]
            widths.append(max(size.maximum for size in sizes))
            # A number stays with its unit; words may fold paths.
            whole = column.no_wrap or column.justify == "right"
            cells = [size.maximum if whole else min(size.minimum, FOLDED_WIDTH) for size in sizes[1:]]
            least.append(max(sizes[0].minimum, *cells, 1))
        room = options.max_width - (super().__rich_measure__(console, options).minimum - len(widths))
        if sum(least) > room:
            yield from self._lines(options.max_width)
            return
        while sum(widths) > room:
            _, place = max((width, place) for place, width in enumerate(widths) if width > least[place])
            widths[place] -= 1
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _lines(self, width: int) -> RenderResult:
        """Yield the first cell of each row, and below it the others, each with the head of its column."""
        for row, cells in zip(
            self.rows, zip(*(column.cells for column in self.columns), strict=True), strict=True
        ):
            first, *others = (
                Text.assemble(head, ": " if head else "", _text(cell), overflow="fold")
                for head, cell in zip((str(column.header) for column in self.columns), cells, strict=True)
                if str(cell)
            )
            first.stylize(row.style or "bold")
            short = [other for other in others if "\n" not in other.plain and other.cell_len < width // 2]
            long = [other for other in others if other not in short]
            yield first
            yield Padding(Group(Columns(short, (0, 3)), *long), (0, 0, 0, 2))


def _text(cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def table(*columns: str, title: str = "") -> Table:
    """Return an empty table in the project's style; columns that begin with ``>`` are right-aligned."""
    made = _FittingTable(title)
    for column in columns:
        right = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold")
    return made


def section_table(section: Section) -> Table:
    """Return a section's title and table."""
    made = table(*section.columns, title=section.title)
    for row in section.rows:
        made.add_row(*row)
    return made


def pairs_table(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return names with their values, without column heads."""
    made = Table(box=box.SIMPLE, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, value)
    return made


def devices_table(statuses: Sequence[DeviceStatus]) -> Group:
    """Return the table of devices, and the reason and the fix of each unusable one."""
    made = table("device", "usable", "GPU", "NPU")
    made.columns[0].no_wrap = True
    lines: list[Text] = []
    for status in statuses:
        yes = "yes" if status.time == "real" else status.time
        usable = Text(yes, "green") if status.usable else Text("no", "red")
        made.add_row(status.name, usable, status.gpu, status.npu)
        if status.reason or status.fix:
            lines.append(Text(f"{status.name}: {status.reason} {status.fix}".rstrip()))
    return Group(made, *lines)


def cache_table(kinds: Sequence[CacheKind]) -> Table:
    """Return files and size of each kind of cached file."""
    made = table("kind", "content", ">files", ">size", "folder")
    for kind in kinds:
        size = format_bytes(kind.size_bytes)
        made.add_row(kind.name, kind.content, str(kind.files), size, str(kind.path))
    total = sum(kind.size_bytes for kind in kinds)
    made.add_section()
    made.add_row("all", "", str(sum(kind.files for kind in kinds)), format_bytes(total), "")
    return made


def conversion_table(found: Conversion) -> Table:
    """Return the size and the accuracy of a quantised checkpoint."""
    zeros = "" if found.symmetric else " with zero points"
    pairs = (
        ("folder", str(found.folder)),
        ("size", f"{format_bytes(found.size_bytes)} of {format_bytes(found.source_bytes)}"),
        ("linears", f"{found.linears} in 4 bits, blocks of {found.block}{zeros}"),
        ("signal to error", f"{found.signal_db:.1f} dB; {found.worst_db:.1f} dB in {found.worst}"),
    )
    return pairs_table(pairs)


def evaluation_table(found: Evaluation) -> Table:
    """Return a model's likelihood of a text, and its nearness to float weights."""
    where = f"{found.device}, plan {found.plan}, {found.precision}"
    pairs = [("model", where), ("text", f"{found.windows} windows of {found.window_tokens} tokens")]
    pairs.append(("perplexity", f"{found.perplexity:.4f}"))
    if found.float_perplexity is not None:
        change = found.perplexity / found.float_perplexity - 1
        pairs += [
            ("with float weights", f"{found.float_perplexity:.4f} ({change:+.2%})"),
            ("same likeliest token", f"{found.top_1_agreement:.2%}"),
            ("KL divergence", f"{found.divergence:.3g} nats a token"),
        ]
    return pairs_table([*pairs, *(("note", text) for text in found.notes)])


def models_table(models: Sequence[StoredModel]) -> Table:
    """Return the models on this machine."""
    made = table("model", "kind", ">size", "files")
    for model in models:
        paths = "\n".join(str(path) for path in model.paths)
        made.add_row(model.name, model.kind, format_bytes(model.size_bytes), paths)
    return made


def export_report(result: Exported) -> Group:
    """Return the content of an exported model, and the command that runs it."""
    made = table("content", ">files", ">size")
    for part in result.parts:
        made.add_row(part.name, str(part.files), format_bytes(part.size_bytes))
    made.add_section()
    made.add_row("all", str(sum(part.files for part in result.parts)), format_bytes(result.size_bytes))
    software = ", ".join(f"{name} {number}" for name, number in result.versions.items())
    return Group(
        Text(
            f"{result.folder}: device {result.device}, plan {result.plan}, {result.precision}, up to "
            f"{result.context} positions"
        ),
        made,
        *(Text(text) for text in result.notes),
        Text(f'`heterollm generate {result.folder} "Once upon a time"` runs it; the folder can be moved.'),
        note(f"Made by {software}. OpenCL programs are compiled where it runs: they are no portable files."),
    )


def precompile_report(result: Precompiled) -> Group:
    """Return the graphs compiled for a chip, and how to copy them to it."""
    counted = (">graphs", ">contexts", ">compiled", ">size", ">time")
    made = table("group", ">tokens", *counted, "loads in the emulator")
    for build in result.builds:
        loads = "yes" if build.loadable == build.graphs else f"{build.loadable} of {build.graphs}"
        made.add_row(
            build.group,
            ", ".join(map(str, build.lengths)),
            str(build.graphs),
            str(build.contexts),
            str(build.compiled),
            format_bytes(build.size_bytes),
            f"{build.build_s:.1f} s",
            f"{loads}: {build.refusal}" if build.refusal else loads,
        )
    made.add_section()
    counts = (
        sum(build.graphs for build in result.builds),
        sum(build.contexts for build in result.builds),
        sum(build.compiled for build in result.builds),
    )
    size = format_bytes(result.size_bytes)
    made.add_row("all", "", *map(str, counts), size, f"{result.build_s:.1f} s", "")
    versions = result.versions
    return Group(
        Text(f"{result.chip} (SoC {result.soc}), plan {result.plan}, {result.precision}"),
        made,
        Text(f"Copy the files in {result.folder} into the same folder of the device's cache"),
        Text("(`heterollm cache path` there), and load the same checkpoint with the same options."),
        *(Text(text) for text in result.notes),
        note(
            f"The device needs onnxruntime-qnn {versions['onnxruntime-qnn']} (QAIRT {versions['qairt']}), or "
            "it compiles again. Not verified on hardware."
        ),
    )

"""The command line: options in, one call, a result on stdout and everything else on stderr.

Each module of this room has one group ``commands``; a new one is added twice here, to the imports and to the
order of the help. Commands import heavy modules when they run, so that the help appears at once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from heterollm.base import BROKEN_PIPE, DONE, FAILED, INTERRUPTED, USAGE, HeteroLLMError, OptionError
from heterollm.cli import bench as cli_bench
from heterollm.cli import cache as cli_cache
from heterollm.cli import calibrate as cli_calibrate
from heterollm.cli import compile as cli_compile
from heterollm.cli import complete as cli_complete
from heterollm.cli import config as cli_config
from heterollm.cli import demo as cli_demo
from heterollm.cli import devices as cli_device
from heterollm.cli import evaluate as cli_evaluate
from heterollm.cli import export as cli_export
from heterollm.cli import generate as cli_generate
from heterollm.cli import models as cli_models
from heterollm.cli import plan as cli_plan
from heterollm.cli import profile as cli_profile
from heterollm.cli import serve as cli_serve
from heterollm.cli import simulate as cli_simulate
from heterollm.cli import trace as cli_trace
from heterollm.cli.examples import add_examples
from heterollm.cli.other_words import own_words
from heterollm.cli.panels import HELP

EVERYWHERE: Final = ("--debug", "--no-config")
"""Options of the program that may also follow the command."""

UsageError: Final[Any] = typer.BadParameter.__bases__[0]
"""Typer's error of wrong usage, which Typer does not export."""


GREETING: Final = """\
heterollm runs a language model on a GPU and an NPU at the same time. Three commands to begin with:

  heterollm demo                   shows GPU, NPU and both at work in a minute, without a download
  heterollm smollm2-135m           fetches a small model (270 MB) and talks to you
  heterollm simulate llama-3.2-1b  shows the times of a model on a phone that is not here

`heterollm -h` lists all commands, and `heterollm COMMAND -h` the options of one."""
"""Text for a call without words."""


class Commands(TyperGroup):
    """The commands; all end in the same way after Ctrl-C, a closed pipe and wrong usage."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - of typer's own click
        """Read the options before the command; ``--help`` writes here."""
        with _endings():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's context, from its own copy of click
        """Run the chosen command."""
        with _endings():
            return super().invoke(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:  # noqa: ANN401 - of typer's own click
        """Return commands and options, and models once a part of a name is typed."""
        found: list[Any] = super().shell_complete(ctx, incomplete)
        if not incomplete or incomplete.startswith("-"):
            return found
        model = next(param for param in self.commands["chat"].params if param.name == "model")
        return [*found, *model.shell_complete(ctx, incomplete)]


@contextlib.contextmanager
def _endings() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _note("Interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    except UsageError as error:
        context = getattr(error, "ctx", None)
        if context is None or type(error).show is not UsageError.show:  # help, which typer shows
            raise
        _note(context.get_usage())
        message = error.format_message().replace("Value error, ", "")
        message += "" if message.endswith((".", "?")) else "."
        _show_error(HeteroLLMError(message, fix=f"`{context.command_path} -h` shows the options."))
        raise typer.Exit(USAGE) from None
    except BrokenPipeError:
        from heterollm.base import discard_output

        discard_output(messages=True)
        raise typer.Exit(BROKEN_PIPE) from None


app = typer.Typer(
    cls=Commands,
    help="Run a language model on a GPU and an NPU, from a Hugging Face checkpoint or a GGUF file. "
    "A model in place of a command talks to you.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": list(HELP)},
)
# In the order of the help.
for group in (
    cli_generate.commands,
    cli_serve.commands,
    cli_demo.commands,
    cli_models.commands,
    cli_evaluate.commands,
    cli_export.commands,
    cli_compile.commands,
    cli_device.commands,
    cli_profile.commands,
    cli_calibrate.commands,
    cli_plan.commands,
    cli_bench.commands,
    cli_trace.commands,
    cli_simulate.commands,
    cli_cache.commands,
    cli_config.commands,
):
    app.add_typer(group)
add_examples(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code, one of :data:`heterollm.base.EXIT_CODES`.

    Args:
        arguments: Words after the program's name; by default the process's.
    """
    from heterollm.base import discard_output, hold_descriptors, private_stdout

    hold_descriptors()
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = list(itertools.takewhile(lambda argument: argument != "--", given))
    # These options have the same effect before and after the command, so they are removed here.
    rest = [argument for argument in options if argument not in EVERYWHERE] + given[len(options) :]
    try:
        with private_stdout():
            return _run(rest, debug="--debug" in options, config="--no-config" not in options)
    except BrokenPipeError:  # of stderr, or of stdout at the end
        discard_output(messages=True)
        return BROKEN_PIPE


@functools.cache
def _program() -> Any:  # noqa: ANN401 - of typer's own click
    """Return the tree of commands, which Typer would make again for every call."""
    return typer.main.get_command(app)


def _run(words: list[str], *, debug: bool, config: bool) -> int:
    from heterollm.base import check_stdout, quiet_libraries

    with (
        quiet_libraries(_note, debug=debug),
        cli_complete.named_shell(words) as words,
        cli_complete.whole_words(),
    ):
        try:
            check_stdout()
            try:
                words = own_words(words, _program())
            except OptionError as error:
                _show_error(error)
                return USAGE
            _program()(args=words, prog_name="heterollm", default_map=_defaults(words) if config else None)
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else DONE
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - the one place where everything ends
            return _show_error(error, debug=debug)
    return DONE


def _defaults(words: list[str]) -> dict[str, Any] | None:
    """Return the options of the file of defaults; None if the words call no command, or one on that file."""
    command = next((word for word in words if not word.startswith("-")), "config")
    if command == "config":
        return None
    from heterollm.cli.config_file import config_defaults, config_path, read_config

    try:
        path = config_path()
        return config_defaults(_program(), path) if read_config(path) else None
    except HeteroLLMError as error:
        if not {*HELP, "--help-all"}.intersection(words):
            raise
        _note(str(error))  # the help needs no defaults
        return None


def _show_error(error: Exception, *, debug: bool = False) -> int:
    from heterollm.report import console as report

    if debug:
        report.show(report.note("".join(traceback.format_exception(error)).rstrip()))
    if isinstance(error, HeteroLLMError):
        report.show(report.error_line(error))
    else:
        report.show(report.bug_line(error))
    return FAILED


def _note(text: str) -> None:
    from heterollm.report import console as report

    report.show(report.note(text))


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[  # noqa: ARG001 - main() reads these; declared for the help
        bool, typer.Option("--debug", help="Show tracebacks and the warnings of libraries.")
    ] = False,
    no_config: Annotated[  # noqa: ARG001
        bool, typer.Option("--no-config", help="Ignore the file of defaults, `heterollm config path`.")
    ] = False,
) -> None:
    """Handle the options that need no command."""
    if not version and context.invoked_subcommand is None:
        from heterollm.report import console as report

        report.show(report.message(GREETING))
        raise typer.Exit(USAGE)
    if version:
        from heterollm import __version__
        from heterollm.base import write

        write(f"heterollm {__version__}\n")
        raise typer.Exit

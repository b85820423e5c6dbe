"""The command line: options in, one call, a result on stdout and everything else on stderr.

Heavy modules are imported inside the commands, so that help comes at once.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

from heterollm.errors import HeteroLLMError, InputError, OptionError

if TYPE_CHECKING:
    from heterollm.kernels.ops import Precision
    from heterollm.llm import LLM

__all__ = ["app", "main"]

FAILED: Final = 1
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""As shells report a process that a signal ended."""


class Commands(TyperGroup):
    """The commands, with one answer to Ctrl-C and to a reader that went away."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - typer's context, from its own copy of click
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            from heterollm.terminal import discard_output

            discard_output()
            raise typer.Exit(BROKEN_PIPE) from None


app = typer.Typer(
    cls=Commands,
    help="Run a language model on a GPU and an NPU, from a Hugging Face checkpoint.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(help="Look at and clear the cache.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache_app, name="cache")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or its hub name.")]
DeviceOption = Annotated[str, typer.Option(help="auto, snapdragon, host or emulator.")]
PlanOption = Annotated[str, typer.Option(help="auto, gpu, npu, layer, or the file of a plan.")]
PrecisionOption = Annotated[str, typer.Option(help="w4a16, w4a8 or fp16.")]
GroupSize = Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="Give 4-bit weights zero points.")]
Context = Annotated[int | None, typer.Option(help="Positions of the KV cache.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token every time.")]
TopK = Annotated[int, typer.Option(help="Sample among so many of the likeliest tokens; 0 among all.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens of this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out what is less likely than this fraction of the best.")]
Penalty = Annotated[float, typer.Option(help="Above 1 makes tokens that were seen less likely.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
GpuThreads = Annotated[int | None, typer.Option(help="Threads of the GPU part on host and emulator.")]
NpuThreads = Annotated[int | None, typer.Option(help="Threads of the NPU part on host; 0 leaves it out.")]
AllowSlow = Annotated[bool, typer.Option("--allow-slow", help="Emulate models that take seconds a pass.")]
Kinds = Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="weights, graphs, opencl.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    0 is success, 1 an error (one panel on stderr), 2 wrong usage, 130 Ctrl-C.

    Args:
        arguments: What follows the program's name; by default what the process was started with.
    """
    from heterollm.terminal import private_stdout, quiet_libraries

    given = list(sys.argv[1:] if arguments is None else arguments)
    options = list(itertools.takewhile(lambda argument: argument != "--", given))
    debug = "--debug" in options
    # The option means the same before and after the command, so it is taken out here.
    rest = [argument for argument in options if argument != "--debug"] + given[len(options) :]
    with private_stdout(), quiet_libraries(_note, debug=debug):
        try:
            app(args=rest, prog_name="heterollm")
        except SystemExit as ended:
            return ended.code if isinstance(ended.code, int) else 0
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:  # noqa: BLE001 - the one place where everything ends
            return _show_error(error, debug=debug)
    return 0


def _show_error(error: Exception, *, debug: bool) -> int:
    from heterollm import report

    if debug:
        traceback.print_exception(error)
    if isinstance(error, HeteroLLMError):
        report.show(report.error_panel(error))
    else:
        report.show(report.bug_panel(error))
    return FAILED


def _note(text: str) -> None:
    from heterollm import report

    report.show(report.note(text))


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[  # noqa: ARG001 - main() has taken it; declared for the help
        bool, typer.Option("--debug", help="Show tracebacks and the warnings of libraries.")
    ] = False,
) -> None:
    """Handle the options that need no command."""
    if version:
        from heterollm import __version__
        from heterollm.terminal import write

        write(f"heterollm {__version__}\n")
        raise typer.Exit


# -- answers -----------------------------------------------------------------------------------------


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")],
    device: DeviceOption = "auto",
    plan: PlanOption = "auto",
    precision: PrecisionOption = "w4a16",
    group_size: GroupSize = 32,
    asymmetric: Asymmetric = False,
    context: Context = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    gpu_threads: GpuThreads = None,
    npu_threads: NpuThreads = None,
    allow_slow: AllowSlow = False,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt: text to stdout as it is made, statistics to stderr."""
    from heterollm import report
    from heterollm.terminal import write, write_json

    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise InputError("The prompt is empty.", fix="Give at least one word.")
    with _load(
        model,
        device=device,
        plan=plan,
        precision=precision,
        group_size=group_size,
        symmetric=not asymmetric,
        context=context,
        gpu_threads=gpu_threads,
        npu_threads=npu_threads,
        allow_slow=allow_slow,
    ) as llm:
        stream = llm.stream(
            text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or (),
        )
        where = {
            "device": llm.device.name,
            "time_kind": llm.device.time_kind,
            "plan": llm.plan.level,
            "precision": llm.plan.precision,
        }
        try:
            if as_json:
                result = stream.result
                write_json({"model": model, **where, **result.to_dict(), "notes": list(llm.notes)})
                return
            for step in stream:
                write(step.text)
            write("\n")
            result = stream.result
        finally:
            # Without it, closing the model would wait for the rest of the answer.
            stream.close()
    report.show(report.statistics_lines(result, **where))


def _read_stdin() -> str:
    """Return all of stdin without the newline that `echo` and editors put at its end."""
    return sys.stdin.read().removesuffix("\n")


@app.command()
def chat(
    model: Model,
    device: DeviceOption = "auto",
    plan: PlanOption = "auto",
    precision: PrecisionOption = "w4a16",
    group_size: GroupSize = 32,
    asymmetric: Asymmetric = False,
    context: Context = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer at most.")] = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: Penalty = 1.0,
    seed: Seed = None,
    system: Annotated[str | None, typer.Option(help="Instructions before the first message.")] = None,
    gpu_threads: GpuThreads = None,
    npu_threads: NpuThreads = None,
    allow_slow: AllowSlow = False,
) -> None:
    """Talk to a model: /reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from heterollm.chat_loop import ChatLoop

    with _load(
        model,
        device=device,
        plan=plan,
        precision=precision,
        group_size=group_size,
        symmetric=not asymmetric,
        context=context,
        gpu_threads=gpu_threads,
        npu_threads=npu_threads,
        allow_slow=allow_slow,
    ) as llm:
        ChatLoop(
            llm,
            system=system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        ).run()


def _load(model: str, **options: Any) -> LLM:  # noqa: ANN401 - LLM.load's own
    from heterollm import report

    with report.progress_bars() as progress:
        # The imports alone take a moment, and the bar says what is going on.
        progress("Loading", 0, 1)
        from heterollm.llm import LLM

        progress("Loading", 1, 1)
        llm = LLM.load(model, progress=progress, **options)
    if llm.device.reason:
        _note(f"device auto chose {llm.device.name}: {llm.device.reason}")
    return llm


@app.command()
def demo(
    device: DeviceOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Length of the text.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """Generate with the bundled model and measure every plan level; needs no download."""
    from heterollm import report
    from heterollm.demo import PROMPT, run_demo
    from heterollm.terminal import write, write_json

    with report.progress_bars() as progress:
        if as_json:
            write_json(run_demo(device=device, max_new_tokens=max_new_tokens, progress=progress).to_dict())
            return
        write(PROMPT)
        result = run_demo(device=device, max_new_tokens=max_new_tokens, on_text=write, progress=progress)
    write("\n\n" + report.render(report.demo_report(result), like=sys.stdout))


@app.command("compile")
def compile_graphs(
    model: Model,
    soc: Annotated[str, typer.Option(help="Qualcomm's number of the chip: 57 is the Snapdragon 8 Gen 3.")],
    plan: Annotated[str, typer.Option(help="npu, layer, or the file of a plan for snapdragon.")] = "layer",
    precision: PrecisionOption = "w4a16",
    group_size: GroupSize = 32,
    asymmetric: Asymmetric = False,
    lengths: Annotated[str | None, typer.Option(help="Some of the lengths only, such as 1,32,256.")] = None,
    context: Context = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a Snapdragon's NPU graphs ahead, on Linux x86-64; they are then copied to the device."""
    from heterollm import report
    from heterollm.precompile import precompile
    from heterollm.terminal import write, write_json

    with report.progress_bars() as progress:
        result = precompile(
            model,
            soc=soc,
            plan=plan,
            precision=cast("Precision", precision),
            group_size=group_size,
            symmetric=not asymmetric,
            lengths=None if lengths is None else _numbers(lengths, "--lengths"),
            context=context,
            progress=progress,
        )
    if as_json:
        write_json(result.to_dict())
        return
    write(report.render(report.precompile_report(result), like=sys.stdout))


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise OptionError(f"{option} is {text!r:.80}.", fix="Give whole numbers with commas between them.")
    return [int(part) for part in parts]


# -- the machine -------------------------------------------------------------------------------------


@app.command()
def devices(as_json: JsonOption = False) -> None:
    """List the devices; for those that are not usable, why and what to install."""
    import dataclasses

    from heterollm import report
    from heterollm.kernels.device import list_devices
    from heterollm.terminal import write, write_json

    statuses = list_devices()
    if as_json:
        write_json([dataclasses.asdict(status) for status in statuses])
        return
    write(report.render(report.devices_table(statuses), like=sys.stdout))


@app.command()
def doctor(
    device: DeviceOption = "auto",
    gpu_threads: GpuThreads = None,
    npu_threads: NpuThreads = None,
    as_json: JsonOption = False,
) -> None:
    """Run every operator on every part of a device against float64; exit code 1 if something fails."""
    from heterollm import report
    from heterollm.doctor import diagnose
    from heterollm.report_doctor import diagnosis_report
    from heterollm.terminal import write, write_json

    with report.progress_bars() as progress:
        diagnosis = diagnose(device, gpu_threads=gpu_threads, npu_threads=npu_threads, progress=progress)
    if as_json:
        write_json(diagnosis.to_dict())
    else:
        write(report.render(diagnosis_report(diagnosis), like=sys.stdout))
    if not diagnosis.passed:
        raise typer.Exit(FAILED)


# -- the cache ---------------------------------------------------------------------------------------


@cache_app.command("list")
def cache_list(as_json: JsonOption = False) -> None:
    """Show what the cache holds and how much room it takes."""
    from heterollm import report
    from heterollm.cache_folder import list_cache
    from heterollm.terminal import write, write_json

    kinds = list_cache()
    if as_json:
        write_json([kind.to_dict() for kind in kinds])
        return
    write(report.render(report.cache_table(kinds), like=sys.stdout))


@cache_app.command("clear")
def cache_clear(
    kinds: Annotated[
        list[str] | None, typer.Argument(metavar="[KIND]...", help="weights, graphs or opencl.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete cached files of some kinds, or of all; they are made again when needed."""
    from heterollm import report
    from heterollm.cache_folder import clear_cache, list_cache
    from heterollm.kernels.cache import cache_root
    from heterollm.terminal import write
    from heterollm.units import format_bytes

    wanted = kinds or []
    if not yes:
        report.show(report.cache_table(list_cache(wanted)))
        typer.confirm(f"Delete these files in {cache_root()}?", abort=True, err=True)
    cleared = clear_cache(wanted)
    files, size = sum(kind.files for kind in cleared), sum(kind.size_bytes for kind in cleared)
    write(f"Deleted {files} files, {format_bytes(size)}.\n")


@cache_app.command("path")
def cache_path() -> None:
    """Print where the cache is."""
    from heterollm.kernels.cache import cache_root
    from heterollm.terminal import write

    write(f"{os.fspath(cache_root())}\n")

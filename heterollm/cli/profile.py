"""The command ``profile`` and those under it."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import typer
from typer.core import TyperGroup

from heterollm.base import FAILED
from heterollm.cli import complete as cli_complete
from heterollm.cli.effects import leave_idle_out
from heterollm.cli.options import (
    PRECISIONS,
    DeviceOptions,
    GroupSize,
    JsonOption,
    ScalesOption,
    command_group,
    one_of,
    several,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.kernels.ops import Precision


class ProfileGroup(TyperGroup):
    """Takes models unless its first word is a command."""

    allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - of typer's own click
        """Read options and models; leave a command and the words after it alone."""
        if not args or args[0] not in self.commands:
            return super().parse_args(ctx, args)
        super().parse_args(ctx, [])
        ctx._protected_args, ctx.args = args[:1], args[1:]  # noqa: SLF001 - as its base class does
        return args[1:]

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - of typer's own click
        """Run a command, or check the options of a measurement and take it."""
        if not ctx._protected_args:  # noqa: SLF001 - as its base class does
            leave_idle_out(ctx)
        return super().invoke(ctx)


OTHER_SHARE: Final = 0.25
"""Share of the budget for another split of the cores, which has fewer points: none of them is the NPU's."""

HELP = "Measure a device once, so that the solver can plan for it; or look at a profile."

commands = command_group("profile", HELP, ProfileGroup)

ProfileName = Annotated[
    str | None,
    typer.Argument(
        metavar="[PROFILE]",
        help="A file, or a fingerprint's beginning; by default the newest.",
        autocompletion=cli_complete.profiles,
    ),
]


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """The measured weight shapes and their formats."""

    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Models whose shapes are measured: folders, hub names, known models.",
            autocompletion=cli_complete.profiled,
        ),
    ] = None
    precision: Annotated[
        list[str] | None,
        typer.Option(
            help="w4a16 (default), w4a8, w8a8 or fp16; may be given several times.",
            parser=one_of(PRECISIONS),
            autocompletion=lambda incomplete: cli_complete.beginning(incomplete, PRECISIONS),
            metavar="NAME",
        ),
    ] = None
    group_size: GroupSize = 32
    scales: ScalesOption = "free"


@dataclass(frozen=True, slots=True)
class EffortOptions:
    """The effort of a measurement."""

    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s or 5m; none for the full grid.")] = (
        "4m"
    )
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Measure only the points that one model's plan needs, in a minute."),
    ] = False
    update: Annotated[
        bool, typer.Option("--update", help="Measure only disturbed points and those that the profile lacks.")
    ] = False
    characterise: Annotated[
        bool,
        typer.Option(
            "--characterise", help="Also measure the NPU's stages, order of operands and effect of k."
        ),
    ] = False
    techniques: Annotated[
        Sequence[Literal["shadowattn", "npumoe", "npu-attention"]],
        several(
            "--technique",
            help="Measure for a technique, too: attention for shadowattn, its graphs for npu-attention, "
            "experts' graphs for npumoe.",
            names=("shadowattn", "npumoe", "npu-attention"),
            metavar="NAME",
        ),
    ] = ()
    no_tune: Annotated[bool, typer.Option("--no-tune", help="Do not tune the GPU kernels first.")] = False


@commands.callback(help=HELP, invoke_without_command=True, no_args_is_help=False)
@takes_records
def profile(
    context: typer.Context,
    opened: DeviceOptions,
    shapes: ShapeOptions,
    effort: EffortOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure a device, unless a command follows."""
    if context.invoked_subcommand is not None:
        return
    _refuse_commands(context, shapes.models or ())
    from heterollm.base import format_duration, parse_duration
    from heterollm.benchmarks import run_profile
    from heterollm.planning import ProfilingSession, other_splits
    from heterollm.profiler import SessionOptions, budget_of
    from heterollm.report import console as report
    from heterollm.report import profile as report_profile

    budget_s = budget_of(parse_duration(effort.budget, "--budget"), quick=effort.quick)
    others = other_splits(opened.device, opened.threads.gpu_threads, opened.threads.npu_threads)
    other_s = None if budget_s is None else OTHER_SHARE * budget_s
    options = SessionOptions.of(
        budget_s=None if budget_s is None else budget_s * (1.0 - OTHER_SHARE * len(others)),
        quick=effort.quick,
        update=effort.update,
        tune=not effort.no_tune,
        characterise=effort.characterise,
        sparse_attention="shadowattn" in effort.techniques,
        expert_graphs="npumoe" in effort.techniques,
        attention_graphs="npu-attention" in effort.techniques,
    )
    profiling = ProfilingSession(
        opened.device,
        models=shapes.models or (),
        precisions=cast("list[Precision]", shapes.precision or ["w4a16"]),
        group_size=shapes.group_size,
        scales=shapes.scales,
        gpu_threads=opened.threads.gpu_threads,
        npu_threads=opened.threads.npu_threads,
        power=opened.power,
    )
    with profiling:
        for text in profiling.notes(options):
            report.show(report.note(text))
        for gpu, npu in others:
            share = "" if other_s is None else f", about {format_duration(other_s)} of the budget"
            report.show(report.note(f"After it {gpu}+{npu} cores, GPU first, in a process of its own{share}"))
        try:
            with report_profile.time_bar() as progress:
                result = profiling.run(options, progress)
        except KeyboardInterrupt:
            report.show(report_profile.interrupted_note(profiling.kept()))
            raise
    for split in others:
        run_profile(_arguments(opened, shapes, effort, split, other_s))
    report.answer(report_profile.run_report(result), result.to_dict(), as_json=as_json)
    if result.useless:
        raise typer.Exit(FAILED)


def _arguments(
    opened: DeviceOptions,
    shapes: ShapeOptions,
    effort: EffortOptions,
    split: tuple[int, int],
    budget_s: float | None,
) -> list[str]:
    """Return the arguments of the same command for another split of the cores."""
    gpu, npu = split
    words = ["profile", "--device", opened.device, "--gpu-threads", str(gpu), "--npu-threads", str(npu)]
    words += ["--budget", "none" if budget_s is None else f"{max(1.0, budget_s):.0f}s"]
    words += ["--group-size", str(shapes.group_size), "--scales", shapes.scales]
    flags = {"--quick": effort.quick, "--update": effort.update, "--no-tune": effort.no_tune}
    words += [name for name, given in flags.items() if given]
    for precision in shapes.precision or ():
        words += ["--precision", precision]
    # Passes and characteristics are the NPU's.
    return [*words, *(shapes.models or ())]


def _refuse_commands(context: typer.Context, models: Sequence[str]) -> None:
    """Refuse a command's name after an option, which the command would not get, and a mistyped name."""
    named = [name for name in models if name in context.command.commands]  # type: ignore[attr-defined]
    if named:
        raise typer.BadParameter(
            f"Options stand before {named[0]!r}. Give the options of `profile {named[0]}` after it; a folder "
            f"of this name is ./{named[0]}.",
            ctx=context,
        )
    for name in models:
        near = difflib.get_close_matches(name, context.command.commands, 1)  # type: ignore[attr-defined]
        if near and not os.path.exists(name):  # noqa: PTH110 - of any text
            raise typer.BadParameter(
                f"There is no model {name!r:.80}. Did you mean `heterollm profile {near[0]}`?", ctx=context
            )


@commands.command("list")
def profile_list(as_json: JsonOption = False) -> None:
    """List the profiles in the cache, damaged ones included."""
    from heterollm.profiler.records import list_profiles
    from heterollm.report import console as report
    from heterollm.report import profile as report_profile

    stored = list_profiles()
    report.answer(report_profile.profiles_table(stored), stored, as_json=as_json)


@commands.command("show")
def profile_show(
    name: ProfileName = None,
    everything: Annotated[bool, typer.Option("--all", help="Also list splits of groups.")] = False,
    plots: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw plots into this folder, as PNG files.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with charts and tables.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the measurements of a device, and the accuracy of predictions from them."""
    from heterollm.profiler import summarize
    from heterollm.profiler.predict import checked
    from heterollm.profiler.records import find_profile, list_profiles
    from heterollm.report import console as report
    from heterollm.report import profile as report_profile

    found, path = find_profile(name)
    summary = summarize(checked(found))
    if name is None:
        others = [one for one in list_profiles() if one.device == found.device and one.path != path]
        for one in others:
            command = f"heterollm profile show {one.fingerprint}"
            report.show(report.note(f"Another profile of {one.device}, of other threads: `{command}`"))
    if plots is not None or html is not None:
        from heterollm.report import write_outputs

        for text in write_outputs(summary, folder=plots, page=html):
            report.show(report.note(text))
    report.answer(
        report_profile.profile_report(summary, everything=everything),
        {"path": str(path), **summary.to_dict()},
        as_json=as_json,
    )


@commands.command("compare")
def profile_compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A file, or a fingerprint's beginning.", autocompletion=cli_complete.profiles
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B", help="The profile to compare with A.", autocompletion=cli_complete.profiles
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare two profiles and list changes beyond the noise."""
    from heterollm.profiler import compare
    from heterollm.profiler.records import find_profile
    from heterollm.report import console as report
    from heterollm.report import profile as report_profile

    comparison = compare(find_profile(first)[0], find_profile(second)[0])
    report.answer(report_profile.comparison_report(comparison), comparison.to_dict(), as_json=as_json)


@commands.command("export")
def profile_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")],
    name: ProfileName = None,
) -> None:
    """Copy a profile out of the cache."""
    from heterollm.base import labelled, write
    from heterollm.profiler.records import export_profile, find_profile

    found, _ = find_profile(name)
    file = labelled(file, simulated=found.time_kind == "simulated")
    export_profile(found, file)
    write(f"Wrote {len(found.records)} records of {found.device} {found.fingerprint} to {file}.\n")


@commands.command("import")
def profile_import(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of `heterollm profile export`.")],
) -> None:
    """Merge a profile into the cache, under the fingerprint of its own device."""
    from heterollm.base import write
    from heterollm.profiler.records import import_profile

    imported = import_profile(file)
    profile_ = imported.profile
    write(
        f"{imported.new} of {len(profile_.records)} records of {profile_.device} {profile_.fingerprint} "
        f"are new in {imported.path}.\n"
    )

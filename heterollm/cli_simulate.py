"""The command ``simulate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from heterollm.cli_options import JsonOption, command_group
from heterollm.errors import OptionError

if TYPE_CHECKING:
    from heterollm.kernels.simulated_clock import GpuLoad
    from heterollm.simulated_result import SimulationResult

__all__ = ["commands", "parse_load", "parse_overrides"]

commands = command_group()


@commands.command("simulate")
def simulate_model(
    model: Annotated[
        str, typer.Option(help="llama-3-8b, another known model, a folder, or the path of a config.json.")
    ] = "llama-3-8b",
    soc: Annotated[
        str, typer.Option(help="snapdragon-8gen3, snapdragon-8elite, or the path of a YAML file.")
    ] = "snapdragon-8gen3",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 256,
    decode: Annotated[int, typer.Option(help="Tokens made after the first.")] = 64,
    plan_level: Annotated[str, typer.Option(help="gpu, npu, layer, tensor or block.")] = "tensor",
    length_policy: Annotated[
        str,
        typer.Option(help="auto, padding, pipe or online: how npu and layer run lengths without a graph."),
    ] = "auto",
    sync: Annotated[
        str, typer.Option(help="finish (the driver's waits and copies), poll or predict.")
    ] = "predict",
    resolve: Annotated[
        bool, typer.Option("--resolve", help="Solve the plan for --sync; else only the hand-over changes.")
    ] = False,
    gpu_load: Annotated[
        str | None, typer.Option(metavar="60fps:5ms", help="A game beside it: its rate and GPU time a frame.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Change a parameter of the SoC, such as npu.execute_us=50."),
    ] = None,
    head_bits: Annotated[
        int | None, typer.Option(help="Bits of head and embedding: 4, as in the papers, or 8.")
    ] = None,
    every_form: Annotated[
        bool, typer.Option("--every-form", help="Let graphs have forms that HeteroLLM does not have.")
    ] = False,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compute everything as well, of a checkpoint with weights.")
    ] = False,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev, and FILE.png beside it."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a model's shapes on a simulated SoC, on a virtual clock: no time it prints was measured."""
    from heterollm import report
    from heterollm.report_simulate import simulation_report
    from heterollm.simulate import SimulationRequest, simulate
    from heterollm.terminal import write, write_json

    if timeline is not None:
        from heterollm.trace_file import check_target

        check_target(timeline)
    choices: dict[str, Any] = {"length_policy": length_policy, "sync": sync}
    request = SimulationRequest(
        model,
        soc,
        prompt,
        decode,
        plan_level,
        resolve=resolve,
        load=None if gpu_load is None else parse_load(gpu_load),
        overrides=parse_overrides(what_if or []),
        head_bits=(8 if numerics else 4) if head_bits is None else head_bits,
        every_form=True if every_form else None,
        numerics=numerics,
        trace=timeline is not None,
        **choices,
    )
    with report.progress_bars() as progress:
        result = simulate(request, progress)
    if timeline is not None:
        report.show(report.note(_write_timeline(result, timeline)))
    if as_json:
        write_json(result.to_dict())
        return
    write(report.render(simulation_report(result), like=sys.stdout))


def parse_load(text: str) -> GpuLoad:
    """Return the game that ``60fps:5ms`` describes.

    Raises:
        OptionError: It describes none, or one that leaves the GPU no time.
    """
    from heterollm.kernels.simulated_clock import GpuLoad

    rate, _, time = text.partition(":")
    try:
        if not (rate.endswith("fps") and time.endswith("ms")):
            raise ValueError(text)
        return GpuLoad(float(rate.removesuffix("fps")), 1e3 * float(time.removesuffix("ms")))
    except ValueError:
        raise OptionError(
            f"--gpu-load is {text!r:.80}.", fix="Give frames a second and GPU time a frame: 60fps:5ms."
        ) from None


def parse_overrides(given: list[str]) -> dict[str, float]:
    """Return the parameters that ``--what-if`` changes.

    Raises:
        OptionError: One is not of the form ``name=value``.
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise OptionError(
                f"--what-if is {text!r:.80}.", fix="Give a parameter and a number: npu.execute_us=50."
            ) from None
    return found


def _write_timeline(result: SimulationResult, path: Path) -> str:
    """Write the simulated timeline and its picture; return what was written."""
    from heterollm.plots_trace import trace_png
    from heterollm.trace_file import save_file, save_trace

    trace = cast("Any", result.trace)
    picture = path.with_name(f"{path.name}.png")
    save_trace(trace, path)
    save_file(picture, trace_png(trace))
    return f"Wrote the simulated timeline to {path} and {picture}."

"""The commands that answer: ``generate`` and ``chat``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterollm.base import InputError
from heterollm.cli.options import (
    AllowFallback,
    AllowSlow,
    Asymmetric,
    Context,
    DeviceOption,
    GpuThreads,
    GroupSize,
    JsonOption,
    MinP,
    Model,
    NpuThreads,
    Penalty,
    PlanOption,
    PrecisionOption,
    Seed,
    SyncOption,
    Temperature,
    TopK,
    TopP,
    command_group,
)

if TYPE_CHECKING:
    from heterollm.llm import LLM

__all__ = ["commands"]

commands = command_group()


@commands.command()
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
    sync: SyncOption = "auto",
    allow_fallback: AllowFallback = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record what both parts do, for `heterollm trace`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt: text to stdout as it is made, statistics to stderr."""
    from heterollm.base import write, write_json
    from heterollm.report import console as report

    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise InputError("The prompt is empty.", fix="Give at least one word.")
    if trace is not None:
        from heterollm.base import check_target, labelled
        from heterollm.kernels.sim import is_simulated

        trace = labelled(trace, simulated=is_simulated(device))
        check_target(trace)
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
        sync=sync,
        allow_fallback=allow_fallback,
        trace=trace is not None,
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
            if trace is not None:
                report.show(report.note(_write_trace(llm, trace)))
        failures = llm.failures
    for text in failures:
        report.show(report.note(text))
    report.show(report.statistics_lines(result, **where))


def _write_trace(llm: LLM, path: Path) -> str:
    """Write what was recorded, of an answer that failed too, and say where it is."""
    from heterollm.trace import save_trace

    recorded = llm.take_trace()
    save_trace(recorded, path)
    return (
        f"Wrote the trace of {len(recorded.passes)} passes: `heterollm trace {path}` sums it up, and "
        "ui.perfetto.dev shows it."
    )


def _read_stdin() -> str:
    """Return all of stdin without the newline that `echo` and editors put at its end."""
    return sys.stdin.read().removesuffix("\n")


@commands.command()
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
    sync: SyncOption = "auto",
    allow_fallback: AllowFallback = False,
) -> None:
    """Talk to a model: /reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from heterollm.cli.chat_loop import ChatLoop

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
        sync=sync,
        allow_fallback=allow_fallback,
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
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        # The imports alone take a moment, and the bar says what is going on.
        progress("Loading", 0, 1)
        from heterollm.llm import LLM

        progress("Loading", 1, 1)
        llm = LLM.load(model, progress=progress, **options)
    if llm.device.reason:
        report.show(report.note(f"device auto chose {llm.device.name}: {llm.device.reason}"))
    return llm

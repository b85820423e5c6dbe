"""The commands ``generate`` and ``chat``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterollm.base import InputError, OptionError
from heterollm.cli.options import (
    JsonOption,
    Model,
    ModelOptions,
    RunOptions,
    TokenOptions,
    command_group,
    pass_request,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.llm import LLM
    from heterollm.text import GenerationResult

__all__ = ["commands"]

commands = command_group()


@commands.command()
@takes_records
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")],
    options: ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 256,
    *,
    choice: TokenOptions,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None,
    run: RunOptions,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record the work of GPU and NPU, for `heterollm trace`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue a prompt: text to stdout as it is made, statistics to stderr."""
    from heterollm.base import write, write_json
    from heterollm.report import console as report

    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise InputError("The prompt is empty.", fix="Give at least one word.")
    _check_answer(choice, max_new_tokens, stop or ())
    trace = _trace_file(trace, options.device)
    with _load(model, options, run, trace=trace is not None) as llm:
        stream = llm.stream(
            text,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            **asdict(choice),
        )
        try:
            if as_json:
                write_json(_answer_json(model, llm, stream.result))
                return
            for step in stream:
                write(step.text)
            write("\n")
        finally:
            # Else closing the model would wait for the rest of the answer.
            stream.close()
            if trace is not None:
                report.show(report.note(_write_trace(llm, trace)))
        notes = (*llm.pass_notes, *_prompt_notes(llm, stream.result))
        reads = llm.expert_reads
    for text in notes:
        report.show(report.note(text))
    report.show(report.statistics_lines(stream.result, llm.device, llm.plan, reads))


def _check_answer(choice: TokenOptions, max_new_tokens: int, stop: Sequence[str] = ()) -> None:
    """Refuse the options of an answer before a model is loaded.

    Raises:
        OptionError: An option is not legal.
    """
    from heterollm.text import GenerationOptions, SamplingOptions

    if "" in stop:
        raise OptionError("--stop is empty.", fix="Leave it out, or give the text that ends the answer.")
    sampling = SamplingOptions(**asdict(choice))
    GenerationOptions(max_new_tokens=max_new_tokens, sampling=sampling, stop=tuple(stop))


def _answer_json(model: str, llm: LLM, result: GenerationResult) -> dict[str, object]:
    """Return an answer, and where it was computed, in a form that JSON can hold."""
    return {
        "model": model,
        "device": llm.device.name,
        "time_kind": llm.device.time_kind,
        "plan": llm.plan.level,
        "precision": llm.plan.precision,
        **({} if llm.expert_reads is None else {"experts": asdict(llm.expert_reads)}),
        **result.to_dict(),
        "notes": [*llm.notes, *_prompt_notes(llm, result)],
    }


def _prompt_notes(llm: LLM, result: GenerationResult) -> tuple[str, ...]:
    """Return notes on the attention of an answer's prompt."""
    from heterollm.planning import dense_prompt_notes

    return dense_prompt_notes(llm.plan, result.prompt_tokens)


def _trace_file(path: Path | None, device: str) -> Path | None:
    """Return the checked file of a trace; the name of a simulated one has the word simulated.

    Raises:
        OptionError: The file cannot be written.
    """
    if path is None:
        return None
    from heterollm.base import check_target, labelled
    from heterollm.kernels.sim import is_simulated

    path = labelled(path, simulated=is_simulated(device))
    check_target(path)
    return path


def _write_trace(llm: LLM, path: Path) -> str:
    """Write the recorded trace, of a failed answer too, and return a note with its path."""
    from heterollm.trace import save_trace

    recorded = llm.take_trace()
    save_trace(recorded, path)
    return (
        f"Wrote the trace of {len(recorded.passes)} passes: `heterollm trace {path}` sums it up, and "
        "ui.perfetto.dev shows it."
    )


def _read_stdin() -> str:
    """Return all of stdin without the newline that `echo` and editors put at its end."""
    from heterollm.base import check_stdin

    check_stdin()
    return sys.stdin.read().removesuffix("\n")


@commands.command()
@takes_records
def chat(
    model: Model,
    options: ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer at most.")] = 1024,
    *,
    choice: TokenOptions,
    system: Annotated[str | None, typer.Option(help="Instructions before the first message.")] = None,
    run: RunOptions,
) -> None:
    """Talk to a model: /reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from heterollm.base import check_stdin
    from heterollm.cli.chat_loop import ChatLoop

    check_stdin()
    _check_answer(choice, max_new_tokens)
    with _load(model, options, run) as llm:
        ChatLoop(llm, system=system, max_new_tokens=max_new_tokens, choice=choice).run()


def _load(model: str, options: ModelOptions, run: RunOptions, *, trace: bool = False) -> LLM:
    from heterollm.report import console as report

    if os.path.isfile(os.path.join(model, "config.json")):  # noqa: PTH113, PTH118 - of any text, legal or not
        from heterollm.model import ModelConfig
        from heterollm.text import check_tokenizer

        # Before weights are read: loading a model that cannot take text would be wasted.
        ModelConfig.from_folder(Path(model))
        check_tokenizer(Path(model))
    with report.progress_bars() as progress:
        # The imports alone take a moment, and the bar shows it.
        progress("Loading", 0, 1)
        from heterollm.llm import LLM

        progress("Loading", 1, 1)
        llm = LLM.load(
            model,
            device=options.device,
            plan=options.plan,
            request=pass_request(options.passes, options.attention, options.overflow),
            precision=options.weights.precision,
            group_size=options.weights.group_size,
            symmetric=not options.weights.asymmetric,
            scales=options.weights.scales,
            calibration=options.weights.calibration,
            context=options.context,
            gpu_threads=run.threads.gpu_threads,
            npu_threads=run.threads.npu_threads,
            power=run.power,
            allow_slow=run.allow_slow,
            sync=run.sync,
            allow_fallback=run.allow_fallback,
            experts_gib=run.experts_gib,
            trace=trace,
            progress=progress,
        )
    if llm.device.reason:
        report.show(report.note(f"device auto chose {llm.device.name}: {llm.device.reason}"))
    for text in llm.plan_notes:
        report.show(report.note(text))
    return llm

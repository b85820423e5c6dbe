"""The commands ``generate`` and ``chat``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heterollm.base import OptionError
from heterollm.cli.load import load_model
from heterollm.cli.options import (
    JsonOption,
    Model,
    ModelOptions,
    RunOptions,
    TokenOptions,
    command_group,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.llm import LLM

commands = command_group()


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Prompts of ``generate`` besides its argument."""

    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", metavar="FILE", help="Text after PROMPT; repeatable; - reads stdin."),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Many prompts, one a line, or JSON lines in FILE.jsonl; answers as JSON lines.",
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option(help="Instructions before the prompt, in the chat template."),
    ] = None
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Continue the text as it is, also where a model has a chat template."),
    ] = False


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer, and reports on its tokens."""

    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeatable.")] = None
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="JSON Schema that the answer follows; TEXT begins with {."),
    ] = None
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lark grammar that the answer follows.")
    ] = None
    top_logprobs: Annotated[
        int, typer.Option(help="Show this many of the likeliest tokens at each place of the answer.")
    ] = 0

    def keywords(self) -> dict[str, Any]:
        """Return the options as those of :meth:`heterollm.LLM.stream`; reads their files."""
        from heterollm.base import read_text

        schema = self.json_schema
        if schema is not None and not schema.lstrip().startswith("{"):
            schema = read_text(Path(schema))
        return {
            "stop": tuple(self.stop or ()),
            "json_schema": schema,
            "grammar": None if self.grammar is None else read_text(self.grammar),
            "top_log_probabilities": self.top_logprobs,
        }


@commands.command()
@takes_records
def generate(
    model: Model,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="A question, or a text to continue; - or a pipe: stdin."),
    ] = None,
    *,
    given: PromptOptions,
    options: ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer.")] = 256,
    choice: TokenOptions,
    answer: AnswerForm,
    run: RunOptions,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Record the work of GPU and NPU, for `heterollm trace`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer a prompt: text to stdout as it is made, statistics to stderr.

    A model with a chat template answers the prompt as a message; another one, or --raw, continues the text.
    """
    from heterollm.cli.answers import answer_lines, write_answer
    from heterollm.cli.prompts import in_template, prompt_lines, single_prompt
    from heterollm.report import console as report

    if given.prompts is not None and (prompt is not None or given.file or as_json):
        raise typer.BadParameter("--prompts excludes PROMPT, --file and --json: it writes JSON lines.")
    if given.raw and given.system is not None:
        raise typer.BadParameter("--raw excludes --system, which needs the chat template.")
    lines = None if given.prompts is None else list(prompt_lines(given.prompts, given.system))
    asked = single_prompt(prompt, given.file or (), given.system) if lines is None else None
    keywords = answer.keywords() | asdict(choice) | {"max_new_tokens": max_new_tokens}
    _check_answer(keywords)
    trace = _trace_file(trace, options.device)
    with load_model(model, options, run, trace=trace is not None) as llm:
        templated = llm.tokenizer.has_chat_template and not given.raw
        try:
            if asked is not None:
                if templated and not asked.messages:
                    report.show(
                        report.note("The prompt is a message in the model's chat template; see --raw.")
                    )
                    asked = asked.in_template()
                write_answer(llm, model, asked, keywords, as_json=as_json)
            elif lines is not None:
                answer_lines(llm, in_template(lines) if templated else lines, keywords)
        finally:
            if trace is not None:
                report.show(report.note(_write_trace(llm, trace)))


def _check_answer(keywords: dict[str, Any]) -> None:
    """Refuse the options of an answer before a model is loaded.

    Raises:
        OptionError: An option is not legal.
        InputError: The schema or grammar is not legal.
    """
    from heterollm.text import GenerationOptions, SamplingOptions, check_structure

    rest = dict(keywords)
    if "" in rest.get("stop", ()):
        raise OptionError("--stop is empty.", fix="Leave it out, or give the text that ends the answer.")
    sampling = SamplingOptions(
        **{name: rest.pop(name) for name in SamplingOptions.__annotations__ if name in rest}
    )
    check_structure(GenerationOptions(sampling=sampling, **rest))


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
    """Talk to a model: /help lists the commands, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    from heterollm.base import check_stdin
    from heterollm.cli.chat_loop import ChatLoop

    check_stdin()
    _check_answer(asdict(choice) | {"max_new_tokens": max_new_tokens})
    with load_model(model, options, run) as llm:
        ChatLoop(llm, system=system, max_new_tokens=max_new_tokens, choice=choice).run()

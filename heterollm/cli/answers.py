"""Answers of ``generate`` to one prompt, and to many as JSON lines."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from heterollm.base import FAILED, HeteroLLMError, silent, write, write_json
from heterollm.cli.prompts import Prompt
from heterollm.report import console as report

if TYPE_CHECKING:
    from heterollm.engine import Stream
    from heterollm.llm import LLM
    from heterollm.text import GenerationResult, GenerationStep


class AnswerWriter:
    """Writes an answer as it is made: its text to stdout, and its reasoning to stderr."""

    def __init__(self) -> None:
        self.text = ""
        """The text so far."""
        self._reasons = False

    def add(self, step: GenerationStep) -> None:
        """Write a step."""
        if step.reasoning:
            report.show_reasoning(step.reasoning)
            self._reasons = True
        if step.text:
            if self._reasons:
                report.show_reasoning("\n\n")
            self._reasons = False
            write(step.text)
            self.text += step.text


def write_answer(llm: LLM, model: str, prompt: Prompt, options: dict[str, Any], *, as_json: bool) -> None:
    """Write one answer as it is made, or as one JSON value; notes and statistics go to stderr.

    Args:
        llm: The model.
        model: Its name.
        prompt: The prompt.
        options: Those of :meth:`heterollm.LLM.stream`.
        as_json: Whether stdout gets JSON.
    """
    waiting = report.Waiting("Reading the prompt")
    stream = _start(llm, prompt, options | {"progress": waiting.progress})
    steps: list[GenerationStep] = []
    try:
        if as_json:
            with report.progress_bars() as progress:
                for done, _ in enumerate(waiting.until_first(stream), 1):
                    progress("Answering", done, options["max_new_tokens"])
            write_json(_answer_json(model, llm, stream.result))
            return
        writer = AnswerWriter()
        for step in waiting.until_first(stream):
            writer.add(step)
            if step.top_log_probabilities is not None:
                steps.append(step)
        write("\n")
    finally:
        # Else closing the model would wait for the rest of the answer.
        stream.close()
    result = stream.result
    if steps:
        report.show(report.token_table(steps, llm.tokenizer.token_bytes.text))
    for text in (*llm.pass_notes, *_prompt_notes(llm, result)):
        report.show(report.note(text))
    report.show(report.statistics_lines(result, llm.device, llm.plan, llm.expert_reads))


def answer_lines(
    llm: LLM, lines: Sequence[tuple[int, Prompt | HeteroLLMError]], options: dict[str, Any]
) -> None:
    """Write the answers to many prompts as JSON lines; a failed prompt has its error in its line.

    Args:
        llm: The model.
        lines: Numbers of the lines of a file with their prompts.
        options: Those of :meth:`heterollm.LLM.stream`.

    Raises:
        Exit: A prompt failed.
    """
    failed = 0
    # A bar would lie across the answers.
    shown = contextlib.nullcontext(silent) if sys.stdout.isatty() else report.progress_bars()
    with shown as progress:
        for done, (number, prompt) in enumerate(lines):
            progress("Answering", done, len(lines))
            named = {} if isinstance(prompt, HeteroLLMError) or prompt.key is None else {"id": prompt.key}
            line = {"line": number, **named, **_line_json(llm, prompt, options)}
            failed += "error" in line
            write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        progress("Answering", len(lines), len(lines))
    for text in llm.pass_notes:
        report.show(report.note(text))
    if failed:
        report.show(report.note(f"{failed} of {len(lines)} prompts failed; their lines say why."))
        raise typer.Exit(FAILED)


def _start(llm: LLM, prompt: Prompt, options: dict[str, Any]) -> Stream:
    return (
        llm.stream_chat(prompt.messages, **options) if prompt.messages else llm.stream(prompt.text, **options)
    )


def _line_json(llm: LLM, prompt: Prompt | HeteroLLMError, options: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a prompt, or its error, in a form that JSON can hold."""
    try:
        if isinstance(prompt, HeteroLLMError):
            raise prompt
        stream = _start(llm, prompt, options)
        try:
            result = stream.result
        finally:
            stream.close()
    except HeteroLLMError as error:
        return {"error": {"message": error.message, "fix": error.fix}}
    return {"prompt": prompt.text, **_result_json(llm, result)}


def _answer_json(model: str, llm: LLM, result: GenerationResult) -> dict[str, Any]:
    """Return an answer, and where it was computed, in a form that JSON can hold."""
    return {
        "model": model,
        "device": llm.device.name,
        "time_kind": llm.device.time_kind,
        "plan": llm.plan.level,
        "precision": llm.plan.precision,
        **({} if llm.expert_reads is None else {"experts": asdict(llm.expert_reads)}),
        **_result_json(llm, result),
        "notes": [*llm.notes, *_prompt_notes(llm, result)],
    }


def _result_json(llm: LLM, result: GenerationResult) -> dict[str, Any]:
    """Return a result in a form that JSON can hold, with the texts of the likeliest tokens."""
    data = result.to_dict()
    if result.top_log_probabilities is not None:
        data["top_log_probabilities"] = [
            [
                {"token_id": token, "text": llm.tokenizer.token_bytes.text(token), "log_probability": value}
                for token, value in top
            ]
            for top in result.top_log_probabilities
        ]
    return data


def _prompt_notes(llm: LLM, result: GenerationResult) -> tuple[str, ...]:
    """Return notes on the attention of an answer's prompt."""
    from heterollm.planning import dense_prompt_notes

    return dense_prompt_notes(llm.plan, result.prompt_tokens)

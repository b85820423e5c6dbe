"""Loads a model for commands that answer prompts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from heterollm.base import ExportError, is_exported
from heterollm.cli.effects import given_keywords
from heterollm.cli.options import ModelOptions, RunOptions, load_keywords

if TYPE_CHECKING:
    from heterollm.llm import LLM


def load_model(model: str, options: ModelOptions, run: RunOptions, *, trace: bool = False) -> LLM:
    """Load a model with a progress bar, and show the reasons for its device and plan.

    Raises:
        HeteroLLMError: The checkpoint, device, plan or an option is unusable.
    """
    from heterollm.report import console as report

    if os.path.isfile(os.path.join(model, "config.json")):  # noqa: PTH113, PTH118 - of any text, legal or not
        from heterollm.model import ModelConfig
        from heterollm.text import check_tokenizer

        # Before weights are read: loading a model that cannot take text would be wasted.
        ModelConfig.from_folder(Path(model))
        check_tokenizer(Path(model))
    if run.profile is not None:
        if is_exported(model):
            raise ExportError(
                f"--profile {run.profile} is for a plan, and the exported model {model} has one.",
                fix="Leave --profile out.",
            )
        _profile_quickly(model, options, run)
    with report.progress_bars() as progress:
        # The imports alone take a moment, and the bar shows it.
        progress("Loading", 0, 1)
        from heterollm.llm import LLM

        progress("Loading", 1, 1)
        llm = LLM.load(
            model,
            **given_keywords(
                {
                    **load_keywords(options, run.threads),
                    "power": run.power,
                    "allow_slow": run.allow_slow,
                    "sync": run.sync,
                    "allow_fallback": run.allow_fallback,
                    "experts_gib": run.experts_gib,
                    "kv_bits": run.kv_bits,
                    "speculative": run.speculative,
                    "guesses": run.guesses,
                    "trace": trace,
                }
            ),
            progress=progress,
        )
    if llm.device.reason:
        report.show(report.note(f"device auto chose {llm.device.name}: {llm.device.reason}"))
    for text in llm.plan_notes:
        report.show(report.note(text))
    return llm


def fetch(model: str) -> None:
    """Fetch a hub's model with a bar, before a command of its own profiles it.

    Raises:
        CheckpointError: There is no such model.
    """
    from heterollm.model import checkpoint_folder
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        checkpoint_folder(model, progress=progress)


def _profile_quickly(model: str, options: ModelOptions, run: RunOptions) -> None:
    """Measure what the device's profile lacks, each split of the cores in a process of its own."""
    from heterollm.benchmarks import Configuration, profile_splits
    from heterollm.kernels.threads import split_threads
    from heterollm.report import console as report

    fetch(model)
    threads, weights = run.threads, options.weights
    named = threads.gpu_threads is not None or threads.npu_threads is not None
    split = split_threads(threads.gpu_threads, threads.npu_threads)
    wanted = Configuration(
        device=options.device,
        precision=weights.precision,
        group_size=weights.group_size,
        scales=weights.scales,
        threads=(len(split.gpu_cores), len(split.npu_cores)) if named else None,
    )
    for text in profile_splits(model, [wanted]):
        report.show(report.note(text))

"""The command ``eval``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from heterollm.cli.options import (
    DeviceOption,
    JsonOption,
    KvBitsOption,
    LoraOption,
    Model,
    ThreadOptions,
    WeightOptions,
    command_group,
)
from heterollm.cli.records import takes_records

commands = command_group()


@commands.command("eval")
@takes_records
def evaluate_model(
    model: Model,
    text: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Plain text; repeatable, one after the other.")
    ],
    windows: Annotated[int, typer.Option(help="Windows of text at most.")] = 8,
    window: Annotated[int, typer.Option(metavar="TOKENS", help="Length of a window.")] = 512,
    alone: Annotated[
        bool, typer.Option("--alone", help="Only the perplexity, without a comparison with float weights.")
    ] = False,
    *,
    device: DeviceOption = "auto",
    plan: Annotated[str, typer.Option(help="auto, a level, or the file of a plan.")] = "auto",
    weights: WeightOptions,
    lora: LoraOption = None,
    kv_bits: KvBitsOption = None,
    threads: ThreadOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity on a text, and how near the quantised model is to its float weights."""
    from heterollm.benchmarks import evaluate
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        found = evaluate(
            model,
            text,
            windows=windows,
            window_tokens=window,
            compare=not alone,
            progress=progress,
            device=device,
            plan=plan,
            precision=weights.precision,
            group_size=weights.group_size,
            symmetric=not weights.asymmetric,
            scales=weights.scales,
            calibration=weights.calibration,
            lora=lora,
            kv_bits=kv_bits,
            gpu_threads=threads.gpu_threads,
            npu_threads=threads.npu_threads,
        )
    report.answer(report.evaluation_table(found), asdict(found), as_json=as_json)

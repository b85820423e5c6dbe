"""Examples in the help of every command, and the table of exit codes; tests parse all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

import typer
from typer.models import CommandInfo, TyperInfo

from heterollm.base import EXIT_CODES

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    "": (
        "heterollm demo",
        "heterollm devices",
        "heterollm profile MODEL",
        'heterollm generate MODEL "What is a kernel?"',
    ),
    "calibrate": (
        "heterollm calibrate MODEL -o calibration.json",
        "heterollm calibrate MODEL prose.txt code.txt -o calibration.json --windows 16",
        "heterollm calibrate MODEL prose.txt --window 2048 --head-importance",
    ),
    "generate": (
        'heterollm generate MODEL "What is a kernel?" --max-new-tokens 64',
        'heterollm generate MODEL "Once upon a time" --raw',
        "heterollm generate MODEL - --temperature 0.7 --seed 1 < prompt.txt",
        'heterollm generate MODEL "def add(a, b):" --plan layer --json',
        'heterollm generate MODEL "Anna is 31." --json-schema schema.json --top-logprobs 3',
        'heterollm generate MODEL "Summarise:" --file notes.txt --system "Answer in one sentence."',
        "heterollm generate MODEL --prompts prompts.jsonl",
        'heterollm generate MODEL "import os" --trace run.json',
    ),
    "chat": (
        "heterollm chat MODEL",
        "heterollm chat bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M",
        'heterollm chat MODEL --system "Answer in one sentence." --temperature 0.7',
    ),
    "serve": (
        "heterollm serve MODEL",
        "heterollm serve MODEL --port 9000 --api-key secret --cors https://example.org",
        "heterollm serve MODEL --plan tensor --sessions-gib 2 --queue 16",
    ),
    "demo": ("heterollm demo", "heterollm demo --device sim:snapdragon-8gen3", "heterollm demo --json"),
    "pull": (
        "heterollm pull HuggingFaceTB/SmolLM2-135M-Instruct",
        "heterollm pull bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M",
        "heterollm pull qwen3-0.6b",
    ),
    "convert": (
        "heterollm convert MODEL -o small",
        "heterollm convert MODEL -o small --group-size 128 --lora adapter",
    ),
    "eval": (
        "heterollm eval MODEL --text prose.txt",
        "heterollm eval MODEL --text prose.txt --precision w4a8",
    ),
    "list": ("heterollm list", "heterollm list --json"),
    "rm": ("heterollm rm HuggingFaceTB/SmolLM2-135M-Instruct",),
    "export": (
        "heterollm export MODEL --device host --plan layer -o exported",
        "heterollm export MODEL --device snapdragon --soc 57 --profile phone.json --plan tensor -o phone",
    ),
    "compile": (
        "heterollm compile MODEL --soc 57",
        "heterollm compile MODEL --soc 57 --plan npu --prompt 32,256",
    ),
    "devices": ("heterollm devices", "heterollm devices --json"),
    "doctor": ("heterollm doctor", "heterollm doctor --device host --gpu-threads 1 --npu-threads 1"),
    "profile": (
        "heterollm profile MODEL",
        "heterollm profile --quick",
        "heterollm profile --device sim:snapdragon-8gen3 --budget none",
        "heterollm profile show --html profile.html",
    ),
    "profile list": ("heterollm profile list", "heterollm profile list --json"),
    "profile show": (
        "heterollm profile show",
        "heterollm profile show 2ba454f9 --all",
        "heterollm profile show --html profile.html --plots pictures",
    ),
    "profile compare": ("heterollm profile compare before.json after.json",),
    "profile export": ("heterollm profile export phone.json", "heterollm profile export phone.json 2ba454f9"),
    "profile import": ("heterollm profile import phone.json",),
    "plan": (
        "heterollm plan MODEL --explain",
        "heterollm plan MODEL --prompt 64,300 --plan tensor",
        "heterollm plan MODEL --html plan.html",
        "heterollm plan MODEL --profile phone.json -o phone-plan.json",
    ),
    "bench": (
        "heterollm bench MODEL -p 256 -n 64 --plan gpu,npu,tensor --profile-first",
        "heterollm bench MODEL -p 256,300 -n 0 --engine self,llama.cpp -o rows.jsonl",
        "heterollm bench --from rows.jsonl --html bench.html",
    ),
    "trace": (
        "heterollm trace run.json",
        "heterollm trace run.json --html run.html",
        "heterollm trace run.json --png run.png",
    ),
    "simulate": (
        "heterollm simulate",
        "heterollm simulate llama-3-8b --prompt 300 --plan gpu",
        "heterollm simulate --gpu-load 60fps:5ms --what-if npu.execute_us=50",
    ),
    "cache": ("heterollm cache list", "heterollm cache clear graphs --yes"),
    "cache list": ("heterollm cache list", "heterollm cache list --json"),
    "cache clear": ("heterollm cache clear", "heterollm cache clear weights graphs --yes"),
    "cache path": ("heterollm cache path",),
    "config": ("heterollm config path", "heterollm config show"),
    "config path": ("heterollm config path",),
    "config show": ("heterollm config show", "heterollm config show --json"),
}
"""Command lines by the words after ``heterollm``; MODEL stands for a checkpoint of the user."""


SUMMARIES: Final[dict[str, str]] = {
    "generate": "Answer a prompt.",
    "chat": "Talk to a model.",
    "serve": "Serve a model to clients of several APIs and to a browser.",
    "demo": "See GPU, NPU and both at work in a minute; no download.",
    "pull": "Fetch a model from the Hugging Face hub.",
    "convert": "Quantise a model once.",
    "eval": "Measure perplexity and the nearness to float weights.",
    "list": "Show the models on this machine.",
    "rm": "Delete models from the caches.",
    "calibrate": "Measure a model's activations and attention heads on text.",
    "export": "Put all that a device needs to run a model into a folder.",
    "compile": "Compile a Snapdragon's NPU graphs ahead.",
    "devices": "List the devices, and why one is not usable.",
    "doctor": "Check every operator on a device against float64.",
    "profile": "Measure a device once, or look at its profile.",
    "plan": "Solve for the best split of every operator; show why.",
    "bench": "Measure prefill and decode; compare levels and engines.",
    "trace": "Show where the time of a recorded run went.",
    "simulate": "Run a model's shapes on a simulated phone.",
    "cache": "Look at and clear the cache.",
    "config": "Look at the file of defaults.",
}
"""Lines of the list of commands; the help of each says more."""

Info: TypeAlias = TyperInfo | CommandInfo


def add_examples(app: typer.Typer) -> None:
    """Put every command's examples under its help, and the exit codes under the program's."""
    for name, info in command_names(app):
        if name in EXAMPLES:
            info.epilog = _block("Examples:", EXAMPLES[name])
        if name in SUMMARIES:
            info.short_help = SUMMARIES[name]
    codes = [f"{code:>3}  {meaning}" for code, meaning in EXIT_CODES.items()]
    app.info.epilog = "\n\n".join((_block("Examples:", EXAMPLES[""]), _block("Exit codes:", codes)))


def command_names(app: typer.Typer) -> Iterator[tuple[str, Info]]:
    """Yield every command and every named group of the program, with the words that call it."""
    for group in app.registered_groups:
        below = group.typer_instance
        if below is None:
            continue
        words = below.info.name if isinstance(below.info.name, str) else ""
        if words:
            callback = below.registered_callback
            yield words, callback if callback is not None else below.info
        for command in below.registered_commands:
            own = command.name or (command.callback.__name__ if command.callback else "")
            yield f"{words} {own}".strip(), command


def _block(title: str, lines: tuple[str, ...] | list[str]) -> str:
    """Return lines that stay as they are; a lone backspace says so to typer."""
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])

"""Profiles a device before a bench, once for each split of the cores, each in its own process."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from heterollm.base import GRACE_S, ProfileError, start_process
from heterollm.benchmarks.cases import Configuration
from heterollm.benchmarks.stopping import TerminatedInterrupt
from heterollm.kernels.threads import split_threads
from heterollm.model import checkpoint_folder
from heterollm.planning import other_splits


def profile_command(model: str | Path, configuration: Configuration) -> list[str]:
    """Return the arguments of the command that measures the profile of a configuration.

    Args:
        model: Folder of the checkpoint.
        configuration: The configuration.
    """
    arguments = ["profile", str(model), "--quick", "--update", "--device", configuration.device]
    arguments += ["--precision", configuration.precision, "--group-size", str(configuration.group_size)]
    if configuration.scales != "free":
        arguments += ["--scales", configuration.scales]
    if configuration.threads is not None:
        gpu, npu = configuration.threads
        arguments += ["--gpu-threads", str(gpu), "--npu-threads", str(npu)]
    return arguments


def profile_splits(model: str | Path, configurations: Sequence[Configuration]) -> Iterator[str]:
    """Run the commands one after the other, and yield each before it runs.

    Each run measures only the points that the profile lacks.

    Args:
        model: A folder, a GGUF file or a hub name.
        configurations: All configurations.

    Raises:
        ProfileError: A command failed.
    """
    checkpoint_folder(model)  # fetches a hub's model, or refuses a name
    commands = dict.fromkeys(
        tuple(profile_command(model, one))
        for every in configurations
        if every.engine == "self"
        for one in split_by_split(every)
    )
    for arguments in commands:
        yield f"Running `heterollm {' '.join(arguments)}`"
        run_profile(arguments)


def split_by_split(configuration: Configuration) -> tuple[Configuration, ...]:
    """Return a configuration for each split of the cores that it may choose among."""
    others = other_splits(configuration.device) if configuration.threads is None else []
    if not others:
        return (configuration,)
    split = split_threads()
    every = [(len(split.gpu_cores), len(split.npu_cores)), *others]
    return tuple(replace(configuration, threads=threads) for threads in every)


def run_profile(arguments: Sequence[str]) -> None:
    """Run a command that profiles in a process of its own, which can split the cores in its own way.

    Args:
        arguments: The words after ``heterollm``.

    Raises:
        ProfileError: The command failed.
    """
    process = start_process(_run_command, *arguments)
    try:
        process.join()
    except KeyboardInterrupt as error:
        # Ctrl-C reaches the command, too; other signals do not.
        if sys.platform != "win32" and isinstance(error, TerminatedInterrupt):
            os.kill(cast("int", process.pid), signal.SIGINT)
        process.join(GRACE_S)
        process.kill()
        raise
    if process.exitcode:
        raise ProfileError(
            f"`heterollm {' '.join(arguments)}` failed with exit code {process.exitcode}.",
            fix="Run it by itself.",
        )


def _run_command(*arguments: str) -> None:
    """Run a command of heterollm without its output; its progress bar stays."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.argv = ["heterollm", *arguments]
    runpy.run_module("heterollm", run_name="__main__")

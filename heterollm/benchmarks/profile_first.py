"""Profiles a device before a bench, once for each split of the cores, each in its own process."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from heterollm.base import ProfileError
from heterollm.benchmarks.cases import Configuration
from heterollm.benchmarks.children import GRACE_S, start
from heterollm.benchmarks.stopping import TerminatedInterrupt
from heterollm.model import checkpoint_folder

__all__ = ["profile_command", "profile_splits"]


def profile_command(
    model: str | Path, configuration: Configuration, *, budget_s: float | None = None
) -> list[str]:
    """Return the arguments of the command that measures the profile of a configuration.

    Args:
        model: Folder of the checkpoint.
        configuration: The configuration.
        budget_s: Time to measure everything again; by default a quick run adds missing points.
    """
    how = ["--quick", "--update"] if budget_s is None else ["--budget", f"{budget_s:.0f}s"]
    arguments = ["profile", str(model), *how, "--device", configuration.device]
    arguments += ["--precision", configuration.precision, "--group-size", str(configuration.group_size)]
    if configuration.scales != "free":
        arguments += ["--scales", configuration.scales]
    if configuration.threads is not None:
        gpu, npu = configuration.threads
        arguments += ["--gpu-threads", str(gpu), "--npu-threads", str(npu)]
    return arguments


def profile_splits(
    model: str | Path, configurations: Sequence[Configuration], *, budget_s: float | None = None
) -> Iterator[str]:
    """Run the commands one after the other, and yield each before it runs.

    Without a budget, each run measures only the points that the profile lacks.

    Args:
        model: A folder, a GGUF file or a hub name.
        configurations: All configurations.
        budget_s: Time of each run.

    Raises:
        ProfileError: A command failed.
    """
    folder = checkpoint_folder(model)
    commands = dict.fromkeys(
        tuple(profile_command(folder, one, budget_s=budget_s))
        for one in configurations
        if one.engine == "self"
    )
    for arguments in commands:
        shown = f"heterollm {' '.join(arguments)}"
        yield f"Running `{shown}`"
        process = start(_run_command, *arguments)
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
                f"`{shown}` failed with exit code {process.exitcode}.", fix="Run it by itself."
            )


def _run_command(*arguments: str) -> None:
    """Run a command of heterollm without its output; its progress bar stays."""
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    sys.argv = ["heterollm", *arguments]
    runpy.run_module("heterollm", run_name="__main__")

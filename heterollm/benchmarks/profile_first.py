"""Profiles a device before a bench, once for each split of the cores, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from heterollm.base import ProfileError
from heterollm.benchmarks.cases import Configuration
from heterollm.benchmarks.children import environment
from heterollm.model import checkpoint_folder

__all__ = ["profile_command", "profile_splits"]


def profile_command(
    model: str | Path, configuration: Configuration, *, budget_s: float | None = None
) -> list[str]:
    """Return the arguments of the command that makes the profile which a configuration needs.

    Args:
        model: Folder of the checkpoint.
        configuration: What will run.
        budget_s: Time to spend, on everything anew; by default it is a quick one of what is not known yet.
    """
    how = ["--quick", "--update"] if budget_s is None else ["--budget", f"{budget_s:.0f}s"]
    arguments = ["profile", str(model), *how, "--device", configuration.device]
    arguments += ["--precision", configuration.precision, "--group-size", str(configuration.group_size)]
    if configuration.threads is not None:
        gpu, npu = configuration.threads
        arguments += ["--gpu-threads", str(gpu), "--npu-threads", str(npu)]
    return arguments


def profile_splits(
    model: str | Path, configurations: Sequence[Configuration], *, budget_s: float | None = None
) -> Iterator[str]:
    """Run the commands one after the other, and yield each before it runs.

    Without a budget, what a profile already has is not measured again.

    Args:
        model: A folder or a hub name.
        configurations: What will run.
        budget_s: Time to spend on each.

    Raises:
        ProfileError: One failed.
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
        # It ends with this process, as it watches its input.
        command = [sys.executable, "-P", "-m", "heterollm.benchmarks.child", *arguments]
        with subprocess.Popen(  # noqa: S603 - our own interpreter
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment()
        ) as process:
            code = process.wait()
        if code:
            raise ProfileError(f"`{shown}` failed with exit code {code}.", fix="Run it by itself.")

"""Exports a model for a device: weights, plan, NPU graphs, tuned parameters and settings in one folder.

It is the preparation of a load, whose files lie in the folder in place of the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Unpack

import numpy as np

from heterollm.base import (
    EXPORTED,
    OptionError,
    Progress,
    check_keywords,
    locked,
    own_folder,
    own_tree,
    silent,
)
from heterollm.engine import EngineThread
from heterollm.export_files import Exported, ExportTarget, ExportWriter
from heterollm.loading import PlannedModel, SourceModel, open_for
from heterollm.model import Checkpoint
from heterollm.planning import CoreSplit, LoadKeywords, LoadOptions, choose_context, open_compiler, plan_ahead

AHEAD: Final = "snapdragon"
"""The device that need not be here."""

OF_ANSWERS: Final = ("speculative", "guesses", "trace")
"""Options of a load that leave nothing to export."""


def export_model(
    model: str | Path,
    folder: str | Path,
    *,
    soc: str | None = None,
    context_layers: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[LoadKeywords],
) -> Exported:
    """Put everything that a device needs to run a model into a folder, which takes the model's place.

    Args:
        model: A local folder, a GGUF file or a hub name.
        folder: The folder, new, empty, or of an interrupted export of the same model with the same options.
        soc: Qualcomm's number of a Snapdragon that is not here, for ``device="snapdragon"`` on Linux x86-64;
            ``profile`` is then the file of its profile.
        context_layers: With ``soc``: layers that share a context; None as ``$HETEROLLM_CONTEXT_LAYERS`` says,
            else 1.
        progress: Called with the name of a stage, the steps done and the total number of steps.
        options: Those of :meth:`heterollm.LLM.load`, of which the folder's loads take those that they do not
            replace; ``speculative``, ``guesses`` and ``trace`` are for these loads alone.

    Raises:
        ExportError: The folder holds another exported model.
        HeteroLLMError: The checkpoint, device, plan, folder or an option is unusable.
    """
    report = progress or silent
    check_keywords(options, LoadKeywords.__annotations__)
    for name in OF_ANSWERS:
        if options.get(name):
            raise OptionError(f"{name} leaves nothing to export.", fix="Give it to the load of the folder.")
    if soc is not None and options.get("device") != AHEAD:
        raise OptionError(f"soc is for device {AHEAD}.", fix=f"Choose device {AHEAD}, or leave soc out.")
    if context_layers is not None and soc is None:
        raise OptionError("context_layers is for a device that is not here.", fix="Give its soc, too.")
    asked = LoadOptions(**options)
    target = Path(folder).expanduser().absolute()
    _check_folder(target)
    source = SourceModel.of(Checkpoint(model, asked.lora, report))
    context = choose_context(source.config, asked.context)
    with _locked(target), own_tree(target), contextlib.ExitStack() as stack:
        if soc is None:
            found = _here(source, asked, context, stack, report)
        else:
            found = _elsewhere(source, asked, context, soc, context_layers)
        writer = ExportWriter(source, asked, context, target, found, report, (soc, context_layers))
        try:
            return writer.write()
        except OSError as error:
            raise _unwritable(target, error) from error


def _check_folder(folder: Path) -> None:
    """Refuse a folder with other files.

    Raises:
        OptionError: It holds other files, or is none.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise _unwritable(folder, error) from error
    if names and EXPORTED not in names:
        raise OptionError(f"{folder} holds other files.", fix="Name a new or an empty folder.")


def _unwritable(folder: Path, error: OSError) -> OptionError:
    return OptionError(f"{folder} cannot be written: {error.strerror}.", fix="Name another folder.")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process write the folder; the lock lies in the cache."""
    key = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    with locked(own_folder("checks") / f"{key}.json"):
        yield


def _here(
    source: SourceModel, asked: LoadOptions, context: int, stack: contextlib.ExitStack, report: Progress
) -> ExportTarget:
    """Open the device, and plan.

    Raises:
        OptionError: It is a simulated one.
        HeteroLLMError: As for a load.
    """
    thread = EngineThread()
    stack.callback(thread.close)
    cores = CoreSplit(asked, source.config, context)
    report("Opening the device", 0, 1)
    device = thread.run(lambda: open_for(asked, cores))
    report("Opening the device", 1, 1)
    if device.is_simulated:
        raise OptionError(
            f"{device.name} computes on this machine's cores, so that nothing is to export for it.",
            fix="Choose device host, or the device that it models.",
        )
    stack.callback(lambda: thread.run(device.close))
    report("Planning", 0, 1)
    planned = PlannedModel.of(source, asked, device, thread, context, cores.reason_for(device))
    report("Planning", 1, 1)
    table, split = device.gpu.tuning.table, device.split
    threads = {}
    if asked.plan == "auto" and planned.plan.threads is None and split.gpu_cores:
        threads = {"gpu_threads": len(split.gpu_cores), "npu_threads": len(split.npu_cores)}
    return ExportTarget(
        *(device.name, planned.plan, planned.notes, device.keeper, device.packager),
        device.activation_dtype,
        table.to_json() if table.tuned or table.attention else "",
        threads,
    )


def _elsewhere(
    source: SourceModel, asked: LoadOptions, context: int, soc: str, context_layers: int | None
) -> ExportTarget:
    """Plan for a Snapdragon that is not here."""
    npu = open_compiler(soc, context_layers)
    planned = plan_ahead(npu, asked, source.config, context, asked.profile)
    return ExportTarget(AHEAD, planned.plan, planned.notes, npu, npu, np.dtype(np.float16))

"""The commands about the machine: ``devices`` and ``doctor``."""

from __future__ import annotations

import typer

from heterollm.base import FAILED
from heterollm.cli.options import DeviceOptions, JsonOption, command_group
from heterollm.cli.records import takes_records

__all__ = ["commands"]

commands = command_group()


@commands.command()
def devices(as_json: JsonOption = False) -> None:
    """List the devices, simulated ones too; for those that are not usable, why and what to install."""
    import dataclasses

    from heterollm.base import write_json
    from heterollm.kernels.open import list_devices
    from heterollm.kernels.sim import simulated_devices
    from heterollm.report import console as report

    statuses = [*list_devices(), *simulated_devices()]
    if as_json:
        write_json([dataclasses.asdict(status) for status in statuses])
        return
    report.present(report.devices_table(statuses))


@commands.command()
@takes_records
def doctor(opened: DeviceOptions, as_json: JsonOption = False) -> None:
    """Run every operator on every part of a device against float64; exit code 1 if something fails."""
    from heterollm.base import write_json
    from heterollm.doctor import diagnose
    from heterollm.report import console as report
    from heterollm.report import diagnosis_report

    with report.progress_bars() as progress:
        diagnosis = diagnose(
            opened.device,
            gpu_threads=opened.threads.gpu_threads,
            npu_threads=opened.threads.npu_threads,
            progress=progress,
        )
    if as_json:
        write_json(diagnosis.to_dict())
    else:
        report.present(diagnosis_report(diagnosis))
    if not diagnosis.passed:
        raise typer.Exit(FAILED)

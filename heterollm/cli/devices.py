"""The commands about the machine: ``devices`` and ``doctor``."""

from __future__ import annotations

import typer

from heterollm.base import FAILED
from heterollm.cli.options import DeviceOptions, JsonOption, command_group
from heterollm.cli.records import takes_records

commands = command_group()


@commands.command()
def devices(as_json: JsonOption = False) -> None:
    """List all devices, with the reason and the package to install for an unusable one."""
    import dataclasses

    from heterollm.base import cache_root
    from heterollm.kernels.devices import list_devices
    from heterollm.kernels.sim import simulated_devices
    from heterollm.report import console as report

    cache_root()  # one error, where every device would give it as its reason
    statuses = [*list_devices(), *simulated_devices()]
    report.answer(
        report.devices_table(statuses), [dataclasses.asdict(status) for status in statuses], as_json=as_json
    )


@commands.command()
@takes_records
def doctor(opened: DeviceOptions, as_json: JsonOption = False) -> None:
    """Run every operator on GPU and NPU and compare with float64; exit code 1 if one fails."""
    from heterollm.doctor import diagnose
    from heterollm.report import console as report
    from heterollm.report import diagnosis_report

    with report.progress_bars() as progress:
        diagnosis = diagnose(
            opened.device,
            gpu_threads=opened.threads.gpu_threads,
            npu_threads=opened.threads.npu_threads,
            power=opened.power,
            progress=progress,
        )
    report.answer(diagnosis_report(diagnosis), diagnosis.to_dict(), as_json=as_json)
    if not diagnosis.passed:
        raise typer.Exit(FAILED)

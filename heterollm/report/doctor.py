"""The report of the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterollm.report.console import note, pairs_table, table

if TYPE_CHECKING:
    from heterollm.doctor import Check, Diagnosis

PROCESSORS: Final = ("GPU", "NPU")


def diagnosis_report(diagnosis: Diagnosis) -> Group:
    """Return the facts, the table of checks, and every failure with its fix."""
    parts: list[RenderableType] = [pairs_table(diagnosis.facts)]
    if diagnosis.checks:
        parts.append(_support_table(diagnosis.checks))
        gates = sorted({check.gate for check in diagnosis.checks})
        limits = " and ".join(f"{gate:.0e}" for gate in gates)
        parts.append(note(f"Largest error (NMSE against float64) of each operator's cases; gate {limits}."))
    for check in diagnosis.checks:
        if check.status == "fail":
            where = f"{check.part}, {check.operator}, {check.case}: {check.message}"
            parts.append(_finding("FAIL", "red", where, check.fix))
    parts += [_finding("FAIL", "red", one.message, one.fix) for one in diagnosis.problems]
    parts += [_finding("NOTE", "yellow", one.message, one.fix) for one in diagnosis.warnings]
    unverified = dict.fromkeys(check.operator for check in diagnosis.checks if check.status == "unverified")
    verdict = f"Device {diagnosis.device}: everything passed."
    if unverified:
        verdict = f"Device {diagnosis.device}: nothing failed; unverified: {', '.join(unverified)}."
    if not diagnosis.passed:
        verdict = f"Device {diagnosis.device} is not usable as it is."
    parts.append(Text(verdict, "bold green" if diagnosis.passed else "bold red"))
    return Group(*parts)


def _support_table(checks: Sequence[Check]) -> Table:
    made = table("operator", *PROCESSORS)
    for operator in dict.fromkeys(check.operator for check in checks):
        cells = [
            _cell([check for check in checks if check.operator == operator and check.part == processor])
            for processor in PROCESSORS
        ]
        made.add_row(operator, *cells)
    return made


def _cell(checks: Sequence[Check]) -> Text:
    if not checks:
        return Text("")
    failed = [check for check in checks if check.status == "fail"]
    if failed:
        return Text(f"FAIL  {len(failed)} of {len(checks)}", "bold red")
    errors = [check.error for check in checks if check.error is not None]
    if not errors and checks[0].status == "unverified":
        return Text(f"unverified  {checks[0].message}", "yellow")
    if not errors and checks[0].status == "pass":
        return Text(f"pass  {checks[0].message}", "green")
    if not errors:
        return note(checks[0].message or "not offered")
    return Text(f"pass  {max(errors):.0e} in {len(errors)}", "green")


def _finding(kind: str, style: str, message: str, fix: str) -> Text:
    return Text.assemble((f"{kind}  ", f"bold {style}"), message, (f" {fix}" if fix else "", "bold"))

"""All operators: the registry is this folder, whose every file is imported once."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import ModuleType

from heterollm.kernels.operators.operator import Form, OperatorCheck, StepCategory, Timed


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    package = __name__.rpartition(".")[0]
    folder = importlib.import_module(package).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(folder))
    found = (
        importlib.import_module(f"{package}.{name}") for name in names if f"{package}.{name}" != __name__
    )
    return tuple(module for module in found if hasattr(module, "STEPS"))


@functools.cache
def operator_steps() -> Mapping[str, StepCategory]:
    """Return the names of operators in steps, with their categories in traces."""
    return {name: category for module in _modules() for name, category in module.STEPS.items()}


def operator_checks() -> Iterator[OperatorCheck]:
    """Yield the checks of all operators."""
    for module in _modules():
        yield from getattr(module, "CHECKS", ())


@functools.cache
def timed_operators() -> Mapping[str, tuple[Timed, Form]]:
    """Return the operators that profiles have times of, and their forms, by names in profiles."""
    members = (member for module in _modules() for member in vars(module).values())
    timed = (member for member in members if isinstance(member, Timed))
    return {name: (one, form) for one in timed for form, name in one.forms.items()}


def name_in_profiles(operator: str, form: Form) -> str:
    """Return the name of another form of an operator in profiles; its own if it lacks that form."""
    return timed_operators()[operator][0].forms.get(form, operator)

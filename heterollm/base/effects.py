"""Conditions under which options have an effect, so that none is accepted and ignored.

A table of :class:`Effect` stands beside the options that it is about. A given option without an effect is
refused; a default of a file is left out instead, because it is meant for other commands too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from heterollm.base.errors import OptionError

OptionFacts: TypeAlias = Mapping[str, Any]
"""Values of all options by name, and of what else decides; a name may be missing."""

FLAGS: Final[Mapping[str, str]] = {
    "as_json": "--json",
    "form": "--format",
    "output": "--output",
    "techniques": "--technique",
    "symmetric": "--asymmetric",
}
"""Names of options that differ from those of their parameters."""


@dataclass(frozen=True, slots=True)
class Effect:
    """A condition under which options have an effect.

    Args:
        names: Names of the options, separated by spaces.
        acts: Whether they have an effect.
        reason: Reason why they have none otherwise.
        fix: Another option that would give them one; empty if there is none.
    """

    names: str
    acts: Callable[[OptionFacts], bool]
    reason: str
    fix: str = ""

    def error(self, name: str, value: object) -> OptionError:
        """Return the error of an option without effect."""
        leave = f"eave {flag(name)} out."
        return OptionError(
            f"{shown_option(name, value)} changes nothing: {self.reason}.",
            fix=f"{self.fix}, or l{leave}" if self.fix else f"L{leave}",
        )


def flag(name: str) -> str:
    """Return the option of a parameter as the command line has it."""
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def shown_option(name: str, value: object) -> str:
    """Return an option with its value, as given on the command line."""
    if isinstance(value, bool) or value is None:
        return flag(name)
    if isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    return f"{flag(name)} {value!s:.80}"


def idle_options(
    effects: Iterable[Effect], given: Collection[str], facts: OptionFacts
) -> Iterator[tuple[str, Effect]]:
    """Yield the given options that have no effect, with the condition that is not met.

    Args:
        effects: The conditions.
        given: Names of the options.
        facts: What decides.
    """
    for effect in effects:
        named = [name for name in effect.names.split() if name in given]
        if named and not effect.acts(facts):
            yield from ((name, effect) for name in named)


def refuse_idle(effects: Iterable[Effect], given: Collection[str], facts: OptionFacts) -> None:
    """Refuse a given option that has no effect.

    Raises:
        OptionError: There is one; the message has its name, its value and the reason.
    """
    for name, effect in idle_options(effects, given, facts):
        raise effect.error(name, facts.get(name))


def refuse_idle_everywhere(idle: Sequence[Mapping[str, Effect]], given: OptionFacts) -> None:
    """Refuse a given option that has no effect in any case of a grid.

    Args:
        idle: Options without effect of each case, with the condition that is not met.
        given: Values of the given options by name.

    Raises:
        OptionError: There is one.
    """
    for name, effect in idle[0].items() if idle else ():
        if name in given and all(name in one for one in idle):
            raise effect.error(name, given[name])

"""Conditions under which the options of commands have an effect; commands check them before they run.

An option on the command line without an effect is refused. One from the file of defaults or the environment
is left out, as if it were not there: the file's options are for all commands and all their uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, cast

from heterollm.base import Effect, OptionFacts, idle_options, is_exported, refuse_idle
from heterollm.cli.panels import PanelCommand

if TYPE_CHECKING:
    from heterollm.planning import LoadKeywords

BESIDE: Final = ("DEFAULT_MAP", "ENVIRONMENT")
"""Sources of options beside the command line."""

OF_LOAD: Final = {"asymmetric": "symmetric", "techniques": "request"}
"""Options of a load by those of a command that have other names."""

_of_file: ContextVar[frozenset[str]] = ContextVar("_of_file", default=frozenset())
_given: ContextVar[frozenset[str]] = ContextVar("_given", default=frozenset())


def options_of_file() -> frozenset[str]:
    """Return the options of the running command that the file of defaults or the environment set."""
    return _of_file.get()


def given_keywords(values: LoadKeywords) -> LoadKeywords:
    """Return the options of a load that the user gave, so that an exported model's own are its defaults."""
    from heterollm.planning import LoadOptions

    usual, of_file = LoadOptions(), {OF_LOAD.get(name, name) for name in options_of_file()}
    kept = {
        name: value for name, value in values.items() if name in _given.get() or value != getattr(usual, name)
    }
    return cast("LoadKeywords", {**kept, "defaults": frozenset(of_file)})


class CheckedCommand(PanelCommand):
    """A command that refuses given options which have no effect."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401 - of typer's own click
        """Check the options, and run the command."""
        leave_idle_out(ctx)
        return super().invoke(ctx)


def given_options(ctx: Any) -> frozenset[str]:  # noqa: ANN401 - of typer's own click
    """Return the names of the options on the command line."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, one in sources.items() if one is not None and one.name == "COMMANDLINE")


def leave_idle_out(ctx: Any) -> None:  # noqa: ANN401 - of typer's own click
    """Refuse options of the command line without an effect, and reset those of the file of defaults.

    Raises:
        OptionError: An option of the command line has no effect.
    """
    words = tuple(ctx.command_path.split()[1:])
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    effects, facts = command_effects(words), _facts(ctx.params)
    of_file = {name for name, one in sources.items() if one is not None and one.name in BESIDE}
    own = {param.name: param for param in ctx.command.params}
    for name in {name for name, _ in idle_options(effects, of_file, facts)}:
        ctx.params[name] = own[name].process_value(ctx, own[name].default)
        of_file.discard(name)
    _of_file.set(frozenset(of_file))
    _given.set(given_options(ctx))
    refuse_idle(effects, given_options(ctx), _facts(ctx.params))


def _facts(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a command, with the device of the exported model that it names, if any."""
    model = options.get("model")
    if isinstance(model, list | tuple) and len(model) == 1:
        model = model[0]
    if not isinstance(model, str) or not is_exported(model):
        return options
    from heterollm.exported import ExportedFolder

    found = ExportedFolder.find(model)
    known = found is not None and options.get("device") == "auto"
    return {**options, "device": found.manifest.device} if found is not None and known else options


def command_effects(words: tuple[str, ...]) -> tuple[Effect, ...]:
    """Return the conditions of the options of a command.

    Args:
        words: The command, without the program's name.
    """
    if words and words[0] in LOADING:
        # A late import: these bring the solver.
        from heterollm.planning import LOAD_EFFECTS

        return (*OWN.get(words, ()), *LOAD_EFFECTS)
    return OWN.get(words, ())


def _is_made(plan: object) -> bool:
    """Return whether a plan is the file of one."""
    from heterollm.planning import is_file

    return is_file(plan)


def _has_npu(facts: OptionFacts) -> bool:
    return bool(facts["npu_threads"] != 0)


def _needs_profile(facts: OptionFacts) -> bool:
    made = facts["plan"] == "gpu" or _is_made(facts["plan"])
    return not made or facts.get("speculative") is not None


def _is_sampled(facts: OptionFacts) -> bool:
    """Return whether tokens are sampled; an option out of its bounds is refused with them."""
    from heterollm.text import SamplingOptions

    SamplingOptions(**{name: facts[name] for name in SAMPLED.split()})
    return bool(facts["temperature"] != 0)


def _is_simulated(facts: OptionFacts) -> bool:
    from heterollm.kernels.sim import is_simulated

    return is_simulated(facts["device"])


LOADING: Final = ("generate", "chat", "serve", "eval", "plan", "export", "compile", "profile", "doctor")
"""Commands with options of a load; bench checks a configuration's, and simulate a case's."""

SAMPLED: Final = "top_k top_p min_p seed"
"""Options that choose among tokens."""

SAMPLING: Final = Effect(
    SAMPLED,
    _is_sampled,
    "temperature 0 takes the likeliest token",
    "Give a --temperature above 0",
)
PROFILING: Final = Effect(
    "profile", _needs_profile, "a plan that is given, or gpu, needs no times", "Choose another plan"
)
WITHOUT_DEVICE: Final = Effect(
    "gpu_threads",
    lambda facts: not _is_simulated(facts),
    "the threads of a simulated device compute answers, and this command asks for none",
)

OWN: Final[Mapping[tuple[str, ...], tuple[Effect, ...]]] = {
    ("generate",): (SAMPLING, PROFILING),
    ("chat",): (SAMPLING, PROFILING),
    ("serve",): (PROFILING,),
    ("plan",): (
        Effect(
            "device gpu_threads npu_threads power",
            lambda facts: facts["profile"] is None,
            "the profile of --profile has a device and its threads",
        ),
        WITHOUT_DEVICE,
        Effect(
            "explain",
            lambda facts: not (facts["steps"] or facts["as_json"]),
            "neither steps nor JSON have rejected placements",
            "Leave out --steps and --json",
        ),
        Effect(
            "prompt decode",
            lambda facts: facts["steps"] or not facts["as_json"],
            "the JSON form is that of the plan, for all lengths",
            "Add --steps, or leave out --json",
        ),
    ),
    ("compile",): (
        Effect(
            "profile",
            lambda facts: (
                bool(facts["techniques"])
                or not (facts["plan"] in ("gpu", "npu", "layer") or _is_made(facts["plan"]))
            ),
            "plans npu and layer, and one that is given, need no times",
            "Choose plan tensor, block, fused or auto",
        ),
    ),
    ("export",): (
        Effect(
            "soc",
            lambda facts: facts["device"] == "snapdragon",
            "only the graphs of a Snapdragon are compiled elsewhere",
            "Choose --device snapdragon",
        ),
        Effect(
            "context_layers",
            lambda facts: facts["soc"] is not None,
            "a device that is here knows how many layers share a context",
            "Add --soc",
        ),
        Effect(
            "profile",
            lambda facts: not (facts["plan"] == "gpu" or _is_made(facts["plan"])),
            "a plan that is given, or gpu, needs no times",
            "Choose another plan",
        ),
    ),
    ("calibrate",): (
        Effect(
            "int16_limit pruned loss_limit",
            lambda facts: facts["precision"] == "w8a8",
            "only activations of precision w8a8 have 8 bits",
            "Choose --precision w8a8",
        ),
    ),
    ("profile",): (
        WITHOUT_DEVICE,
        Effect(
            "group_size",
            lambda facts: set(facts["precision"] or ["w4a16"]) != {"fp16"},
            "weights of precision fp16 have no blocks",
            "Add another precision",
        ),
        Effect("characterise techniques", _has_npu, "they are about the NPU", "Give the NPU a thread"),
        Effect(
            "no_tune",
            lambda facts: not (facts["quick"] or _is_simulated(facts)),
            "neither a quick run nor one of a simulated device tunes kernels",
            "Leave out --quick",
        ),
    ),
    ("doctor",): (WITHOUT_DEVICE,),
}
"""Conditions of commands beside those of a load, by command."""

"""Options that several commands share, the records that hold them, and groups of commands.

A new group of commands is a module of this room with ``commands = command_group()`` and functions under
``@commands.command()``; :mod:`heterollm.cli.command_line` lists it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from heterollm.cli import complete as cli_complete
from heterollm.cli.effects import CheckedCommand
from heterollm.engine import Sync
from heterollm.kernels.ops import Power, Precision, Scales

if TYPE_CHECKING:
    from heterollm.planning import LoadKeywords
    from heterollm.solver import AttentionRequest, Overflow, PlanRequest


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of typer that takes one of some names."""

    def parse(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r:.80} is not one of {', '.join(map(repr, names))}.")
        return text

    return parse


def whole_number(text: str) -> int:
    """Return a number as an option states it.

    Raises:
        BadParameter: The text is not a whole number.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise typer.BadParameter(f"{text!r:.80} is not a whole number.")
    return int(text)


def chunk_count(text: str | int) -> Literal["auto"] | int:
    """Return the number of chunks at once that an option states, or ``auto``; its default is a number.

    Raises:
        BadParameter: The text is neither.
    """
    if isinstance(text, int):
        return text
    return "auto" if text == "auto" else whole_number(text)


def several(
    *flags: str,
    help: str,  # noqa: A002 - as typer names it
    names: Sequence[str] = (),
    item: Callable[[str], object] | None = None,
    metavar: str = "NAME,NAME",
) -> Any:  # noqa: ANN401 - as typer.Option
    """Return an option that takes one value, or several with commas between them, as a tuple.

    Args:
        flags: Names of the option; by default that of its parameter.
        help: Text of the help.
        names: Values that the shell offers.
        item: Parser of one value; by default it takes the names alone.
        metavar: Form of a value in the help.
    """
    parse_item = one_of(names) if item is None else item

    def parse(given: str | tuple[object, ...]) -> tuple[object, ...]:
        if isinstance(given, tuple):  # the default
            return given
        return tuple(parse_item(part.strip()) for part in given.split(","))

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in cli_complete.beginning(last, names)]

    return typer.Option(*flags, help=help, metavar=metavar, parser=parse, autocompletion=complete)


def numbers(*flags: str, help: str) -> Any:  # noqa: A002, ANN401 - as typer.Option
    """Return an option that takes whole numbers with commas between them."""
    return several(*flags, help=help, item=whole_number, metavar="N,N")


PRECISIONS: tuple[Precision, ...] = get_args(Precision)
Names: TypeAlias = Sequence[str]
IntegerList: TypeAlias = Sequence[int]

ModelArgument = typer.Argument(
    metavar="MODEL",
    help="A folder, a GGUF file, OWNER/NAME or OWNER/NAME:Q4_K_M on the Hugging Face hub, a known name such "
    "as qwen3-0.6b, or tiny-python-lm (bundled).",
    autocompletion=cli_complete.models,
)
Model = Annotated[str, ModelArgument]
MaybeModel = Annotated[str | None, ModelArgument]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto, snapdragon, opencl, intel, host, emulator, intel:cpu, or sim:SOC (simulated).",
        autocompletion=cli_complete.devices,
    ),
]
PrecisionOption = Annotated[Precision, typer.Option(help="Bits of weights and activations.")]
GroupSize = Annotated[Literal[32, 64, 128], typer.Option(help="Weights that share a scale.")]
ScalesOption = Annotated[
    Scales, typer.Option(help="Scales of 4-bit weights; stepped: as integer NPU graphs need.")
]
CalibrationOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File of `calibrate`, for integer NPU graphs and npumoe.")
]
Context = Annotated[int | None, typer.Option(help="Positions of the KV cache.")]
PowerOption = Annotated[Power, typer.Option(help="Clocks and cores to ask for on snapdragon.")]
SyncOption = Annotated[
    Sync, typer.Option(help="How to wait for the GPU; `operator` waits after each operator.")
]
Format: TypeAlias = Literal["table", "md", "csv", "json", "jsonl"]
FormatOption = Annotated[Format, typer.Option("--format", help="Format of the output.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
InFlightOption = Annotated[
    Any,
    typer.Option(
        help="Chunks of a long prompt at once, 1 to 16, in turns that fill waits; auto: as few as pay.",
        metavar="N|auto",
        parser=chunk_count,
    ),
]
TechniqueChoice: TypeAlias = Literal["llm.npu", "shadowattn", "npumoe", "npu-attention", "auto"]
TECHNIQUES: tuple[TechniqueChoice, ...] = get_args(TechniqueChoice)[:-1]
TechniqueOption = Annotated[
    Sequence[TechniqueChoice],
    several(
        "--technique",
        help="llm.npu: chunks out of order, see docs/llm-npu.md; shadowattn: sparse attention in prompts, "
        "see docs/shadow-attention.md; npumoe: a mixture's experts on the NPU, see "
        "docs/mixture-of-experts.md; npu-attention: attention of prompts on the NPU, see "
        "docs/how-the-split-works.md; auto: those, or none, with which the plan is predicted to be fastest.",
        names=get_args(TechniqueChoice),
    ),
]
ExpertsGibOption = Annotated[
    float | None,
    typer.Option(
        help="Memory of a mixture's experts in GiB; others are read from storage when chosen. Default: all."
    ),
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        metavar="lookup|MODEL",
        help="Check several guessed tokens in one pass: those that followed the same text before (lookup), "
        "or those of a smaller model with the same tokenizer. See docs/speculative.md.",
        autocompletion=cli_complete.drafts,
    ),
]
GuessesOption = Annotated[
    int | None,
    typer.Option(help="With --speculative: guesses in each pass, 1 to 15. Default: as many as pay."),
]
OverflowOption = Annotated[
    Literal["gpu", "drop", "pad"],
    typer.Option(
        help="With npumoe: tokens beyond an expert's capacity go to the GPU, or are dropped, which changes "
        "results; pad: capacities hold all calibrated tokens."
    ),
]
RowsOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Append each row as a JSON line.")
]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of the technique shadowattn."""

    keep: Annotated[float, typer.Option(help="With shadowattn: mean share of the keys that heads keep.")] = (
        0.2
    )
    keep_by: Annotated[
        Literal["mass", "importance", "uniform"],
        typer.Option(
            help="With shadowattn: share the kept keys out by calibrated attention, by the paper's "
            "importance of heads, or alike."
        ),
    ] = "mass"
    score_buckets: Annotated[
        Literal[1, 5, 9], typer.Option(help="With shadowattn: scale factors to choose among in each pass.")
    ] = 1
    estimator: Annotated[
        Literal["auto", "npu", "gpu"],
        typer.Option(
            help="With shadowattn: the processor that estimates scores; auto: the faster one of each layer, "
            "length and number of keys, by the profile."
        ),
    ] = "auto"

    def request(self, **more: Any) -> AttentionRequest:  # noqa: ANN401 - fields of the request
        """Return the request of these options."""
        from heterollm.solver import AttentionRequest

        return AttentionRequest(
            keep=self.keep,
            keep_by=self.keep_by,
            buckets=self.score_buckets,
            estimator=self.estimator,
            **more,
        )


def technique_request(
    techniques: Sequence[TechniqueChoice], attention: AttentionOptions, overflow: Overflow
) -> PlanRequest | None:
    """Return the request to the solver; None without a technique."""
    from heterollm.solver import ExpertsRequest, PlanRequest

    if not techniques:
        return None
    experts = ExpertsRequest(overflow)
    return PlanRequest(techniques=tuple(techniques), attention=attention.request(), experts=experts)


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """Threads of GPU and NPU on devices where both run on the cores of one CPU."""

    gpu_threads: Annotated[int | None, typer.Option(help="Threads of a GPU on CPU cores.")] = None
    npu_threads: Annotated[int | None, typer.Option(help="Threads of an NPU on CPU cores; 0: no NPU.")] = None


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """A device and the threads of its processors."""

    device: DeviceOption = "auto"
    threads: ThreadOptions = ThreadOptions()
    power: PowerOption = "burst"


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """Formats of weights and activations."""

    precision: PrecisionOption = "w4a16"
    group_size: GroupSize = 32
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give 4-bit weights zero points.")] = False
    scales: ScalesOption = "free"
    calibration: CalibrationOption = None


LoraOption = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="A LoRA adapter (PEFT), merged into the weights at load."),
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of loading a model: device, plan, weights and context."""

    device: DeviceOption = "auto"
    plan: Annotated[
        str,
        typer.Option(
            help="auto, gpu, npu, layer, tensor, block, fused, or the file of a plan.",
            autocompletion=cli_complete.plans,
        ),
    ] = "auto"
    weights: WeightOptions = WeightOptions()
    lora: LoraOption = None
    context: Context = None
    techniques: TechniqueOption = ()
    attention: AttentionOptions = AttentionOptions()
    overflow: OverflowOption = "gpu"


def load_keywords(options: ModelOptions, threads: ThreadOptions) -> LoadKeywords:
    """Return options of a model as those of :meth:`heterollm.LLM.load`."""
    return {
        "device": options.device,
        "plan": options.plan,
        "request": technique_request(options.techniques, options.attention, options.overflow),
        "precision": options.weights.precision,
        "group_size": options.weights.group_size,
        "symmetric": not options.weights.asymmetric,
        "scales": options.weights.scales,
        "calibration": options.weights.calibration,
        "lora": options.lora,
        "context": options.context,
        "gpu_threads": threads.gpu_threads,
        "npu_threads": threads.npu_threads,
    }


KvBitsOption = Annotated[
    Literal[8, 16, 32] | None,
    typer.Option(help="Bits of a number in the KV cache; 16 by default. See docs/kv-cache.md."),
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of running a loaded model."""

    threads: ThreadOptions = ThreadOptions()
    power: PowerOption = "burst"
    allow_slow: Annotated[
        bool, typer.Option("--allow-slow", help="Emulate a model even if a pass takes seconds.")
    ] = False
    sync: SyncOption = "auto"
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Continue on the GPU when the NPU fails.")
    ] = False
    experts_gib: ExpertsGibOption = None
    kv_bits: KvBitsOption = None
    speculative: SpeculativeOption = None
    guesses: GuessesOption = None
    profile: Annotated[
        Literal["quick"] | None,
        typer.Option(help="Measure what plans lack of the device first, in about a minute."),
    ] = None


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """The choice of an answer's tokens."""

    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample among this many likeliest tokens; 0: all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens up to this total probability.")
    ] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Leave out tokens below this fraction of the best one's probability.")
    ] = 0.0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1 makes repeated tokens less likely.")] = (
        1.0
    )
    presence_penalty: Annotated[
        float, typer.Option(help="Above 0 makes tokens that the answer has less likely; -2 to 2.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="The same for each time that the answer has them; -2 to 2.")
    ] = 0.0
    seed: Annotated[int | None, typer.Option(help="Seed that makes sampling repeatable.")] = None


class CheckedTyper(typer.Typer):
    """A group whose commands refuse given options without an effect."""

    def command(  # type: ignore[override] # names one default, and hands on all else
        self,
        name: str | None = None,
        *,
        cls: type[TyperCommand] = CheckedCommand,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Return the decorator of a command, as typer does."""
        return super().command(name, cls=cls, **options)


def command_group(
    name: str | None = None, description: str | None = None, cls: type[TyperGroup] = TyperGroup
) -> typer.Typer:
    """Return an empty group of commands.

    Args:
        name: The word before its commands; without a name they are commands of the program.
        description: Help of a group with a name.
        cls: The class of the group.
    """
    return CheckedTyper(name=name, cls=cls, help=description, no_args_is_help=True, rich_markup_mode=None)


def chosen_format(form: Format, *, as_json: bool) -> Format:
    """Return the format that ``--format`` and ``--json`` name together.

    Raises:
        BadParameter: They name two formats.
    """
    if not as_json:
        return form
    if form not in ("table", "json"):
        raise typer.BadParameter(f"--json prints JSON, and --format {form} does not.", param_hint="--json")
    return "json"

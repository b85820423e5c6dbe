"""Loads a model, and a draft model that guesses for it, on an opened device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from heterollm.base import GIB, OptionError, PlanError, Progress, silent
from heterollm.engine import (
    DraftSpeculator,
    EngineThread,
    Session,
    check_memory,
    check_precision,
    fitting_need,
    longest_guessed_pass,
    measured_pass_s,
    start_engine,
)
from heterollm.exported import ExportedFolder
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import CACHE_DTYPES
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.sim import Simulation
from heterollm.model import (
    Checkpoint,
    ExportedCheckpoint,
    ModelConfig,
    ModelWeights,
    expert_specs,
    find_model,
    load_weights,
)
from heterollm.planning import (
    LOAD_OPTIONS,
    LOOKUP,
    CoreSplit,
    LoadOptions,
    PlanInputs,
    Planned,
    calibrated_experts,
    calibrated_ranges,
    calibrated_scales,
    check_kv_bits,
    check_source_effects,
    choose_context,
    idle_notes,
    inputs_of_file,
    inputs_of_load,
    make_plan,
    predicted_pass_s,
)
from heterollm.solver import LEVELS, SOLVED_LEVELS, Plan, PlannedAttention, PlanRequest
from heterollm.text import (
    CHOSEN_GUESSES,
    LOOKUP_PRIORS,
    GuessPace,
    LookupProposer,
    NoTokenizer,
    Speculator,
    Tokenizer,
    load_tokenizer,
)
from heterollm.trace import Tracer, take_trace

if TYPE_CHECKING:
    from heterollm.engine import Engine, ExpertBudget, MemoryNeed


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A checkpoint, its configuration and its tokenizer, without its weights.

    Args:
        checkpoint: The files.
        config: The model.
        tokenizer: Its tokenizer, if it has one.
        exported: The exported model that stands for a checkpoint; None for a checkpoint.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    tokenizer: Tokenizer | NoTokenizer
    exported: ExportedFolder | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, exported: ExportedFolder | None = None) -> Self:
        """Read the configuration and the tokenizer."""
        config = ModelConfig.from_folder(checkpoint.folder)
        return cls(checkpoint, config, load_tokenizer(checkpoint.folder, config.eos_ids), exported)

    @classmethod
    def find(
        cls, model: str | Path, options: Mapping[str, Any], report: Progress
    ) -> tuple[Self, LoadOptions]:
        """Return a checkpoint or an exported model, and the options of its load.

        Args:
            model: A local folder, a GGUF file or a hub name.
            options: Given options by name.
            report: Called while the files of an exported model are checked.

        Raises:
            HeteroLLMError: It is damaged, or an option is not legal or contradicts it.
        """
        exported = ExportedFolder.find(model)
        if exported is None:
            asked = LoadOptions(**options)
            return cls.of(Checkpoint(model, asked.lora, report)), asked
        asked = exported.options(options, report)
        return cls.of(exported.checkpoint(), exported), asked

    def weights(
        self, asked: LoadOptions, device: Device, specs: Sequence[OpSpec], report: Progress
    ) -> ModelWeights:
        """Return the weights for a device.

        Args:
            asked: Options of the load.
            device: The opened device.
            specs: Every group of the model but the experts of a mixture.
            report: Called while the weights are quantised.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        if self.exported is not None:
            assert isinstance(self.checkpoint, ExportedCheckpoint)
            return self.exported.weights(self.checkpoint, self.config, specs, device.activation_dtype)
        return load_weights(
            self.checkpoint,
            self.config,
            precision=asked.precision,
            group_size=asked.group_size,
            symmetric=asked.symmetric,
            scales=asked.scales,
            float_dtype=device.activation_dtype,
            progress=lambda done, total: report("Quantising weights", done, total),
        )


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model that fits a device, ready to read its weights.

    Args:
        source: The checkpoint.
        asked: Options of the load.
        device: The opened device.
        inputs: All that the plan follows from.
        plan: The plan.
        notes: Differences of the plan from the request.
        experts: Memory that experts may take; None for all of them.
        need: Memory of the model.
    """

    source: SourceModel
    asked: LoadOptions
    device: Device
    inputs: PlanInputs
    plan: Plan
    notes: tuple[str, ...]
    experts: ExpertBudget | None
    need: MemoryNeed

    @classmethod
    def of(
        cls,
        source: SourceModel,
        asked: LoadOptions,
        device: Device,
        thread: EngineThread,
        context: int,
        chosen: str = "",
        report: Progress = silent,
    ) -> Self:
        """Plan a model, and check that the device runs the plan.

        Args:
            source: The checkpoint.
            asked: Options of the load.
            device: The opened device.
            thread: The engine thread.
            context: Positions of a session.
            chosen: Why ``auto`` split the device's cores.
            report: Called with the plans solved and their number where several are compared.

        Raises:
            HeteroLLMError: The device, plan or an option is unusable.
        """
        config = source.config
        check_source_effects(asked, config)
        inputs = inputs_of_load(asked, config, context, device, chosen=chosen)
        check_precision(device, asked.precision, inputs.specs)
        planned = thread.run(lambda: make_plan(inputs, report))
        plan = planned.plan
        check_kv_bits(asked.kv_bits, is_sparse=plan.technique(PlannedAttention).is_active)
        budget = _expert_budget(asked, config, inputs.specs)
        need = fitting_need(
            *(device, config, inputs.specs, plan, context),
            given=inputs.given,
            experts_bytes=None if budget is None else budget.size_bytes,
        )
        held = () if source.exported is None else source.exported.give_to(device)
        notes = (*planned.notes, *idle_notes(asked, device, plan), *held)
        return cls(source, asked, device, inputs, plan, notes, budget, need)

    @property
    def context(self) -> int:
        """Positions of a session."""
        return self.inputs.request.context

    @property
    def draft_notes(self) -> tuple[str, ...]:
        """Remarks on the model as a draft."""
        turns = f"The draft model guesses under plan {self.plan.level}, in turns with the model's passes."
        return (turns, *(f"Draft model: {note}" for note in self.notes))

    def start(self, thread: EngineThread, report: Progress) -> tuple[ModelWeights, Engine]:
        """Read the weights and start the engine on its thread.

        Raises:
            HeteroLLMError: The checkpoint is damaged, or the device fails.
        """
        asked, device, plan = self.asked, self.device, self.plan
        weights = self.source.weights(asked, device, self.inputs.specs, report)
        ranges = calibrated_ranges(asked.weights_calibration, weights)
        scales = {
            buckets: calibrated_scales(asked.weights_calibration, buckets)
            for buckets in {one.buckets for one in plan.technique(PlannedAttention).sparse}
        }
        # A late import: without an OpenCL binding, opening the device has raised the error that says so.
        from heterollm.engine import MixtureOptions

        observer = thread.run(lambda: Tracer(device)) if asked.trace else None
        engine = thread.run(
            lambda: start_engine(
                device,
                weights,
                plan,
                self.context,
                report,
                allow_fallback=asked.allow_fallback,
                allow_slow=asked.allow_slow,
                observer=observer,
                ranges=ranges,
                techniques={"attention": scales},
                mixture=MixtureOptions(self.experts),
            )
        )
        return weights, engine


def plan_for(
    model: str | Path, options: LoadOptions, profile: Path | None = None, report: Progress = silent
) -> Planned:
    """Return the solver's plan of a model that is not loaded.

    Args:
        model: A local folder or a hub name, of which only the configuration is read, or the name of a known
            model.
        options: Options of the load.
        profile: A profile's file, in place of that of the device; the device need not be here.
        report: Called with a stage's name, steps done and steps in all.

    Raises:
        ProfileError: There is no profile, or it is damaged.
        HeteroLLMError: The checkpoint, device or an option is not usable.
    """
    config = find_model(model, closest=False, progress=report).config
    check_source_effects(options, config)
    context = choose_context(config, options.context)
    if profile is not None:
        # A late import: a load with a plan of its own reads no profile.
        from heterollm.profiler.predict import checked
        from heterollm.profiler.records import Profile

        inputs = inputs_of_file(options, config, context, checked(Profile.load(profile)))
        return _reported_plan(inputs, report)
    cores = CoreSplit(options, config, context)
    report("Opening the device", 0, 1)
    device = open_for(options, cores, numerics=False)
    report("Opening the device", 1, 1)
    inputs = inputs_of_load(options, config, context, device, chosen=cores.reason_for(device))
    inputs.profiled("The plan")  # a load would take the GPU alone
    planned = _reported_plan(inputs, report)
    fitting_need(device, config, inputs.specs, planned.plan, context, given=inputs.given)
    return planned


def _reported_plan(inputs: PlanInputs, report: Progress) -> Planned:
    report("Planning", 0, 1)
    planned = make_plan(inputs, report)
    report("Planning", 1, 1)
    return planned


def open_for(options: LoadOptions, cores: CoreSplit, *, numerics: bool = True) -> Device:
    """Open the device of a load; called on the engine thread.

    Args:
        options: Of the load.
        cores: Splits the cores.
        numerics: Whether a simulated device computes values, without which it gives no answers.
    """
    device = open_device(
        options.device,
        gpu_threads=options.gpu_threads,
        npu_threads=options.npu_threads,
        profiling=options.trace,
        simulation=Simulation(numerics=numerics),
        power=options.power,
        choose_threads=cores,
    )
    if options.kv_bits is not None:
        device.cache_dtype = CACHE_DTYPES[options.kv_bits]
    return device


def planned_draft(main: PlannedModel, thread: EngineThread) -> PlannedModel | None:
    """Return the planned draft model of a load, and check that both fit; None without one.

    Both models take turns on the device. The draft's NPU graphs get the memory that the model's leave.

    Raises:
        OptionError: The draft has another tokenizer.
        DeviceError: The memory does not suffice for both.
        PlanError: The NPU cannot hold the graphs of both.
    """
    asked, device = main.asked, main.device
    if asked.speculative in (None, LOOKUP):
        check_memory(main.need)
        return None
    assert asked.speculative is not None
    source = SourceModel.of(Checkpoint(asked.speculative))
    _check_tokenizers(main.source, source)
    level = asked.plan if asked.plan in (*LEVELS, *SOLVED_LEVELS) else "auto"
    limit = None if device.npu is None else device.npu.addressable_bytes
    left = None if limit is None else max(0, limit - main.need.npu_graphs)
    own = replace(
        asked,
        speculative=None,
        guesses=None,
        plan=level,
        request=None if left is None else PlanRequest(npu_gib=left / GIB),
        precision="w4a16" if asked.precision == "w8a8" else asked.precision,
        scales="free",
        calibration=None,
        experts_gib=None,
        trace=False,
        defaults=LOAD_OPTIONS,  # nobody gave them for the draft
    )
    context = min(main.context, choose_context(source.config, None))
    draft = PlannedModel.of(source, own, device, thread, context)
    if left is not None and draft.need.npu_graphs > left:
        raise PlanError(
            f"The NPU holds {limit} bytes of graphs; the model's plan takes {main.need.npu_graphs} and the "
            f"draft's {draft.need.npu_graphs}.",
            fix="Choose plan auto or gpu, or a smaller draft.",
        )
    check_memory(replace(main.need, draft=draft.need.total))
    return draft


def speculator_of(
    main: PlannedModel, engine: Engine, draft: Engine | None, thread: EngineThread, report: Progress
) -> Speculator | None:
    """Return the speculator of a loaded model; None without speculative decoding.

    Without predictions from a profile it measures passes. Called on the engine thread.

    Args:
        main: The model.
        engine: Its engine.
        draft: The engine of its draft, if it has one.
        thread: The thread of both.
        report: Called while passes compile.
    """
    asked = main.asked
    if asked.speculative is None:
        return None
    longest = longest_guessed_pass(engine)
    counts = CHOSEN_GUESSES if asked.guesses is None else range(1, asked.guesses + 1)
    lengths = [1, *(count + 1 for count in counts if count < longest)]
    engine.compile_ahead(engine.new_cache(), (), report, decode=lengths)
    pass_s = predicted_pass_s(main.inputs, main.plan, longest) or measured_pass_s(engine, longest)
    # Neither counts nor a trace know of these passes.
    engine.reset_counts()
    if engine.observer is not None:
        take_trace(engine)
    if draft is None:
        pace = GuessPace(pass_s, LOOKUP_PRIORS, fixed=asked.guesses)
        return lambda *_: LookupProposer(pace)
    drafting, vocab_size = draft, draft.vocab_size

    def new_session() -> Session:
        return Session(drafting, thread, vocab_size)

    guess_s = measured_pass_s(draft, 1)[0]
    return DraftSpeculator(pass_s, guess_s, asked.guesses, new_session)


def _check_tokenizers(main: SourceModel, draft: SourceModel) -> None:
    """Refuse a draft whose ids stand for other texts.

    Raises:
        OptionError: One has no tokenizer, or they have different ones.
    """
    for one in (main, draft):
        if isinstance(one.tokenizer, NoTokenizer):
            raise OptionError(
                f"{one.checkpoint.folder} has no tokenizer, so that model and draft cannot be compared.",
                fix=f"Use --speculative {LOOKUP}.",
            )
    assert isinstance(main.tokenizer, Tokenizer)
    assert isinstance(draft.tokenizer, Tokenizer)
    ours, theirs = main.tokenizer.vocabulary, draft.tokenizer.vocabulary
    if ours != theirs:
        other = len(ours.items() ^ theirs.items())
        raise OptionError(
            f"The draft model {draft.checkpoint.folder} has another tokenizer: {len(theirs)} tokens beside "
            f"{len(ours)}, of which {other} differ.",
            fix=f"Give a smaller model of the same family, or --speculative {LOOKUP}.",
        )


def _expert_budget(asked: LoadOptions, config: ModelConfig, specs: Sequence[OpSpec]) -> ExpertBudget | None:
    """Return the memory that experts may take; None for all of them."""
    if asked.experts_gib is None or config.mixture is None:
        return None
    # A late import, as that of the engine.
    from heterollm.engine import expert_budget

    popular = calibrated_experts(asked.calibration)
    return expert_budget(expert_specs(config, specs), asked.experts_gib, popular)

"""Loads a model, and a draft model that guesses for it, on an opened device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from heterollm.base import Progress, silent
from heterollm.engine import EngineThread, check_precision, fitting_need, start_engine
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
)
from heterollm.solver import Plan, PlannedAttention
from heterollm.text import NoTokenizer, Tokenizer, load_tokenizer
from heterollm.trace import Tracer

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
        check_kv_bits(asked.kv_bits, is_sparse=bool(plan.technique(PlannedAttention).sparse))
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


def _expert_budget(asked: LoadOptions, config: ModelConfig, specs: Sequence[OpSpec]) -> ExpertBudget | None:
    """Return the memory that experts may take; None for all of them."""
    if asked.experts_gib is None or config.mixture is None:
        return None
    # A late import, as that of the engine.
    from heterollm.engine import expert_budget

    popular = calibrated_experts(asked.calibration)
    return expert_budget(expert_specs(config, specs), asked.experts_gib, popular)

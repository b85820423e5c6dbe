"""The model as a user holds it. Start reading here: load opens, profiles nothing, plans and compiles."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from heterollm.base import EngineError, InputError, OptionError, Progress, silent
from heterollm.engine import (
    EngineThread,
    Session,
    SessionSource,
    Stream,
    Sync,
    check_emulation,
    check_ids,
    check_memory,
    check_precision,
    check_sync,
    memory_need,
)
from heterollm.kernels.device import Device
from heterollm.kernels.open import open_device
from heterollm.kernels.ops import OpSpec, Precision
from heterollm.kernels.sim import Simulation, is_simulated
from heterollm.model import Checkpoint, ModelConfig, ModelWeights, load_weights, op_specs
from heterollm.planning import check_length_policy, check_options, choose_context, choose_plan
from heterollm.solver import LengthPolicy, Plan, check_plan
from heterollm.text import (
    Generation,
    GenerationOptions,
    GenerationResult,
    SamplingOptions,
    Tokenizer,
    reusable_prefix,
)
from heterollm.trace import start_engine, take_trace

if TYPE_CHECKING:
    from heterollm.engine import Engine
    from heterollm.planning import Planner
    from heterollm.solver import LengthCosts
    from heterollm.trace import Trace

__all__ = ["LLM"]

T = TypeVar("T")


class LLM:
    """A loaded model on an opened device. Made by :meth:`load`; use as a context manager or close it."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        weights: ModelWeights,
        engine: Engine,
        thread: EngineThread,
        plan_notes: Sequence[str] = (),
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._weights = weights
        self._engine = engine
        self._thread = thread
        self._plan_notes = tuple(plan_notes)
        self._own_session: Session | None = None

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        device: str = "auto",
        plan: str | Path | Plan = "auto",
        precision: Precision = "w4a16",
        group_size: int = 32,
        symmetric: bool = True,
        context: int | None = None,
        gpu_threads: int | None = None,
        npu_threads: int | None = None,
        allow_slow: bool = False,
        sync: Sync = "auto",
        length_policy: LengthPolicy = "padding",
        allow_fallback: bool = False,
        trace: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Load a checkpoint and make it ready to answer.

        Args:
            model: A local folder or a hub name.
            device: ``snapdragon``, ``host``, ``emulator`` or ``auto``.
            plan: A plan, a plan file, a level (``gpu``, ``npu``, ``layer``; ``tensor``, ``block``: the
                solver's) or ``auto``: ``block`` if the solver takes a block at any length, else ``tensor``,
                or ``gpu`` as long as the device has no profile.
            precision: ``w4a16`` (4-bit weights, 8-bit embedding and head), ``w4a8`` (the same weights, inputs
                rounded to int8; ``host`` only) or ``fp16`` (float weights; FP32 on ``host``).
            group_size: Weights that share a scale: 32, 64 or 128.
            symmetric: Whether 4-bit codes have no zero point of their own.
            context: Positions of a session; the model's own limit, at most 4096, by default.
            gpu_threads: Threads of the OpenCL part on ``host`` and ``emulator``.
            npu_threads: Threads of the NPU part on ``host``; 0 leaves it out.
            allow_slow: Run a model on the emulator that takes it more than a few seconds a pass.
            sync: How the parts wait for each other: a strategy of :mod:`heterollm.kernels.sync.handover`,
                ``operator`` to finish the GPU's queue after every operator, or ``auto``
                (:func:`heterollm.engine.waits.default_strategies`).
            length_policy: How levels ``npu`` and ``layer`` run lengths that the NPU has no graph for:
                ``padding`` to the next one, ``pipe`` (several graphs one after the other) or ``auto`` (what
                the device's profile predicts to be faster for each group). The solver needs none.
            allow_fallback: Go on with the GPU alone when the NPU part fails; :attr:`notes` then says so.
            trace: Record every pass for :meth:`take_trace`.
            progress: Called with a stage's name, steps done and steps in all.

        Raises:
            HeteroLLMError: The checkpoint, device, plan or an option is not usable.
        """
        stopped = threading.Event()

        def report(stage: str, done: int, total: int) -> None:
            if stopped.is_set():
                raise EngineError("Loading was stopped.")
            (progress or silent)(stage, done, total)

        check_options(model, plan, precision, group_size, symmetric)
        check_sync(sync)
        check_length_policy(length_policy)
        checkpoint = Checkpoint(model)
        config = ModelConfig.from_folder(checkpoint.folder)
        positions = choose_context(config, context)
        tokenizer = Tokenizer.from_folder(checkpoint.folder)
        thread = EngineThread()
        try:
            opening: dict[str, Any] = {"gpu_threads": gpu_threads, "npu_threads": npu_threads}
            opening |= {"profiling": True} if trace else {}
            # A simulated device gives answers only where they are computed.
            simulated = is_simulated(device)
            opening |= {"simulation": Simulation(numerics=True)} if simulated else {}
            opened = thread.run(lambda: open_device(device, **opening))
            specs = op_specs(
                config,
                precision,
                group_size,
                symmetric,
                float_bits=32 if opened.activation_dtype == np.float32 else 16,
            )
            check_precision(opened, precision, specs)
            planners: list[Planner] = []
            chosen = choose_plan(
                plan,
                specs,
                device=opened.name,
                standard_lengths=opened.standard_lengths,
                precision=precision,
                context=positions,
                solve=functools.partial(_solved, planners, opened, config, specs, precision, positions),
                length_policy=length_policy,
                length_costs=functools.partial(_length_costs, opened, config, specs, precision),
            )
            # Before anything is read: quantising a model that cannot run would take its time in vain.
            _check_fit(config, specs, chosen, positions, opened)
            weights = load_weights(
                checkpoint,
                config,
                precision=precision,
                group_size=group_size,
                symmetric=symmetric,
                float_dtype=opened.activation_dtype,
                progress=lambda done, total: report("Quantising weights", done, total),
            )
            check_emulation(opened, weights, chosen, allow_slow)
            options: dict[str, Any] = {"sync": sync, "allow_fallback": allow_fallback, "trace": trace}
            for planner in planners:
                options |= {"profile": planner.profile, "placements": planner}
            engine = thread.run(lambda: start_engine(opened, weights, chosen, positions, report, **options))
        except BaseException:
            # Ctrl-C arrives here while the engine thread works on; it ends at its next step.
            stopped.set()
            thread.close()
            raise
        plan_notes = [note for planner in planners for note in planner.notes]
        return cls(config, tokenizer, weights, engine, thread, plan_notes)

    # -- answers -------------------------------------------------------------------------------------

    def generate(self, prompt: str | Sequence[int], **options: Any) -> GenerationResult:  # noqa: ANN401
        """Return the whole answer to a prompt; see :meth:`stream` for the options."""
        stream = self.stream(prompt, **options)
        try:
            return stream.result
        except BaseException:
            stream.close()
            raise

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        session: Session | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        log_probabilities: bool = False,
    ) -> Stream:
        """Start an answer and return its steps as they are made.

        Args:
            prompt: Text, or token ids as they are.
            session: Where to put the prompt. What the session holds of it is not computed again, what it
                holds beyond is forgotten. A session of the model's own by default.
            max_new_tokens: Upper limit; None for as many as the context holds.
            temperature: 0 takes the likeliest token every time.
            top_k: Sample among so many of the likeliest tokens; 0 among all.
            top_p: Sample among the likeliest tokens that hold this much probability.
            min_p: Leave out tokens less likely than this fraction of the likeliest.
            repetition_penalty: Above 1 makes tokens that were seen less likely.
            seed: Makes sampling repeatable.
            stop: Texts that end the answer.
            ignore_eos: Go on past end tokens.
            log_probabilities: Report every token's log-probability.

        Raises:
            OptionError: An option is not legal.
            InputError: The prompt is empty, longer than the context, or not token ids of this model.
        """
        options = GenerationOptions(
            max_new_tokens=max_new_tokens,
            sampling=SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed),
            stop=_stop_strings(stop),
            ignore_eos=ignore_eos,
            log_probabilities=log_probabilities,
        )
        given = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids: list[int] = check_ids(given, self.config.vocab_size).tolist()
        if len(ids) > self.context:
            raise InputError(
                f"The prompt has {len(ids)} tokens, but the context holds {self.context}.",
                fix="Shorten the prompt or load the model with a larger context.",
            )
        target = self._session_of_its_own() if session is None else session
        if not target.belongs_to(self._engine):
            raise OptionError("The session was made by another model.", fix="Use this model's session().")

        def start(cancel: threading.Event) -> Generation:
            reused = reusable_prefix(target.ids.tolist(), ids)
            target.truncate(reused)
            source = SessionSource(target)
            clock = self.device.now_s
            return Generation(source, self.tokenizer, ids, options, reused=reused, cancel=cancel, clock=clock)

        return Stream(self._thread, start)

    def session(self) -> Session:
        """Return a new, empty session."""
        return Session(self._engine, self._thread, self.config.vocab_size)

    # -- what it is ----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that runs."""
        return self._engine.plan

    @property
    def device(self) -> Device:
        """The opened device."""
        return self._engine.device

    @property
    def context(self) -> int:
        """Positions of a session."""
        return self._engine.context

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided differently from what was asked, why ``auto`` chose a device, and what failed."""
        reason = self.device.reason
        chosen = (f"device auto chose {self.device.name}: {reason}",) if reason else ()
        return (
            *chosen,
            *self._plan_notes,
            *self._weights.notes,
            *self.device.gpu.variants.notes,
            *self.failures,
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """What failed, and since which token the GPU computes alone; empty unless it was allowed to."""
        return self._engine.notes

    def reference_state_dict(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Yield the tensors that the runtime computes with, float32, under their Hugging Face names.

        One at a time, so that anyone can compare the runtime with transformers without holding two models.
        """
        return self._weights.reference_state_dict()

    def on_engine_thread(self, call: Callable[[], T]) -> T:
        """Run a call on the engine thread, where the in-place methods of sessions belong.

        Raises:
            EngineError: The model is closed.
        """
        return self._thread.run(call)

    def take_trace(self) -> Trace:
        """Return what was recorded since the model was loaded or since the last call, and forget it.

        Raises:
            OptionError: The model was not loaded with ``trace=True``.
        """
        return self._thread.run(lambda: take_trace(self._engine))

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the model. Calls that are queued finish first; later ones raise. May be called twice."""
        self._thread.close(self._engine.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _session_of_its_own(self) -> Session:
        if self._own_session is None:
            self._own_session = self.session()
        return self._own_session


def _solved(
    planners: list[Planner],
    device: Device,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    precision: Precision,
    context: int,
    level: str,
) -> Plan | None:
    """Return the solver's plan of a level and keep its planner; None where the device has no profile."""
    from heterollm.planning import Planner, PlanRequest, stored_profile

    profile = stored_profile(device)
    if profile is None:
        return None
    planners.append(Planner(profile, config, specs, precision, PlanRequest(context, level=level)))  # type: ignore[arg-type]
    return planners[0].plan


def _length_costs(
    device: Device, config: ModelConfig, specs: Sequence[OpSpec], precision: Precision
) -> LengthCosts | None:
    """Return what the profile predicts for whole groups on the NPU; None where the device has none."""
    from heterollm.planning import Planner, stored_profile

    profile = stored_profile(device)
    return None if profile is None else Planner(profile, config, specs, precision).length_us


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,) if stop else ()
    if not isinstance(stop, list | tuple):
        raise OptionError(f"stop is {stop!r}, but must be a text or a list of texts.")
    return tuple(stop)


def _check_fit(
    config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, context: int, device: Device
) -> None:
    # Imported only now, as the engine is.
    from heterollm.engine import HEAD_ROWS, pool_sizes

    check_plan(
        plan,
        specs,
        device.npu,
        longest=config.max_positions,
        head_rows=HEAD_ROWS,
        activation=config.activation,
    )
    slots = pool_sizes(config, specs, plan, device.activation_dtype.itemsize)
    check_memory(memory_need(config, specs, plan, context, slots, device.cache_dtype))

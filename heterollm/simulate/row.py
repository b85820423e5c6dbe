"""A row of a sweep over simulations: the case and its result, labelled as simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import structs

from heterollm.base import Amount, Count, InputError, PositiveNumber, decode
from heterollm.simulate.phase import Frames
from heterollm.solver import NPU_EXPERTS, SHADOW_ATTENTION

if TYPE_CHECKING:
    from heterollm.simulate.request import SimulationRequest
    from heterollm.simulate.result import SimulationResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRow:
    """One case of a sweep. Where it failed, the fields of its result are None and ``error`` says why.

    The names are those of ``heterollm simulate --json`` where it has them.

    Args:
        simulated: Always true: no time in a row was measured.
        time: Always ``simulated``.
        model: Name or path, as the user gave it.
        soc: Name or path, as the user gave it.
        plan_level: Level of the plan.
        plan_for: What the solver planned for.
        length_policy: How lengths without a graph ran.
        in_flight: Chunks of a long prompt at once, as requested.
        sync: How the processors waited for each other.
        gpu_load: A game that runs at the same time, as ``60fps:5ms``; None without one.
        what_if: Parameters of the SoC that were changed.
        head_bits: Bits of the head and the embedding.
        every_form: Whether graphs could have forms that HeteroLLM lacks.
        calibrated: Whether ranges for integer graphs were assumed.
        techniques: Techniques of papers over the plan.
        attention: Options of the technique ``shadowattn``; None without it.
        overflow: Fate of tokens beyond an expert's capacity; None without a pass ``npumoe``.
        imbalance: Assumed largest load of an expert over the mean one; None for the default. ``experts``
            has the value of a mixture.
        pruned: Assumed share of the layers whose outliers are pruned.
        outlier_share: Assumed share of an operator's input channels that have outliers in a pass; None in
            rows of older versions, which assumed 16 channels.
        prompt_tokens: Tokens of the prompt.
        decode_tokens: Tokens made after the first.
        error: Why the case failed.
        device: Name of the simulated device.
        fingerprint: Fingerprint of the device, its parameters included.
        note: Approximations of the model.
        lanes: Chunks at once by the plan.
        chunk_tokens: Tokens of a chunk.
        npu_graphs: Graphs of the plan, for all layers and lengths.
        npu_gib: Memory of their weights, counted for each length, and of their own inputs and outputs.
        npu_limit_gib: Memory that the NPU can address; None without a limit.
        npu_opening_s: Time to open them all, once they are built.
        ttft_ms: Time to the first token.
        prefill_ms: Time of the prompt.
        prefill_tokens_per_second: Rate of the prompt.
        decode_tokens_per_second: Rate of the tokens after it; None without any.
        prefill_joules: Energy of the prompt, the middle of its range.
        decode_joules_per_token: Energy of a token, the middle of its range.
        average_watts: Power of both phases.
        prefill: Time and resources of the prompt.
        decode: Time and resources of the tokens after it.
        predicted_npu_idle_fraction: The share of the prompt in which the NPU has nothing to do, as the solver
            predicts it for chunks in flight; ``prefill`` has the simulated one.
        in_order: Time and resources of the prompt, one chunk after the other; None without chunks in flight.
        slowdown: Time of each phase with the game over its time without.
        experts: The rows of a mixture's experts in the prompt, under assumed loads; None without experts.
        cuts: The plan in words: the split of each group, by phase.
    """

    simulated: bool = True
    time: str = "simulated"
    model: str
    soc: str
    plan_level: str
    plan_for: str
    length_policy: str
    in_flight: Literal["auto"] | Count = 1
    sync: str
    gpu_load: str | None
    what_if: Mapping[str, float]
    head_bits: Count
    every_form: bool
    calibrated: bool = False
    techniques: tuple[str, ...] = ()
    attention: Mapping[str, Any] | None = None
    overflow: str | None = None
    imbalance: Amount | None = None
    pruned: Amount = 0.85
    outlier_share: Amount | None = None
    prompt_tokens: Count
    decode_tokens: Count
    error: str | None = None
    device: str | None = None
    fingerprint: str | None = None
    note: str | None = None
    lanes: Count | None = None
    chunk_tokens: Count | None = None
    npu_graphs: Count | None = None
    npu_gib: Amount | None = None
    npu_limit_gib: PositiveNumber | None = None
    npu_opening_s: Amount | None = None
    ttft_ms: PositiveNumber | None = None
    prefill_ms: PositiveNumber | None = None
    prefill_tokens_per_second: PositiveNumber | None = None
    decode_tokens_per_second: PositiveNumber | None = None
    prefill_joules: PositiveNumber | None = None
    decode_joules_per_token: PositiveNumber | None = None
    average_watts: PositiveNumber | None = None
    prefill: Mapping[str, Any] | None = None
    decode: Mapping[str, Any] | None = None
    predicted_npu_idle_fraction: Amount | None = None
    in_order: Mapping[str, Any] | None = None
    slowdown: Mapping[str, float] | None = None
    experts: Mapping[str, Any] | None = None
    cuts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        request: SimulationRequest,
        result: SimulationResult | None = None,
        error: str | None = None,
    ) -> SimulatedRow:
        """Return the row of a case.

        Args:
            request: The case.
            result: Its result; None if it failed.
            error: Why it failed.
        """
        load = request.load
        found: dict[str, Any] = {} if result is None else result.to_dict()
        results: dict[str, Any] = {name: found.get(name) for name in RESULTS}
        return cls(
            model=request.model,
            soc=request.soc,
            plan_level=request.level,
            plan_for=request.plan_for,
            length_policy=request.length_policy,
            in_flight=request.in_flight,
            sync=request.sync,
            gpu_load=None if load is None else load_text(load.frames_per_s, load.frame_us),
            what_if=dict(request.overrides),
            head_bits=request.head_bits,
            every_form=request.forms,
            calibrated=request.calibrated,
            techniques=request.techniques,
            attention=structs.asdict(request.attention) if SHADOW_ATTENTION in request.techniques else None,
            overflow=request.experts.overflow if NPU_EXPERTS in request.techniques else None,
            imbalance=request.imbalance,
            pruned=request.pruned,
            outlier_share=request.outlier_share,
            prompt_tokens=request.prompt,
            decode_tokens=request.decode,
            error=error,
            cuts={} if result is None else result.splits,
            **results,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, in the order of the fields."""
        found = {name: getattr(self, name) for name in ROW_FIELDS}
        return found | {"techniques": list(self.techniques)}

    @classmethod
    def from_dict(cls, data: object) -> SimulatedRow:
        """Read a row of a file.

        Raises:
            InputError: It is no row of a simulation, or a field is missing or wrong, with its path.
        """
        source, fix = "A line is no row of `heterollm simulate`", "Give a file that its -o wrote."
        if not isinstance(data, dict) or data.get("simulated") is not True:
            raise InputError(f"{source}.", fix=fix)
        row = decode(data, cls, source=source, error=InputError, fix=fix)
        for name in ("prefill", "decode"):
            if (frames := (getattr(row, name) or {}).get("frames")) is not None:
                decode(
                    frames,
                    Frames,
                    source=f"{source}: {name}.frames",
                    error=InputError,
                    fix="Write the file again: older versions did not count the frames that a game drops.",
                )
        return row


ROW_FIELDS: Final = tuple(one.name for one in fields(SimulatedRow))
RESULTS: Final = ROW_FIELDS[ROW_FIELDS.index("device") : ROW_FIELDS.index("cuts")]


def load_text(frames_per_s: float, frame_us: float) -> str:
    """Return a game as ``--gpu-load`` takes it, such as ``60fps:5ms``."""
    return f"{frames_per_s:g}fps:{frame_us / 1e3:g}ms"

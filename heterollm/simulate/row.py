"""A row of a sweep over simulations: what was asked for and what came out, plain and labelled simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from heterollm.base import InputError

if TYPE_CHECKING:
    from heterollm.simulate.request import SimulationRequest
    from heterollm.simulate.result import SimulationResult

__all__ = ["ROW_FIELDS", "SimulatedRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRow:
    """One case of a sweep. Results are None where the simulation failed, and ``error`` gives the reason.

    The names are those of ``heterollm simulate --json`` where it has them.

    Args:
        simulated: Always true: no time in a row was measured.
        time: Always ``simulated``.
        model: Name or path, as asked for.
        soc: Name or path, as asked for.
        plan_level: Of the plan.
        length_policy: How lengths without a graph ran.
        sync: How the parts waited for each other.
        resolve: Whether the plan was solved for ``sync``.
        gpu_load: A game beside the model, as ``60fps:5ms``; None without one.
        what_if: Parameters of the SoC that were changed.
        head_bits: Bits of the head and the embedding.
        every_form: Whether graphs could be of forms that HeteroLLM does not have.
        left_out: Forms that the plan could not take.
        prompt_tokens: Tokens of the prompt.
        decode_tokens: Tokens made after the first.
        error: Why there is nothing else.
        device: Name of the simulated device.
        fingerprint: Of the device, its parameters included.
        note: Approximations of the model, in words.
        ttft_ms: Time to the first token.
        prefill_ms: Time of the prompt.
        prefill_tokens_per_second: Rate of the prompt.
        decode_tokens_per_second: Rate of the tokens after it; None without any.
        prefill_joules: Energy of the prompt, the middle of its range.
        decode_joules_per_token: Energy of a token, the middle of its range.
        average_watts: Power of both phases.
        prefill: What the prompt took and used.
        decode: What the tokens took and used.
        slowdown: Times longer that each phase took beside the game.
        cuts: The plan: by phase and group, who computes it, in words.
    """

    simulated: bool = True
    time: str = "simulated"
    model: str
    soc: str
    plan_level: str
    length_policy: str
    sync: str
    resolve: bool
    gpu_load: str | None
    what_if: Mapping[str, float]
    head_bits: int
    every_form: bool
    left_out: tuple[str, ...] = ()
    prompt_tokens: int
    decode_tokens: int
    error: str | None = None
    device: str | None = None
    fingerprint: str | None = None
    note: str | None = None
    ttft_ms: float | None = None
    prefill_ms: float | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    prefill_joules: float | None = None
    decode_joules_per_token: float | None = None
    average_watts: float | None = None
    prefill: Mapping[str, Any] | None = None
    decode: Mapping[str, Any] | None = None
    slowdown: Mapping[str, float] | None = None
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
            result: What came out; None if it failed.
            error: Why it failed.
        """
        load = request.load
        asked = cls(
            model=request.model,
            soc=request.soc,
            plan_level=request.level,
            length_policy=request.length_policy,
            sync=request.sync,
            resolve=request.resolve,
            gpu_load=None if load is None else load_text(load.frames_per_s, load.frame_us),
            what_if=dict(request.overrides),
            head_bits=request.head_bits,
            every_form=request.forms,
            left_out=request.left_out,
            prompt_tokens=request.prompt,
            decode_tokens=request.decode,
            error=error,
        )
        return asked if result is None else asked._with(result)

    def _with(self, result: SimulationResult) -> SimulatedRow:
        """Return the row with what came out."""
        decode = result.decode
        return replace(
            self,
            device=result.device,
            fingerprint=result.fingerprint,
            note=result.note,
            ttft_ms=result.ttft_us / 1e3,
            prefill_ms=result.prefill.elapsed_us / 1e3,
            prefill_tokens_per_second=result.prefill.tokens_per_second,
            decode_tokens_per_second=result.decode_tokens_per_second,
            prefill_joules=result.prefill.energy.middle_joules,
            decode_joules_per_token=result.decode_joules_per_token,
            average_watts=result.average_watts,
            prefill=result.prefill.to_dict(),
            decode=None if decode is None else decode.to_dict(),
            slowdown=result.slowdown(),
            cuts=result.cuts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, in the order of the fields."""
        found = {name: getattr(self, name) for name in ROW_FIELDS}
        return found | {"left_out": list(self.left_out)}

    @classmethod
    def from_dict(cls, data: object) -> SimulatedRow:
        """Read a row of a file.

        Raises:
            InputError: It is no row of a simulation.
        """
        if not isinstance(data, dict) or data.get("simulated") is not True or not data.keys() >= REQUIRED:
            raise InputError(
                "A line is no row of `heterollm simulate`.", fix="Give a file that its -o wrote."
            )
        for name in NUMBERS:
            value = data.get(name)
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                raise InputError(
                    f"{name} of a simulated row is {value!r:.40}.", fix="Write the file again with -o."
                )
        for name in TABLES:
            if not isinstance(data.get(name), dict | None):
                raise InputError(f"{name} of a simulated row is no table.", fix="Write the file again.")
        for name in ("prefill", "decode"):
            _check_frames((data.get(name) or {}).get("frames"))
        left_out = data.get("left_out", [])
        if not isinstance(left_out, list) or not all(isinstance(form, str) for form in left_out):
            raise InputError("left_out of a simulated row is no list of forms.", fix="Write the file again.")
        known = {name: data[name] for name in ROW_FIELDS if name in data}
        return cls(**known | {"left_out": tuple(left_out)})


ROW_FIELDS: Final = tuple(one.name for one in fields(SimulatedRow))
NUMBERS: Final = (
    "ttft_ms",
    "prefill_ms",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "prefill_joules",
    "decode_joules_per_token",
    "average_watts",
)
TABLES: Final = ("prefill", "decode", "slowdown", "cuts", "what_if")
REQUIRED: Final = {
    *("model", "soc", "plan_level", "length_policy", "sync", "resolve", "gpu_load", "what_if", "head_bits"),
    *("every_form", "prompt_tokens", "decode_tokens", "error"),
}


def _check_frames(frames: object) -> None:
    """Check the frames of a phase; None stands for a phase without a game.

    Raises:
        InputError: They do not say how many were due, as rows once did not, or do not fit together.
    """
    if frames is None:
        return
    found = frames if isinstance(frames, dict) else {}
    counts = [count for name in ("in_time", "drawn", "due") if type(count := found.get(name)) is int]
    if len(counts) != 3 or not 0 <= counts[0] <= counts[1] <= counts[2]:
        raise InputError(
            f"The frames of a simulated row are {frames!r:.80}: how many were due, drawn and in_time does "
            "not stand there, or does not fit together.",
            fix="Write the file again: older versions did not count the frames that a game drops.",
        )


def load_text(frames_per_s: float, frame_us: float) -> str:
    """Return a game as ``--gpu-load`` takes it, such as ``60fps:5ms``."""
    return f"{frames_per_s:g}fps:{frame_us / 1e3:g}ms"

"""The fastest public engines by chip and model, and the rest of a simulated phase to a goal beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from heterollm.kernels.sim import SIMULATED

if TYPE_CHECKING:
    from heterollm.simulate.result import SimulationResult


class PublicSpeed(NamedTuple):
    """Tokens a second of a prompt and of decode, by the engine with the fastest prompt."""

    prefill: float
    decode: float
    engine: str


_HUB: Final = "AI Hub, NPU"
PUBLIC_SPEEDS: Final[Mapping[tuple[str, str], PublicSpeed]] = {
    ("snapdragon-8gen3", "llama-3.1-8b"): PublicSpeed(468, 12.03, "PowerServe, NPU"),
    ("snapdragon-8gen3", "llama-3.2-1b"): PublicSpeed(1877, 59, "PowerServe, NPU"),
    ("snapdragon-8gen3", "gemma-4-e2b"): PublicSpeed(873, 21, "llama.cpp, NPU"),
    ("snapdragon-8elite", "llama-3.1-8b"): PublicSpeed(898, 15.0, _HUB),
    ("snapdragon-8elite", "llama-3.2-3b"): PublicSpeed(1635, 30.0, _HUB),
    ("snapdragon-8elite", "llama-3.2-1b"): PublicSpeed(3350, 60.2, _HUB),
    ("snapdragon-8elite", "qwen3-4b"): PublicSpeed(1951, 24.9, _HUB),
    ("snapdragon-8elite-gen5", "llama-3.1-8b"): PublicSpeed(1238, 16.45, _HUB),
    ("snapdragon-8elite-gen5", "llama-3.2-3b"): PublicSpeed(2045, 32.4, _HUB),
    ("snapdragon-8elite-gen5", "llama-3.2-1b"): PublicSpeed(4604, 75.5, _HUB),
    ("snapdragon-8elite-gen5", "qwen3-4b"): PublicSpeed(2639, 28.8, _HUB),
    ("snapdragon-8elite-gen5", "gemma-4-e2b"): PublicSpeed(3808, 52, "LiteRT, GPU"),
    ("snapdragon-x-elite", "llama-3.1-8b"): PublicSpeed(583, 10.95, _HUB),
    ("snapdragon-x-elite", "llama-3.2-3b"): PublicSpeed(977, 19.7, _HUB),
    ("snapdragon-x-elite", "llama-3.2-1b"): PublicSpeed(2112, 43.8, _HUB),
    ("snapdragon-x-elite", "qwen3-4b"): PublicSpeed(1310, 21.8, _HUB),
    ("snapdragon-x2-elite", "llama-3.1-8b"): PublicSpeed(1142, 22.8, _HUB),
    ("snapdragon-x2-elite", "llama-3.2-3b"): PublicSpeed(1991, 43.2, _HUB),
    ("snapdragon-x2-elite", "llama-3.2-1b"): PublicSpeed(4571, 93.6, _HUB),
    ("snapdragon-x2-elite", "qwen3-4b"): PublicSpeed(2765, 39.1, _HUB),
}
"""By SoC and model; sources are in bench/anchors.py. An Extreme has those of the X2 Elite."""

PREFILL_GOAL: Final = 0.97
DECODE_GOALS: Final = {"snapdragon-x-elite": 1.4, "snapdragon-x2-elite": 1.15}
"""Over the public speed; 1 elsewhere."""


def beside_public(result: SimulationResult) -> Iterator[str]:
    """Yield a sentence for each phase: its speed over the public one, and the rest to the goal."""
    soc = result.device.removeprefix(SIMULATED).removesuffix("-extreme")
    # The two generations have the same sizes.
    public = PUBLIC_SPEEDS.get((soc, result.model.replace("llama-3-8b", "llama-3.1-8b")))
    if public is None:
        return
    for use in result.phases:
        prompt = use.phase == "prefill"
        speed = public.prefill if prompt else public.decode
        goal = PREFILL_GOAL if prompt else DECODE_GOALS.get(soc, 1.0)
        passes, found = 1 if prompt else use.tokens, use.tokens_per_second / speed
        words = (
            f"Simulated {use.phase} reaches {found:.2f} of the best public speed ({speed:g} tokens/s, "
            f"{public.engine})"
        )
        if found >= goal:
            yield f"{words}, and the goal is {goal:g}."
            continue
        total_ms = use.elapsed_us / passes / 1e3
        over_ms = total_ms * (1 - found / goal)
        spent = {
            name: sum(one.used_us[name] for one in use.account) / passes / 1e3
            for name in use.account[0].used_us
        }
        yield (
            f"{words}; for the goal of {goal:g} a {'prompt' if prompt else 'token'} takes {over_ms:.1f} of "
            f"{total_ms:.1f} ms too long. Both compute for {spent['both']:.1f} ms, the GPU alone for "
            f"{spent['gpu']:.1f}, the NPU alone for {spent['npu']:.1f}; neither does while "
            f"{use.npu_runs / passes:.0f} runs start ({spent['start']:.1f}), buffers are copied "
            f"({spent['copies']:.1f}), or the control thread waits, maps or submits "
            f"({spent['waits'] + spent['maps'] + spent['submission']:.1f})."
        )

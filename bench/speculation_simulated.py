"""Simulates speculative decoding of a large model with a draft: passes of n tokens, and gains by acceptance.

The times of passes under each plan level are those of the simulated clock, beside those that the solver's
costs predict. Nothing is computed, and the acceptance is an assumption. With each comes the number of guesses
that the predictions choose, and its gain on the clock. The draft and the model take turns.

    python bench/speculation_simulated.py --out bench/results/speculation_simulated.jsonl
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
from conditions import append_rows, conditions, script_parser

from heterollm.base import silent
from heterollm.engine import Engine
from heterollm.kernels.devices import open_device
from heterollm.kernels.sim import SIMULATED, Simulation
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.planning import ProfiledModel
from heterollm.planning.planner import solve_plan
from heterollm.simulate.profile import profile_of
from heterollm.solver import Plan, PlanRequest, level_plan
from heterollm.text import MOST_GUESSES, GuessPace

GROUP_SIZE: Final = 128
RUNS: Final = 3
"""The last run counts: graphs are built and waits learnt before it."""

ACCEPTANCES: Final = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)


class Simulated:
    """A model of shapes only on a simulated SoC under one plan level."""

    def __init__(self, model: str, soc: str, level: str, position: int) -> None:
        found = find_model(model)
        device = open_device(f"{SIMULATED}{soc}", simulation=Simulation(numerics=False, every_form=True))
        specs = op_specs(found.config, "w4a16", GROUP_SIZE, True)
        profile = profile_of(device, found.name, found.config, specs, silent, ())
        self.profiled = ProfiledModel(profile, found.config, tuple(specs), "w4a16")
        self.position = position
        context = position + MOST_GUESSES + 1
        if level in ("gpu", "npu", "layer"):
            self.plan: Plan = level_plan(
                level,
                specs,
                device=device.name,
                precision="w4a16",
                standard_lengths=device.standard_lengths,
                chunk_length=512,
            )
        else:
            self.plan = solve_plan(self.profiled, PlanRequest(level=level)).plan
        weights = shape_only_weights(found.config, specs)
        self.device = device
        self.engine = Engine(device, weights, self.plan, context, silent)
        self.cache = self.engine.new_cache()

    def simulated_s(self, tokens: int) -> float:
        """Return the seconds of a decode pass on the clock."""
        ids = np.zeros(tokens, np.int32)
        for _ in range(RUNS):
            begin_s = self.device.now_s()
            if tokens == 1:
                self.engine.decode(self.cache, self.position, 0)
            else:
                self.engine.decode_several(self.cache, self.position, ids)
        return self.device.now_s() - begin_s

    def predicted_s(self, tokens: int) -> float:
        """Return the seconds of a decode pass by the solver's costs."""
        found = self.profiled.predict(self.plan, "decode", tokens, position=self.position)
        assert found is not None
        return found.time_us / 1e6


def expected_tokens(acceptance: float, guesses: int) -> float:
    """Return the mean tokens of a pass."""
    return sum(acceptance**count for count in range(guesses + 1))


def rows_of(model: str, draft: str, soc: str, level: str, position: int) -> Iterator[dict[str, Any]]:
    """Yield the passes of a model, then the gains of its draft and of lookup."""
    lengths = range(1, MOST_GUESSES + 2)
    target, small = (Simulated(name, soc, level, position) for name in (model, draft))
    simulated = {tokens: target.simulated_s(tokens) for tokens in lengths}
    predicted = {tokens: target.predicted_s(tokens) for tokens in lengths}
    common = {"time": "simulated", "soc": soc, "model": model, "level": level, "position": position}
    for tokens in lengths:
        yield {
            **common,
            "kind": "pass",
            "tokens": tokens,
            "ms": simulated[tokens] * 1e3,
            "predicted_ms": predicted[tokens] * 1e3,
            "npu": any(step.processor == "npu" for step in target.engine.steps("decode", tokens)),
        }
    draft_s, draft_predicted_s = small.simulated_s(1), small.predicted_s(1)
    for name, guess_s, guess_predicted_s in (("lookup", 0.0, 0.0), (draft, draft_s, draft_predicted_s)):
        for acceptance in ACCEPTANCES:
            pace = GuessPace(list(predicted.values()), (acceptance,), guess_s=guess_predicted_s)
            pace.learn_pass(1, predicted[1])
            guesses = pace.guesses(0, MOST_GUESSES)
            rates = {
                count: expected_tokens(acceptance, count) / (simulated[count + 1] + count * guess_s)
                for count in range(MOST_GUESSES + 1)
            }
            best = max(rates, key=rates.__getitem__)
            yield {
                **common,
                "kind": "gain",
                "guesses_by": name,
                "assumed_acceptance": acceptance,
                "draft_ms": guess_s * 1e3,
                "guesses": guesses,
                "tokens_per_s": rates[guesses],
                "plain_tokens_per_s": rates[0],
                "gain": rates[guesses] / rates[0],
                "best_guesses": best,
                "best_gain": rates[best] / rates[0],
            }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print and keep the rows of every level."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--draft", default="llama-3.2-1b")
    parser.add_argument("--soc", default="snapdragon-8gen3")
    parser.add_argument("--levels", default="gpu,tensor,block")
    parser.add_argument("--position", type=int, default=512, help="tokens before the passes")
    options = parser.parse_args(arguments)
    for level in options.levels.split(","):
        for row in rows_of(options.model, options.draft, options.soc, level, options.position):
            if row["kind"] == "pass":
                print(
                    f"{level}: pass of {row['tokens']:2} tokens {row['ms']:8.2f} ms simulated, "
                    f"{row['predicted_ms']:8.2f} predicted{', with the NPU' if row['npu'] else ''}"
                )
            else:
                print(
                    f"{level}: {row['guesses_by']}, assumed acceptance {row['assumed_acceptance']:.0%}: "
                    f"{row['guesses']} guesses, {row['tokens_per_s']:.2f} tokens/s simulated, "
                    f"gain {row['gain']:.2f} (best {row['best_guesses']}: {row['best_gain']:.2f})"
                )
            append_rows(options.out, conditions() | row)


if __name__ == "__main__":
    main()

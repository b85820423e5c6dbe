"""Simulation with numerics: the answers are those of ``host``, the times are modelled."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from heterollm.llm import LLM
from heterollm.simulate import SimulationRequest, simulate

TINY = Path(str(resources.files("heterollm.data.tiny_python_lm")))
PROMPT = "def area(width, height):\n"


def answer_of(device, plan):
    with LLM.load(TINY, device=device, plan=plan, context=256) as llm:
        result = llm.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
        session = llm.session()
        logits = session.prefill(np.arange(40) % llm.config.vocab_size, all_logits=True)
        return result, logits, llm.device.time_kind


@pytest.mark.parametrize("plan", ["gpu", "layer"])
def test_a_simulated_device_gives_the_answers_of_host(plan):
    host, logits, _ = answer_of("host", plan)
    simulated, others, kind = answer_of("sim:snapdragon-8gen3", plan)
    assert kind == "simulated"
    assert simulated.token_ids == host.token_ids
    assert simulated.text == host.text
    assert np.allclose(logits, others, atol=1e-4)
    # Modelled times are the same each time; measured ones never are.
    again, _, _ = answer_of("sim:snapdragon-8gen3", plan)
    assert (again.ttft_s, again.decode_tokens_per_s) == (simulated.ttft_s, simulated.decode_tokens_per_s)
    assert simulated.ttft_s > 0


def test_numerics_of_a_simulation_choose_tokens():
    request = SimulationRequest(str(TINY), prompt=32, decode=4, level="layer", head_bits=8, numerics=True)
    first, second = simulate(request), simulate(request)
    assert len(first.tokens) == 5
    assert first.tokens == second.tokens
    assert len(set(first.tokens)) > 1
    assert first.to_dict() == second.to_dict()

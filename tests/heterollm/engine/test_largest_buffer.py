"""A device whose largest buffer is smaller than the head and the KV cache gives the same answers."""

import dataclasses

import numpy as np
import pytest
from msgspec import structs

from heterollm import LLM
from heterollm.base import KernelError
from heterollm.kernels.gpu import runtime as opencl

PROMPT = "import os"
CONTEXT = 256
LIMIT = 420_000
"""Less than the head's 512 KiB and two layers of the KV cache, 256 KiB each; more than slots of 64 tokens."""


@pytest.fixture
def largest_buffer(monkeypatch):
    """A function that sets the largest buffer of devices that are opened from now on."""
    real = opencl.device_traits

    def limit(size_bytes):
        monkeypatch.setattr(
            opencl,
            "device_traits",
            lambda *given, **named: dataclasses.replace(real(*given, **named), max_buffer_bytes=size_bytes),
        )

    return limit


def answers(llm):
    """Return logits and tokens of two sessions in turns, one of them a fork of the other."""
    ids = llm.tokenizer.encode(PROMPT)
    first = llm.session()
    found = [first.prefill(ids)]
    second = first.fork()
    for token in (5, 6, 7):
        found.append(first.decode(token))
        found.append(second.decode(token + 10))
    found.append(second.prefill(list(range(3, 43))))
    third = llm.session()
    found.append(third.prefill(ids[::-1]))
    text = llm.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    return np.stack([np.array(logits) for logits in found]), text.token_ids, first


@pytest.mark.parametrize("level", ["gpu", "layer"])
def test_several_buffers_give_the_answers_of_one(bundled_model, largest_buffer, level):
    with LLM.load(bundled_model, device="host", plan=level, context=CONTEXT) as llm:
        plan = structs.replace(llm.plan, chunk_length=64)
    with LLM.load(bundled_model, device="host", plan=plan, context=CONTEXT) as llm:
        expected, tokens, session = answers(llm)
        assert len(llm._engine._compiler._linears.packed(-1, "head")._pieces) == 1
    largest_buffer(LIMIT)
    with LLM.load(bundled_model, device="host", plan=plan, context=CONTEXT) as llm:
        logits, split_tokens, session = answers(llm)
        memories = llm._engine._compiler.states.memory.memories
        assert max(memory.size_bytes for memory in memories) <= LIMIT < session.memory_bytes
        assert len(llm._engine._compiler._linears.packed(-1, "head")._pieces) > 1
    assert np.array_equal(logits, expected)
    assert split_tokens == tokens


def test_a_layer_that_no_buffer_takes_is_refused(bundled_model, largest_buffer):
    largest_buffer(LIMIT)
    with pytest.raises(KernelError, match="exceeds the limit") as caught:
        LLM.load(bundled_model, device="host", plan="gpu", context=2 * CONTEXT)
    assert "context" in caught.value.fix

"""SmolLM2-135M-Instruct, a published model: parity, long context, greedy text, chat, the emulator.

``HETEROLLM_PUBLISHED_MODEL`` names its folder; without it ``bench/published_model.py`` fetches the model.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from gates import LOGITS_SQNR_DB
from hypothesis import given, settings
from hypothesis import strategies as st
from published import fetched

from heterollm.base import InputError, OptionError
from heterollm.cli import main
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.npu import qnn_available
from heterollm.llm import LLM
from heterollm.solver import Plan
from heterollm.text import Conversation

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = "sim:snapdragon-8gen3"
PROMPT = "The capital of France is"
QUESTION = "What is the capital of France?"
SCALARS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "integer", "minimum": -3, "maximum": 400},
    {"type": "string", "maxLength": 12},
    {"enum": ["été", "winter", 3]},
    {"type": "array", "items": {"type": "null"}, "maxItems": 2},
]
EMULATED, REASON, _ = qnn_available(emulator=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetched("HETEROLLM_PUBLISHED_MODEL", "fetch", tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Iterator[Callable[[LLM], Any]]:
    """Return a function that gives transformers' model of the runtime's tensors."""
    made: list[Any] = []

    def model(llm: LLM) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        if not made:  # no level changes the tensors
            config = AutoConfig.from_pretrained(folder)
            built = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            state = {name: torch.from_numpy(value.copy()) for name, value in llm.reference_state_dict()}
            missing, unexpected = built.load_state_dict(state, strict=False)
            assert not unexpected
            assert set(missing) <= {"lm_head.weight"}
            built.tie_weights()
            made.append(built)
        return made[0]

    yield model
    made.clear()


def expected_logits(model: Any, ids: list[int], last: int = 0) -> np.ndarray:
    """Return logits ``[m, vocab]`` of all positions, or of the last ones."""
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([ids]), logits_to_keep=last).logits[0].numpy()
    return found


def text_ids(llm: LLM, count: int) -> list[int]:
    """Return so many ids of English text."""
    ids: list[int] = llm.tokenizer.encode((ROOT / "docs" / "soc-model.md").read_text("utf-8"))
    return (ids * (1 + count // len(ids)))[:count]


@pytest.mark.parametrize("level", ["gpu", "npu", "layer", "rows"])
def test_parity_on_host(
    level: str,
    folder: Path,
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[[LLM], Plan],
    oracle: Callable[[LLM], Any],
) -> None:
    """``rows`` cuts every group in the middle; tensor and block are solved for the simulated device below."""
    llm = host_llm(folder, plan="gpu" if level == "rows" else level, context=256)
    if level == "rows":
        llm = host_llm(folder, plan=half_rows_plan(llm), context=256)
    ids = text_ids(llm, 75)
    session = llm.session()
    prompt = session.prefill(ids[:70], all_logits=True)
    decoded = np.stack([session.decode(token) for token in ids[70:]])
    logits = np.concatenate([prompt, decoded])
    assert sqnr_db(logits, expected_logits(oracle(llm), ids)) >= LOGITS_SQNR_DB["fp32"]


@pytest.fixture(scope="module")
def long_logits(oracle: Callable[[LLM], Any]) -> Callable[[LLM, list[int]], np.ndarray]:
    """Return a function that gives transformers' logits after the last of some tokens, computed once."""
    found: list[np.ndarray] = []

    def logits(llm: LLM, ids: list[int]) -> np.ndarray:
        if not found:
            found.append(expected_logits(oracle(llm), ids, last=1))
        return found[0]

    return logits


@pytest.mark.parametrize("level", ["gpu", "layer"])
def test_the_whole_context_of_8192(
    level: str,
    folder: Path,
    host_llm: Callable[..., LLM],
    long_logits: Callable[[LLM, list[int]], np.ndarray],
) -> None:
    llm = host_llm(folder, plan=level, context=8192)
    ids = text_ids(llm, 8193)
    session = llm.session()
    logits = session.prefill(ids[:8192])[None]
    assert sqnr_db(logits, long_logits(llm, ids[:8192])) >= LOGITS_SQNR_DB["fp32"]
    with pytest.raises(InputError, match="1 tokens at position 8192 exceed the context of 8192"):
        session.decode(ids[8192])
    with pytest.raises(InputError, match="prompt has 8193 tokens, but the context holds 8192"):
        llm.generate(ids, max_new_tokens=1)
    with pytest.raises(OptionError, match=r"context of 8193 is outside .* 1 to 8192"):
        LLM.load(folder, device="host", context=8193)


@pytest.mark.parametrize("level", ["tensor", "block"])
def test_parity_of_solved_plans(level: str, folder: Path, oracle: Callable[[LLM], Any]) -> None:
    assert main(["profile", str(folder), "--device", SIMULATED]) == 0
    with LLM.load(folder, device=SIMULATED, plan=level, context=256, kv_bits=32) as llm:
        assert llm.plan.uses_npu
        ids = text_ids(llm, 70)
        logits = llm.session().prefill(ids, all_logits=True)
        assert sqnr_db(logits, expected_logits(oracle(llm), ids)) >= LOGITS_SQNR_DB["fp32"]


@pytest.mark.parametrize("level", ["gpu", "layer"])
def test_greedy_text(
    level: str, folder: Path, host_llm: Callable[..., LLM], oracle: Callable[[LLM], Any]
) -> None:
    """The tokens that transformers' own loop makes of the same tensors."""
    llm = host_llm(folder, plan=level, context=256)
    ids = llm.tokenizer.encode(PROMPT)
    with torch.no_grad():
        whole = oracle(llm).generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)[0].tolist()
    result = llm.generate(PROMPT, max_new_tokens=32, temperature=0.0)
    assert list(result.token_ids) == whole[len(ids) :]
    assert "Paris" in result.text


def test_chat_template_and_stop_token(folder: Path, host_llm: Callable[..., LLM]) -> None:
    from transformers import AutoTokenizer

    llm = host_llm(folder, plan="gpu", context=512)
    chat = Conversation(llm.tokenizer)
    chat.add_user(QUESTION)
    ids = chat.prompt_ids()
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    result = llm.generate(ids, max_new_tokens=128, temperature=0.0)
    assert "Paris" in result.text
    assert result.stop_reason == "eos"
    assert len(result.token_ids) < 128
    assert "<|im_end|>" not in result.text
    assert theirs.convert_tokens_to_ids("<|im_end|>") in llm.tokenizer.eos_ids


@pytest.fixture(scope="module")
def chatty(folder: Path) -> Iterator[LLM]:
    with LLM.load(folder, device="host", plan="gpu", context=512) as llm:
        yield llm


@given(
    st.dictionaries(st.text("abé日 ", min_size=1, max_size=4), st.sampled_from(SCALARS), max_size=4),
    st.sampled_from([0.0, 0.8]),
)
@settings(max_examples=12, deadline=None)
def test_an_answer_follows_a_schema(chatty: LLM, members: dict[str, Any], temperature: float) -> None:
    schema = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
    options: dict[str, Any] = {"temperature": temperature, "seed": 7, "max_new_tokens": 300}
    result = chatty.chat(
        [{"role": "user", "content": "Describe a cat as JSON."}], json_schema=schema, **options
    )
    assert result.stop_reason == "complete"
    jsonschema.validate(json.loads(result.text), schema)


@pytest.mark.emulator
@pytest.mark.skipif(not EMULATED, reason=REASON)
def test_the_emulator_makes_the_tokens_of_host(folder: Path, host_llm: Callable[..., LLM]) -> None:
    expected = host_llm(folder, plan="gpu", context=64).generate(PROMPT, max_new_tokens=4, temperature=0.0)
    with LLM.load(folder, device="emulator", plan="layer", context=64, allow_slow=True) as llm:
        assert llm.generate(PROMPT, max_new_tokens=4, temperature=0.0).token_ids == expected.token_ids

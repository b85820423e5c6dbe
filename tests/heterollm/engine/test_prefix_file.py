"""Files of the state behind a prompt's beginning: what goes on from them has the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import CacheError, InputError
from heterollm.engine import Session, open_prefix
from heterollm.llm import LLM

CONTEXT = 512
LENGTH = 300
"""Beyond the windows of the tiny models, and on no page's end."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {"kv_bits": 8},
    "gemma3_text": {},
    "gpt_oss": {"kv_bits": 8},
    "gemma4_text": {},
    "lfm2": {},
    "qwen3_next": {},
}

Load = Callable[..., LLM]


def begun(llm: LLM, length: int = LENGTH) -> Session:
    session = llm.session()
    session.prefill(np.random.default_rng(5).integers(1, 2048, length))
    return session


def saved(llm: LLM, session: Session, path: Path) -> Path:
    llm.on_engine_thread(lambda: session.copy_prefix(session.position).write(path, {}))
    return path


def loaded(llm: LLM, path: Path) -> Session:
    session = llm.session()
    llm.on_engine_thread(lambda: session.load_prefix(open_prefix(path)))
    return session


@pytest.mark.parametrize("family", FAMILIES)
def test_another_process_goes_on_with_the_same_bits(
    family: str, checkpoint: Any, host_llm: Load, tmp_path: Path
) -> None:
    options = {"plan": "gpu", "context": CONTEXT, **FAMILIES[family]}
    llm, other = (host_llm(checkpoint(family), **options) for _ in range(2))
    session = begun(llm)
    path = saved(llm, session, tmp_path / "state.safetensors")
    again = loaded(other, path)
    np.testing.assert_array_equal(again.ids, session.ids)
    for ids in ([7], [8, 9, 10], list(range(11, 80)), [3]):
        np.testing.assert_array_equal(again.decode(ids), session.decode(ids))
    # A second use of the file, and going back within it.
    twice = loaded(other, path)
    assert twice.position == LENGTH
    twice.truncate(2)
    fresh = other.session()
    fresh.prefill(session.ids[:2])
    np.testing.assert_allclose(twice.decode([7]), fresh.decode([7]), rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def llm(checkpoint: Any) -> Any:
    with LLM.load(checkpoint("llama"), device="host", plan="gpu", context=CONTEXT) as made:
        yield made


def test_damaged_files_are_refused_and_the_session_stays_usable(llm: LLM, tmp_path: Path) -> None:
    session = begun(llm)
    content = saved(llm, session, tmp_path / "state.safetensors").read_bytes()
    expected = session.decode(7)
    generator = np.random.default_rng(1)
    for number in range(40):
        damaged = bytearray(content)
        place = int(generator.integers(len(damaged))) if number % 2 else int(generator.integers(400))
        if number % 5 == 0:
            del damaged[place:]
        else:
            damaged[place] ^= 1 << int(generator.integers(8))
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(damaged)
        other = llm.session()
        try:
            llm.on_engine_thread(lambda path=path, other=other: other.load_prefix(open_prefix(path)))
        except CacheError:
            assert other.position == 0
            other.prefill(session.ids[:LENGTH])
        # Blanks of the header, and names in its metadata, are no part of a state.
        assert other.position == LENGTH
        np.testing.assert_array_equal(other.decode(7), expected)


def test_a_state_of_another_size_is_refused(
    llm: LLM, checkpoint: Any, host_llm: Load, tmp_path: Path
) -> None:
    path = saved(llm, begun(llm), tmp_path / "state.safetensors")
    for family, options in (("qwen3", {}), ("llama", {"kv_bits": 8}), ("llama", {"kv_bits": 32})):
        other = host_llm(checkpoint(family), plan="gpu", context=CONTEXT, **options)
        assert other.state_key != llm.state_key
        with pytest.raises(CacheError, match="another model"):
            loaded(other, path)
    shorter = host_llm(checkpoint("llama"), plan="gpu", context=256)
    with pytest.raises(CacheError, match="another model"):
        loaded(shorter, path)


def test_a_state_that_is_gone_is_not_copied(checkpoint: Any, host_llm: Load) -> None:
    llm = host_llm(checkpoint("lfm2"), plan="gpu", context=CONTEXT)
    session = begun(llm)
    with pytest.raises(InputError, match="not there"):
        llm.on_engine_thread(lambda: session.copy_prefix(LENGTH - 1))

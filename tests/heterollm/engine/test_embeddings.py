"""Embeddings of random checkpoints in the forms of published ones, against transformers in float64."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_models import declare, end_with
from faults import failing_graphs
from safetensors.torch import load_file, save_file

from heterollm.base import ContextError, GraphError, HeteroLLMError, OptionError, UnsupportedModelError
from heterollm.llm import LLM
from heterollm.model import read_pooling
from heterollm.solver import Plan
from heterollm.trace import summarise_phases


def save_bare(folder: Path) -> None:
    """Save the tensors again as a model without its head does."""
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    """Qwen3-Embedding's form: bare names, a head that is not tied, an end token, last token, length 1."""
    source = checkpoint("qwen3", tie_word_embeddings=False)
    folder = Path(shutil.copytree(source, tmp_path_factory.mktemp("qwen") / "model"))
    save_bare(folder)
    end_with(folder, "<|endoftext|>")
    return declare(
        folder, "Pooling", "Normalize", pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False
    )


def states(llm: LLM, folder: Path, ids: list[int]) -> np.ndarray:
    """The normed states of all tokens, by transformers in float64 on the runtime's tensors."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    tensors = {name: torch.from_numpy(value.copy()) for name, value in llm.reference_state_dict()}
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager"
    )
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.no_grad():
        return model.eval().model(torch.tensor([ids])).last_hidden_state[0].numpy()


def pooled(rows: np.ndarray, mode: str, normalized: bool, dimensions: int | None = None) -> np.ndarray:
    vector = (rows[-1] if mode == "last" else rows.mean(axis=0))[:dimensions]
    return vector / np.linalg.norm(vector) if normalized or dimensions else vector


def check(llm: LLM, folder: Path, mode: str, normalized: bool) -> None:
    for length in (1, 7, 33, 130, 333, 8):  # odd ones, several heads, several chunks, and a short one again
        ids = [(7 * place + length) % 2000 for place in range(length)]
        expected = pooled(states(llm, folder, ids), mode, normalized)
        (found,) = llm.embed([ids])
        assert found.dtype == np.float32
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 4e-3, (length, error)
        assert np.array_equal(found, llm.embed([ids])[0])


@pytest.mark.parametrize("plan", ["gpu", "layer", "rows"])
def test_the_last_token_of_qwen3_embedding(
    qwen: Path, plan: str, half_rows_plan: Callable[..., Plan]
) -> None:
    chosen: Any = plan
    if plan == "rows":
        with LLM.load(qwen, device="host", plan="gpu") as gpu:
            chosen = half_rows_plan(gpu, 64)
    with LLM.load(qwen, device="host", plan=chosen) as llm:
        before = llm.generate("def add", max_new_tokens=6).token_ids
        check(llm, qwen, "last", normalized=True)
        assert llm.generate("def add", max_new_tokens=6, session=llm.session()).token_ids == before


@pytest.fixture
def copied(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that copies the checkpoint of a family, so that a test can add files to it."""
    return lambda family: Path(shutil.copytree(checkpoint(family), tmp_path / family))


def test_the_mean_of_all_tokens_without_a_length_of_one(copied: Callable[[str], Path]) -> None:
    folder = declare(copied("llama"), "Pooling", pooling_mode="mean", most=None)
    with LLM.load(folder, device="host", plan="gpu") as llm:
        check(llm, folder, "mean", normalized=False)


@pytest.mark.parametrize("family", ["gemma3_text", "lfm2", "qwen3_5_text", "opt"])
def test_families_with_windows_recurrent_state_and_other_norms(
    copied: Callable[[str], Path], family: str
) -> None:
    folder = declare(copied(family), "Pooling", "Normalize", pooling_mode_mean_tokens=True)
    with LLM.load(folder, device="host", plan="gpu", trace=True) as llm:
        for length in (70, 7, 301):
            ids = [(7 * place + length) % 2000 for place in range(length)]
            expected = pooled(states(llm, folder, ids), "mean", True)
            assert np.linalg.norm(llm.embed([ids])[0] - expected) < 4e-3
        assert summarise_phases(llm.take_trace())["prefill"].passes


@pytest.mark.parametrize("form", ["last token, length 1", "mean"])
def test_texts_have_the_embeddings_of_sentence_transformers(
    form: str, qwen: Path, copied: Callable[[str], Path]
) -> None:
    """From text to vector: its own tokens, pooling and length, on the runtime's tensors in float64."""
    library = pytest.importorskip("sentence_transformers", reason="needs pip install sentence-transformers")
    folder = qwen if form != "mean" else declare(copied("llama"), "Pooling", pooling_mode_mean_tokens=True)
    texts = ["def add(a, b):", "import os", "é漢 x", "word " * 150]
    with LLM.load(folder, device="host", plan="gpu") as llm:
        found, short = llm.embed(texts), llm.embed(texts, dimensions=32)
        tensors = {name: torch.from_numpy(value.copy()) for name, value in llm.reference_state_dict()}
    theirs = library.SentenceTransformer(str(folder), device="cpu").double()
    theirs.tokenizer.pad_token = "<|endoftext|>"  # it asks for one, though a text alone has no padding
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    missing, _ = theirs[0].auto_model.load_state_dict(bare, strict=False)
    assert not missing
    for text, vector, cut in zip(texts, found, short, strict=True):
        expected = theirs.encode(text)
        assert np.linalg.norm(vector - expected) < 4e-3 * np.linalg.norm(expected), text
        expected = theirs.encode(text, truncate_dim=32, normalize_embeddings=True)
        assert np.linalg.norm(cut - expected) < 4e-3


def test_the_gpu_goes_on_with_the_whole_text(
    qwen: Path, half_rows_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = failing_graphs(monkeypatch)
    ids = [(7 * place) % 2000 for place in range(200)]
    with LLM.load(qwen, device="host", plan="gpu") as gpu:
        plan, expected = half_rows_plan(gpu, 64), gpu.embed([ids])
    for allowed in (False, True):
        with LLM.load(qwen, device="host", plan=plan, allow_fallback=allowed) as llm:
            fails.clear()
            assert np.allclose(llm.embed([ids]), expected, atol=2e-3)
            fails.set()
            if allowed:
                assert np.allclose(llm.embed([ids]), expected, atol=1e-5)
                assert llm.failures
                continue
            with pytest.raises(GraphError, match="the device is gone"):
                llm.embed([ids])


@pytest.fixture(scope="module")
def llm(qwen: Path) -> Iterator[LLM]:
    with LLM.load(qwen, device="host", plan="gpu", context=600) as loaded:
        yield loaded


def test_a_text_has_its_end_token_and_may_be_cut(llm: LLM, qwen: Path) -> None:
    end = llm.tokenizer.vocabulary["<|endoftext|>"]
    ids = llm.embedding_ids("def add(a, b):")
    assert ids.tolist() == [*llm.tokenizer.encode("def add(a, b):", add_bos=False), end]
    long = "x y " * 600
    with pytest.raises(ContextError, match="512"):
        llm.embed([long])
    with pytest.raises(ContextError, match="512"):
        llm.embed([[5] * 513])
    cut = llm.embedding_ids(long, cut=True)
    assert (len(cut), cut[-1]) == (512, end)
    assert llm.embedding_ids("", cut=True).tolist() == [end]


def test_fewer_dimensions_have_the_length_of_one(llm: LLM) -> None:
    texts = ["def add", "import os"]
    whole, short = llm.embed(texts), llm.embed(texts, dimensions=32)
    assert (whole.shape, short.shape) == ((2, 128), (2, 32))
    assert np.allclose(short, whole[:, :32] / np.linalg.norm(whole[:, :32], axis=1, keepdims=True), atol=1e-6)
    for wrong in (0, 129):
        with pytest.raises(OptionError, match="dimensions"):
            llm.embed(texts, dimensions=wrong)


def test_a_stopped_embedding_leaves_the_engine_free(llm: LLM) -> None:
    ids = llm.embedding_ids([5] * 500)
    with pytest.raises(HeteroLLMError, match="stopped"):
        llm.embedding(ids, stopped=lambda: True)
    assert np.isfinite(llm.embed(["x"])).all()


def test_a_model_of_texts_has_none(bundled_model: Path) -> None:
    with LLM.load(bundled_model, device="host", plan="gpu") as llm:
        assert llm.pooling is None
        with pytest.raises(UnsupportedModelError, match="no pooling"):
            llm.embed(["x"])


BAD: dict[str, Any] = {
    "cls": (("Pooling",), {"pooling_mode_cls_token": True}, "cls_token"),
    "two modes": (("Pooling",), {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "mean"),
    "no mode": (("Pooling",), {}, "nothing"),
    "a dense layer": (("Pooling", "Dense"), {"pooling_mode_lasttoken": True}, "Dense"),
    "no pooling": (("Normalize",), {}, "Normalize"),
    "a length": (("Pooling",), {"pooling_mode_lasttoken": True, "most": 0}, "max_seq_length"),
}


@pytest.mark.parametrize("name", BAD)
def test_other_declarations_are_refused_by_name(tmp_path: Path, name: str) -> None:
    names, settings, said = BAD[name]
    with pytest.raises(HeteroLLMError, match=said):
        read_pooling(declare(tmp_path, *names, **settings))


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    for content in ("{", "{}", "[5]", '[{"type": "Transformer", "path": "../.."}]'):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(HeteroLLMError, match=r"modules\.json"):
            read_pooling(tmp_path)
    declare(tmp_path, "Pooling", pooling_mode_lasttoken=True)
    prompts = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    pooling = read_pooling(tmp_path)
    assert pooling is not None
    assert (pooling.prompt, pooling.most_tokens, pooling.normalized) == ("Find: ", 512, False)

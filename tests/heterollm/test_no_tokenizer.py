"""A checkpoint without tokenizer files: tokens go in and out, and text is refused by the name of the file."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import CheckpointError
from heterollm.llm import LLM

IDS = [5, 6, 7, 300]
FILES = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def bare(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(bundled_model, folder, ignore=shutil.ignore_patterns("__pycache__", *FILES))
    return folder


@pytest.fixture(scope="module")
def llm(bare: Path) -> Iterator[LLM]:
    with LLM.load(bare, device="host", plan="layer") as loaded:
        yield loaded


def test_tokens_are_those_of_the_whole_checkpoint(llm: LLM, bundled_model: Path) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "ignore_eos": True}
    stream = llm.stream(IDS, **options)
    steps = list(stream)
    logits = llm.session().prefill(IDS)
    session = llm.session()
    session.prefill(IDS[:-1])
    decoded = session.decode(IDS[-1])
    with LLM.load(bundled_model, device="host", plan="layer") as whole:
        expected = whole.generate(IDS, **options)
        np.testing.assert_array_equal(logits, whole.session().prefill(IDS))
        other = whole.session()
        other.prefill(IDS[:-1])
        np.testing.assert_array_equal(decoded, other.decode(IDS[-1]))
    assert stream.result.token_ids == expected.token_ids
    assert expected.text
    assert stream.result.text == "".join(step.text for step in steps) == ""


def test_the_model_says_which_tokens_end_an_answer(llm: LLM, bare: Path, tmp_path: Path) -> None:
    wanted = llm.generate(IDS, max_new_tokens=12, ignore_eos=True).token_ids
    folder = tmp_path / "model"
    shutil.copytree(bare, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wanted[5]}), "utf-8")
    with LLM.load(folder, device="host", plan="gpu") as ending:
        result = ending.generate(IDS, max_new_tokens=12)
    assert result.stop_reason == "eos"
    assert result.token_ids == wanted[: wanted.index(wanted[5]) + 1]


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm: llm.generate("import os"),
        lambda llm: llm.generate(IDS, stop="\n"),
        lambda llm: llm.tokenizer,
    ],
    ids=["prompt", "stop", "tokenizer"],
)
def test_text_names_the_missing_file(llm: LLM, bare: Path, ask: Callable[[LLM], object]) -> None:
    with pytest.raises(CheckpointError) as caught:
        ask(llm)
    assert str(bare / "tokenizer.json") in caught.value.message
    assert "token ids" in str(caught.value.fix)
    assert llm.generate(IDS, max_new_tokens=1).generated_tokens == 1


def test_files_that_come_later_are_found_when_text_is_asked_for(
    bare: Path, bundled_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bare, folder)
    with LLM.load(folder, device="host", plan="gpu") as late:
        tokens = late.generate(IDS, max_new_tokens=4, ignore_eos=True).token_ids
        for name in FILES:
            shutil.copy(bundled_model / name, folder)
        assert late.generate("import os", max_new_tokens=1).prompt_tokens == len(
            late.tokenizer.encode("import os")
        )
        result = late.generate(IDS, max_new_tokens=4, ignore_eos=True)
        assert result.text == late.tokenizer.decode(tokens) != ""


@pytest.mark.parametrize("command", [["generate", "import os"], ["chat"]], ids=["generate", "chat"])
def test_commands_that_take_text_refuse_it_before_they_load(
    run: Any, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    code, out, err = run(command[0], bare, *command[1:], "--device", "host")
    assert (code, out) == (1, "")
    assert "tokenizer.json is missing" in err
    assert err.count("Error: ") == 1
    assert not (tmp_path / "cache" / "weights").exists()


def test_bench_needs_no_text(run: Any, bare: Path) -> None:
    options = ("-p", 8, "-n", 2, "-r", 1, "--device", "host", "--plan", "gpu", "--json")
    code, out, err = run("bench", bare, *options)
    assert code == 0, err
    rows = json.loads(out)
    assert {row["test"] for row in rows} == {"pp8", "tg2"}
    assert all(row["error"] is None and row["quality"]["quality_passed"] is not False for row in rows)

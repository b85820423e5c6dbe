"""The tokenizer of GGUF files: fields that change it, and properties of tokens that files do not store."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.stored.gguf_text_rules import RULES
from heterollm.model.stored.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from heterollm.text import Tokenizer

BYTES = [f"<0x{value:02X}>" for value in range(256)]
PIECES = ["\u2581", "\u2581h", "\u2581hi", "h", "i", "hi", "\n", "a", "b", "ab", "bb"]
MARKS = ["<|user|>", "<|end|>", "<|endoftext|>", "<mark>"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, *MARKS]
SPM: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(PIECES))] + [0.0] * 4,
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [3, 3, 3, 4],
}
LETTERS = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
BPE_TOKENS = [*LETTERS, "ab", "12", "123", "<s>", "<e>", "<e2>", "\u0120a"]
BPE: dict[str, Any] = {
    "general.architecture": "qwen2",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": BPE_TOKENS,
    "tokenizer.ggml.token_type": [1] * len(LETTERS) + [1, 1, 1, 3, 3, 3, 1],
    "tokenizer.ggml.merges": ["a b", "1 2", "12 3", "\u0120 a"],
    "tokenizer.ggml.bos_token_id": BPE_TOKENS.index("<s>"),
    "tokenizer.ggml.eos_token_id": BPE_TOKENS.index("<e>"),
}


def read(metadata: dict[str, Any]) -> GgufTokenizer:
    return gguf_tokenizer(Path("a.gguf"), metadata)


def loaded(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    found = read(metadata)
    assert found.tokenizer is not None
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(found.tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(found.config))
    (folder / "config.json").write_text(json.dumps(found.ids))
    return Tokenizer.from_folder(folder)


def pieces(metadata: dict[str, Any], text: str, folder: Path) -> list[str]:
    """The texts of the ids of a text, with the tokens that begin it."""
    return [metadata["tokenizer.ggml.tokens"][index] for index in loaded(metadata, folder).encode(text)]


PLAIN_USER = ["<s>", "\u2581", *(f"<0x{code:02X}>" for code in b"<|user|>")]
"""The mark as text."""


class Seen(NamedTuple):
    """The pieces of a text in a file without a field, or with another value, and with it.

    Args:
        base: The file.
        value: The value.
        text: A text.
        without: Its pieces without the value.
        found: Its pieces with it.
    """

    base: dict[str, Any]
    value: Any
    text: str
    without: list[str]
    found: list[str]


def less(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name.removeprefix("tokenizer.ggml.") not in names}


TEXT_CASES: dict[str, list[Seen]] = {
    "tokenizer.ggml.tokens": [
        Seen(SPM, [*SPM_TOKENS[:-1], "\u2581b"], "b", ["<s>", "\u2581", "b"], ["<s>", "\u2581b"]),
    ],
    "tokenizer.ggml.scores": [
        Seen(
            SPM,
            [-1.0 if token == "ab" else 0.0 for token in SPM_TOKENS],
            "abb",
            ["<s>", "\u2581", "ab", "b"],
            ["<s>", "\u2581", "a", "bb"],
        )
    ],
    "tokenizer.ggml.token_type": [
        Seen(
            less(SPM, "token_type"),
            SPM["tokenizer.ggml.token_type"],
            "<|user|>",
            PLAIN_USER,
            ["<s>", "<|user|>"],
        ),
        Seen(SPM, [1] * len(SPM_TOKENS), "<|user|>", ["<s>", "<|user|>"], PLAIN_USER),
        # By its text llama.cpp knows that it ends an answer.
        Seen(
            SPM,
            [1] * len(SPM_TOKENS),
            "<|end|>h",
            ["<s>", "<|end|>", "\u2581h"],
            ["<s>", "<|end|>", "\u2581h"],
        ),
    ],
    "tokenizer.ggml.merges": [Seen(BPE, ["1 2"], "ab", ["ab"], ["a", "b"])],
    "tokenizer.ggml.pre": [
        Seen(BPE, "llama-bpe", "123", ["1", "2", "3"], ["<s>", "123"]),
        Seen(less(BPE, "pre"), "qwen2", "123", ["123"], ["1", "2", "3"]),
    ],
    "tokenizer.ggml.model": [
        Seen({**SPM, "tokenizer.ggml.merges": ["h i"]}, "gpt2", "hi", ["<s>", "\u2581hi"], ["hi"]),
        Seen(
            {**SPM, "tokenizer.ggml.merges": ["\u2581 h", "\u2581h i"]},
            "gemma4",
            "a hi\nhi",
            ["<s>", "\u2581", "a", "\u2581hi", "\n", "hi"],
            ["a", "\u2581hi", "\n", "h", "i"],
        ),
    ],
    "tokenizer.ggml.bos_token_id": [
        Seen(SPM, 2, "hi", ["<s>", "\u2581hi"], ["</s>", "\u2581hi"]),
        Seen(
            less({**BPE, "tokenizer.ggml.pre": "tekken"}, "bos_token_id"),
            BPE_TOKENS.index("<s>"),
            "ab",
            ["ab"],
            ["<s>", "ab"],
        ),
    ],
    "tokenizer.ggml.add_bos_token": [
        Seen(SPM, False, "hi", ["<s>", "\u2581hi"], ["\u2581hi"]),
        Seen(BPE, True, "ab", ["ab"], ["<s>", "ab"]),
        Seen({**BPE, "tokenizer.ggml.pre": "tekken"}, False, "ab", ["<s>", "ab"], ["ab"]),
    ],
    "tokenizer.ggml.add_space_prefix": [
        Seen(SPM, False, "hi", ["<s>", "\u2581hi"], ["<s>", "hi"]),
        Seen({**SPM, "general.architecture": "gemma2"}, True, "hi", ["<s>", "hi"], ["<s>", "\u2581hi"]),
    ],
    "general.name": [
        Seen(
            SPM,
            name,
            "<|user|>\nhi<|end|>\n<|endoftext|>\n",
            [
                "<s>",
                "<|user|>",
                "\u2581",
                "\n",
                "hi",
                "<|end|>",
                "\u2581",
                "\n",
                "<|endoftext|>",
                "\u2581",
                "\n",
            ],
            ["<s>", "<|user|>", "\u2581hi", "<|end|>", "<|endoftext|>", "\u2581", "\n"],
        )
        for name in ("Phi-3-mini", "a PHI3 finetune", "Phi 3.5 Mini Instruct")
    ],
}
"""Fields that change the pieces of a text."""

AT = SPM_TOKENS.index
ID_CASES: dict[str, tuple[dict[str, Any], int, str, Any, Any]] = {
    "tokenizer.ggml.eos_token_id": (
        SPM,
        AT("h"),
        "eos_token_id",
        [2, AT("<|end|>"), AT("<|endoftext|>")],
        [AT("h")],
    ),
    **{
        f"tokenizer.ggml.{name}_token_id": (SPM, AT("h"), "eos_token_id", [2, AT("<|end|>")], [2, AT("h")])
        for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep")
    },
    "tokenizer.ggml.padding_token_id": (SPM, AT("h"), "pad_token_id", None, AT("h")),
    "tokenizer.ggml.unknown_token_id": (SPM, AT("h"), "unk_token", "<unk>", "h"),
    "tokenizer.chat_template": (SPM, "{{ messages }}", "chat_template", None, "{{ messages }}"),
    "tokenizer.chat_template.*": (
        {**SPM, "tokenizer.chat_template": "a"},
        "b",
        "chat_template",
        "a",
        [{"name": "default", "template": "a"}, {"name": "x", "template": "b"}],
    ),
}
"""Fields that change an entry: file, value, entry, its first values without the field, and with it."""


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.value!s:.20}")
        for name, cases in TEXT_CASES.items()
        for case in cases
    ],
)
def test_a_field_changes_the_pieces_of_a_text(name, case, tmp_path):
    assert pieces(case.base, case.text, tmp_path / "without") == case.without
    assert pieces({**case.base, name: case.value}, case.text, tmp_path / "with") == case.found


@pytest.mark.parametrize("name", ID_CASES)
def test_a_field_changes_an_entry(name):
    base, value, entry, without, found = ID_CASES[name]
    for metadata, wanted in ((base, without), ({**base, name.replace("*", "x"): value}, found)):
        own = read(metadata)
        stated = {**own.ids, **own.config}.get(entry)
        if entry == "eos_token_id":
            stated = stated[: len(wanted)] if wanted != [2, AT("h")] else stated[:2]
        assert stated == wanted


def test_named_chat_templates_load(tmp_path):
    template = "hi {{ messages[0].content }}"
    metadata = {**SPM, "tokenizer.chat_template": template, "tokenizer.chat_template.tool_use": "ab"}
    own = loaded(metadata, tmp_path)
    assert own.apply_chat_template([{"role": "user", "content": "x"}]) == own.encode("hi x", add_bos=False)


@pytest.mark.parametrize("pre", [None, "", "default"])
def test_a_file_without_a_rule_has_llama_cpps_and_a_note(pre, tmp_path):
    metadata = {**less(BPE, "pre"), **({} if pre is None else {"tokenizer.ggml.pre": pre})}
    found = read(metadata)
    assert len(found.notes) == 1
    assert "tokenizer.ggml.pre" in found.notes[0]
    assert found.tokenizer == read({**BPE, "tokenizer.ggml.pre": "default"}).tokenizer
    assert not read(BPE).notes
    assert not read(SPM).notes  # sentencepiece divides no text


TEXT = "Hello, it's  x`y 1234567\n\nü!"
PUNCTUATION_APART = [
    "Hello",
    ",",
    " it",
    "'",
    "s",
    " ",
    " x",
    "`",
    "y",
    " ",
    "123",
    "456",
    "7",
    "\n",
    "\n",
    "ü",
    "!",
]
DIVIDED = {
    "default": PUNCTUATION_APART,
    "falcon": PUNCTUATION_APART,
    "gpt-2": ["Hello", ",", " it", "'s", " ", " x", "`", "y", " 1234567", "\n", "\n", "ü", "!"],
    "smollm": ["Hello", ",", " it", "'s", " ", " x", "`", "y", " ", *"1234567", "\n", "\n", "ü", "!"],
    "llama-bpe": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", "123", "456", "7", "\n\n", "ü", "!"],
    "qwen2": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", *"1234567", "\n\n", "ü", "!"],
    "qwen35": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", *"1234567", "\n\n", "ü", "!"],
    "seed-coder": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", *"1234567", "\n\n", "ü", "!"],
    "tekken": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", *"1234567", "\n\n", "ü", "!"],
    "gpt-4o": ["Hello", ",", " it's", " ", " x", "`y", " ", "123", "456", "7", "\n\n", "ü", "!"],
    "bailingmoe": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", *"1234567", "\n\n", "ü", "!"],
    "deepseek-v3": ["Hello", ",", " it", "'s", " ", " x", "`y", " ", "123", "456", "7", "\n\n", "ü", "!"],
    "deepseek-coder": [
        "Hello",
        ",",
        " it",
        "'",
        "s",
        " ",
        " x",
        "`",
        "y",
        " ",
        *"1234567",
        "\n",
        "\n",
        "ü",
        "!",
    ],
}
"""The pieces of TEXT by each rule, taken from its patterns by hand."""


def divided(pre: str, text: str) -> list[str]:
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in RULES[pre].patterns]
    return [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", DIVIDED)
def test_a_rule_divides_a_text(pre):
    assert divided(pre, TEXT) == DIVIDED[pre]


def test_every_rule_has_such_a_test():
    tested = {RULES[name].patterns for name in DIVIDED}
    assert {rule.patterns for rule in RULES.values()} == tested


@pytest.mark.parametrize("name", ["Qwen2", "LLAMA-BPE", "viking", 3])
def test_names_of_rules_are_compared_letter_by_letter(name):
    with pytest.raises(UnsupportedModelError, match="does not know"):
        read({**BPE, "tokenizer.ggml.pre": name})


def test_merges_are_required_where_tokens_need_them():
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        read({**SPM, "tokenizer.ggml.model": "gemma4"})
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        read(less(BPE, "merges"))


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["<|end|>", "<|return|>"], ["<|end|>", "<|return|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|flush|>", "<|calls|>"], ["<|flush|>", "<|calls|>"]),
        (["</s>", "<|tool_response>"], ["<|tool_response>"]),
        (["</s>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], ...),
    ],
)
def test_tokens_end_an_answer_by_their_text(texts, ends):
    tokens = [*LETTERS, *texts]
    metadata = {
        **less(BPE, "eos_token_id", "bos_token_id"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": [],
    }
    wanted = texts[:-1] if ends is ... else ends
    assert [tokens[index] for index in read(metadata).ids["eos_token_id"]] == wanted


def test_marks_of_other_models_keep_white_space(tmp_path):
    for name in ("Phi-4", "Phi", None):
        metadata = {**SPM, "tokenizer.ggml.pre": "default", **({"general.name": name} if name else {})}
        assert pieces(metadata, "<|user|>\n", tmp_path / str(name)) == ["<s>", "<|user|>", "\u2581", "\n"]


def test_masks_strip_the_white_space_before_them(tmp_path):
    tokens = [*SPM_TOKENS[:-1], "<mask>"]
    metadata = {**SPM, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "jina-v2-de"}
    assert pieces(metadata, "hi <mask>", tmp_path) == ["<s>", "\u2581hi", "<mask>"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokenizer.ggml.tokens": [*BPE_TOKENS[:-1], "ab"]}, "'ab' twice"),
        ({"tokenizer.ggml.tokens": [*BPE_TOKENS, "c"]}, "scores"),
        ({"tokenizer.ggml.tokens": [7]}, "not a list"),
        ({"tokenizer.ggml.eos_token_id": 10_000}, "eos_token_id 10000 is none of"),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "no tokenizer.ggml.bos",
        ),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(changes, said):
    metadata = {name: value for name, value in {**BPE, **changes}.items() if value is not None}
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read(metadata)


def test_empty_texts_and_whole_scores_are_read():
    tokens = [*SPM_TOKENS[:-2], "", ""]
    scores = [int(score) for score in SPM["tokenizer.ggml.scores"]]
    found = read({**SPM, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores})
    vocabulary = json.loads(str(found.tokenizer))["model"]["vocab"]
    last = len(tokens) - 1
    assert vocabulary[f"[EMPTY_{last}]"] == last
    assert len(vocabulary) == len(tokens)

"""The least number of tokens of a text: never more than it has, and none where a text may vanish."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import ContextError
from heterollm.text import Tokenizer
from heterollm.text.prompt_bound import UNICODE_SHRINKS, prompt_bound

BYTES = {f"<0x{value:02X}>": value for value in range(256)}
LETTERS = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
TEXTS = st.text(
    st.one_of(
        st.sampled_from("aab  \n\t\u3000\u0301▁é가\u1100\u1161\u212b\U0001d432\ufb03<>m"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=60,
)


def byte_level(**model: Any) -> tokenizers.Tokenizer:
    words = {**LETTERS, "aa": 256, "aaaa": 257, "ĠĠ": 258}
    backend = tokenizers.Tokenizer(models.BPE(words, [("a", "a"), ("aa", "aa"), ("Ġ", "Ġ")], **model))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    words = {**BYTES, "<unk>": 256, "a": 257, "▁": 258, "aa": 259, "▁▁": 260, "é": 261}
    model = models.BPE(words, [("a", "a"), ("▁", "▁")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def unigram() -> tokenizers.Tokenizer:
    words = [("<unk>", 0.0), ("a", -1.0), ("aa", -1.5), ("▁", -1.0), *((name, -9.0) for name in BYTES)]
    backend = tokenizers.Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    return backend


def normalized(backend: tokenizers.Tokenizer, *parts: Any) -> tokenizers.Tokenizer:
    backend.normalizer = normalizers.Sequence(list(parts))
    return backend


def marked(backend: tokenizers.Tokenizer, **flags: bool) -> tokenizers.Tokenizer:
    backend.add_tokens([AddedToken("<m>", **flags)])
    return backend


BOUNDED = {
    "byte level": byte_level(),
    "composed": normalized(byte_level(), normalizers.NFC()),
    "compatible": normalized(byte_level(), normalizers.NFKC()),
    "decomposed": normalized(byte_level(), normalizers.NFD(), normalizers.NFKD()),
    "replaced": normalized(byte_level(), normalizers.Replace("aaa", "b"), normalizers.NFC()),
    "marks": marked(byte_level()),
    "marks that swallow": marked(byte_level(), rstrip=True, lstrip=True),
    "normalised marks": marked(normalized(byte_level(), normalizers.Replace("<", "<<<<<<")), normalized=True),
    "byte fallback": byte_fallback(),
    "byte fallback, marks that swallow": marked(byte_fallback(), rstrip=True, normalized=False),
    "unigram": unigram(),
    "unknown characters": tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>")),
}


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 40))
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str, times: int) -> None:
    bound = prompt_bound(BOUNDED[name])
    assert bound is not None
    for text_of in (text * times, "<m>" + text * times + "<m>"):
        assert bound.least_tokens(text_of) <= len(BOUNDED[name].encode(text_of).ids)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_of_any_length_has_many_tokens(name: str) -> None:
    bound = prompt_bound(BOUNDED[name])
    assert bound is not None
    assert bound.least_tokens("a" * 1_000_000) >= 1_000_000 // 100


def vanishing() -> dict[str, tuple[tokenizers.Tokenizer, str]]:
    """Tokenizers, and texts of any length that are one token or none."""
    spaces, words = byte_level(), tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    spaces.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces.pre_tokenizer])
    split = byte_level()
    split.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("a", "removed"), split.pre_tokenizer])
    pieces = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    unknown = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    joined = tokenizers.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    runs = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0))
    made = marked(normalized(byte_level(), normalizers.Replace("b", " ")), rstrip=True, normalized=True)
    return {
        "spaces": (spaces, " " * 999),
        "words": (words, "b" * 999),
        "pieces": (pieces, "b" * 999),
        "removed": (split, "a" * 999),
        "unknown": (unknown, "b" * 999),
        "joined": (joined, "b" * 999),
        "runs": (runs, "b" * 999),
        "pattern": (normalized(byte_level(), normalizers.Replace(Regex("a+"), "b")), "a" * 999),
        "deleted": (normalized(byte_level(), normalizers.Replace("a", "")), "a" * 999),
        "stripped": (normalized(byte_level(), normalizers.Strip()), " " * 999),
        "accents": (normalized(byte_level(), normalizers.NFD(), normalizers.StripAccents()), "\u0301" * 999),
        "made white space": (made, "<m>" + "b" * 999),
    }


VANISHING = vanishing()


@pytest.mark.parametrize("name", VANISHING)
def test_a_tokenizer_that_drops_text_has_no_bound(name: str) -> None:
    backend, text = VANISHING[name]
    assert len(backend.encode(text).ids) <= 1
    assert prompt_bound(backend) is None


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_normal_forms_shrink_by_no_more_than_the_factor(form: Any) -> None:
    """By Python's tables: the longest text for each character that may come out."""
    full = {"NFC": "NFD", "NFKC": "NFKD"}.get(form, form)
    longest: dict[str, int] = {}
    singles = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for single in singles:
        apart = unicodedata.normalize(full, single)  # type: ignore[arg-type]
        longest[apart] = max(longest.get(apart, 0), len(single.encode()))
    changed = {one for one in singles if not unicodedata.is_normalized(full, one)}  # type: ignore[arg-type]
    made = set("".join(unicodedata.normalize(form, one) for one in changed))
    for single in made:
        apart = unicodedata.normalize(full, single)  # type: ignore[arg-type]
        bytes_to = [0, *[0] * len(apart)]
        for end in range(1, len(apart) + 1):
            bytes_to[end] = max(bytes_to[begin] + longest.get(apart[begin:end], 0) for begin in range(end))
        assert bytes_to[-1] <= UNICODE_SHRINKS * len(single.encode()), single


def test_a_long_text_is_refused_before_it_is_tokenised_and_one_that_fits_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer.from_folder(Path(tiny.__file__).parent)
    space = max((name for name in tokenizer.vocabulary if set(name) == {"Ġ"}), key=len)
    fits = " " * (1 << 18)
    ids = tokenizer.encode(fits)
    assert len(ids) <= len(fits) // len(space) + 8
    assert tokenizer.encode(fits, most_tokens=len(ids)) == ids

    def tokenised(*_: object, **__: object) -> None:
        raise AssertionError("tokenised")

    class Backend:
        encode_batch_fast = encode = encode_batch = tokenised

    monkeypatch.setattr(tokenizer, "_backend", Backend)
    for most in (1, 1024):
        with pytest.raises(ContextError, match="at least"):
            tokenizer.encode("a" * 2_000_000, most_tokens=most)
    with pytest.raises(ContextError, match="at least"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a" * 2_000_000}], most_tokens=1024)


def test_the_bound_follows_the_longest_token() -> None:
    for length in (10, 50):
        words = {**LETTERS, **{"a" * size: 256 + size for size in range(2, length + 1)}}
        backend = tokenizers.Tokenizer(
            models.BPE(words, [("a" * (size - 1), "a") for size in range(2, length + 1)])
        )
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        assert json.loads(backend.to_str())["model"]["type"] == "BPE"
        bound = prompt_bound(backend)
        assert bound is not None
        assert bound.token_bytes == length

"""Tokenizers of the families that heterollm runs, built here, and the bundled one."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, event, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

import heterollm.data.tiny_python_lm as tiny
from heterollm.base import CheckpointError, InputError
from heterollm.text import GenerationOptions, GrammarTokens, Tokenizer, load_tokenizer

TINY = Path(tiny.__file__).parent
TEXT = "Hello, wörld! 😀👩‍👩‍👧 日本語のテキスト, как дела? def f(x):\n\treturn  x  # spaces "
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|head|>{{ message.role }}\n"
    "{% if message.role == 'robot' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ message.content | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant\n{% endif %}"
)


def save(folder, backend, tokenizer_config, **files):
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def byte_level(special=("<|begin|>", "<|head|>", "<|end|>")):
    """A byte-level BPE as of Llama 3 and Qwen 2; emoji and Chinese are spread over several tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TEXT], trainer)
    # not special, and not in the byte alphabet
    backend.add_tokens([AddedToken("日本語", special=False), AddedToken("\ufffd", special=False)])
    return backend


def sentencepiece(style):
    """A Llama 2-like BPE with byte fallback, in the form of published files or of transformers 5."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for value in range(256):
        vocab[f"<0x{value:02X}>"] = len(vocab)
    for character in "▁abcdefghilmnoprstuwxyHé,.!\n日":
        vocab[character] = len(vocab)
    merges = [("l", "l"), ("▁", "a"), ("▁", "H"), ("▁H", "e"), ("ll", "o"), ("▁", "w"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if style == "published":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def adding(backend, single):
    """Add a post-processor that writes special tokens around a text."""
    names = [part for part in single.split() if part != "$A"]
    special = [(name, backend.token_to_id(name)) for name in names]
    template = processors.TemplateProcessing(single=single, special_tokens=special)
    if isinstance(backend.decoder, decoders.ByteLevel):
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    else:
        backend.post_processor = template
    return backend


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    llama3 = adding(byte_level(), "<|begin|> $A")
    qwen_config = {"bos_token": None, "eos_token": "<|end|>", "add_bos_token": False}
    llama2 = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "tokenizer_class": "LlamaTokenizer",
    }
    llama3_config = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": LLAMA3_TEMPLATE}
    return {
        "bundled": TINY,
        "llama3": save(root / "llama3", llama3, llama3_config),
        "qwen2": save(root / "qwen2", byte_level(), qwen_config),
        "llama2": save(root / "llama2", adding(sentencepiece("published"), "<s> $A"), llama2),
        # tokenizer.json outweighs the flag, as in transformers 5
        "llama2-flag": save(root / "flag", sentencepiece("published"), {**llama2, "add_bos_token": True}),
        "metaspace": save(root / "meta", adding(sentencepiece("new"), "<s> $A </s>"), llama2),
    }


@pytest.fixture(scope="module")
def loaded(folders):
    return {name: Tokenizer.from_folder(folder) for name, folder in folders.items()}


NAMES = ["bundled", "llama3", "qwen2", "llama2", "llama2-flag", "metaspace"]
BOS = {"bundled": [], "llama3": [0], "qwen2": [], "llama2": [1], "llama2-flag": [], "metaspace": [1]}


@pytest.mark.parametrize("name", NAMES)
def test_encode_begins_as_the_checkpoint_says_and_never_twice(loaded, name):
    tokenizer = loaded[name]
    bare = tokenizer.encode("Hello all", add_bos=False)
    assert tokenizer.encode("Hello all") == BOS[name] + bare
    assert tokenizer.encode("") == BOS[name] + tokenizer.encode("", add_bos=False)
    assert not set(bare) & {0, 1, 2}
    bos = {"llama3": "<|begin|>", "llama2": "<s>", "metaspace": "<s>"}.get(name, "")
    written = tokenizer.encode(bos + "Hello all")
    assert written.count(0) + written.count(1) == len(BOS[name])
    assert written[: len(BOS[name])] == BOS[name]


@pytest.mark.parametrize("name", NAMES[:-1])
def test_ids_are_those_of_transformers(loaded, folders, name):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(str(folders[name]), config=transformers.LlamaConfig())
    if name in ("llama2", "llama2-flag"):
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folders[name]))
    for text in (TEXT, "Hello all", " leading", "x\n\ny  z ", ""):
        assert loaded[name].encode(text) == theirs.encode(text)
        ids = theirs.encode(text)
        assert loaded[name].decode(ids) == theirs.decode(ids, skip_special_tokens=True)


SPELLINGS = ["<|end|>", "<|head|>", "日本語", "He", "Z", "<new>", "<newer>", "q"]
FLAGS = ["special", "lstrip", "rstrip", "normalized", "single_word"]
MARK = {"__type": "AddedToken"}


def files_with(forms):
    """Return files of a checkpoint in which each special token has one form, as all programs write it.

    Args:
        forms: Fields of the object for each text; None for a string.
    """
    texts = st.sampled_from(SPELLINGS)
    strings = st.sampled_from([text for text in SPELLINGS if forms[text] is None] or [SPELLINGS[0]])
    objects = texts.map(lambda text: {"content": text, **(forms[text] or {})})
    marked, unmarked = (
        texts.map(
            lambda text, mark=mark: text if forms[text] is None else {"content": text, **forms[text], **mark}
        )
        for mark in (MARK, {})
    )
    config = {f"{name}_token": marked for name in ("bos", "eos", "unk", "pad", "image", "own")} | {
        "extra_special_tokens": st.lists(marked, max_size=3)
        | st.dictionaries(st.sampled_from(["image_token", "audio_token"]), marked),
        "additional_special_tokens": st.lists(strings, max_size=3),
        "model_specific_special_tokens": st.dictionaries(st.just("video_token"), strings),
        "added_tokens_decoder": st.dictionaries(st.integers(0, 500).map(str), objects, max_size=3),
        "add_bos_token": st.booleans(),
        "add_prefix_space": st.booleans(),
    }
    older = dict.fromkeys(("bos_token", "eos_token", "image_token"), unmarked)
    added = st.lists(texts, max_size=3, unique=True)
    files = {
        "tokenizer_config": st.fixed_dictionaries({}, optional=config),
        "special_tokens_map": st.fixed_dictionaries({}, optional=older),
        "added_tokens": added.map(lambda texts: {text: 380 + index for index, text in enumerate(texts)}),
    }
    return st.fixed_dictionaries({}, optional=files)


FORMS = st.fixed_dictionaries(
    dict.fromkeys(SPELLINGS, st.none() | st.dictionaries(st.sampled_from(FLAGS), st.booleans()))
)
FILES = FORMS.flatmap(files_with)


@pytest.mark.parametrize("padded", [False, True])
@given(files=FILES)
@example(
    files={
        "tokenizer_config": {
            "bos_token": {"content": "He"} | MARK,
            "eos_token": {"content": "He", "normalized": True} | MARK,
        }
    }
)
@settings(max_examples=150, deadline=None)
def test_the_files_of_a_checkpoint_count_as_in_transformers(tmp_path_factory, padded, files):
    import transformers

    # There transformers overlooks that objects and the token of padding are special.
    assume("added_tokens" not in files or not (padded or "__type" in json.dumps(files)))
    backend = byte_level()
    if padded:
        backend.enable_padding(length=64, pad_id=2, pad_token="<|end|>")
    folder = save(tmp_path_factory.mktemp("files"), backend, {})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    try:
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    except Exception as error:  # noqa: BLE001 - such as a TypeError for a token by two names
        event(type(error).__name__)
        return
    ours = Tokenizer.from_folder(folder)
    expected, found = (json.loads(one.to_str()) for one in (theirs.backend_tokenizer, ours._backend))
    for fields in (expected, found):
        del fields["padding"], fields["post_processor"]
    assert found == expected
    assert ours._template._special == theirs.special_tokens_map
    assert ours.eos_ids == {theirs.eos_token_id} - {None}
    for text in (TEXT, "<new> q<|end|>", "日本語 He"):
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [TEXT, "Hello all", "a", "日本", "\n\n", "👩‍👩‍👧", "x " * 50])
def test_text_comes_back(loaded, name, text):
    tokenizer = loaded[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(index) for index in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_streamed_pieces_join_to_the_decoded_text(loaded, name, data):
    tokenizer = loaded[name]
    size = tokenizer.vocab_size
    # Low ids are special tokens and bytes: weight them, and go past the vocabulary.
    some = st.integers(0, size - 1) | st.integers(0, min(size, 260)) | st.integers(size, size + 5)
    ids = data.draw(st.lists(some, max_size=60))
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(index) for index in ids]
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(ids)
    assert decoder.finish() == ""


@pytest.mark.parametrize("name", ["llama3", "llama2"])
@given(data=st.binary(max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_bytes_stream_as_they_decode(loaded, name, data):
    tokenizer = loaded[name]
    if name == "llama2":
        ids = [3 + value for value in data]
    else:
        alphabet = _byte_names()
        ids = [tokenizer._backend.token_to_id(alphabet[value]) for value in data]
    decoder = tokenizer.stream_decoder()
    text = "".join([decoder.push(index) for index in ids]) + decoder.finish()
    assert text == tokenizer.decode(ids)
    if name == "llama3":
        assert text == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("name", NAMES)
def test_a_grammar_and_the_decoded_text_agree_on_every_token(loaded, name):
    """Constraints know tokens as bytes; characters of several tokens show where the text differs."""
    texts = ["été 日本語", 'a "quote"', "🙂 lo\\n", "", "\ufffd"]
    tokenizer = loaded[name]
    options = GenerationOptions(json_schema={"enum": texts})
    tokens = GrammarTokens(tokenizer, tokenizer.vocab_size + 3)
    seen = set()
    for seed in range(40):
        random, constraint, ids = np.random.default_rng(seed), tokens.constraint(options), []
        logits = np.empty(tokenizer.vocab_size + 3, np.float32)
        while not ids or not constraint.accept(ids[-1]):
            logits[:] = random.standard_normal(len(logits))
            ids.append(int(constraint.allowed(logits).argmax()))
            assert len(ids) < 200
        seen.add(json.loads(tokenizer.decode(ids)))
    assert seen == set(texts)


def with_marks(folder, backend, config):
    """Save a tokenizer with the marks of a reasoning model: some are text, and one is special."""
    backend.add_tokens(
        [AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>", "<tool_call>")]
    )
    backend.add_tokens([AddedToken("<mark>", special=True)])
    return Tokenizer.from_folder(save(folder, backend, config))


@pytest.mark.parametrize("style", ["bytes", "published", "new"])
def test_an_answer_may_hold_marks_that_are_text(tmp_path, style):
    """llguidance's own reader takes every added token of the shape <…> as special."""
    backend = byte_level() if style == "bytes" else adding(sentencepiece(style), "<s> $A")
    tokenizer = with_marks(tmp_path, backend, {"eos_token": "<|end|>" if style == "bytes" else "</s>"})
    rows = tokenizer.vocab_size
    tokens = GrammarTokens(tokenizer, rows)
    special = tokenizer.vocabulary["<mark>"]
    marks = {tokenizer.vocabulary[mark] for mark in ("<think>", "</think>", "<tool_call>")}
    used = set()
    for text in ("a<think>b", "<tool_call>", "</think><think>", " <think> <mark>", "<mark>", "a<|end|>b</s>"):
        for options in ({"json_schema": {"const": text}}, {"grammar": "start: " + json.dumps(text)}):
            for seed in range(4):
                random = np.random.default_rng(seed)
                constraint, ids = tokens.constraint(GenerationOptions(**options)), []
                while not ids or not constraint.accept(ids[-1]):
                    logits = random.standard_normal(rows).astype(np.float32)
                    logits[[special, *marks]] += 5
                    ids.append(int(constraint.allowed(logits).argmax()))
                joined = b"".join(tokenizer.token_bytes.of(index) for index in ids).decode()
                assert (json.loads(joined) if "json_schema" in options else joined) == text
                assert special not in ids
                used |= marks & set(ids)
    # the model writes them as it learnt to
    assert used == marks
    # a grammar may ask for a special token by its name, and for any token by its number
    for name, index in (("<mark>", special), (f"<[{min(marks)}]>", min(marks))):
        constraint = tokens.constraint(GenerationOptions(grammar=f'start: "a" {name}'))
        constraint.accept(tokenizer.vocabulary["a"])
        allowed = np.flatnonzero(np.isfinite(constraint.allowed(np.zeros(rows, np.float32))))
        assert index in allowed


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_bytes_of_tokens_join_to_the_text(loaded, name, data):
    tokenizer = loaded[name]
    size = tokenizer.vocab_size
    some = st.integers(0, size - 1) | st.integers(0, min(size, 260)) | st.integers(size, size + 5)
    written = tokenizer.encode(data.draw(st.text(max_size=20)), add_bos=False)
    ids = data.draw(st.permutations([*written, *data.draw(st.lists(some, max_size=8))]) | st.just(written))
    seen = [index for index in ids if tokenizer.token_bytes.of(index) is not None]
    begin = [tokenizer.token_bytes.of(index, first=True) for index in seen[:1]]
    joined = b"".join([*begin, *(tokenizer.token_bytes.of(index) for index in seen[1:])])
    text = tokenizer.decode(ids)
    if "\ufffd" not in joined.decode(errors="replace") and "\ufffd" not in text:
        assert joined == text.encode()
    elif tokenizer.token_bytes._byte_of:
        assert joined.decode(errors="replace") == text


def test_a_token_for_people_shows_parts_of_characters(loaded):
    tokenizer = loaded["llama3"]
    first, *_ = tokenizer.encode("\U0001f600", add_bos=False)
    own = tokenizer.token_bytes
    assert own.of(first) == "\U0001f600".encode()[: len(own.of(first))]
    assert own.text(first).startswith("\\xf0")
    assert (own.of(0), own.text(0)) == (None, "<|begin|>")
    assert (own.of(10**6), own.text(10**6)) == (None, "")


def _byte_names():
    """The characters by which byte-level vocabularies write bytes, by byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    names = {value: chr(value) for value in printable}
    for value in range(256):
        if value not in names:
            names[value] = chr(256 + len(names) - len(printable))
    return names


@pytest.mark.parametrize("name", ["llama3", "llama2"])
def test_a_character_is_never_split(loaded, name):
    tokenizer = loaded[name]
    ids = tokenizer.encode("é😀日x", add_bos=False)
    decoder = tokenizer.stream_decoder()
    seen = ""
    for index in ids:
        seen += decoder.push(index)
        assert "é😀日x".startswith(seen)
    assert seen == "é😀日x"
    cut = tokenizer.stream_decoder()
    # "\x93" ends no character here; unfinished bytes come out at the end and nowhere else
    bytes_of_emoji = [index for index in tokenizer.encode("😁", add_bos=False) if tokenizer.decode([index])][
        :-1
    ]
    assert "".join(cut.push(index) for index in bytes_of_emoji).strip() == ""
    assert "\ufffd" in cut.finish()


def test_unreadable_bytes_come_with_the_next_readable_text(loaded):
    tokenizer = loaded["llama3"]
    names = _byte_names()
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(tokenizer._backend.token_to_id(names[value])) for value in b"a\x80\x80b\xf0\x9f"]
    assert pieces == ["a", "", "", "\ufffd\ufffdb", "", ""]
    assert decoder.finish() == "\ufffd"


@pytest.mark.parametrize("junk", range(40))
def test_a_character_after_much_unreadable_text_is_whole(loaded, junk):
    tokenizer = loaded["llama3"]
    names = _byte_names()
    data = b"\x80" * junk + "😀日é".encode()
    decoder = tokenizer.stream_decoder()
    text = "".join([decoder.push(tokenizer._backend.token_to_id(names[value])) for value in data])
    assert text + decoder.finish() == "\ufffd" * junk + "😀日é"


def test_unreadable_text_is_not_held_for_long(loaded):
    """What is held is decoded again with every token, so that the cost of a token would grow."""
    tokenizer = loaded["llama3"]
    decoder = tokenizer.stream_decoder()
    junk = tokenizer._backend.token_to_id(_byte_names()[0x80])
    written = ""
    for count in range(1, 400):
        written += decoder.push(junk)
        assert len(written) > count - 20
    assert written + decoder.finish() == "\ufffd" * 399


def test_a_leading_space_is_kept_as_the_whole_text_has_it(loaded):
    tokenizer = loaded["llama2"]
    ids = tokenizer.encode("Hello all", add_bos=False)
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push(index) for index in ids]
    assert pieces[0] == "He"
    assert " a" in pieces
    assert "".join(pieces) == "Hello all"


def test_end_ids_are_those_of_the_model_and_of_the_tokenizer(loaded, folders):
    assert {name: loaded[name].eos_ids for name in ("bundled", "llama3", "qwen2", "llama2")} == {
        "bundled": {0},
        "llama3": {2},
        "qwen2": {2},
        "llama2": {2},
    }
    assert load_tokenizer(folders["llama3"], (2, 1)).eos_ids == {1, 2}


def test_the_vocabulary_counts_added_tokens(loaded):
    tokenizer = loaded["llama3"]
    assert tokenizer.vocab_size == tokenizer._backend.get_vocab_size(True)
    assert tokenizer.encode("日本語", add_bos=False) == [tokenizer.vocab_size - 2]
    assert tokenizer.decode([tokenizer.vocab_size, 2**32 - 1]) == ""


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path, loaded):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64, pad_id=2, pad_token="<|end|>")
    tokenizer = Tokenizer.from_folder(save(tmp_path / "t", backend, {"eos_token": "<|end|>"}))
    assert tokenizer.encode("Hello, Hello, Hello") == loaded["qwen2"].encode("Hello, Hello, Hello")


def test_the_template_of_the_checkpoint_is_used_without_a_second_beginning(loaded):
    tokenizer = loaded["llama3"]
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": " Hi "}]
    assert tokenizer.has_chat_template
    assert tokenizer.chat_stop_strings == ()
    ids = tokenizer.apply_chat_template(messages)
    text = "<|begin|><|head|>system\nBe brief<|end|><|head|>user\nHi<|end|><|head|>assistant\n"
    assert tokenizer._backend.decode(ids, skip_special_tokens=False) == text
    assert ids.count(0) == 1
    assert tokenizer.encode(text) == ids
    assert (
        tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        == ids[: len(ids) - 1 - ids[::-1].index(1)]
    )


def test_a_template_file_is_used(tmp_path):
    folder = save(tmp_path / "t", adding(byte_level(), "<|begin|> $A"), {"bos_token": "<|begin|>"})
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.has_chat_template
    # as in transformers, a template that writes no beginning gets none
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "é"}])) == "[é]"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}])[0] != 0


def test_several_named_templates_use_the_default(tmp_path):
    templates = [
        {"name": "tool_use", "template": "tool"},
        {"name": "default", "template": "plain{{ messages[0].content }}"},
    ]
    tokenizer = Tokenizer.from_folder(save(tmp_path / "a", byte_level(), {"chat_template": templates}))
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == "plainx"
    tokenizer = Tokenizer.from_folder(save(tmp_path / "b", byte_level(), {"chat_template": templates[:1]}))
    with pytest.raises(CheckpointError, match="template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["bundled", "llama2"])
def test_without_a_template_the_dialogue_is_plain(loaded, name):
    tokenizer = loaded[name]
    assert not tokenizer.has_chat_template
    messages = [
        {"role": "user", "content": "Hello\n"},
        {"role": "assistant", "content": " all"},
        {"role": "user", "content": "more"},
    ]
    ids = tokenizer.apply_chat_template(messages)
    assert ids[: len(BOS[name])] == BOS[name]
    assert tokenizer.decode(ids) == "User: Hello\n\nAssistant: all\n\nUser: more\n\nAssistant:"
    closed = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert tokenizer.decode(closed) == "User: Hello\n\nAssistant: all\n\nUser: more\n\n"
    assert "\n\nUser:" in tokenizer.chat_stop_strings


LINES = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"
NO_SYSTEM = "{% for m in messages if m.role != 'system' %}{{ m.content }}|{% endfor %}"
REASONING = (
    "{% for m in messages %}{{ m.content.split('</think>')[-1].replace('/no_think', '') }}|{% endfor %}"
)


@pytest.mark.parametrize("template", [LINES, NO_SYSTEM, REASONING], ids=["parts", "no system", "reasoning"])
def test_a_template_loses_no_message(tmp_path, template):
    """Templates for pictures read parts of a content, and nothing of a text; others ignore a role."""
    tokenizer = Tokenizer.from_folder(save(tmp_path / "t", byte_level(), {"chat_template": template}))
    dialogue = [
        {"role": "user", "content": "one /no_think"},
        {"role": "assistant", "content": "<think>hm</think>two"},
        {"role": "user", "content": "three"},
    ]
    found = tokenizer.decode(tokenizer.apply_chat_template(dialogue))
    if template == REASONING:
        assert found == "one |two|three|"
    else:
        assert found == "one /no_think|<think>hm</think>two|three|"
    asked = [{"role": "system", "content": "be brief"}, *dialogue]
    if template == NO_SYSTEM:
        with pytest.raises(InputError, match="ignores messages of the role system"):
            tokenizer.apply_chat_template(asked)
        return
    assert tokenizer.decode(tokenizer.apply_chat_template(asked)) == f"be brief|{found}"


def test_a_template_that_reads_no_message_is_refused(tmp_path):
    tokenizer = Tokenizer.from_folder(save(tmp_path / "t", byte_level(), {"chat_template": "hello"}))
    with pytest.raises(InputError, match="ignores messages of the role user"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_what_a_template_refuses_is_bad_input(loaded):
    with pytest.raises(InputError, match="no such role"):
        loaded["llama3"].apply_chat_template([{"role": "robot", "content": "x"}])
    for tokenizer in loaded.values():
        with pytest.raises(InputError, match="message"):
            tokenizer.apply_chat_template([])


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 + 'a' }}", "{{ messages[0].content.nothing.more }}"])
def test_a_damaged_template_is_named(tmp_path, template):
    tokenizer = Tokenizer.from_folder(save(tmp_path / "t", byte_level(), {"chat_template": template}))
    with pytest.raises((CheckpointError, InputError), match="template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_bad_text_and_bad_ids_are_bad_input(loaded):
    with pytest.raises(InputError, match="Unicode"):
        loaded["bundled"].encode("a\ud800b")
    for ids in ([-1], [2**32], [1.5], ["a"]):
        with pytest.raises(InputError, match="ids"):
            loaded["bundled"].decode(ids)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "None"}}'),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xff"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("special_tokens_map.json", b"nonsense"),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files_are_named(tmp_path, folders, name, content):
    folder = tmp_path / "checkpoint"
    shutil.copytree(folders["llama2"], folder)
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(folder)
    expected = "chat template" if b"chat_template" in content else name
    assert expected in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_truncated_tokenizer_file_is_named(tmp_path, folders):
    folder = tmp_path / "checkpoint"
    shutil.copytree(folders["bundled"], folder, ignore=shutil.ignore_patterns("*.safetensors", "held_out*"))
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(folder)


def test_the_older_vocabulary_files_of_qwen_give_the_same_ids(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([TEXT], trainer)
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("Hello") == backend.encode("Hello").ids


def test_remote_code_is_not_run(tmp_path, folders):
    folder = tmp_path / "checkpoint"
    shutil.copytree(folders["llama3"], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tokenizer: pass\n")
    tokenizer = Tokenizer.from_folder(folder)
    assert not (tmp_path / "ran").exists()
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


@pytest.fixture
def older(tmp_path):
    """A checkpoint without tokenizer.json, which transformers reads."""
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    return tmp_path


def test_older_files_without_transformers_say_what_to_install(older, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"vocab\.json needs the library transformers") as caught:
        Tokenizer.from_folder(older)
    assert "pip install 'heterollm[older-tokenizers]'" in caught.value.fix


def test_loading_leaves_the_logging_of_transformers_as_it_was(older):
    import transformers

    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_info()
    try:
        Tokenizer.from_folder(older)
        assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.INFO
    finally:
        transformers.utils.logging.set_verbosity(before)


@pytest.mark.parametrize("given", [None, "0"])
def test_loading_leaves_the_environment_as_it_was(older, monkeypatch, given):
    monkeypatch.delenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", raising=False)
    if given is not None:
        monkeypatch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", given)
    Tokenizer.from_folder(older)
    assert os.environ.get("TRANSFORMERS_NO_ADVISORY_WARNINGS") == given


class TestFailuresOfTheLibrary:
    @pytest.fixture
    def panic(self):
        """What the library's native code raises when it aborts: a BaseException."""
        backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        encoding = backend.encode("a a a")
        with pytest.raises(BaseException, match="stride") as caught:
            encoding.truncate(1, stride=5)
        assert not isinstance(caught.value, Exception)
        return caught.value

    @pytest.mark.parametrize("place", ["tokenizer_files._by_tokenizers", "tokenizer.Tokenizer._added_around"])
    def test_a_panic_while_loading_is_a_damaged_checkpoint(self, monkeypatch, panic, place):
        def fail(*_, **__):
            raise panic

        monkeypatch.setattr(f"heterollm.text.{place}", fail)
        with pytest.raises(CheckpointError, match="stride"):
            Tokenizer.from_folder(TINY)

    def test_a_panic_while_encoding_or_decoding_is_a_damaged_checkpoint(self, monkeypatch, panic):
        class Broken:
            def __getattr__(self, name):
                raise panic

        tokenizer = Tokenizer.from_folder(TINY)
        stream = tokenizer.stream_decoder()
        monkeypatch.setattr(tokenizer, "_backend", Broken())
        for call in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([1])):
            with pytest.raises(CheckpointError, match=r"tokenizer fails.*stride"):
                call()
        stream._backend = Broken()
        with pytest.raises(CheckpointError, match=r"tokenizer fails.*stride"):
            stream.finish()


@pytest.mark.parametrize("own_file", [False, True])
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 1e300 * 10 ** 400 }}", "OverflowError"),
        ("{{ 'x' * 10 ** 17 }}", "of memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_template_that_fails_is_named(tmp_path, template, reason, own_file):
    folder = save(tmp_path / "t", byte_level(), {} if own_file else {"chat_template": template})
    name = "chat_template.jinja" if own_file else "tokenizer_config.json"
    if own_file:
        (folder / name).write_text(template)
    with pytest.raises(CheckpointError, match=reason) as caught:
        Tokenizer.from_folder(folder).apply_chat_template([{"role": "user", "content": "x"}])
    assert str(folder / name) in caught.value.message

"""Templates and tokenizers that would take time or memory without end: one error, within limits."""

import json
import os
import threading

import jinja2
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers.utils.chat_template_utils import render_jinja_template

from heterollm.base import MIB, CheckpointError, LimitedChild, LimitError
from heterollm.text import chat_template
from heterollm.text.tokenizer import Tokenizer
from heterollm.text.tokenizer_check import check_tokenizer_file

MESSAGES = [{"role": "user", "content": "Hello {{ 7 * 7 }} <b>"}]


@pytest.fixture(scope="module")
def child():
    made = LimitedChild("heterollm.text.template_child:render", cpu_s=1, memory_bytes=160 * MIB)
    yield made
    made.close()


def byte_level():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def save(folder, backend, template=None):
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (
        {"chat_template": template} if template else {}
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


# Such templates take all of the time that they may; a loop, a power and a list do so by default.
LIMITED = pytest.mark.slow


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10 ** 9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format('a') }}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) | length }}",
        "{{ ('x' * 10 ** 6).replace('x', 'x' * 1000) | length }}",
        "{{ ('x' * 10 ** 6) | replace('', 'x' * 1000) }}",
        "{{ [0] * 10 ** 9 }}",
        pytest.param("{{ lipsum(n=10 ** 8) }}", marks=LIMITED),
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{{ 9 ** (9 ** 9) }}",
        pytest.param("{{ (10 ** 4000000) | string | length }}", marks=LIMITED),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_never_ends_is_one_error(tmp_path, child, monkeypatch, template):
    monkeypatch.setattr(chat_template, "TEMPLATES", child)
    tokenizer = Tokenizer.from_folder(save(tmp_path / "model", byte_level(), template))
    with pytest.raises(CheckpointError, match=r"chat template in .*(takes|gives|fails)"):
        tokenizer.apply_chat_template(MESSAGES)
    good = Tokenizer.from_folder(save(tmp_path / "good", byte_level(), "{{ messages[0]['content'] }}"))
    assert good.decode(good.apply_chat_template(MESSAGES)) == MESSAGES[0]["content"]


REASONED = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so", "reasoning": "hm"},
    {"role": "assistant", "content": "so", "thinking": "t", "reasoning_content": None},
]


@pytest.mark.parametrize("messages", [MESSAGES, REASONED], ids=["one", "reasoned"])
@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{% endfor %}",
        "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ add_generation_prompt }}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m }}{% endfor %}{{ none }}",
        "{{ strftime_now('%%') }}{{ dict(a=1) }}{{ namespace(x=2).x }}{{ tools }}{{ documents }}",
        "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}",
        "a\n    {% if true %}\n  b\r\n  {%- endif %}\n{# c #}\n  d\n",
        "{{ {'b': 'é<', 'a': [1, none]} | tojson(indent=2, sort_keys=true) }}{{ 'é' | tojson(true) }}",
        "{{ {'a': 1, 'b': 2} | tojson(separators=(',', ':')) }}{{ dict.fromkeys(['x'], 1) }}",
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}{% endfor %}",
        "{% set n = namespace(self=1) %}{% set n.self = n.self + 1 %}{{ n.self }}{{ undefined_name }}",
        "{% set n = namespace(_a=1) %}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ dict.__class__ }}{{ ''.__class__.__mro__ }}",
        "{{ undefined_name.more }}",
        "{% endfor %}",
    ],
)
def test_the_child_renders_as_transformers_does(child, template, messages):
    variables = {"bos_token": "<s>", "add_generation_prompt": True}
    found = child.ask({"template": template, "variables": variables | {"messages": messages}})
    try:
        theirs, _ = render_jinja_template([messages], chat_template=template, **variables)
    except jinja2.TemplateSyntaxError:
        assert [*found] == ["damaged"]
    except jinja2.TemplateError:
        assert [*found] == ["refused"]
    else:
        assert found == {"text": theirs[0]}


def test_the_child_answers_several_threads_and_lives_on(child):
    template, answers = "{{ messages[0]['content'] }}", {}

    def ask(number):
        message = {"role": "user", "content": str(number)}
        answers[number] = child.ask({"template": template, "variables": {"messages": [message]}})["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) for number in range(8)}


def test_a_child_that_dies_is_one_error(monkeypatch, tmp_path):
    folder = tmp_path / "path"
    folder.mkdir()
    (folder / "dying.py").write_text("import os\ndef end_the_process(_request):\n    os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    dying = LimitedChild("dying:end_the_process")
    for _ in range(2):
        with pytest.raises(LimitError, match="ends the process"):
            dying.ask(1)


def doubling(parts):
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.Replace("a", "aa")] * parts)
    return backend


def decoding(parts):
    backend = byte_level()
    backend.decoder = decoders.Sequence([*[decoders.Replace("a", "aa")] * parts, decoders.ByteLevel()])
    return backend


def splitting(pattern):
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
    )
    return backend


def replacing(pattern, content):
    backend = byte_level()
    backend.normalizer = normalizers.Sequence([normalizers.Replace(Regex(pattern), content)])
    return backend


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: doubling(30), "makes 1073741824 characters of one"),
        (lambda: decoding(30), "makes 1073741824 characters of one"),
        (lambda: replacing("", "x" * 100), "makes 101 characters of one"),
        (lambda: replacing("a|b", "x" * 100), "makes 100 characters of one"),
        (lambda: splitting(r"(a+)+$"), "match for ever"),
        (lambda: splitting(r"(?:(?:[a-z_.]+)*x)*!"), "match for ever"),
        (lambda: replacing(r"(\s*[^\]()]{2,})+$", "x"), "match for ever"),
        (lambda: splitting(r"(x\g<1>?)+"), "match for ever"),
        (lambda: splitting(r"(?:a|a)*$"), "retry-limit"),
        (lambda: splitting(r"[ab]*[ab]*[ab]*[ab]*[ab]*c"), "retry-limit|takes more than"),
    ],
)
def test_a_tokenizer_without_bounds_is_refused(tmp_path, monkeypatch, make, said):
    monkeypatch.setattr("heterollm.text.tokenizer_check.CPU_S", 2)
    folder = save(tmp_path / "model", make())
    with pytest.raises(CheckpointError, match=said) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / "tokenizer.json") in caught.value.message


GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize(
    "pattern", [GPT2, GPT4, O200K, DEEPSEEK, r"\d{1,3}(?=(?:\d{3})*\b)", r"[一-龥ぁ-ゖ]+"]
)
def test_patterns_of_published_tokenizers_pass(tmp_path, pattern):
    folder = save(tmp_path / "model", splitting(pattern))
    check_tokenizer_file(folder / "tokenizer.json")
    assert Tokenizer.from_folder(folder).encode("def f(x): 123")


def test_normalizers_of_published_tokenizers_pass(tmp_path):
    backend = byte_level()
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
            normalizers.Lowercase(),
        ]
    )
    check_tokenizer_file(save(tmp_path / "model", backend) / "tokenizer.json")


def test_a_verdict_is_kept_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    folder = save(tmp_path / "model", splitting(GPT2))
    check_tokenizer_file(folder / "tokenizer.json")
    monkeypatch.setattr("heterollm.text.tokenizer_check.LimitedChild", None)  # nothing is tried again
    check_tokenizer_file(folder / "tokenizer.json")
    splitting(r"(a+)+$").save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="match for ever"):
        check_tokenizer_file(folder / "tokenizer.json")

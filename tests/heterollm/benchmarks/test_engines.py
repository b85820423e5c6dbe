"""Engines: which are found, and whether those of bench/engines compute what heterollm does."""

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from heterollm.base import DeviceError, OptionError, UnsupportedModelError
from heterollm.benchmarks import Configuration, plugins
from heterollm.benchmarks.cases import Case
from heterollm.benchmarks.child import random_ids
from heterollm.benchmarks.engine import Job
from heterollm.benchmarks.engines import open_engine
from heterollm.benchmarks.quality import sqnr_db

BESIDE = Path(plugins.__file__).resolve().parents[2]
ENGINES = Path(__file__).resolve().parents[3] / "bench" / "engines"


@pytest.fixture
def only_the_checkout(monkeypatch):
    monkeypatch.setattr(plugins, "CHECKOUT", ENGINES)
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    monkeypatch.setattr(sys, "path", [*sys.path])


def foreign(name, **options):
    return Configuration(engine=name, plan_level="", length_policy="", sync="", device="", **options)


def test_transformers_computes_what_heterollm_does(only_the_checkout, bundled_model, host_llm):
    engine = open_engine(Job(bundled_model, foreign("transformers", threads=(1, 0)), 64))
    try:
        ids = random_ids(3, 2048, 23)
        own = host_llm(bundled_model, plan="gpu", precision="w4a16", context=64).session()
        expected = [own.prefill(ids[:20]), *(own.decode(int(token)) for token in ids[20:])]
        assert sqnr_db(engine.logits(ids, 3), np.stack(expected)) > 90
        assert engine.facts.exact
        assert engine.sample_us(Case(8, 2, 4), ids) > 0
        assert engine.account(Case(8, 2, 4))["flops"] > 0
    finally:
        engine.close()


def test_the_checkout_and_entry_points_name_engines(only_the_checkout, monkeypatch):
    for name in ("self", "llama.cpp", "transformers"):
        plugins.check_engine(name)
    other = EntryPoint("other", "heterollm.benchmarks.cases:Case", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (other,))
    plugins.check_engine("other")
    assert plugins.load_plugin("other") is Case


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"url": "file:///home/a%20b/clone", "dir_info": {}}, Path("/home/a b/clone")),
        (
            {"url": "https://example.org/heterollm.git", "vcs_info": {}},
            BESIDE,
        ),
        (None, BESIDE),
    ],
)
def test_pip_records_where_the_checkout_is(record, found, monkeypatch):
    class Installed:
        def read_text(self, name):
            assert name == "direct_url.json"
            return record and json.dumps(record)

    monkeypatch.setattr(plugins, "distribution", lambda name: Installed())
    assert plugins._checkout() == found


def test_without_the_checkout_an_engine_is_refused_with_the_way_to_it(
    only_the_checkout, monkeypatch, tmp_path
):
    monkeypatch.setattr(plugins, "CHECKOUT", tmp_path)
    with pytest.raises(
        OptionError, match=r"There is no engine 'llama\.cpp' here; known engines: self\."
    ) as found:
        plugins.check_engine("llama.cpp")
    assert "pip install ./bench/engines" in found.value.fix


def test_a_plug_in_that_cannot_be_imported_is_named(only_the_checkout, monkeypatch):
    broken = EntryPoint("broken", "no_such_module:Engine", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: (broken,))
    with pytest.raises(DeviceError, match="no_such_module:Engine"):
        plugins.load_plugin("broken")


@pytest.mark.parametrize("family", ["qwen2", "mistral", "smollm3", "llama"])
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(
    only_the_checkout, checkpoint, family, tmp_path
):
    """The last has scaled positions."""
    plugins.load_plugin("llama.cpp")
    write_gguf = sys.modules["heterollm_engines.gguf_file"].write_gguf
    with pytest.raises(UnsupportedModelError, match="is not written as GGUF"):
        write_gguf(checkpoint(family), tmp_path / "model.gguf")


def test_llama_cpp_without_its_library_or_format_says_how(only_the_checkout, bundled_model, monkeypatch):
    with pytest.raises(OptionError, match="no format for fp16"):
        open_engine(Job(bundled_model, foreign("llama.cpp", precision="fp16"), 64))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(DeviceError, match="is not installed") as found:
        open_engine(Job(bundled_model, foreign("llama.cpp"), 64))
    assert "heterollm[bench]" in found.value.fix


def test_llama_cpp_for_other_instructions_than_heterollm_is_refused(only_the_checkout, monkeypatch):
    plugins.load_plugin("llama.cpp")
    check = sys.modules["heterollm_engines.llama_cpp_engine"].check_instructions
    check("AVX2 = 1 | AVX512 = 1")
    monkeypatch.setenv("HETEROLLM_POCL_TARGET", "haswell")
    check("AVX2 = 1 | FMA = 1 | F16C = 1 | AVX512 = 0")
    with pytest.raises(OptionError, match="limited to haswell"):
        check("AVX2 = 1 | FMA = 1 | F16C = 1 | AVX512 = 1")

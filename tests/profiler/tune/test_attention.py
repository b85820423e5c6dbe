"""The faster style of attention is kept, one that computes wrongly never is."""

import dataclasses

import numpy as np
import pytest

from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import AttentionClass, OpenClRuntime
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.tuning import DeviceTuning, read_table
from heterollm.profiler.measure import Measurement
from heterollm.profiler.tune import attention, tune_attention
from heterollm.profiler.tune import search as search_module

HEADS = [(2, 2, 16)]


@pytest.fixture(scope="module")
def runtime():
    device = open_device("host")
    yield device.gpu
    device.close()


@pytest.fixture
def phone(runtime, monkeypatch, tmp_path):
    """The runtime as a GPU, with a tuning table of its own."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path))
    opened = OpenClRuntime(runtime._device)
    opened.traits = dataclasses.replace(opened.traits, is_cpu=False)
    opened.tuning = DeviceTuning(opened.traits.identity(), enabled=True)
    return opened


def compared(phone, monkeypatch, coalesced_us):
    """Tune with given times, for one token alone."""
    times = {"simt": Measurement((10.0,) * 3), "coalesced": Measurement((coalesced_us,) * 3)}

    def measured(calls, **_):
        return {name: times.get(name, times["simt"]) for name in calls}

    monkeypatch.setattr(search_module, "measure_interleaved", measured)
    monkeypatch.setattr(attention, "TOKENS", (1,))
    monkeypatch.setattr(attention, "CONTEXT", 70)
    return tune_attention(phone, HEADS, activation_dtype=np.float32, kv_dtype=np.float32)


@pytest.mark.parametrize(("coalesced_us", "style"), [(9.0, "coalesced"), (9.9, "simt")])
def test_the_faster_style_is_kept(phone, monkeypatch, coalesced_us, style):
    (chosen,) = compared(phone, monkeypatch, coalesced_us)
    assert (chosen.style, chosen.coalesced_us, chosen.failure) == (style, coalesced_us, "")
    assert read_table(phone.tuning.identity).attention == {chosen.shape: chosen}
    assert phone.tuning.attention_style(AttentionClass(16, 1, False, "one")) == style


def test_a_style_that_computes_wrongly_is_not_tried_again(phone, monkeypatch):
    def wrong(files):
        return read_sources(files).replace("staged_key * STAGED_ROW + piece", "staged_key * STAGED_ROW")

    monkeypatch.setattr("heterollm.kernels.gpu.programs.read_sources", wrong)
    (chosen,) = compared(phone, monkeypatch, 1.0)
    assert chosen.style == "simt"
    assert "wrong numbers" in chosen.failure
    monkeypatch.undo()
    assert compared(phone, monkeypatch, 1.0) == (chosen,)


def test_what_ends_the_process_is_not_tried_again_and_an_interruption_is(phone, monkeypatch):
    def crash(*_):
        (left,) = read_table(phone.tuning.identity).attention.values()
        assert (left.style, left.failure) == ("simt", attention.LOST)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(attention, "_compared", crash)
        with pytest.raises(KeyboardInterrupt):
            compared(phone, patch, 1.0)
    assert read_table(phone.tuning.identity).attention == {}


def test_a_cpu_has_nothing_to_compare(runtime):
    assert tune_attention(runtime, HEADS, activation_dtype=np.float32, kv_dtype=np.float32) == ()

"""A model's power: votes between answers, none within one."""

import time

import pytest

from heterollm import LLM
from heterollm.base import OptionError
from heterollm.kernels.devices import open_device


class Switch:
    """A switch that records its calls."""

    problem = ""

    def __init__(self):
        self.calls = []

    def wake(self):
        self.calls.append("wake")

    def rest(self):
        self.calls.append("rest")

    def await_rest(self):
        """Wait until the last call was to rest."""
        for _ in range(60_000):
            if self.calls[-1:] == ["rest"]:
                return
            time.sleep(0.01)
        raise AssertionError(self.calls)


def test_a_model_rests_between_answers_and_asks_nothing_within_one(monkeypatch, bundled_model):
    switch, opened = Switch(), []

    def open_awake(name, *, power, **options):
        assert name == "auto"
        device = open_device("host", power=power, **options)
        opened.append(power)
        device.power, device.power_switch = power, switch
        return device

    monkeypatch.setattr("heterollm.loading.open_device", open_awake)
    monkeypatch.setattr("heterollm.engine.thread.IDLE_S", 0.05)
    with LLM.load(bundled_model, plan="gpu", power="balanced") as llm:
        assert opened == ["balanced"]
        assert llm.device.description()["power"] == "balanced"
        llm.generate("import os", max_new_tokens=1)  # makes the session, so that the next answer is one call
        switch.await_rest()
        calls = len(switch.calls)
        llm.generate("import os", max_new_tokens=8, ignore_eos=True)
        switch.await_rest()
        assert switch.calls[calls:] == ["wake", "rest"]
    with LLM.load(bundled_model, plan="gpu", power="default") as llm:
        assert "power" not in llm.device.description()
        before = list(switch.calls)
        llm.generate("import os", max_new_tokens=2)
        time.sleep(0.2)
        assert switch.calls == before


def test_an_unknown_power_is_refused_before_anything_is_loaded(bundled_model):
    with pytest.raises(OptionError, match="no power 'full'"):
        LLM.load(bundled_model, power="full")

"""A kernel that the driver refuses costs speed, not the answer, and people are told."""

import pytest

from heterollm.doctor import checks as doctor_checks
from heterollm.doctor import diagnose
from heterollm.kernels.gpu import OpenClRuntime
from heterollm.llm import LLM
from heterollm.report import console as report
from heterollm.report import diagnosis_report


@pytest.fixture
def no_vector_attention(monkeypatch):
    build = OpenClRuntime.kernel

    def kernel(self, files, name, defines=None):
        if "attention_vector.cl" in files:
            return build(self, files, name, {**(defines or {}), "BROKEN(": 1})
        return build(self, files, name, defines)

    monkeypatch.setattr(OpenClRuntime, "kernel", kernel)


def answer(folder):
    with LLM.load(folder, device="host", context=64) as llm:
        return llm.generate("def add(a, b):", max_new_tokens=8).text, llm.notes


def test_the_answer_is_the_same_and_the_model_says_why_it_is_slower(bundled_model, request):
    expected, notes = answer(bundled_model)
    assert not any("cannot use" in note for note in notes)
    request.getfixturevalue("no_vector_attention")
    text, notes = answer(bundled_model)
    assert text == expected
    told = [note for note in notes if "cannot use" in note]
    assert ["plain" in note for note in told] == [False, True]
    assert all("vector kernel for attention" in note for note in told)


def test_the_doctor_says_so(no_vector_attention, monkeypatch):
    monkeypatch.setattr(doctor_checks, "LITMUS_ROUNDS", 100)
    diagnosis = diagnose("host")
    assert diagnosis.passed
    assert any(
        "cannot use the vector kernel for attention" in warning.message for warning in diagnosis.warnings
    )
    text = report.render(diagnosis_report(diagnosis), width=300)
    assert "cannot use the vector kernel for attention" in text

"""Perplexity and nearness to float weights, against the definitions."""

import json

import numpy as np
import pytest

from heterollm.text import divergences, perplexity, surprises


def test_the_divergence_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    logits, reference = rng.standard_normal((2, 100, 50)).astype(np.float32) * 3
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(1, keepdims=True)
        for x in (reference, logits)
    )
    assert np.allclose(divergences(logits, reference), (p * np.log(p / q)).sum(1))
    assert (divergences(reference + 5, reference) < 1e-9).all()


def test_the_figures_are_those_of_the_logits(bundled_model, host_llm, run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text((bundled_model / "held_out.txt").read_text("utf-8")[:3000], "utf-8")
    options = ("--text", str(text), "--windows", "2", "--window", "96", "--device", "host", "--plan", "gpu")
    code, out, _ = run("eval", str(bundled_model), *options, "--json")
    assert code == 0
    found = json.loads(out)
    models = [
        host_llm(bundled_model, plan="gpu", precision=precision, kv_bits=bits)
        for precision, bits in (("w4a16", 16), ("fp16", 32))
    ]
    ids = np.array(models[0].tokenizer.encode(text.read_text("utf-8"), add_bos=False)[:192]).reshape(2, 96)
    own, exact = ([model.session().prefill(window, all_logits=True) for window in ids] for model in models)
    for logits, name in ((own, "perplexity"), (exact, "float_perplexity")):
        wanted = perplexity(surprises(one, window) for one, window in zip(logits, ids, strict=True))
        assert found[name] == pytest.approx(wanted, rel=1e-5)
    diverged = np.mean([divergences(*pair) for pair in zip(own, exact, strict=True)])
    assert found["divergence"] == pytest.approx(diverged, rel=1e-3)
    assert 0.8 < found["top_1_agreement"] < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--window", "1"), "windows of 1 tokens"), (("--window", "9999"), "fewer than a window")],
)
def test_impossible_windows_are_refused(bundled_model, run, tmp_path, words, said):
    text = tmp_path / "text.txt"
    text.write_text("def f(x):\n    return x\n")
    code, _, err = run("eval", str(bundled_model), "--text", str(text), "--device", "host", "--alone", *words)
    assert code == 1
    assert said in " ".join(err.split())

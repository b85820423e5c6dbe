"""The technique shadowattn from the command line, on a made-up profile of ``host`` by which it pays early."""

import io
import json
import sys
import time

import pytest

from heterollm.cli import main
from heterollm.kernels.devices import open_device
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.npu.session import SessionGraph
from heterollm.model import ModelConfig, op_specs, shape_of_specs
from heterollm.profiler.measure.layers import layer_cases
from heterollm.profiler.measure.sparse_cases import sparse_cases
from heterollm.profiler.records import Profile, Record, profile_path
from heterollm.solver import Plan, PlannedAttention
from heterollm.trace import load_trace

USABLE, REASON, _ = qnn_available(emulator=True)
WEIGHTS = ("--scales", "stepped")
TECHNIQUE = ("--technique", "shadowattn", "--estimator", "npu")


def time_us(key):
    """Return a time by which the NPU estimates fast, and dense attention takes the GPU long."""
    if key.operator == "attention":
        return 5 + 1e-3 * key.heads * key.tokens * (key.context - key.tokens / 2)
    if not hasattr(key, "keys"):
        return 5.0
    pairs = key.heads * key.group * key.tokens * key.keys
    costs = {"scores": (100, 1e-5), "selection": (20, 1e-5), "sparse_attention": (20, 2e-4 * key.keep)}
    once_us, pair_us = costs.get(key.operator, (20, 1e-3 if key.operator == "score_estimate" else 0))
    return once_us + pair_us * pairs


def add_attention(profile, device, folder):
    config = ModelConfig.from_folder(folder)
    shape = shape_of_specs(config, op_specs(config, "w4a16", 32, True, float_bits=32), "model")
    for cases in (layer_cases(device, shape, quick=True, sparse=True), sparse_cases(shape, quick=True)):
        for case in cases:
            profile.add(Record(case.key, (time_us(case.key),)))


@pytest.fixture(scope="module")
def files(bundled_model, keep_even_profile, host, tmp_path_factory):
    """A folder with a calibration and a profile, which is in the cache, too."""
    folder = tmp_path_factory.mktemp("shadowattn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(folder / "cache"))
        keep_even_profile(host, bundled_model, "w4a16")
        path = profile_path(host.name, host.fingerprint())
        profile = Profile.load(path)
        add_attention(profile, host, bundled_model)
        profile.save(path)
        profile.save(folder / "profile.json")
        threads = ("--gpu-threads", str(len(host.split.gpu_cores)))
        words = ("calibrate", str(bundled_model), "--windows", "2", *threads)
        assert main([*words, "-o", str(folder / "heads.json")]) == 0
        yield folder


@pytest.fixture(scope="module")
def text(bundled_model):
    return (bundled_model / "held_out.txt").read_text("utf-8")


@pytest.fixture
def weights(files):
    return (*WEIGHTS, "--calibration", files / "heads.json", "--device", "host")


@pytest.fixture
def estimates(monkeypatch):
    """Numbers of key heads that graphs of the NPU have estimated; each graph takes some time."""
    bind, runs = SessionGraph.bind, []

    def counted(graph, inputs, outputs):
        call = bind(graph, inputs, outputs)

        def run():
            call()
            runs.append(len(inputs["queries"]))
            time.sleep(0.02)

        return run if "queries" in inputs else call

    monkeypatch.setattr(SessionGraph, "bind", counted)
    return runs


def test_a_long_prompt_runs_in_a_pipeline_and_a_saved_plan_repeats_it(
    run, files, weights, text, bundled_model, estimates
):
    asked = ("generate", bundled_model, text[:4500], *weights, "--max-new-tokens", "4", "--json")
    trace_file, plan_file = files / "trace.json", files / "plan.json"
    code, out, err = run(*asked, *TECHNIQUE, "--trace", trace_file)
    assert code == 0, err
    found = json.loads(out)
    assert not [note for note in found["notes"] if "dense" in note]
    trace = load_trace(trace_file)
    graphs = [span for span in trace.spans if (span.track, span.operator) == ("npu", "scores")]
    kernels = [span for span in trace.spans if span.track == "gpu" and span.operator == "selection"]
    assert 0 < len(graphs) == len(kernels) == len(estimates)
    assert any(
        graph.begin_ns < kernel.end_ns and kernel.begin_ns < graph.end_ns
        for graph in graphs
        for kernel in kernels
    )
    assert run("plan", bundled_model, *weights, *TECHNIQUE, "-o", plan_file)[0] == 0
    assert Plan.load(plan_file).technique(PlannedAttention).sparse
    code, out, err = run(*asked, "--plan", plan_file)
    assert code == 0, err
    assert json.loads(out)["token_ids"] == found["token_ids"]
    assert len(estimates) == 2 * len(graphs)


def test_both_turns_of_a_dialogue_are_sparse(run, weights, text, bundled_model, estimates, monkeypatch):
    counts = []

    class Lines(io.StringIO):
        def readline(self, *size):
            counts.append(len(estimates))
            return super().readline(*size)

    turns = [text[at : at + 2400].replace("\n", " ") for at in (0, 2400)]
    monkeypatch.setattr(sys, "stdin", Lines("\n".join([*turns, ""])))
    code, _, err = run("chat", bundled_model, *weights, *TECHNIQUE, "--max-new-tokens", "2")
    assert code == 0, err
    first, second, end = counts
    assert 0 == first < second < end
    assert "dense" not in err


def test_a_short_prompt_is_dense_and_the_user_learns_why(run, weights, bundled_model, estimates):
    asked = ("generate", bundled_model, "import os", *weights, "--max-new-tokens", "2")
    code, _, err = run(*asked, *TECHNIQUE)
    assert code == 0
    words = " ".join(err.split())
    assert "Attention in this prompt of" in words
    assert "tokens on can gain: `heterollm plan --explain` shows where" in words
    assert not estimates
    # Nobody asked here.
    assert "Attention in this prompt" not in run(*asked)[2]


def test_a_plan_without_any_gain_says_what_to_do(run, files, weights, bundled_model):
    words = ("plan", bundled_model, *weights[:-2], "--profile", files / "profile.json", *TECHNIQUE)
    code, out, err = run(*words, "--keep", "1.0")
    assert code == 0, err
    shown = " ".join(out.split())
    assert "Attention stays dense: by the profile sparse attention gains too little" in shown
    assert "Attention of prompts is sparse in" in " ".join(run(*words)[1].split())


@pytest.fixture
def snapdragon(bundled_model, keep_even_profile, files, tmp_path):
    """The file of a profile that a Snapdragon could have."""
    device = open_device("sim:snapdragon-8gen3")
    try:
        keep_even_profile(device, bundled_model, "w4a16")
        found = Profile.load(profile_path(device.name, device.fingerprint()))
        profile = Profile({**found.description, "device": "snapdragon"}, found.records, found.runs)
        add_attention(profile, device, bundled_model)
    finally:
        device.close()
    profile.save(tmp_path / "snapdragon.json")
    return tmp_path / "snapdragon.json"


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.skipif(not USABLE, reason=REASON)
def test_graphs_of_scores_are_compiled_ahead_by_a_profile(run, files, weights, bundled_model, snapdragon):
    asked = ("compile", bundled_model, "--soc", "57", "--plan", "gpu", *weights[:-2], *TECHNIQUE, "--json")
    code, out, err = run(*asked, "--profile", snapdragon, "--context", "1024")
    assert code == 0, err
    assert {build["group"] for build in json.loads(out)["builds"]} == {"scores"}


@pytest.mark.skipif(not USABLE, reason=REASON)
def test_compile_needs_a_profile_of_a_snapdragon_for_the_technique(run, files, weights, bundled_model):
    asked = ("compile", bundled_model, "--soc", "57", "--plan", "gpu", *weights[:-2], *TECHNIQUE)
    for options, said in (
        ((), "needs a profile of the device"),
        (("--profile", files / "profile.json"), "'host'"),
    ):
        code, _, err = run(*asked, *options)
        assert code != 0
        assert said in " ".join(err.split())

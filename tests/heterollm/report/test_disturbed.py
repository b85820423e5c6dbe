"""A profile that other load disturbed says so, and asks to be taken again."""

from pathlib import Path

import pytest

from heterollm.planning.profiling import ProfilingResult
from heterollm.profiler import RunSummary
from heterollm.report import console
from heterollm.report import profile as report_profile


@pytest.mark.parametrize(
    ("noise", "drift", "said"),
    [
        (0.01, 0.03, ""),
        (0.4, 0.03, "measurements lie more than ±25% apart"),
        (0.01, 0.84, "the reference operator took up to 1.8 times as long"),
    ],
)
def test_a_disturbed_profile_says_so(sample_profile, noise, drift, said):
    profile = sample_profile(noise=noise)
    summary = RunSummary(1.0, 1.0, measured=70, drift_fraction={"gpu": 0.02, "npu": drift}, finished=True)
    shown = console.render(
        report_profile.run_report(ProfilingResult(profile, summary, Path("profile.json"), ("a model",)))
    )
    shown = " ".join(shown.split())
    assert ("Disturbed:" in shown) == bool(said)
    assert said in shown
    assert ("run the same command again" in shown) == bool(said)

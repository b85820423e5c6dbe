"""Prints hashes of what a simulated device gives; run as a script by test_same_everywhere.py.

The first argument is the size that the host shall say its largest cache has.
"""

import hashlib
import json
import sys

from heterollm.kernels.gpu import traits as device_traits

device_traits.host_cache_bytes = lambda: int(sys.argv[1])  # before anything imports it

from heterollm.base import cache_root  # noqa: E402
from heterollm.loading import plan_for  # noqa: E402
from heterollm.planning import LoadOptions  # noqa: E402
from heterollm.profiler.predict import fitted_predictor  # noqa: E402
from heterollm.profiler.records import Profile  # noqa: E402
from heterollm.simulate import SimulationRequest, simulate  # noqa: E402

MODELS = ("qwen2-0.5b", "qwen3-0.6b")


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def without_sources(text):
    """Return JSON without the hashes of the sources that something was measured with."""

    def rest(fields):
        return {name: value for name, value in fields.items() if name != "code"}

    return json.loads(text, object_hook=rest)


def records_of(profile):
    """Return all that was measured, without when."""
    for line in without_sources(profile.to_json())["records"]:
        line.pop("taken_s")
        if line["kind"] != "drift":  # its key is the time of the run
            yield json.dumps(line, sort_keys=True)


def main():
    found = {}
    for model in MODELS:
        known = set((cache_root() / "profiles").rglob("*.json"))
        request = SimulationRequest(model, prompt=64, decode=4)
        simulate(request)
        (path,) = set((cache_root() / "profiles").rglob("*.json")) - known
        profile = Profile.load(path)
        found[f"{model} profile"] = digest("\n".join(sorted(records_of(profile))))
        found[f"{model} predictor"] = digest(repr(fitted_predictor(profile).fits))
        for level in ("tensor", "block"):
            options = LoadOptions(group_size=128, plan=level)
            found[f"{model} {level} plan"] = digest(plan_for(model, options, path).plan.to_json())
    found["simulation"] = digest(json.dumps(simulate(request).to_dict(), sort_keys=True))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

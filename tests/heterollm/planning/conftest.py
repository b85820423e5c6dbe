"""Profiles that need no measurement."""

import pytest

from heterollm.model import ModelConfig, op_specs, shape_of_specs
from heterollm.profiler.measure.linears import code_of
from heterollm.profiler.predict import fitted_predictor
from heterollm.profiler.records import LinearKey, Profile, Record, profile_path
from heterollm.profiler.work import enumerate_points


@pytest.fixture(scope="session")
def keep_even_profile():
    """A function that keeps a profile in which both parts are equally fast, and its predictor."""

    def keep(device, folder, precision):
        config = ModelConfig.from_folder(folder)
        shape = shape_of_specs(config, op_specs(config, precision, 32, True, float_bits=32), "model")
        traits = device.gpu.traits
        points, _ = enumerate_points(
            [shape], device.npu, cache_bytes=traits.cache_bytes, max_buffer_bytes=traits.max_buffer_bytes
        )
        made = Profile.of(device)
        for work in points:
            key = LinearKey(work.processor, work.point, code_of(work.processor))
            made.add(Record(key, (5.0 + work.point.flops / 1e4,)))
        made.save(profile_path(device.name, device.fingerprint()))
        fitted_predictor(made)

    return keep

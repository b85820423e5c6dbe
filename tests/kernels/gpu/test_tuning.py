import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import pytest
from drivers import driver_variables
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from heterollm.base import CacheError, OptionError
from heterollm.kernels.formats import linear_errors, random_weight, reference
from heterollm.kernels.gpu import (
    LEGAL,
    BuildError,
    DeviceTuning,
    GpuLinear,
    KernelParameters,
    ShapeClass,
    Tuned,
    Variant,
    all_parameters,
    default_parameters,
    kernel_source_hash,
    merge_launches,
)
from heterollm.kernels.gpu.pocl.target import TARGET_VARIABLE
from heterollm.kernels.gpu.sources import read_sources
from heterollm.kernels.gpu.tuning import DeviceIdentity, TuningTable, change_table, read_table
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import WeightFormat

INT4 = WeightFormat(4, 32)
ONE = ShapeClass(INT4, False, False, "one")
MANY = ShapeClass(INT4, False, False, "many")
INT8_MANY = ShapeClass(INT4, True, False, "many")
IDENTITY = DeviceIdentity("a processor", "a platform", 2, 4096, 2**19, "1.0")
DEFAULT = default_parameters("vector", MANY)
OTHER = replace(DEFAULT, items=1, token_step=64)
TUNED = Tuned(OTHER, 90.0, 100.0)


def filled_table():
    table = TuningTable(IDENTITY)
    table.keep(MANY, TUNED)
    table.keep(ONE, Tuned(default_parameters("vector", ONE), 1.5, 1.5))
    table.quarantine(INT8_MANY, replace(DEFAULT, depth_inputs=512), "it computes wrong numbers.")
    return table


# ---- the table ------------------------------------------------------------------------------------------


def test_a_table_survives_the_round_trip():
    table = filled_table()
    again = TuningTable.from_json(table.to_json(), IDENTITY)
    assert again.tuned == table.tuned
    assert again.quarantined == table.quarantined
    assert again.to_json() == table.to_json()


def test_quarantine_ends_use_and_refuses_later_use(cache_folder):
    table = filled_table()
    table.quarantine(MANY, OTHER, "it does not build.")
    assert MANY not in table.tuned
    table.keep(MANY, TUNED)
    assert MANY not in table.tuned
    assert table.is_quarantined(MANY, OTHER)
    assert not table.is_quarantined(INT8_MANY, OTHER)
    table.release(MANY, OTHER)
    table.keep(MANY, TUNED)
    assert table.tuned[MANY] == TUNED


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device", "another processor"),
        ("driver", "1.1"),
        ("kernel_source_hash", "0" * 16),
        ("compute_units", 8),
        ("local_bytes", 1),
    ],
)
def test_a_foreign_table_is_refused_with_the_reason(name, value):
    text = filled_table().to_json()
    with pytest.raises(OptionError, match=f"Its {name} is"):
        TuningTable.from_json(text, replace(IDENTITY, **{name: value}))


def edited(path, value):
    content = json.loads(filled_table().to_json())
    place = content
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema",), 2),
        (("schema",), None),
        (("more",), 1),
        (("tuned",), {}),
        (("tuned", 0), 7),
        (("tuned", 0, "tuned_us"), -1.0),
        (("tuned", 0, "tuned_us"), float("nan")),
        (("tuned", 0, "default_us"), "fast"),
        (("tuned", 0, "tuned_us"), True),
        (("tuned", 0, "shape", "weight", "bits"), 5),
        (("tuned", 0, "shape", "weight", "block"), 48),
        (("tuned", 0, "shape", "half"), 0),
        (("tuned", 0, "shape", "tokens"), ["many"]),
        (("tuned", 0, "parameters", "items"), 3),
        (("tuned", 0, "parameters", "items"), 2.0),
        (("tuned", 0, "parameters", "style"), {}),
        (("tuned", 0, "parameters", "many"), 1),
        (("tuned", 0, "parameters", "prefetch_bytes"), None),
        (("tuned", 0, "parameters", "more"), 1),
        (("tuned", 0, "parameters", "many"), False),
        (("tuned", 0, "shape", "tokens"), "one"),
        (("quarantined", 0, "reason"), 4),
        (("quarantined", 0, "reason"), "x" * 10_000),
        (("quarantined", 0), []),
        (("identity", "driver"), None),
    ],
)
def test_a_damaged_table_is_refused(path, value):
    content = json.loads(filled_table().to_json())
    if path[:2] == ("tuned", 0):
        # Sorted by name: the entry to damage is the one of many tokens.
        assert content["tuned"][0]["shape"]["tokens"] == "many"
    with pytest.raises(OptionError):
        TuningTable.from_json(edited(path, value), IDENTITY)


def test_the_schema_takes_a_table_and_refuses_a_damaged_one():
    path = Path(__file__).resolve().parents[3] / "docs" / "schemas" / "tuning.schema.json"
    schema = jsonschema.Draft202012Validator(json.loads(path.read_text("utf-8")))
    schema.validate(json.loads(filled_table().to_json()))
    for where, value in (
        (("schema",), 2),
        (("tuned", 0, "tuned_us"), -1.0),
        (("tuned", 0, "shape", "weight", "bits"), 5),
        (("tuned", 0, "parameters", "prefetch_bytes"), None),
        (("quarantined", 0, "reason"), 4),
    ):
        assert not schema.is_valid(json.loads(edited(where, value))), where


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\0\1", '{"schema": 1, "schema": 1}', "[" * 100_000])
def test_what_is_no_table_is_refused(text):
    with pytest.raises(OptionError):
        TuningTable.from_json(text, IDENTITY)


def test_a_shape_named_twice_is_refused():
    content = json.loads(filled_table().to_json())
    content["tuned"].append(content["tuned"][0])
    with pytest.raises(OptionError, match="twice"):
        TuningTable.from_json(json.dumps(content), IDENTITY)


# ---- the file -------------------------------------------------------------------------------------------


def test_a_file_is_written_and_read(cache_folder):
    assert read_table(IDENTITY).tuned == {}
    change_table(IDENTITY, lambda table: table.keep(MANY, TUNED))
    change_table(IDENTITY, lambda table: table.quarantine(ONE, default_parameters("simt", ONE), "slow"))
    table = read_table(IDENTITY)
    assert table.tuned == {MANY: TUNED}
    assert [bad.reason for bad in table.quarantined] == ["slow"]
    assert IDENTITY.path.is_relative_to(cache_folder / "tuning")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b'{"schema": 1'])
def test_a_damaged_file_means_the_defaults_and_a_line_in_the_log(cache_folder, caplog, content):
    IDENTITY.path.parent.mkdir(parents=True)
    IDENTITY.path.write_bytes(content)
    with pytest.raises(CacheError, match="cannot be used"):
        read_table(IDENTITY)
    tuning = DeviceTuning(IDENTITY, enabled=True)
    assert tuning.parameters(MANY) is None
    assert tuning.parameters(MANY) is None
    assert len([line for line in caplog.messages if "default parameters" in line]) == 1
    tuning.change(lambda table: table.keep(MANY, TUNED))
    assert DeviceTuning(IDENTITY, enabled=True).parameters(MANY) == OTHER


def test_a_new_driver_replaces_what_the_old_one_left(cache_folder):
    change_table(IDENTITY, lambda table: table.keep(MANY, TUNED))
    newer = replace(IDENTITY, driver="2.0")
    assert newer.path == IDENTITY.path
    with pytest.raises(CacheError, match=r"Its driver is '1\.0', not '2\.0'"):
        read_table(newer)
    assert change_table(newer, lambda table: None).tuned == {}
    assert read_table(newer).tuned == {}


def test_a_cache_that_cannot_be_written_still_serves_this_process(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "file"))
    tuning = DeviceTuning(IDENTITY, enabled=True)
    tuning.change(lambda table: table.keep(MANY, TUNED))
    assert tuning.parameters(MANY) == OTHER
    assert any("not kept" in line for line in caplog.messages)


def test_parameters_from_elsewhere_are_used_but_for_those_that_failed_here(cache_folder):
    text = filled_table().to_json().encode()
    tuning = DeviceTuning(IDENTITY, enabled=True)
    tuning.quarantine(MANY, OTHER, "it does not build.")
    assert tuning.take(text) == ""
    assert tuning.parameters(MANY) is None
    assert tuning.parameters(ONE) == default_parameters("vector", ONE)
    tuning.quarantine(ONE, default_parameters("vector", ONE), "it does not build, either.")
    assert tuning.parameters(ONE) is None
    assert len(read_table(IDENTITY).quarantined) == 2  # this device's own file
    assert read_table(IDENTITY).tuned == {}
    other = DeviceTuning(replace(IDENTITY, driver="2.0"), enabled=True)
    assert "driver is '1.0', not '2.0'" in other.take(text)
    assert other.parameters(ONE) is None
    assert other.take(b"nothing")


def test_two_processes_lose_nothing_of_each_other(cache_folder):
    script = """
import sys
from heterollm.kernels.gpu.parameters import ShapeClass, all_parameters
from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.gpu.tuning import DeviceIdentity, Tuned, change_table
identity = DeviceIdentity("a processor", "a platform", 2, 4096, 2**19, "1.0")
half = sys.argv[1] == "1"
for block in (16, 32, 64, 128):
    for kind in ("one", "few", "many"):
        shape = ShapeClass(WeightFormat(4, block), False, half, kind)
        first, second = all_parameters("vector", shape)[:2]
        change_table(identity, lambda table: table.keep(shape, Tuned(first, 1.0, 2.0)))
        change_table(identity, lambda table: table.quarantine(shape, second, "bad"))
"""
    command = [sys.executable, "-P", "-c", script]
    both = [subprocess.Popen([*command, half], cwd=cache_folder.parent) for half in ("0", "1")]
    assert [process.wait(timeout=600) for process in both] == [0, 0]
    table = read_table(IDENTITY)
    assert len(table.tuned) == 24
    assert len(table.quarantined) == 24


def test_the_variable_turns_the_table_off(cache_folder, monkeypatch):
    change_table(IDENTITY, lambda table: table.keep(MANY, TUNED))
    assert DeviceTuning(IDENTITY).parameters(MANY) == OTHER
    monkeypatch.setenv("HETEROLLM_TUNING", "off")
    assert DeviceTuning(IDENTITY).parameters(MANY) is None
    assert DeviceTuning(IDENTITY, enabled=True).parameters(MANY) == OTHER


def test_the_source_hash_is_short_and_of_all_sources():
    assert len(kernel_source_hash()) == 16
    assert int(kernel_source_hash(), 16)
    assert IDENTITY.kernel_source_hash == kernel_source_hash()


# ---- parameters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["vector", "simt"])
@pytest.mark.parametrize("tokens", ["one", "few", "many"])
@pytest.mark.parametrize("integer_inputs", [False, True])
def test_the_default_is_legal_and_first(style, tokens, integer_inputs):
    shape = ShapeClass(INT4, integer_inputs, False, tokens)
    found = all_parameters(style, shape)
    assert found[0] == default_parameters(style, shape)
    assert len(set(found)) == len(found) > 3
    for parameters in found:
        parameters.check_for(shape)
        assert msgspec.convert(msgspec.to_builtins(parameters), KernelParameters) == parameters


def test_what_a_device_cannot_run_is_not_kept():
    shape = ShapeClass(INT4, False, False, "few")
    wide = replace(default_parameters("simt", shape), items=8)
    assert wide.work_group() == 512
    table = TuningTable(replace(IDENTITY, max_work_group=256))
    with pytest.raises(OptionError, match="cannot run"):
        table.keep(shape, Tuned(wide, 1.0, 1.0))


def test_a_launch_covers_every_token_whatever_the_parameters():
    for style, many in LEGAL:
        for tokens in (9, 31, 64, 129, 257, 300) if many else (1, 2, 3, 5, 8):
            shape = ShapeClass.of(INT4, integer_inputs=False, half=True, tokens=tokens)
            for parameters in all_parameters(style, shape):
                grid = parameters.grid(tokens, 3)
                steps = grid.global_size[1] // grid.local_size[1]
                assert steps * grid.local_size[1] == grid.global_size[1]
                assert (steps - 1) * grid.token_step < tokens <= steps * grid.token_step
                # A tile that is larger than the launch shrinks.
                assert grid.local_size[0] * grid.local_size[1] <= parameters.work_group()


# ---- the kernels ----------------------------------------------------------------------------------------


def legal_parameters(data):
    style = data.draw(st.sampled_from(["vector", "simt"]), label="style")
    bits = data.draw(st.sampled_from([4, 8]), label="bits")
    block = data.draw(st.sampled_from([16, 32, 128]), label="block")
    number_format = WeightFormat(bits, block, data.draw(st.booleans(), label="symmetric"))
    tokens = data.draw(st.one_of(st.integers(1, 8), st.integers(9, 150)), label="tokens")
    integer_inputs = data.draw(st.booleans(), label="int8 inputs")
    shape = ShapeClass.of(number_format, integer_inputs=integer_inputs, half=False, tokens=tokens)
    return shape, tokens, data.draw(st.sampled_from(all_parameters(style, shape)), label="parameters")


# Every example is a kernel to build.
@settings(max_examples=6, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_legal_parameters_compute_rightly(runtime, within_gate, data):
    check_legal_parameters(runtime, within_gate, data)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_many_legal_parameters_compute_rightly(runtime, within_gate, data):
    check_legal_parameters(runtime, within_gate, data)


def check_legal_parameters(runtime, within_gate, data):
    shape, tokens, parameters = legal_parameters(data)
    if not runtime.tuning.identity.can_run(parameters):
        return
    block = shape.weight.block
    columns = block * data.draw(st.integers(1, 700 // block), label="blocks")
    rows = data.draw(st.lists(st.integers(1, 140), min_size=1, max_size=2), label="rows")
    case = LinearCase(
        shape.weight,
        tuple(rows),
        columns,
        tokens,
        kept=tuple((64 * ((n - 1) // 64), n) for n in rows),
        integer_inputs=shape.integer_inputs,
        seed=data.draw(st.integers(0, 2**32), label="seed"),
    )
    variant = Variant(parameters.style, parameters=parameters)
    within_gate(case.on_gpu(runtime, np.float32, style=variant), case, str(parameters))


@pytest.fixture
def tuned_runtime(runtime, cache_folder):
    """The runtime with an empty table of its own, and as on a CPU without a matrix unit."""
    before = runtime.tuning, runtime.traits
    runtime.tuning = DeviceTuning(runtime.tuning.identity, enabled=True)
    runtime.traits = dataclasses.replace(runtime.traits, has_matrix=False)
    yield runtime
    runtime.tuning, runtime.traits = before


def small_launch(runtime, tokens, style=None):
    rng = np.random.default_rng(0)
    members = [random_weight(rng, 130, 96, INT4)]
    layer = GpuLinear.pack(runtime, members, activation_dtype=np.float32)
    x, y = runtime.shared((tokens, 96), np.float32), runtime.shared((tokens, 130), np.float32)
    x.write(rng.standard_normal((tokens, 96)))
    launch = layer.launch(x, y, tokens=tokens, style=style, label="test")
    launch()
    runtime.finish()
    assert linear_errors(y.read(), reference.linear(x.read(), members)).within("fp32")
    return launch


@pytest.mark.cpu
def test_the_runtime_uses_the_table(tuned_runtime):
    runtime = tuned_runtime
    default = small_launch(runtime, 70)
    assert default.global_size == (2 * 3, 1)
    runtime.tuning.change(lambda table: table.keep(MANY, Tuned(OTHER, 90.0, 100.0)))
    tuned = small_launch(runtime, 70)
    assert tuned.global_size[0] == 1 * 3
    assert tuned.global_size[1] > 1
    assert dict(runtime.kernel_identity(tuned.kernel)[2])["MAX_TOKEN_STEP"] == 64
    assert small_launch(runtime, 1).global_size == (3, 1)
    assert small_launch(runtime, 70, style="vector").global_size == default.global_size
    runtime.tuning.enabled = False
    assert small_launch(runtime, 70).global_size == default.global_size


@pytest.mark.usefixtures("merges")
def test_tuned_launches_can_be_merged(tuned_runtime):
    runtime = tuned_runtime
    one = ShapeClass(INT4, False, False, "one")
    chosen = replace(default_parameters("vector", one), part_columns=16, prefetch_bytes=0)
    runtime.tuning.change(lambda table: table.keep(one, Tuned(chosen, 1.0, 2.0)))
    launches = [small_launch(runtime, 1), small_launch(runtime, 3), small_launch(runtime, 70)]
    expected = [launch.arguments[4].read() for launch in launches]
    (merged,) = merge_launches(runtime, launches)
    for launch in launches:
        launch.arguments[4].write(np.nan)
    merged()
    runtime.finish()
    for launch, exact in zip(launches, expected, strict=True):
        np.testing.assert_array_equal(launch.arguments[4].read(), exact)


@pytest.mark.cpu
def test_tuned_parameters_that_do_not_build_fall_to_the_default_for_good(tuned_runtime, monkeypatch):
    runtime = tuned_runtime
    runtime.tuning.change(lambda table: table.keep(MANY, Tuned(OTHER, 90.0, 100.0)))
    build = runtime.kernel

    def refuse(files, name, defines=None):
        if (defines or {}).get("MAX_TOKEN_STEP") == 64:
            raise BuildError("the compiler crashed.\nand said more")
        return build(files, name, defines)

    monkeypatch.setattr(runtime, "kernel", refuse)
    notes = list(runtime.variants.notes)
    assert small_launch(runtime, 70).global_size == (2 * 3, 1)
    (note,) = runtime.variants.notes[len(notes) :]
    assert str(OTHER) in note
    assert "the compiler crashed." in note
    assert runtime.tuning.parameters(MANY) is None
    (record,) = read_table(runtime.tuning.identity).quarantined
    assert (record.shape, record.parameters, record.reason) == (MANY, OTHER, "the compiler crashed.")
    assert small_launch(runtime, 70).global_size == (2 * 3, 1)
    assert runtime.variants.notes[len(notes) :] == [note]


def sources(style, integer_inputs):
    if style == "matrix":
        return read_sources(("linear_matrix.cl", "linear_wide.h"))
    common, source = ("linear_wide.h", style) if style == "vector" else ("linear_tiles.h", "simt")
    return read_sources((f"linear_{'int8_' if integer_inputs else ''}{source}.cl", common, "linear.h"))


def test_every_tuned_define_is_in_the_sources():
    for (style, many), names in LEGAL.items():
        for integer_inputs in (False, True)[: 1 if style == "half" else 2]:
            shape = ShapeClass(INT4, integer_inputs, style == "half", "many" if many else "few")
            text = sources(style, integer_inputs)
            last = all_parameters(style, shape)[-1]
            assert names
            for define in last.grid(300 if many else 5, 1).defines:
                assert define in text, (style, many, define)


def test_the_sources_default_to_what_the_table_is_compared_with():
    """The values in force where no define is given, as when a source is compiled alone."""
    for style, many in LEGAL:
        for integer_inputs in (False, True)[: 1 if style == "half" else 2]:
            shape = ShapeClass(INT4, integer_inputs, style == "half", "many" if many else "few")
            defines = default_parameters(style, shape).grid(300 if many else 5, 1).defines
            if style == "simt" and integer_inputs:
                # The header that it shares with the kernel for floats states those of that kernel.
                defines = {key: value for key, value in defines.items() if key == "SLICES"}
            if style == "half":
                # Its depth depends on the block, and the header states that of floats.
                del defines["DEPTH"]
            text = sources(style, integer_inputs)
            stated = dict(re.findall(r"#ifndef (\w+)\n#define \1 (\d+)\n", text))
            for define in set(defines) - {"TOKENS", "STAGED_INPUTS"}:
                assert stated[define] == str(defines[define]), (style, many, define)


SIMULATED = """
import itertools
import numpy as np
from heterollm.kernels.operators.data import fill_slot
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu.linear import GpuLinear
from heterollm.kernels.gpu.parameters import ShapeClass, all_parameters
from heterollm.kernels.gpu import OpenClRuntime, list_opencl_devices
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import WeightFormat

runtime = OpenClRuntime(list_opencl_devices()[0][1])
for rounded, tokens in itertools.product((False, True), (5, 19)):
    case = LinearCase(WeightFormat(4, 32), (70,), 96, tokens, integer_inputs=rounded)
    shape = ShapeClass.of(WeightFormat(4, 32), integer_inputs=rounded, half=False, tokens=tokens)
    legal = list(filter(runtime.tuning.identity.can_run, all_parameters("simt", shape)))
    members, x = case.data(np.float32)
    layer = GpuLinear.pack(runtime, members, activation_dtype=np.float32, integer_inputs=rounded)
    # Slots of the exact size: the simulator tells of any byte beyond them.
    x_slot, y = fill_slot(runtime, x), runtime.shared((tokens, 70), np.float32)
    for parameters in legal[1::8]:
        layer.launch(x_slot, y, tokens=tokens, style=Variant("simt", parameters=parameters), label="test")()
        runtime.finish()
        assert linear_errors(y.read(), case.exact(members, x)).within("fp32"), parameters
print("done")
"""


def test_tuned_kernels_for_gpus_have_no_races_and_stay_in_bounds(cache_folder):
    simulator = Path("/usr/lib/oclgrind/liboclgrind-rt-icd.so")
    if not simulator.exists():
        pytest.skip("needs oclgrind, such as `apt install oclgrind`")
    environment = os.environ | driver_variables(simulator) | {"OCLGRIND_DATA_RACES": "1"}
    environment.pop(TARGET_VARIABLE, None)  # no other OpenCL runtime can be told
    environment.pop("HETEROLLM_SHARED_MEMORY", None)  # it has no shared virtual memory
    done = subprocess.run(
        [sys.executable, "-P", "-c", SIMULATED],
        env=environment,
        cwd=cache_folder.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert not re.search("data race|invalid|divergence", done.stderr, re.IGNORECASE), done.stderr[:2000]

import gc
import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from heterollm.kernels.threads import split_threads

# The developer's shell says nothing to a test of heterollm, the hub, a proxy, the terminal or the language.
# `--shared-memory`, `--processor` and the names in KEPT set some of them for a run.
KEPT = {
    *("HETEROLLM_GOLDEN", "HETEROLLM_PUBLISHED_MODEL", "HETEROLLM_PUBLISHED_GGUF"),
    "HETEROLLM_ADRENO_TOOL",
}
FOREIGN = re.compile(
    r"(HETEROLLM_|HF_|HUGGINGFACE_|TRANSFORMERS_|POCL_|PYOPENCL_|OCL_|LC_).*|COLUMNS|LINES|NO_COLOR|LANG|LANGUAGE"
    r"|(FORCE|CLICOLOR|TTY)_?\w*|(all|https?|no)_proxy|PYTHONWARNINGS|TERM",
    re.IGNORECASE,
)
VENDORS = os.environ.get("OCL_ICD_VENDORS")
# A worker has the first process's folder of programs: all of a run compile each kernel once.
if "PYTEST_XDIST_WORKER" in os.environ:
    KEPT.add("POCL_CACHE_DIR")
for name in [name for name in os.environ if FOREIGN.fullmatch(name) and name not in KEPT]:
    del os.environ[name]
os.environ["LC_ALL"] = "C.UTF-8"

# Without compiled files each worker would compile and rewrite every test, and each process that a test starts
# the whole program.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# NumPy and PyTorch read these at their first import. Their waiting threads take cores from the other worker.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

# A slow machine fails no test, and each run has the same examples.
settings.register_profile(
    "heterollm",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("heterollm")

# PoCL takes both from the environment of the process's first OpenCL call, which any test may make: the number
# of threads that `host` has by default, and a cache that outlives every test that moves heterollm's.
POCL_CACHE = tempfile.TemporaryDirectory(prefix="heterollm-pocl-", ignore_cleanup_errors=True)
os.environ.setdefault("POCL_MAX_PTHREAD_COUNT", str(len(split_threads().gpu_cores)))
os.environ.setdefault("POCL_CACHE_DIR", POCL_CACHE.name)


@pytest.fixture
def taken_for_gpu(monkeypatch, request):
    """Take OpenCL's CPUs for GPUs with memory of their own; with ``--gpu`` there is a GPU already."""
    from named_gpu import take_for_gpu

    if not request.config.getoption("--gpu"):
        take_for_gpu(monkeypatch)


@pytest.fixture(scope="session")
def device_name(request):
    """The device of tests that need both processors: ``host``, with ``--gpu`` ``opencl``."""
    return "opencl" if request.config.getoption("--gpu") else "host"


@pytest.fixture(scope="module")
def host(device_name):
    """The device ``host``, with ``--gpu`` ``opencl``, opened once for the tests of a file.

    Its KV cache has 32 bits where the CPU computes, for gates that 16 bits miss.
    """
    from heterollm.base import DeviceError
    from heterollm.kernels.devices import open_device
    from heterollm.kernels.gpu import CACHE_DTYPES

    try:
        device = open_device(device_name)
    except DeviceError as error:
        pytest.skip(f"needs the device {device_name}: {error}")
    if device_name == "host":
        device.cache_dtype = CACHE_DTYPES[32]
    yield device
    device.close()


def pytest_addoption(parser):
    parser.addoption(
        "--processor",
        help="processor that PoCL compiles for: an older one, such as haswell; or `unknown`, as one "
        "that PoCL's LLVM does not know (in the test's own processes, not in those that tests start)",
    )

    parser.addoption(
        "--binding",
        choices=("pyopencl", "ctypes"),
        help="the OpenCL binding, in tests that name none; pyopencl by default",
    )

    parser.addoption(
        "--shared-memory",
        choices=("svm", "mapped", "host"),
        help="kind of memory that host and GPU share, in tests that name none: `svm` as on a recent Adreno, "
        "`mapped` as on an older one, `host` as on a CPU by default",
    )

    parser.addoption(
        "--gpu",
        metavar="NAME",
        help="run kernels on this GPU: its number in `heterollm devices`, or a part of its name or driver. "
        "A runtime for the CPU, such as `portable`, is taken for a GPU with memory of its own",
    )


def pytest_configure(config):
    if binding := config.getoption("--binding"):  # before anything loads the binding
        os.environ["HETEROLLM_OPENCL_BINDING"] = binding
    if name := config.getoption("--gpu"):
        from named_gpu import use_gpu

        if VENDORS:
            os.environ["OCL_ICD_VENDORS"] = VENDORS
        use_gpu(name)
    if kind := config.getoption("--shared-memory"):
        os.environ["HETEROLLM_SHARED_MEMORY"] = kind
    if kind == "mapped":
        from named_gpu import separate_memory

        separate_memory(pytest.MonkeyPatch())
    processor = config.getoption("--processor")
    if processor == "unknown":
        runpy.run_path(str(Path(__file__).parent / "kernels" / "gpu" / "two_runtimes.py"))[
            "forget_processor"
        ]()
    elif processor:
        os.environ["HETEROLLM_POCL_TARGET"] = processor


def pytest_collection_modifyitems(config, items):
    if config.getoption("--gpu"):
        # Tests that open no GPU say nothing about one.
        opening = {"runtime", "device_name", "taken_for_gpu"}
        left_out = [item for item in items if opening.isdisjoint(item.fixturenames)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip("is about OpenCL on the CPU, not about the GPU of --gpu"))


def pytest_collection_finish():
    """Take all that the imports made out of the garbage collector, and let it look less often.

    What single tests import and what fixtures keep would have it take a tenth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Every cache file of a test run lies in a folder of its own."""
    folder = tmp_path_factory.mktemp("heterollm cache")
    previous = os.environ.get("HETEROLLM_CACHE")
    os.environ["HETEROLLM_CACHE"] = str(folder)
    yield folder
    if previous is None:
        del os.environ["HETEROLLM_CACHE"]
    else:
        os.environ["HETEROLLM_CACHE"] = previous
    # Windows shall take them all, too. PoCL names its own.
    names = {path.name for path in folder.rglob("*") if "opencl" not in path.relative_to(folder).parts[:-1]}
    assert not {name for name in names if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}(?<!\.)", name)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session", autouse=True)
def no_defaults(tmp_path_factory):
    """No test reads the developer's file of defaults."""
    file = tmp_path_factory.mktemp("config") / "heterollm.toml"
    file.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CONFIG", str(file))
        yield


CONTEXTS = {}
PROGRAMS = {}


# Of a module, so that it is not in the way of other files' tests in the same process.
@pytest.fixture(scope="module")
def shared_programs(request):
    """Models share one OpenCL context of a device, and the programs that were built in it.

    PoCL's front end takes 40 ms for a program that its cache has, and a model has about ten. Contexts of
    their own are what tests/kernels has, and every test that starts a process.

    Programs are built without optimisation, which would take PoCL most of the time of these tests. Those with
    it are what tests/kernels has for each kernel and for merged launches, every test that starts a process,
    and the files that set ``OPTIMISED``.
    """
    from heterollm.kernels.gpu import OpenClRuntime
    from heterollm.kernels.gpu import runtime as opencl_runtime

    optimised = getattr(request.module, "OPTIMISED", False)
    open_context, build = opencl_runtime.cl.Context, OpenClRuntime._build

    def shared_context(devices):
        (device,) = devices
        if device.int_ptr not in CONTEXTS:
            CONTEXTS[device.int_ptr] = open_context(devices)
        return CONTEXTS[device.int_ptr]

    def build_once(runtime, source, options, name):
        if not optimised:
            options = [*options, "-cl-opt-disable"]
        key = (runtime.context.int_ptr, source, *options)
        if key not in PROGRAMS:
            PROGRAMS[key] = build(runtime, source, options, name)
        return PROGRAMS[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opencl_runtime.cl, "Context", shared_context)
        patch.setattr(OpenClRuntime, "_build", build_once)
        yield


@pytest.fixture(scope="session")
def model_fields():
    """A factory of ``config.json`` contents of tiny models: ``model_fields("llama", head_dim=32)``."""
    return tiny_fields


@pytest.fixture(scope="session")
def write_model():
    """A factory of random checkpoints: ``write_model(folder, "qwen2", dtype="bfloat16", **fields)``."""
    return write_random_model


def tiny_fields(family="llama", **changes):
    fields = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 160,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_theta": 10000.0,
    }
    return fields | changes


def write_random_model(folder, family="llama", *, dtype="float32", max_shard_size="1GB", seed=0, **changes):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = tiny_fields(family, **changes)
    fields.pop("architectures")
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.05)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    generation = {"bos_token_id": 1, "eos_token_id": [2, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


@pytest.fixture
def calls_of():
    """A function that counts the calls of Python functions in a call: work, on a machine of any speed."""

    def count(call):
        calls = 0

        def watch(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(watch)
        try:
            call()
        finally:
            sys.setprofile(before)
        return calls

    return count


@pytest.fixture
def sample_profile():
    """A factory of small whole profiles of no real device: ``sample_profile(factor=2.0, gpu_threads=2)``."""
    return make_profile


def make_profile(factor=1.0, *, noise=0.01, **description):
    from heterollm.profiler.records import (
        BandwidthKey,
        ContentionKey,
        CopyKey,
        DriftKey,
        FenceKey,
        GraphKey,
        LaunchKey,
        LayerKey,
        LinearKey,
        LinearPoint,
        Profile,
        Record,
    )

    device = {
        "device": "host",
        "time": "real",
        "gpu": "a GPU",
        "npu": "an NPU",
        "npu_copies_by_length": False,
        "cache_bytes": 32 << 20,
    }
    profile = Profile(device | description)

    def add(key, time_us=0.0, taken_s=1e9, **values):
        steps = (-2, -1, 0, 1, 2) if time_us else ()
        samples = tuple(factor * time_us * (1 + noise * step) for step in steps)
        profile.add(Record(key, samples, values=values, taken_s=taken_s))

    def cost_us(point, part):
        stages = -(-point.tokens // 32) * 32 if part == "npu" else point.tokens
        return 20 + stages * point.rows * point.columns / (4e4 if part == "npu" else 2e4)

    shapes = {"qkv": ((512, 128, 128), 512), "o": ((512,), 512), "down": ((512,), 1408)}
    for group, (rows, columns) in shapes.items():
        half = tuple(own // 2 for own in rows)
        for tokens in (1, 32, 64, 256):
            for own in (rows, half):
                gpu = LinearPoint(group, own, columns, tokens, 4, 32)
                add(LinearKey("gpu", gpu, "kernels"), cost_us(gpu, "gpu"))
                npu = LinearPoint(group, own, columns, tokens, 4, 32, form="matmul_nbits")
                add(LinearKey("npu", npu, "graph-1"), cost_us(npu, "npu"), cpu_us=9 * cost_us(npu, "npu"))
            for form, slower in (("weight_first", 1.0), ("activation_first", 3.0)):
                point = LinearPoint(group, rows, columns, tokens, 16, 0, form=form)
                time_us = slower * cost_us(point, "npu")
                add(LinearKey("npu", point, "graph-1"), time_us, cpu_us=9 * time_us)
            add(GraphKey(npu, "graph-1"), 900.0, build_us=5e4, size_bytes=2e6)
    add(LayerKey("attention", 1, 256, 0, 8, 2, 64, "kernels"), 80.0)
    add(LayerKey("rms_norm", 64, 0, 512, 0, 0, 0, "kernels"), 12.0)
    for part, rate in (("gpu", 20.0), ("npu", 30.0)):
        add(BandwidthKey(part, 2**28, False), 1e4, gbps=rate)
        add(BandwidthKey(part, 2**28, True), 2e4, gbps=rate * 0.7)
        add(ContentionKey(part, "memory", "compute"), 1e4, slowdown=1.25)
        add(DriftKey(part, "1000000000.000", 0), 100.0)
    add(LaunchKey("chained"), 3.5)
    add(FenceKey("sleep_poll", 300), 41.0, processor_fraction=0.25)
    add(CopyKey("write", 8192), 7.0)
    broken = LinearPoint("head", (32000,), 512, 1, 8, 32)
    profile.add(Record(LinearKey("npu", broken, "graph-1"), error="The graph is too large.", taken_s=1e9))
    profile.runs["1000000000.000"] = {
        "started_s": 1e9,
        "since_s": 1e9,
        "finished": True,
        "seconds": 125.0,
        "measured": 70,
        "failed": 1,
        "known": 2,
        "left": 3,
        "drift_fraction": {"gpu": 0.05, "npu": 0.02},
        "skipped": {"stage": 40, "linear": 2},
        "models": ["a model w4a16"],
    }
    return profile


@pytest.fixture
def delay_graph():
    """A function that delays a graph: ``delay_graph(path of the model, turns of a loop)``."""
    return _delay_graph


def _delay_graph(model, turns):
    """Delay the output of an ONNX file by a loop, each turn of which takes some microseconds.

    The delay is inside the graph, so that the data really comes late. The loop computes a zero, which is
    added to the output. Runtimes do not fold loops, and this one depends on the input's shape.
    """
    import onnx
    from onnx import TensorProto, helper

    graph_model = onnx.load(str(model), load_external_data=False)
    graph = graph_model.graph
    output = graph.output[0]
    kind = output.type.tensor_type.elem_type
    for node in graph.node:
        for place, name in enumerate(node.output):
            if name == output.name:
                node.output[place] = "undelayed"
    graph.initializer.extend(
        [
            helper.make_tensor("delay_turns", TensorProto.INT64, [], [turns]),
            helper.make_tensor("delay_true", TensorProto.BOOL, [], [True]),
            helper.make_tensor("delay_nothing", TensorProto.FLOAT, [1], [0.0]),
            helper.make_tensor("delay_square", TensorProto.INT64, [2], [64, 64]),
            helper.make_tensor("delay_first", TensorProto.INT64, [1], [0]),
        ]
    )
    graph.node.extend(
        [
            helper.make_node("Shape", [graph.input[0].name], ["delay_shape"]),
            helper.make_node("Gather", ["delay_shape", "delay_first"], ["delay_length"]),
            helper.make_node("Cast", ["delay_length"], ["delay_float"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["delay_float", "delay_nothing"], ["delay_zero"]),
            helper.make_node("Expand", ["delay_zero", "delay_square"], ["delay_start"]),
            helper.make_node(
                "Loop", ["delay_turns", "delay_true", "delay_start"], ["delay_end"], body=_delay_body()
            ),
            helper.make_node("ReduceMax", ["delay_end"], ["delay_sum"], keepdims=0),
            helper.make_node("Cast", ["delay_sum"], ["delay_added"], to=kind),
            helper.make_node("Add", ["undelayed", "delay_added"], [output.name]),
        ]
    )
    onnx.save(graph_model, str(model))


def _delay_body():
    """Return the body of the loop: a product with zeros."""
    from onnx import TensorProto, helper

    return helper.make_graph(
        [
            helper.make_node("Identity", ["delay_condition_in"], ["delay_condition_out"]),
            helper.make_node("MatMul", ["delay_in", "delay_zeros"], ["delay_out"]),
        ],
        "delay",
        [
            helper.make_tensor_value_info("delay_turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("delay_condition_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("delay_in", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("delay_condition_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("delay_out", TensorProto.FLOAT, [64, 64]),
        ],
        [helper.make_tensor("delay_zeros", TensorProto.FLOAT, [64, 64], [0.0] * 64 * 64)],
    )

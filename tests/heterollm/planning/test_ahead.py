"""Compiling a Snapdragon's graphs ahead: what lands in the cache, for whom, and what is refused first."""

import collections
import json
import shutil

import pytest

from heterollm.base import CacheError, GraphError, OptionError, PlanError
from heterollm.cli import main
from heterollm.kernels.npu import QnnNpu, ScoresShard, qnn_available, qnn_held, qnn_runtime
from heterollm.kernels.npu import qnn as npu_qnn
from heterollm.kernels.npu.qnn_runtime import NoRoomError, open_context, open_session
from heterollm.llm import LLM
from heterollm.model import ModelConfig, op_specs
from heterollm.planning import Precompiled, precompile
from heterollm.planning.ahead import GroupBuild
from heterollm.report import console as report
from heterollm.solver import PlannedAttention, SparseAttention, level_plan
from heterollm.solver.sparse.attention import AttentionEntry

USABLE, REASON, _ = qnn_available(emulator=True)
needs_qnn = pytest.mark.skipif(not USABLE, reason=REASON)

GROUPS = ("qkv", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, bundled_model):
    """The bundled model for a Snapdragon 8 Gen 3 at two lengths: the result and the cache folder."""
    folder = tmp_path_factory.mktemp("compiled")
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(folder))
        result = precompile(bundled_model, soc="57", prompts=[32], progress=lambda *step: steps.append(step))
    return result, folder, steps


@pytest.mark.emulator
@needs_qnn
class TestTheBundledModel:
    def test_every_group_has_a_graph_of_each_length_in_each_layer(self, compiled):
        result, folder, steps = compiled
        assert [(build.group, build.lengths) for build in result.builds] == [
            (group, (length,)) for group in GROUPS for length in (1, 32)
        ]
        for build in result.builds:
            assert (build.graphs, build.contexts, build.compiled) == (4, 4, 4)
            assert (build.loadable, build.refusal) == (4, "")
            assert build.build_s > 0
        files = [path for path in (folder / "graphs").iterdir() if path.suffix != ".lock"]
        assert len(files) == 3 * 32
        assert result.size_bytes == sum(path.stat().st_size for path in files)
        done = [step[1:] for step in steps if step[0] == "Compiling NPU graphs"]
        assert done == sorted(done)
        assert len(done) == 33
        assert done[-1][0] == done[-1][1]

    def test_a_run_on_another_machine_compiles_nothing(self, compiled, cache, bundled_model):
        shutil.copytree(compiled[1] / "graphs", cache / "graphs")
        with LLM.load(bundled_model, device="emulator", plan="layer", allow_slow=True) as llm:
            assert llm.device.npu.compiled_count == 0
            assert llm.device.npu.loaded_count == 16  # one prefill length in four layers

    def test_a_device_looks_for_the_same_files(self, compiled, monkeypatch, cache, make_part):
        """Static: what a Hexagon would open is what the compiler wrote."""
        part = make_part()
        emulated = QnnNpu(emulator=True, soc_model="57")._binary(part, "matmul_nbits", 32)
        monkeypatch.setattr(npu_qnn, "qnn_available", lambda *, emulator: (True, "", ""))
        monkeypatch.setattr(npu_qnn, "this_soc", lambda: "57")
        real = QnnNpu(emulator=False)._binary(part, "matmul_nbits", 32)
        assert real == emulated
        monkeypatch.setattr(npu_qnn, "this_soc", lambda: "69")
        assert QnnNpu(emulator=False)._binary(part, "matmul_nbits", 32).model != emulated.model

    def test_what_is_there_is_kept_and_what_is_damaged_replaced(self, compiled, cache, bundled_model):
        shutil.copytree(compiled[1], cache)
        min((cache / "graphs").glob("*_qnn.bin")).write_bytes(b"damaged")
        again = precompile(bundled_model, soc="57", prompts=[32])
        assert sum(build.compiled for build in again.builds) == 1
        # The names that the compiler numbers may be a digit longer.
        assert abs(again.size_bytes - compiled[0].size_bytes) < 100

    def test_the_estimate_is_near(self, compiled, cache, bundled_model, monkeypatch):
        usage = collections.namedtuple("usage", "free")
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage(0))
        with pytest.raises(
            CacheError, match=r"32 graphs take about \d+\.\d MiB, and .* has 0 B free"
        ) as caught:
            precompile(bundled_model, soc="57", prompts=[32])
        assert "--prompt" in caught.value.fix
        assert not list(cache.glob("graphs/*.bin"))
        estimate_mib = float(caught.value.message.split(" MiB")[0].split()[-1]) - 64
        assert compiled[0].size_bytes / 2**20 < estimate_mib < 2 * compiled[0].size_bytes / 2**20

    def test_a_device_finds_the_contexts_of_several_layers(
        self, compiled, monkeypatch, caplog, cache, bundled_model
    ):
        """The emulator looks for what a device would load; where that is refused, each graph is compiled."""
        result = precompile(bundled_model, soc="57", context=32, context_layers=4)
        (build,) = result.builds
        assert (build.group, build.lengths) == (", ".join(GROUPS), (1, 32))
        assert (build.graphs, build.contexts, build.loadable) == (32, 1, 0)
        assert "loads on a Hexagon only" in build.refusal
        assert result.size_bytes == sum(
            path.stat().st_size for path in (cache / "graphs").iterdir() if path.suffix != ".lock"
        )
        # The same graphs with contexts of their own.
        assert result.size_bytes < 0.75 * compiled[0].size_bytes
        shutil.copytree(compiled[1] / "graphs", cache / "graphs", dirs_exist_ok=True)
        looked_for = []

        def refuse_shared(models, *rest):
            if len(models) == 1:
                return open_context(models, *rest)
            looked_for.append([path.exists() for path in models])
            raise GraphError("Shared weights buffer isn't supported on this platform.")

        monkeypatch.setattr(qnn_held, "open_context", refuse_shared)
        monkeypatch.setitem(QnnNpu.__init__.__kwdefaults__, "context_layers", 4)
        with LLM.load(bundled_model, device="emulator", plan="layer", context=32, allow_slow=True) as llm:
            npu = llm.device.npu
            assert npu.compiled_count == 0
            assert npu.loaded_count > 0
            assert npu.copies_by_length
        assert looked_for == [[True] * 32]
        assert "NPU graphs share no contexts from now on: Shared weights buffer" in caplog.text

    @pytest.mark.slow
    @pytest.mark.parametrize("error", ["Error: QNN_COMMON_ERROR_MEM_ALLOC", "Error code: 1009"])
    def test_what_the_npu_holds_is_found_by_its_refusal_and_kept(
        self, compiled, monkeypatch, cache, bundled_model, error
    ):
        """The emulator has one context for each graph; QNN refuses the one after 28 open ones."""
        shutil.copytree(compiled[1] / "graphs", cache / "graphs")
        loaded = []

        def opening(model, *rest, **options):
            if "context" not in options:
                loaded.append(model)
                if len(loaded) > 28:
                    raise qnn_runtime._session_error("a graph", f"contextCreateFromBinary failed. {error}")
            return open_session(model, *rest, **options)

        def answer():
            options = {"plan": "npu", "context": 32, "allow_slow": True}
            with LLM.load(bundled_model, device="emulator", **options) as llm:
                text = llm.generate("import os", max_new_tokens=3).text
                return text, llm.device.npu.open_bytes, llm.device.npu.addressable_bytes

        wanted, every_bytes, limit = answer()
        assert limit == 7 * 2**29
        with monkeypatch.context() as patch:
            patch.setattr(qnn_runtime, "open_session", opening)
            with pytest.raises(NoRoomError, match="QNN loads no further") as refused:
                answer()
        assert "Load the model again" in refused.value.fix
        assert len(loaded) == 29
        # The graphs of one pass are fewer: within the found limit those of the other are closed for them.
        found, held, limit = answer()
        assert found == wanted
        assert held <= limit < every_bytes

    @pytest.mark.slow
    def test_graphs_of_scores_are_compiled_once_for_all_layers(self, cache, bundled_model):
        config = ModelConfig.from_folder(bundled_model)
        units = tuple((head,) for head in range(config.attention.kv_heads))
        placement = SparseAttention((0.5,) * config.attention.heads, units, (9,) * len(units))
        entry = AttentionEntry((1, 64), (1, 512), (0, config.layers - 1), placement)
        specs = op_specs(config, "w4a16", 32, True)
        lengths = {"standard_lengths": (1, 32, 64), "chunk_length": 64}
        plan = level_plan("gpu", specs, device="snapdragon", precision="w4a16", **lengths)
        sparse = plan.with_technique(PlannedAttention((entry,)))
        result = precompile(bundled_model, soc="57", plan=sparse, context=512)
        # One for each number of keys, for all layers and heads.
        assert [(build.group, build.lengths, build.graphs) for build in result.builds] == [
            ("scores", (tokens,), 3) for tokens in (32, 64)
        ]
        assert all(build.loadable == build.compiled == 3 for build in result.builds)
        assert 6 * 10_000 < result.size_bytes < 6 * 200_000
        again = precompile(bundled_model, soc="57", plan=sparse, context=512, prompts=[32])
        assert [(build.lengths, build.graphs, build.compiled) for build in again.builds] == [((32,), 3, 0)]
        npu = QnnNpu(emulator=True, soc_model="57")
        shape = 32 * config.attention.heads // config.attention.kv_heads
        npu.prepare(ScoresShard(1, 256, config.attention.head_dim, 9), shape)
        assert (npu.compiled_count, npu.loaded_count) == (0, 1)
        npu.close()

    def test_from_the_command_line(self, compiled, monkeypatch, capsys, bundled_model):
        monkeypatch.setenv("HETEROLLM_CACHE", str(compiled[1]))
        arguments = ["compile", str(bundled_model), "--soc", "57", "--prompt", "32"]
        assert main(arguments) == 0
        text = capsys.readouterr().out
        assert "Snapdragon 8 Gen 3 (SoC 57), plan layer" in text
        assert "gate_up" in text
        assert main([*arguments, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["builds"]) == 8


@needs_qnn
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"soc": "58"}, OptionError, "no chip '58'"),
        ({"soc": ""}, OptionError, "no chip ''"),
        ({"soc": "57", "prompts": [2]}, OptionError, "no graphs of 2 tokens"),
        ({"soc": "57", "prompts": [], "decode": False}, OptionError, "nothing is to compile"),
        ({"soc": "57", "plan": "gpu"}, OptionError, "nothing is to compile"),
        ({"soc": "57", "plan": "auto"}, OptionError, "nothing is to compile"),
        ({"soc": "57", "context": 0}, OptionError, "A context of 0"),
        ({"soc": "57", "context_layers": -1}, OptionError, "-1 layers cannot share"),
        ({"soc": "57", "prompts": [32], "context_layers": 1}, OptionError, "some lengths alone"),
        ({"soc": "37"}, PlanError, "does not run int4"),
        (
            {"soc": "57", "context": 16, "prompts": [64], "decode": False},
            OptionError,
            "nothing is to compile",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused(cache, bundled_model, options, error, message):
    with pytest.raises(error, match=message):
        precompile(bundled_model, **options)
    assert not list(cache.glob("graphs/*"))


@pytest.mark.parametrize("text", ["", "1,,2", "x", "1.5", "-1", "9" * 50, "\u0661"])
def test_lengths_that_are_no_numbers(capsys, bundled_model, text):
    assert main(["compile", str(bundled_model), "--soc", "57", f"--prompt={text}"]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_the_report_says_what_does_not_load_and_what_to_copy(tmp_path):
    builds = (
        GroupBuild("qkv", (1,), 4, 4, 4, 0, 5 * 2**20, 1.25, "refused by QNN"),
        GroupBuild("down", (32, 64), 8, 4, 0, 8, 3 * 2**20, 0.0, ""),
    )
    versions = {"onnxruntime-qnn": "2.7.0", "qairt": "2.51.0"}
    result = Precompiled("87", "Snapdragon 8 Elite Gen 5", "npu", "fp16", tmp_path, versions, builds)
    text = report.render(report.precompile_report(result), width=200)
    assert "0 of 4: refused by QNN" in text
    assert "32, 64" in text
    assert "8.0 MiB" in text
    assert f"Copy the files in {tmp_path}" in text
    assert "onnxruntime-qnn 2.7.0 (QAIRT 2.51.0)" in text
    assert result.to_dict()["size_bytes"] == 8 * 2**20
    json.dumps(result.to_dict())


@pytest.fixture
def make_part(bundled_model):
    """Return a function that makes the NPU's part of the bundled model's first group."""
    from heterollm.engine.npu_shards import npu_shard
    from heterollm.model import Checkpoint, ModelConfig, load_weights

    def make():
        weights = load_weights(Checkpoint(bundled_model), ModelConfig.from_folder(bundled_model))
        return npu_shard(weights, weights.specs[0], weights.specs[0].member_rows)

    return make

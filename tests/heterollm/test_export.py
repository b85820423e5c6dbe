"""Exported models: the answers of the checkpoint without its preparation, and none from a damaged folder."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from heterollm.base import ExportError, GraphError, HeteroLLMError, OptionError
from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.exported import ExportManifest
from heterollm.exporting import export_model
from heterollm.kernels.gpu import ShapeClass, Tuned, default_parameters
from heterollm.kernels.npu import qnn_available
from heterollm.kernels.ops import WeightFormat
from heterollm.llm import LLM
from heterollm.planning import calibrated_scales
from heterollm.solver import (
    ExpertGroup,
    ExpertsEntry,
    ExpertsPlacement,
    PlannedAttention,
    PlannedExperts,
    SparseAttention,
)
from heterollm.solver.sparse.attention import AttentionEntry

USABLE, REASON, _ = qnn_available(emulator=True)
needs_qnn = pytest.mark.skipif(not USABLE, reason=REASON)
CONTEXT = 128
PREPARATION = (
    "heterollm.model.weight_cache.quantize",
    "heterollm.kernels.npu.host.write_graph",
    "heterollm.kernels.npu.qnn_held.write_graph",
    "heterollm.planning.plan.level_plan",
    "heterollm.planning.planner.solve_plan",
    "heterollm.planning.inputs.stored_profile",
    "heterollm.model.checkpoint.file_digests",
)


def answers(llm: LLM) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the logits of a prompt in two passes and of tokens behind it, and a greedy answer."""
    ids = np.random.default_rng(0).integers(3, 150, 76).tolist()
    session = llm.session()
    logits = [*session.prefill(ids[:70], all_logits=True), *map(session.decode, ids[70:])]
    return np.stack(logits), llm.generate(ids[:40], max_new_tokens=12, ignore_eos=True).token_ids


def counts(llm: LLM) -> tuple[int, int]:
    npu = llm.device.npu
    return (0, 0) if npu is None else (npu.compiled_count, npu.loaded_count)


@pytest.fixture
def no_preparation(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function after whose call nothing can quantise, build graphs, plan, or hash a checkpoint."""

    def forbid() -> None:
        for name in PREPARATION:

            def refuse(*_: object, name: str = name, **__: object) -> None:
                raise AssertionError(f"{name} was called")

            monkeypatch.setattr(name, refuse)

    return forbid


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


def same(model: Path, folder: Path, forbid: Callable[[], None], **options: Any) -> tuple[int, int]:
    """Compare the answers of a checkpoint and of its export; return the export's built and loaded graphs."""
    own = {"device": "host", "context": CONTEXT, **options}
    with LLM.load(model, **own) as llm:
        expected = answers(llm)
        key = llm.state_key
    made = export_model(model, folder, **own)
    forbid()
    with LLM.load(folder, **{name: own[name] for name in ("speculative",) if name in own}) as llm:
        found = answers(llm)
        assert llm.state_key == key
        assert llm.context == CONTEXT
        assert not set(llm.plan_notes)
        assert llm.plan.level == made.plan
        built = counts(llm)
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]
    return built


# -- the same answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"plan": "npu"},
        {"plan": "layer", "precision": "w4a8", "kv_bits": 8},
        {"plan": "npu", "precision": "fp16"},
        {"plan": "layer", "symmetric": False, "group_size": 64},
        {"plan": "gpu", "precision": "w8a8"},
        {"plan": "auto"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_answers_are_those_of_the_checkpoint(
    options: dict[str, Any], checkpoint: Callable[..., Path], tmp_path: Path, no_preparation: Any
) -> None:
    built, loaded = same(checkpoint("llama"), tmp_path / "out", no_preparation, **options)
    assert built == 0
    assert (loaded > 0) == (options["plan"] not in ("gpu", "auto"))


def test_a_split_of_every_operator_keeps_its_plan(
    checkpoint: Callable[..., Path], half_rows_plan: Any, tmp_path: Path, no_preparation: Any
) -> None:
    folder = checkpoint("qwen2")
    with LLM.load(folder, device="host", plan="gpu", context=CONTEXT) as llm:
        plan = half_rows_plan(llm, 64)
    built, loaded = same(folder, tmp_path / "out", no_preparation, plan=plan)
    assert built == 0 < loaded


@pytest.mark.parametrize("family", ["gemma3n_text", "qwen3_moe", "lfm2"])
@pytest.mark.parametrize("precision", ["w4a16", "fp16"])
def test_tables_experts_and_states_are_exported(
    family: str,
    precision: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    no_preparation: Any,
) -> None:
    """Gemma 3n reads rows of a table from its file, and a budget of experts reads these from theirs."""
    more = {"experts_gib": 6e-4} if family == "qwen3_moe" else {}
    same(checkpoint(family), tmp_path / "out", no_preparation, plan="gpu", precision=precision, **more)


def test_a_gguf_file_is_exported(
    checkpoint: Callable[..., Path], tmp_path: Path, no_preparation: Any
) -> None:
    gguf = pytest.importorskip("gguf_writer")
    kinds = gguf.Types
    file = gguf.write_gguf(checkpoint("llama"), tmp_path / "model.gguf", kinds.Q4_0, kinds.Q8_0)
    same(file, tmp_path / "out", no_preparation, plan="layer")
    with LLM.load(tmp_path / "out") as llm:
        assert llm.checkpoint is not None
        assert llm.checkpoint.is_gguf
        assert any("bit for bit" in note for note in llm.notes)


def test_calibrated_graphs_with_shadows_are_exported(
    bundled_model: Path, tmp_path: Path, no_preparation: Any
) -> None:
    file, policy = tmp_path / "ranges.json", Policy(pruned=0.0)
    calibrate(bundled_model, output=file, precision="w8a8", windows=2, gpu_threads=1, policy=policy)
    own = {"plan": "npu", "precision": "w8a8", "calibration": file}
    built, loaded = same(bundled_model, tmp_path / "out", no_preparation, **own)
    assert built == 0 < loaded
    assert list((tmp_path / "out" / "weights").glob("*.qkv.*"))  # by channel


def test_graphs_of_scores_are_exported(
    checkpoint: Callable[..., Path], tmp_path: Path, no_preparation: Any
) -> None:
    folder, file = checkpoint("llama"), tmp_path / "heads.json"
    calibrate(folder, output=file, windows=2, window_tokens=128, gpu_threads=1)
    own = {"scales": "stepped", "calibration": file}
    with LLM.load(folder, device="host", plan="gpu", scales="stepped", context=CONTEXT) as llm:
        plan, heads = llm.plan, llm.config.attention.heads
    entries = []
    for layer, scales in calibrated_scales(file, 1).items():
        units = tuple((head,) for head in range(len(scales)))
        exponents = tuple(scale.exponent for scale in scales)
        placement = SparseAttention((0.5,) * heads, units, exponents, estimator="npu", buckets=1)
        entries.append(AttentionEntry((1, CONTEXT), (1, CONTEXT), (layer, layer), placement))
    sparse = structs.replace(
        plan.with_technique(PlannedAttention(tuple(entries))),
        chunk_length=64,
        calibration=load_calibration(file).key,
    )
    built, loaded = same(folder, tmp_path / "out", no_preparation, plan=sparse, **own)
    assert built == 0 < loaded


def test_groups_of_experts_are_exported(
    checkpoint: Callable[..., Path], tmp_path: Path, no_preparation: Any
) -> None:
    folder = checkpoint("qwen3_moe")
    with LLM.load(folder, device="host", plan="gpu", context=CONTEXT) as llm:
        plan = llm.plan
    placement = ExpertsPlacement((ExpertGroup((2, 0), 32), ExpertGroup((3,), 1)))
    mixed = plan.with_technique(PlannedExperts((ExpertsEntry((1, 64), (0, 1), placement),)))
    mixed = structs.replace(mixed, chunk_length=64)
    built, loaded = same(folder, tmp_path / "out", no_preparation, plan=mixed)
    assert built == 0 < loaded


def test_an_embedding_model_keeps_its_pooling(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    export_model(folder, tmp_path / "out", device="host", plan="gpu")
    texts = [[5, 6, 7], [8, 9]]
    with LLM.load(folder, device="host", plan="gpu") as llm:
        expected = llm.embed(texts)
    with LLM.load(tmp_path / "out") as llm:
        np.testing.assert_array_equal(llm.embed(texts), expected)


def test_a_gpu_runs_it_with_its_tuned_parameters(
    taken_for_gpu: None, checkpoint: Callable[..., Path], tmp_path: Path, no_preparation: Any
) -> None:
    built, loaded = same(checkpoint("llama"), tmp_path / "out", no_preparation, device="opencl", plan="layer")
    assert built == 0 < loaded


@pytest.mark.slow
@pytest.mark.emulator
@needs_qnn
def test_the_emulator_compiles_nothing(
    bundled_model: Path, tmp_path: Path, no_preparation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"device": "emulator", "plan": "layer", "allow_slow": True}
    built, loaded = same(bundled_model, tmp_path / "out", no_preparation, **own)
    assert built == 0 < loaded
    # Another version of the compiler.
    folder = tmp_path / "out"
    monkeypatch.setattr(
        "heterollm.kernels.npu.qnn_held.qnn_versions", lambda: {"onnxruntime-qnn": "1", "qairt": "2"}
    )
    with pytest.raises(GraphError, match="is stale") as caught:
        LLM.load(folder)
    assert "heterollm export" in caught.value.fix


@pytest.mark.slow
@pytest.mark.emulator
@needs_qnn
def test_a_phone_that_is_not_here_gets_its_contexts(bundled_model: Path, tmp_path: Path) -> None:
    made = export_model(
        bundled_model, tmp_path / "out", device="snapdragon", soc="57", plan="layer", context=CONTEXT
    )
    assert made.device == "snapdragon"
    assert made.built > 0
    assert made.versions["soc"].startswith("57")
    again = export_model(
        bundled_model, tmp_path / "out", device="snapdragon", soc="57", plan="layer", context=CONTEXT
    )
    assert again.built == 0
    with pytest.raises(HeteroLLMError, match="Hexagon"):
        LLM.load(tmp_path / "out")


# -- where the folder lies ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untouched(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an exported model and the cache of its export."""
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETEROLLM_CACHE", str(folder / "cache"))
        export_model(bundled_model, folder / "out", device="host", plan="layer", context=CONTEXT)
    return folder


@pytest.fixture
def exported(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path, dirs_exist_ok=True)) / "out"


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in (folder, *folder.rglob("*"))
    }


def test_a_moved_folder_is_read_and_never_written(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_preparation: Any
) -> None:
    with LLM.load(exported) as llm:
        expected = answers(llm)
    moved = exported.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "another cache"))
    for path in (moved, *moved.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = state_of(moved)
    no_preparation()
    for _ in range(2):  # the second load finds the hashes in the cache
        with LLM.load(moved) as llm:
            found = answers(llm)
            assert counts(llm)[0] == 0
    assert state_of(moved) == before
    assert found[1] == expected[1]
    for path in (moved, *moved.rglob("*")):
        path.chmod(0o755)


def test_unchanged_files_are_hashed_once(bundled_model: Path, tmp_path: Path) -> None:
    exported = tmp_path / "out"
    export_model(bundled_model, exported, device="host", plan="layer", context=CONTEXT)

    def hashed(folder: Path) -> int:
        stages: list[str] = []
        LLM.load(folder, progress=lambda stage, *_: stages.append(stage)).close()
        return stages.count("Checking the exported model")

    assert hashed(exported) == 0  # by the export
    other = shutil.copytree(exported, tmp_path / "copy")
    assert hashed(other) > 0
    assert hashed(other) == 0
    os.utime(other / "config.json")
    assert hashed(other) == 1


# -- damage ------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x01
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("config.json", flip),
        ("tokenizer.json", cut),
        ("plan.json", Path.unlink),
        ("weights/*.safetensors", flip),
        ("weights/*.safetensors", Path.unlink),
        ("graphs/*.onnx", flip),
        ("graphs/*.onnx", cut),
        ("graphs/*.weights", cut),
        ("graphs/*.json", Path.unlink),
    ],
)
def test_a_damaged_file_is_named_and_mended(
    pattern: str, damage: Callable[[Path], object], exported: Path, bundled_model: Path
) -> None:
    LLM.load(exported).close()
    path = sorted(exported.glob(pattern))[0]
    damage(path)
    with pytest.raises(ExportError, match=path.name) as caught:
        LLM.load(exported)
    assert "heterollm export" in caught.value.fix
    made = export_model(bundled_model, exported, device="host", plan="layer", context=CONTEXT)
    assert made.built == (1 if pattern.startswith("graphs") else 0)
    LLM.load(exported).close()


def test_a_damaged_manifest_is_refused(exported: Path) -> None:
    manifest = exported / "heterollm.json"
    content = manifest.read_bytes()
    for damaged in (content[:-20], b"", b"[]", b"{}", content.replace(b'"device": "host"', b'"device": "h"')):
        manifest.write_bytes(damaged)
        with pytest.raises(ExportError) as caught:
            LLM.load(exported)
        assert str(exported) in str(caught.value)
    manifest.write_bytes(content.replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(ExportError, match="has version 2 of exported models, and this program reads 1"):
        LLM.load(exported)
    manifest.write_bytes(content)
    found = ExportManifest.load(exported)
    for name in ("../config.json", "/etc/passwd", "a//b"):
        outside = structs.replace(found.files[0], path=name)
        structs.replace(found, files=(outside,)).save(exported)
        with pytest.raises(ExportError, match="outside of the folder"):
            LLM.load(exported)


# -- interruptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "after"),
    [
        ("Reading the checkpoint", 0),
        ("Quantising weights", 1),
        ("Compiling NPU graphs", 0),
        ("Compiling NPU graphs", 9),
        ("Checking the exported model", 5),
    ],
)
def test_an_interrupted_export_goes_on(stage: str, after: int, bundled_model: Path, tmp_path: Path) -> None:
    folder, seen = tmp_path / "out", []
    own: dict[str, Any] = {"device": "host", "plan": "layer", "context": CONTEXT}

    def interrupt(name: str, *_: int) -> None:
        seen.append(name)
        if seen.count(stage) > after and name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_model(bundled_model, folder, progress=interrupt, **own)
    with pytest.raises(HeteroLLMError, match=r"has not finished|has neither"):
        LLM.load(folder)
    # A process that was killed leaves more.
    for kind in ("weights", "graphs"):
        if (folder / kind).is_dir():
            (folder / kind / f".{'a' * 32}.safetensors.{'b' * 16}.partial").write_bytes(b"half")
            (folder / kind / f".{'c' * 32}.building").mkdir()
    before = state_of(folder)
    graphs = len(list(folder.glob("graphs/*.json")))
    made = export_model(bundled_model, folder, **own)
    assert made.built == 16 - graphs
    after_all = state_of(folder)
    kept = [name for name in before if name.startswith(("weights/", "graphs/")) and "/." not in name]
    assert all(after_all[name] == before[name] for name in kept if not name.endswith(".lock"))
    assert not [name for name in after_all if name.endswith((".partial", ".building", ".lock"))]
    with LLM.load(folder) as llm, LLM.load(bundled_model, **own) as other:
        assert answers(llm)[1] == answers(other)[1]
    listed = {one.path for one in ExportManifest.load(folder).files}
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files - listed == {"heterollm.json", ".heterollm"}


def test_a_folder_with_other_content_stays_as_it_is(
    exported: Path, bundled_model: Path, tmp_path: Path
) -> None:
    own: dict[str, Any] = {"device": "host", "plan": "layer", "context": CONTEXT}
    before = state_of(exported)
    for other in ({"plan": "gpu"}, {"precision": "fp16"}, {"context": 64}):
        with pytest.raises(ExportError, match="exported with other options"):
            export_model(bundled_model, exported, **{**own, **other})
    assert state_of(exported).keys() == before.keys()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(OptionError, match="holds other files"):
        export_model(bundled_model, tmp_path / "mine", **own)
    with pytest.raises(OptionError, match="cannot be written"):
        export_model(bundled_model, tmp_path / "mine" / "thesis.txt", **own)
    with pytest.raises(HeteroLLMError, match="is an exported model"):
        export_model(exported, tmp_path / "again", **own)


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "emulator"}, "--device emulator contradicts .* in which it is host"),
        ({"precision": "fp16"}, "--precision fp16 contradicts .* in which it is w4a16"),
        ({"plan": "gpu"}, "--plan gpu contradicts .* in which it is layer"),
        ({"plan": "auto"}, "--plan auto contradicts"),
        ({"group_size": 64}, "--group-size 64 contradicts"),
        ({"symmetric": False}, "--asymmetric contradicts"),
        ({"context": CONTEXT + 1}, f"--context {CONTEXT + 1} contradicts .* at most {CONTEXT}"),
        ({"profile": "profile.json"}, "--profile profile.json contradicts"),
    ],
)
def test_options_that_contradict_the_folder_are_named(
    options: dict[str, Any], words: str, exported: Path
) -> None:
    with pytest.raises(ExportError, match=words):
        LLM.load(exported, **options)
    LLM.load(exported, **options, defaults=frozenset(options)).close()  # a file's yield to the folder


def test_equal_and_open_options_are_taken(exported: Path) -> None:
    own = {"device": "host", "plan": "layer", "precision": "w4a16", "kv_bits": 8, "context": 64}
    with LLM.load(exported, **own, speculative="lookup") as llm:
        assert llm.context == 64
        assert llm.device.cache_dtype == np.int8
    with pytest.raises(OptionError, match="There is no option"):
        LLM.load(exported, presicion="w4a16")
    with pytest.raises(OptionError, match="context of 0"):
        LLM.load(exported, context=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"speculative": "lookup"}, "speculative leaves nothing to export"),
        ({"device": "sim:snapdragon-8gen3"}, "nothing is to export for it"),
        ({"soc": "57"}, "soc is for device snapdragon"),
        ({"soc": "1", "device": "snapdragon"}, "There is no chip '1'"),
        ({"context_layers": 1}, "context_layers is for a device that is not here"),
    ],
)
def test_an_export_without_effect_is_refused(
    options: dict[str, Any], words: str, bundled_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=words):
        export_model(bundled_model, tmp_path / "out", **options)
    assert not (tmp_path / "out" / "heterollm.json").exists()


def test_defaults_of_a_file_apply_where_the_folder_leaves_them_open(exported: Path) -> None:
    with LLM.load(exported, kv_bits=8, allow_slow=True, defaults=frozenset({"kv_bits", "allow_slow"})) as llm:
        assert llm.device.cache_dtype == np.int8


def test_tuned_parameters_travel_to_the_device_they_are_for(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = checkpoint("llama"), tmp_path / "out"
    shape = ShapeClass(WeightFormat(4, 32), False, False, "many")
    chosen = structs.replace(default_parameters("vector", shape), items=1, token_step=64)
    with LLM.load(folder, device="host", plan="gpu") as llm:
        llm.device.gpu.tuning.change(lambda table: table.keep(shape, Tuned(chosen, 1.0, 2.0)))
    export_model(folder, out, device="host", plan="gpu")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "another cache"))
    with LLM.load(out) as llm:
        assert llm.device.gpu.tuning.parameters(shape) == chosen
        assert not llm.plan_notes
    file = out / "tuning.json"
    other = file.read_text().replace('"driver": "', '"driver": "0')
    file.write_text(other)
    found = ExportManifest.load(out)
    files = tuple(
        structs.replace(
            one, size_bytes=len(other.encode()), sha256=hashlib.sha256(other.encode()).hexdigest()
        )
        if one.path == file.name
        else one
        for one in found.files
    )
    structs.replace(found, files=files).save(out)
    with LLM.load(out) as llm:
        assert llm.device.gpu.tuning.parameters(shape) is None
        (note,) = llm.plan_notes
        assert "The exported kernel parameters are not used. Its driver is" in note


# -- the command line --------------------------------------------------------------------------------


def test_the_command_says_what_it_wrote_and_how_to_run_it(
    bundled_model: Path, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    folder = tmp_path / "out"
    words = ("export", bundled_model, "--device", "host", "--plan", "layer", "-o", folder)
    code, shown, _ = run(*words)
    assert code == 0
    for text in ("weights", "NPU graphs", "settings and tokenizer", f"heterollm generate {folder}"):
        assert text in shown
    code, shown, _ = run(*words, "--json")
    assert code == 0
    assert json.loads(shown)["built"] == 0
    prompt = ("generate", folder, "def f(x):", "--max-new-tokens", 6)
    code, shown, _ = run(*prompt)
    assert code == 0
    own = ("--device", "host", "--plan", "layer")
    assert run("generate", bundled_model, *prompt[2:], *own)[1] == shown
    code, _, shown = run(*prompt, "--precision", "fp16")
    assert code == 1
    assert "--precision fp16 contradicts" in shown
    code, _, shown = run(*prompt, "--plan", "auto")  # given, though a default
    assert code == 1
    assert "--plan auto contradicts" in shown
    code, _, shown = run(*prompt, "--profile", "quick")
    assert code == 1
    assert "has one" in shown
    code, _, shown = run("calibrate", folder, "-o", tmp_path / "ranges.json")
    assert code == 1
    assert "is an exported model" in shown


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_graphs_that_others_can_write_are_refused(exported: Path) -> None:
    graph = sorted(exported.glob("graphs/*.onnx"))[0]
    graph.chmod(0o666)
    with pytest.raises(GraphError, match=r"not safe \(another user can write it\)") as caught:
        LLM.load(exported)
    assert "chmod" in caught.value.fix


def test_a_draft_is_a_checkpoint(exported: Path, bundled_model: Path) -> None:
    with pytest.raises(HeteroLLMError, match="is an exported model"):
        LLM.load(bundled_model, device="host", plan="gpu", speculative=exported)

"""Shadow outliers end to end, with norms that were made to give outlier channels and the same results."""

import gc
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16, which the bundled checkpoint has
import numpy as np
import pytest
from msgspec import structs
from safetensors.numpy import load_file, save_file

import heterollm
from heterollm.base import PlanError
from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.calibration.int8_records import ChannelOutliers
from heterollm.calibration.range_records import LinearCalibration
from heterollm.calibration.records import Calibration
from heterollm.engine.shadow import cold
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.ops import Member, OpSpec, Phase, WeightFormat
from heterollm.llm import LLM
from heterollm.solver import ChunkSchedule, GroupTimes, Plan, describe, model_shape, with_shadows
from heterollm.solver.placements import GPU_ONLY, FfnPlacement, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

FACTOR = 32.0
"""Of the injected outlier channels."""

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
CASES = {1: "npu", 5: "row", 63: "npu", 64: "row", 70: "sequence", 129: "sequence", 160: "row"}
"""The split of every operator in a pass of so many tokens."""

CHUNK = 160
PHASES: tuple[Phase, ...] = ("prefill", "decode")
W8A8: dict[str, Any] = {"device": "host", "precision": "w8a8"}


@pytest.fixture(scope="module")
def injected(bundled_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundled model with larger norm weights, and smaller columns of the linears behind."""
    folder = tmp_path_factory.mktemp("outliers") / "model"
    shutil.copytree(bundled_model, folder)
    tensors, rng, layer = load_file(folder / "model.safetensors"), np.random.default_rng(0), 0
    while f"model.layers.{layer}.input_layernorm.weight" in tensors:
        for norm, readers in READERS.items():
            name = f"model.layers.{layer}.{norm}.weight"
            channels = rng.choice(len(tensors[name]), 4, replace=False)
            tensors[name][channels] *= tensors[name].dtype.type(FACTOR)
            for reader in readers:
                tensors[f"model.layers.{layer}.{reader}.weight"][:, channels] /= FACTOR
        layer += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def calibrated(injected: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    path = tmp_path_factory.mktemp("calibration") / "calibration.json"
    return calibrate(
        injected, output=path, precision="w8a8", windows=3, gpu_threads=1, policy=Policy(pruned=0.0)
    )


@pytest.fixture(scope="module")
def ids(injected: Path) -> list[int]:
    with LLM.load(injected, plan="gpu", **W8A8) as llm:
        return llm.tokenizer.encode(Path(__file__).read_text())[: 3 * CHUNK]


def changed(found: Calibration, path: Path, change: Callable[[LinearCalibration], LinearCalibration]) -> Path:
    structs.replace(found, linears=tuple(map(change, found.linears))).save(path)
    return path


def keeping(found: Calibration, path: Path, share: float) -> Path:
    """Write a calibration that keeps a share of the shadows, those that take most error away."""
    ranked = sorted(
        (one for one in found.linears if one.int8.activations == "shadow"), key=lambda one: -one.int8.gain
    )
    kept = {(one.layer, one.group) for one in ranked[: round(share * len(ranked))]}

    def decided(one: LinearCalibration) -> LinearCalibration:
        kind = "shadow" if (one.layer, one.group) in kept else "int8"
        return structs.replace(one, int8=structs.replace(one.int8, activations=kind))

    return changed(found, path, decided)


def with_hot(found: Calibration, path: Path, hot: int) -> Path:
    """Write a calibration with so many hot channels: they have nearly all of the outliers."""

    def named(one: LinearCalibration) -> LinearCalibration:
        chosen = one.int8.chosen
        channels = [
            ChannelOutliers(own.channel, 10**6 if place < hot else 1, own.maximum)
            for place, own in enumerate(one.int8.shadow.outliers)
        ]
        own = structs.replace(one.int8.shadow, outliers=tuple(channels))
        candidates = (*one.int8.shadows[:chosen], own, *one.int8.shadows[chosen + 1 :])
        return structs.replace(one, int8=structs.replace(one.int8, shadows=candidates))

    return changed(found, path, named)


def shadowed(found: Calibration) -> Collection[tuple[int, str]]:
    return {(one.layer, one.group) for one in found.linears if one.int8.activations == "shadow"}


def split_plan(llm: LLM, path: Path) -> Plan:
    """Return a plan with the splits of :data:`CASES`; other lengths and the head run on the GPU."""
    specs, entries, layers = llm._weights.specs, [], (0, llm.config.layers - 1)
    for tokens, kind in CASES.items():
        padded = (64,) if kind == "sequence" and tokens < 128 else (-(-tokens // 64) * 64,)
        padded = {192: (128, 64)}.get(padded[0], padded)
        if kind == "sequence" and tokens > 128:
            padded = (64, 64)
        for spec in specs[:4]:
            half = tuple(rows // 2 // 64 * 64 for rows in spec.member_rows)
            rows = half if kind == "row" and any(half) else spec.member_rows
            at = RowsPlacement(rows, padded, "static_int8")
            entries += [PlanEntry(phase, (tokens, tokens), layers, spec.group, at) for phase in PHASES]
    for phase in PHASES:
        entries += [
            PlanEntry(phase, (1, CHUNK), (spec.layer, spec.layer), spec.group, GPU_ONLY) for spec in specs
        ]
    found = load_calibration(path)
    plan = Plan("shadows", "host", "w8a8", model_shape(specs), CHUNK, tuple(entries), calibration=found.key)
    return with_shadows(plan, shadowed(found))


def answers(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return logits of passes of every length, of decoded tokens, and of a chunk after another."""
    session, rows = llm.session(), []
    for tokens in CASES:
        session.reset()
        rows += [*session.prefill(ids[:tokens], all_logits=True), session.decode(ids[tokens])]
    session.reset()
    rows += [session.prefill(ids[: 2 * CHUNK + 5]), *session.decode(ids[-5:])]
    return np.stack(rows)


def test_the_logits_get_better_the_fewer_shadows_are_pruned(
    injected: Path, calibrated: Calibration, host_llm: Callable[..., LLM], ids: list[int], tmp_path: Path
) -> None:
    """From 100 % over half to none; against float activations on the same weights."""
    exact = host_llm(injected, plan="gpu", **W8A8).session().prefill(ids[:130], all_logits=True)
    quality_db = []
    for share in (0.0, 0.5, 1.0):
        path = keeping(calibrated, tmp_path / f"{share}.json", share)
        llm = host_llm(injected, plan="npu", calibration=path, **W8A8)
        quality_db.append(sqnr_db(llm.session().prefill(ids[:130], all_logits=True), exact))
    assert quality_db[0] < quality_db[1] < quality_db[2]
    assert quality_db[2] > quality_db[0] + 10


@pytest.mark.parametrize(
    ("kind", "sync"),
    [
        ("svm", "event"),
        *(
            pytest.param(kind, sync, marks=pytest.mark.slow)
            for kind, sync in (
                ("mapped", "event"),
                ("host", "flag"),
                ("mapped", "finish"),
                ("svm", "operator"),
            )
        ),
    ],
)
def test_every_split_has_its_shadow(
    kind: str,
    sync: str,
    injected: Path,
    calibrated: Calibration,
    host_llm: Callable[..., LLM],
    ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order of buffers is proven on the way, and the same passes give the same bits again."""
    plain = host_llm(injected, plan="gpu", **W8A8)
    exact = answers(plain, ids)
    path = keeping(calibrated, tmp_path / "all.json", 1.0)
    plan = split_plan(plain, path)
    monkeypatch.setenv("HETEROLLM_SHARED_MEMORY", kind)
    monkeypatch.setenv(CHECK_VARIABLE, "5")
    options = {**W8A8, "calibration": path, "sync": sync}
    llm = host_llm(injected, plan=plan, **options)
    got = answers(llm, ids)
    np.testing.assert_array_equal(answers(llm, ids), got)
    reading = (
        step
        for step in llm.steps("prefill", 5)
        if "outliers" in {buffer.name for buffer in (*step.reads, *step.writes)}
    )
    listed = Counter(step.action for step in reading if step.processor == "host")
    assert listed["fetch"] == listed["read_ahead"] > 0
    if kind == "mapped":
        assert listed["acquire_to_read"] == listed["release"] == listed["fetch"]
    without = with_shadows(plan, {(-1, "qkv")})
    assert sqnr_db(got, exact) > sqnr_db(answers(host_llm(injected, plan=without, **options), ids), exact) + 8


@pytest.mark.parametrize("room", [2, cold.COLD_CHANNELS])
def test_channels_that_are_not_in_memory_count_too(
    room: int,
    injected: Path,
    calibrated: Calibration,
    host_llm: Callable[..., LLM],
    ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one hot channel, and with all of them, in batches that one reading fills or many."""
    monkeypatch.setattr(cold, "COLD_CHANNELS", room)
    results, counts = [], []
    for hot in (1, 10**6):
        path = with_hot(calibrated, tmp_path / f"{hot}.json", hot)
        llm = host_llm(injected, plan="npu", calibration=path, **W8A8)
        results.append(llm.session().prefill(ids[:70], all_logits=True))
        counts.append(sum("outliers were read" in note for note in llm.notes))
    assert counts[0] == 1
    # Sums of float32 in another order move a few codes by a step.
    assert sqnr_db(results[0], results[1]) > 45


def test_a_trace_shows_the_kernels_of_channels_that_are_not_in_memory(
    injected: Path, calibrated: Calibration, ids: list[int], tmp_path: Path
) -> None:
    path = with_hot(calibrated, tmp_path / "cold.json", 1)
    with LLM.load(injected, plan="npu", calibration=path, trace=True, **W8A8) as llm:
        llm.take_trace()
        llm.session().prefill(ids[:70])
        steps, trace = llm.steps("prefill", 70), llm.take_trace()
    fetches = [span for span in trace.spans if span.operator == "fetch"]
    assert len(fetches) == sum(step.action == "fetch" for step in steps)
    cold = {
        track: [span for span in trace.spans if span.operator == "cold outliers" and span.track == track]
        for track in ("engine", "gpu")
    }
    # An operator without such channels in this text has no kernel.
    assert 0 < len(cold["gpu"]) == len(cold["engine"])
    for launch, kernel in zip(cold["engine"], cold["gpu"], strict=True):
        (around,) = (
            one for one in fetches if one.begin_ns <= launch.begin_ns and launch.end_ns <= one.end_ns
        )
        assert launch.layer == kernel.layer == around.layer
        assert kernel.category == "other"


def test_chunks_in_flight_give_the_bits_of_one_after_the_other(
    injected: Path,
    calibrated: Calibration,
    host_llm: Callable[..., LLM],
    ids: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "7")
    path = with_hot(calibrated, tmp_path / "cold.json", 1)
    plain = host_llm(injected, plan="npu", calibration=path, **W8A8)
    entries = [
        structs.replace(entry, lengths=(entry.lengths[0], min(64, entry.lengths[1])))
        for entry in plain.plan.entries
        if entry.lengths[0] <= 64
    ]
    key = load_calibration(path).key
    plan = structs.replace(plain.plan, chunk_length=64, entries=tuple(entries), slices=(), calibration=key)
    times = tuple(GroupTimes(group, 1.0, 0.01, 1.0, 3.0) for group in ("qkv", "o", "gate_up", "down"))
    flying = structs.replace(plan, schedule=ChunkSchedule("out_of_order", 3, times))
    found = []
    for one in (plan, flying):
        session = host_llm(injected, plan=one, calibration=path, **W8A8).session()
        found.append(np.stack([session.prefill(ids[:205]), session.prefill(ids[205:300])]))
    np.testing.assert_array_equal(*found)


def test_decoding_makes_no_lasting_object(
    injected: Path, calibrated: Calibration, host_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    """Although most steps read channels from disk."""
    path = with_hot(calibrated, tmp_path / "cold.json", 1)
    llm = host_llm(injected, plan="npu", calibration=path, **W8A8)
    session = llm.session()
    session.prefill(list(range(260)))  # from here on one bucket of the context serves

    def decode() -> None:
        for token in range(30):
            session.decode_in_place(token)

    llm._thread.run(decode)
    gc.collect()
    ours = [tracemalloc.Filter(True, str(Path(heterollm.__file__).parent / "*"))]
    tracemalloc.start(1)
    try:
        before = tracemalloc.take_snapshot().filter_traces(ours)
        llm._thread.run(decode)
        after = tracemalloc.take_snapshot().filter_traces(ours)
    finally:
        tracemalloc.stop()
    assert sum(difference.size_diff for difference in after.compare_to(before, "lineno")) < 2048
    assert [note for note in llm.notes if "outliers were read" in note]


def test_a_pruned_operator_has_no_kernel_of_the_gpu(
    injected: Path, calibrated: Calibration, host_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    path = keeping(calibrated, tmp_path / "half.json", 0.5)
    llm = host_llm(injected, plan="npu", calibration=path, **W8A8)
    kept = shadowed(load_calibration(path))
    count = Counter(
        (step.layer, step.operator) for step in llm.steps("prefill", 64) if step.action == "kernel"
    )
    for layer in range(llm.config.layers):
        own = sum(place == layer for place, _ in kept)
        assert (count[layer, "outliers"], count[layer, "finding of outliers"]) == (own, 2 * own)
        assert not any(count[layer, group] for group in ("qkv", "o", "gate_up", "down"))
    fetched = [step for step in llm.steps("prefill", 64) if step.action == "fetch"]
    assert {(step.layer, step.operator) for step in fetched} == kept


def test_plans_say_where_shadows_are() -> None:
    at = RowsPlacement((64,), (64,), "static_int8")
    entry = PlanEntry("prefill", (1, 64), (0, 5), "o", at)
    plan = Plan("made", "host", "w8a8", "any", 64, (entry,))
    made = with_shadows(plan, {(2, "o"), (3, "o"), (4, "qkv")})
    assert [(one.layers, one.placement.shadow) for one in made.entries] == [
        ((0, 1), False),
        ((2, 3), True),
        ((4, 5), False),
    ]
    spec = OpSpec("o", 2, (Member("o", 128),), 64, WeightFormat(8, 32, scales="tensor"), "x", "y")
    shown = [
        describe(one.placement, spec, 64).endswith("static_int8 with shadow outliers") for one in made.entries
    ]
    assert shown == [False, True, False]
    assert Plan.from_json(made.to_json()) == made
    assert '"shadow"' not in plan.to_json()
    ffn = structs.replace(entry, group="ffn", placement=FfnPlacement(64, (64,), "ffn_integer"))
    assert with_shadows(structs.replace(plan, entries=(ffn,), slices=()), {(0, "ffn")}).entries == (ffn,)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("o", "the calibration found no outliers in its input"),
        ("gate_up", "the calibration keeps its activations in 16 bits"),
        ("qkv", "no calibration is given"),
    ],
)
def test_a_shadow_without_outliers_is_refused_before_weights_are_read(
    group: str,
    reason: str,
    injected: Path,
    calibrated: Calibration,
    host_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(one: LinearCalibration) -> LinearCalibration:
        int8, place = one.int8, (one.layer, one.group)
        if place == (2, "gate_up"):
            int8 = structs.replace(int8, activations="int16")
        elif place == (2, "o"):
            own = structs.replace(int8.shadow, outliers=(), most_channels=0)
            int8 = structs.replace(int8, activations="int8", shadows=(own,), chosen=0)
        return structs.replace(one, int8=int8)

    path = changed(calibrated, tmp_path / "calibration.json", without)
    options: dict[str, Any] = {**W8A8, "calibration": path}
    if group == "qkv":
        options = {"device": "host", "precision": "w4a16"}
    given = {name: value for name, value in options.items() if name != "calibration"}
    specs = host_llm(injected, plan="gpu", **given)._weights.specs
    own = next(spec for spec in specs if spec.group == group)
    form = "integer" if group == "qkv" else "static_int8"
    at = RowsPlacement(own.member_rows, (64,), form, shadow=True)
    entries = [PlanEntry("prefill", (2, 64), (1, 3), group, at)]
    for phase in PHASES:
        entries += [
            PlanEntry(phase, (1, 64), (spec.layer, spec.layer), spec.group, GPU_ONLY) for spec in specs
        ]
    key = load_calibration(path).key if "calibration" in options else None
    precision = options["precision"]
    plan = Plan("edited", "host", precision, model_shape(specs), 64, tuple(entries), calibration=key)
    monkeypatch.setattr(heterollm.loading, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    layer = 1 if group == "qkv" else 2
    expected = f"shadow of outliers for {group} of layer {layer}, and {reason}"
    with pytest.raises(PlanError, match=expected) as caught:
        LLM.load(injected, plan=plan, **options)
    assert f"entries of {group} for layer {layer}" in caught.value.fix


def test_a_shadow_needs_clamped_inputs(injected: Path, host_llm: Callable[..., LLM]) -> None:
    spec = host_llm(injected, plan="gpu", **W8A8)._weights.specs[1]
    with pytest.raises(PlanError, match="clamps no inputs"):
        RowsPlacement(spec.member_rows, (64,), "matmul_nbits", shadow=True).check(spec, 64)

"""Layers with heads of their own, keys of other layers and embeddings of their own: Gemma 4."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gates import LOGITS_SQNR_DB

from heterollm.base import CheckpointError, HeteroLLMError, OptionError
from heterollm.engine.slot_check import CHECK_VARIABLE
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import ModelConfig, op_specs, shape_of_specs
from heterollm.model.json_fields import read_json_object
from heterollm.model.tensor_file import TensorFile
from heterollm.planning.techniques.sparse_attention import assumed_heads
from heterollm.profiler.measure import layer_tasks
from heterollm.solver import AttentionRequest, Plan
from tests.heterollm.conftest import config_of

KINDS = ("gemma4_text", "gemma4_unified_text")


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("level", ["gpu", "rows"])
def test_pieces_truncation_and_forks_give_transformers_logits(
    level: str,
    family: str,
    checkpoint: Callable[..., Path],
    host_llm: Callable[..., LLM],
    half_rows_plan: Callable[..., Plan],
    reference: Callable[..., np.ndarray],
    token_ids: Callable[[int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "5")
    folder, ids = checkpoint(family), token_ids(73)
    llm = host_llm(folder, plan="gpu", context=96)
    if level == "rows":
        llm = host_llm(folder, plan=half_rows_plan(llm, 64), context=96)
    expected = reference(llm, folder, ids)
    session, rows, first = llm.session(), [], 0
    for piece in (33, 1, 30):
        rows.append(session.prefill(ids[first : first + piece], all_logits=True))
        first += piece
    rows.append(session.decode(ids[first : first + 4]))
    session.truncate(66)
    fork = session.fork()
    rows[-1] = rows[-1][:2]
    rows += [one[None] for one in map(session.decode, ids[66:])]
    assert sqnr_db(np.concatenate(rows), expected) >= LOGITS_SQNR_DB["fp32"]
    forked = np.stack([fork.decode(token) for token in ids[66:]])
    np.testing.assert_array_equal(forked, np.concatenate(rows)[66:])


def test_layers_that_read_the_keys_of_others_keep_none(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    own, shared = (
        host_llm(checkpoint("gemma4_text", num_kv_shared_layers=count), plan="gpu", context=256)
        for count in (0, 2)
    )
    assert 2 * shared.session().memory_bytes == own.session().memory_bytes


def test_memory_counts_the_linear_of_layers_embeddings(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM]
) -> None:
    from heterollm.engine.memory import memory_need

    llm = host_llm(checkpoint("gemma4_text"), plan="gpu")
    specs = llm._weights.specs
    need = memory_need(llm.config, specs, llm.plan, 256, {}, np.dtype(np.float32))
    linear = specs[-1].weight.weight_bytes(4 * 128, 128)
    assert need.gpu_weights == sum(spec.weight_bytes() for spec in specs) + linear


def test_rows_of_layers_embeddings_stay_in_the_file(
    checkpoint: Callable[..., Path], host_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    name = "model.embed_tokens_per_layer.weight"
    source = checkpoint("gemma4_text")
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    file = TensorFile.open(folder / "model.safetensors")
    start = (folder / "model.safetensors").stat().st_size - len(file.data) + file.entries[name].start
    row_bytes = file.bits(name)[0].nbytes
    with (folder / "model.safetensors").open("r+b") as raw:
        raw.seek(start + 7 * row_bytes)
        raw.write(b"\xff" * row_bytes)
    whole, damaged = host_llm(source, plan="gpu"), host_llm(folder, plan="gpu")
    assert whole.session().prefill([5, 7]).shape == damaged.session().prefill([5, 6]).shape
    with pytest.raises(
        CheckpointError, match=f"model.safetensors: tensor {name} holds NaN or infinite values"
    ):
        damaged.session().prefill([5, 7])
    # The failed pass leaves the model usable.
    ids = [8, 9, 10]
    np.testing.assert_array_equal(damaged.session().prefill(ids), whole.session().prefill(ids))


def test_sparse_attention_needs_heads_that_are_alike(checkpoint: Callable[..., Path]) -> None:
    config = ModelConfig.from_folder(checkpoint("gemma4_text"))
    with pytest.raises(OptionError, match="different heads, or keys of other layers"):
        assumed_heads(config, AttentionRequest())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3; expected few enough"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "of the last full_attention"),
        ({"global_head_dim": 33}, "global_head_dim is 33; expected an even width"),
        ({"vocab_size_per_layer_input": 128}, "at least the vocab_size of 2048"),
        ({"enable_moe_block": True}, "moe_intermediate_size is missing"),
        ({"use_bidirectional_attention": "all"}, "attention in both directions"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    change: dict[str, object], message: str, checkpoint: Callable[..., Path]
) -> None:
    values = read_json_object(checkpoint("gemma4_text") / "config.json") | change
    if "global_head_dim" in change:
        del values["per_layer_config"]
    with pytest.raises(HeteroLLMError, match=message):
        ModelConfig.from_dict(values)


def test_profiles_have_times_of_what_lies_between_linears() -> None:
    """Of Gemma 3n: mixing of streams, the branch beside attention, cutoffs of gates."""
    config = config_of("gemma3n_text")
    specs = op_specs(config, "w4a16", 32, True)
    before = {name for spec in specs if spec.layer >= 0 for name in spec.before}
    assert {"stream_mixing", "laurel", "gate_cutoff"} < before
    assert [spec.group for spec in specs if "laurel" in spec.before] == ["qkv"] * config.layers
    shape = shape_of_specs(config, specs, "tiny")
    tasks = layer_tasks(open_device("sim:snapdragon-8gen3"), [shape], quick=True)
    assert before <= {key.operator for task in tasks for key in task.keys}

import json
import os
import shutil
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from heterollm.base import CheckpointError
from heterollm.model import Checkpoint, ModelConfig
from heterollm.model.tensor_file import TensorFile

SAFETENSORS = "model.safetensors"


def read_raw(path):
    """The header as an object and the bytes after it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def validate(folder):
    Checkpoint(folder).validate(ModelConfig.from_folder(folder))


@pytest.fixture(scope="module")
def models(tmp_path_factory, write_model):
    """Checkpoints of one kind each; tests change only copies."""
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "llama", "llama")
    write_model(folder / "tied", "llama", tie_word_embeddings=True)
    write_model(folder / "qwen2", "qwen2")
    write_model(folder / "sharded", "llama", max_shard_size="80KB")
    return folder


@pytest.fixture
def model(models, tmp_path):
    """A copy of a checkpoint, in a folder whose name has a space and other letters."""

    def copy(name="llama"):
        return shutil.copytree(models / name, tmp_path / f"mein größtes Modell {name} 模型")

    return copy


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_float_type_reads_as_torch_does(tmp_path, write_model, dtype):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    folder = write_model(tmp_path, "qwen2", dtype=dtype)
    expected = load_file(folder / SAFETENSORS)
    checkpoint = Checkpoint(folder)
    checkpoint.validate(ModelConfig.from_folder(folder))
    assert set(checkpoint.names) == set(expected)
    for name, tensor in expected.items():
        values = checkpoint.read(name)
        assert values.dtype == np.float32
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.size_bytes(name) == tensor.nbytes
        np.testing.assert_array_equal(values, tensor.to(torch.float32).numpy())
    rows = checkpoint.read("lm_head.weight", (7, 30))
    np.testing.assert_array_equal(rows, expected["lm_head.weight"].to(torch.float32).numpy()[7:30])


def test_the_bundled_model_is_sound():
    validate(str(resources.files("heterollm.data.tiny_python_lm")))


def test_shards_read_as_one(models):
    assert len(list((models / "sharded").glob("*.safetensors"))) > 2
    whole, sharded = Checkpoint(models / "llama"), Checkpoint(str(models / "sharded"))
    assert set(whole.names) == set(sharded.names)
    for name in whole.names:
        np.testing.assert_array_equal(whole.read(name), sharded.read(name))
    validate(models / "sharded")


def test_tied_and_untied_heads(model):
    validate(model("tied"))
    folder = model("llama")
    change_config(folder, tie_word_embeddings=True)
    with pytest.raises(
        CheckpointError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight, but holds two different"
    ):
        validate(folder)
    header, data = read_raw(folder / SAFETENSORS)
    embedding = header["model.embed_tokens.weight"]["data_offsets"]
    head = header["lm_head.weight"]["data_offsets"]
    data = bytearray(data)
    data[head[0] : head[1]] = data[embedding[0] : embedding[1]]
    write_raw(folder / SAFETENSORS, header, bytes(data))
    validate(folder)


@pytest.mark.parametrize("kept", [("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")])
def test_a_tied_embedding_loads_under_the_name_of_the_head(model, kept):
    folder = model("tied")
    wanted = Checkpoint(folder).read("model.embed_tokens.weight")
    tensors = load_file(folder / SAFETENSORS)
    values = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, **{name: values.copy() for name in kept}}, folder / SAFETENSORS)
    found = Checkpoint(folder)
    found.validate(ModelConfig.from_folder(folder))
    assert np.array_equal(found.read("model.embed_tokens.weight"), wanted)
    assert len(found.names) == len(tensors) + len(kept)
    change_config(folder, tie_word_embeddings=False)
    if len(kept) == 1:
        with pytest.raises(CheckpointError, match=r"lacks tensors.*embed_tokens"):
            validate(folder)


def test_an_untied_head_must_be_there(model):
    folder = model("tied")
    change_config(folder, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks tensors.*: lm_head\.weight\."):
        validate(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"lacks tensors .*model\.layers\.2\..* and 6 more"),
        ({"num_hidden_layers": 1}, r"no place for: model\.layers\.1\."),
        ({"intermediate_size": 112}, r"mlp\.down_proj\.weight \[64, 96\] instead of \[64, 112\]"),
        ({"vocab_size": 161}, r"embed_tokens\.weight \[160, 64\] instead of \[161, 64\]"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight \[32, 64\] instead of \[64, 64\]"),
        ({"attention_bias": True}, r"lacks tensors .*k_proj\.bias"),
    ],
)
def test_a_configuration_that_disagrees(model, changes, message):
    folder = model()
    change_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        validate(folder)


def test_biases_that_the_configuration_denies(model):
    folder = model("qwen2")
    change_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match=r"no place for: .*k_proj\.bias"):
        validate(folder)


def rename(header, old, new):
    return {new if name == old else name: value for name, value in header.items()}


def test_frequencies_of_old_exporters_are_passed_over(model):
    folder = model()
    header, data = read_raw(folder / SAFETENSORS)
    place = {"dtype": "F32", "shape": [8], "data_offsets": [len(data), len(data) + 32]}
    header["model.layers.1.self_attn.rotary_emb.inv_freq"] = place
    write_raw(folder / SAFETENSORS, header, data + bytes(32))
    validate(folder)
    header = rename(header, "model.layers.1.self_attn.rotary_emb.inv_freq", "model.extra.weight")
    write_raw(folder / SAFETENSORS, header, data + bytes(32))
    with pytest.raises(CheckpointError, match=r"no place for: model\.extra\.weight"):
        validate(folder)


def test_masks_of_old_exporters_are_passed_over(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("gpt_neox"), tmp_path / "neox")
    header, data = read_raw(folder / SAFETENSORS)
    place = {"dtype": "BOOL", "shape": [1, 1, 8, 4], "data_offsets": [len(data), len(data) + 32]}
    header["gpt_neox.layers.1.attention.bias"] = place
    write_raw(folder / SAFETENSORS, header, data + bytes(32))
    validate(folder)
    header = rename(header, "gpt_neox.layers.1.attention.bias", "gpt_neox.layers.2.attention.bias")
    write_raw(folder / SAFETENSORS, header, data + bytes(32))
    with pytest.raises(CheckpointError, match=r"no place for: gpt_neox\.layers\.2\.attention\.bias"):
        validate(folder)


def test_a_missing_tensor(model):
    folder = model()
    header, data = read_raw(folder / SAFETENSORS)
    name = "model.layers.0.mlp.up_proj.weight"
    write_raw(folder / SAFETENSORS, rename(header, name, f"{name}.old"), data)
    with pytest.raises(CheckpointError, match=rf"lacks tensors .*: {name}\."):
        validate(folder)
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        Checkpoint(folder).read(name)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
def test_a_tensor_of_integers(model, dtype):
    folder = model()
    header, data = read_raw(folder / SAFETENSORS)
    header["model.norm.weight"]["dtype"] = dtype
    write_raw(folder / SAFETENSORS, header, data)
    with pytest.raises(CheckpointError, match=rf"F16, BF16, F32: model\.norm\.weight \({dtype}\)"):
        validate(folder)
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight has type {dtype}"):
        Checkpoint(folder).read("model.norm.weight")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers(model, value):
    folder = model()
    header, data = read_raw(folder / SAFETENSORS)
    name = "model.layers.1.mlp.down_proj.weight"
    start = header[name]["data_offsets"][0] + 4 * 500
    data = data[:start] + np.float32(value).tobytes() + data[start + 4 :]
    write_raw(folder / SAFETENSORS, header, data)
    validate(folder)
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=f"tensor {name} holds NaN or infinite"):
        checkpoint.read(name)
    checkpoint.read(name, (0, 5))


@pytest.mark.parametrize("kept", [0.999, 0.5, 0.01])
def test_a_truncated_shard_is_named(model, kept):
    folder = model("sharded")
    shard = sorted(folder.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    header, _ = read_raw(shard)
    start = int.from_bytes(shard.read_bytes()[:8], "little") + 8
    left = max(int(size * kept), start + 64)
    os.truncate(shard, left)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    [cut] = [name for name, (first, stop) in ends.items() if first <= left - start < stop]
    assert shard.name in str(caught.value)
    assert f"the file ends in tensor {cut}." in str(caught.value)
    assert "Download it again; it may be cut short." in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100])
def test_a_file_cut_in_its_header(model, size):
    folder = model()
    os.truncate(folder / SAFETENSORS, size)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no sound safetensors file"):
        Checkpoint(folder)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"not json",
        b"[]",
        b"[" * 5000,
        {"__metadata__": 3, "a": entry()},
        {"__metadata__": {"x": 1}, "a": entry()},
        {"a": 5},
        {"a": {"dtype": "F32"}},
        {"a": entry(shape=(-1, -2))},
        {"a": entry(shape=(2.0,))},
        {"a": entry(shape=(3,))},
        {"a": entry(offsets=(0, 8, 9))},
        {"a": entry(offsets=(-8, 0))},
        {"a": entry(offsets=(8, 0))},
        {"a": entry(shape=(1 << 62, 1 << 62))},
        {"a": entry(shape=(1,), offsets=(4, 8))},
        {"a": entry(shape=(1,), offsets=(0, 4))},
        {"a": entry(), "b": entry()},
        {"a": entry(shape=(4,), offsets=(0, 16))},
        {},
    ],
)
def test_a_header_that_contradicts_itself(tmp_path, header):
    write_raw(tmp_path / SAFETENSORS, header, bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no sound safetensors file"):
        Checkpoint(tmp_path)


def test_a_header_that_names_a_tensor_twice(tmp_path):
    one = json.dumps(entry())
    write_raw(tmp_path / SAFETENSORS, f'{{"a":{one},"a":{one}}}'.encode(), bytes(8))
    with pytest.raises(CheckpointError, match=r"no sound safetensors file"):
        Checkpoint(tmp_path)


def test_a_header_longer_than_the_file(tmp_path):
    (tmp_path / SAFETENSORS).write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="no sound safetensors file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("padding", range(4))
@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("BF16", ml_dtypes.bfloat16)])
def test_tensors_need_not_be_aligned(tmp_path, padding, name, dtype):
    values = np.array([1.5, -2.25], dtype)
    text = json.dumps({"a": entry(name, offsets=(0, values.nbytes))}).encode() + b" " * padding
    write_raw(tmp_path / SAFETENSORS, text, values.tobytes())
    np.testing.assert_array_equal(Checkpoint(tmp_path).read("a"), values)


def test_empty_tensors_and_scalars(tmp_path):
    header = {"a": entry(shape=(0, 3), offsets=(0, 0)), "b": entry(shape=(), offsets=(0, 4))}
    write_raw(tmp_path / SAFETENSORS, header, np.float32(3).tobytes())
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("a").shape == (0, 3)
    assert checkpoint.read("b") == np.float32(3)


def test_a_missing_shard(model):
    folder = model("sharded")
    shard = sorted(folder.glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks the shard {shard.name}"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no weight_map"),
        ('{"weight_map": []}', "has no weight_map"),
        ('{"weight_map": {"a": 3}}', "places tensor a in 3"),
        ('{"weight_map": {"a": "../../secret.safetensors"}}', r"places tensor a in '\.\./"),
        ('{"weight_map": {"a": ""}}', "places tensor a in ''"),
        ("nonsense", "Cannot read"),
    ],
)
def test_an_index_that_is_wrong(model, content, message):
    folder = model("sharded")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder)


def test_an_index_that_disagrees_with_its_shard(model):
    folder = model("sharded")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][name] = shards[1]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"lacks tensor {name}"):
        Checkpoint(folder)


def test_a_folder_without_safetensors(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="Only safetensors and GGUF are read"):
        Checkpoint(tmp_path)


def test_a_path_that_is_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="There is no folder"):
        Checkpoint(tmp_path / "nowhere" / "at all")
    with pytest.raises(CheckpointError, match="no model tiny-pyhton-lm") as caught:
        Checkpoint("tiny-pyhton-lm")
    assert caught.value.fix == "Did you mean tiny-python-lm?"
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpoint(tmp_path / "file")


@pytest.mark.parametrize("name", ["nobody/has-this-model", "has-no-owner"])
def test_a_hub_name_without_a_connection_says_both(monkeypatch, tmp_path, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        CheckpointError, match=f"There is no folder {name}, and HF_HUB_OFFLINE keeps"
    ) as caught:
        Checkpoint(name)
    assert caught.value.fix.startswith("Unset HF_HUB_OFFLINE")


def hub_error(name, cause=None):
    from huggingface_hub import errors

    kind = getattr(errors, name)
    status = {"GatedRepoError": 403, "HfHubHTTPError": 503}.get(name, 404)
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    error = kind("no") if name == "LocalEntryNotFoundError" else kind("no", response=response)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("name", "cause", "words", "fix"),
    [
        ("RepositoryNotFoundError", None, "no public model of this name", "Check the spelling"),
        ("GatedRepoError", None, "only to accounts that its owner", "https://huggingface.co/some/model"),
        ("RevisionNotFoundError", None, "no revision `main`", "Download a revision"),
        ("LocalEntryNotFoundError", None, "cannot be reached", "Check the connection"),
        ("LocalEntryNotFoundError", "HfHubHTTPError", "answered with status 503", "again later"),
        ("HfHubHTTPError", None, "answered with status 503", "again later"),
    ],
)
def test_failures_of_the_hub_say_what_to_do(monkeypatch, tmp_path, name, cause, words, fix):
    error = hub_error(name, cause and hub_error(cause))

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"There is no folder some/model, and .*{words}") as caught:
        Checkpoint("some/model")
    assert fix in caught.value.fix


def test_a_hub_name_is_fetched_with_the_files_that_matter(monkeypatch, models, tmp_path):
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(models / "llama")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint("someone/some-model")
    assert (asked["name"], checkpoint.folder) == ("someone/some-model", models / "llama")
    assert {"*.json", "*.safetensors"} <= set(asked["allow_patterns"])
    assert "*.bin" not in asked["allow_patterns"]


class TestContentHash:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))

    def test_follows_the_content_and_not_the_place(self, model, models):
        first = Checkpoint(models / "llama").content_hash()
        folder = model()
        assert Checkpoint(folder).content_hash() == first
        change_config(folder, rms_norm_eps=1e-4)
        second = Checkpoint(folder).content_hash()
        assert second != first
        header, data = read_raw(folder / SAFETENSORS)
        write_raw(folder / SAFETENSORS, header, data[:-1] + bytes([data[-1] ^ 1]))
        assert Checkpoint(folder).content_hash() not in (first, second)
        assert Checkpoint(models / "sharded").content_hash() != first

    def test_reads_every_file_once(self, model):
        folder = model("sharded")
        seen = []
        first = Checkpoint(folder).content_hash(lambda done, total: seen.append((done, total)))
        assert (
            seen[-1][0]
            == seen[-1][1]
            == sum(path.stat().st_size for path in (folder / "config.json", *folder.glob("*.safetensors")))
        )
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        seen.clear()
        assert Checkpoint(folder).content_hash(lambda done, total: seen.append((done, total))) == first
        assert seen == []

    @pytest.mark.parametrize("how", ["written in place", "moved here"])
    @pytest.mark.parametrize("inodes", [True, False])
    def test_sees_other_weights_of_equal_size_and_time(self, model, tmp_path, monkeypatch, how, inodes):
        """With the modification time restored, as `cp -p`, `rsync -t` and unpacked archives do."""
        folder = model()
        weights = folder / SAFETENSORS
        if not inodes:
            real = Path.stat

            def stat(path, **options):
                found = real(path, **options)
                return os.stat_result([0 if index == 1 else value for index, value in enumerate(found)])

            monkeypatch.setattr(Path, "stat", stat)
        first = Checkpoint(folder).content_hash()
        before = os.stat(weights)  # noqa: PTH116 - that of Path is patched
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        target = weights if how == "written in place" else tmp_path / "other"
        target.write_bytes(content)
        os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
        target.replace(weights)
        after = os.stat(weights)  # noqa: PTH116
        assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        assert Checkpoint(folder).content_hash() != first

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 5}', b"\xff", b'{"a": ["1 2", 7]}'])
    def test_a_damaged_index_is_made_again(self, model, tmp_path, content):
        folder = model()
        first = Checkpoint(folder).content_hash()
        index = tmp_path / "cache" / "checks" / "digests.json"
        index.write_bytes(content)
        assert Checkpoint(folder).content_hash() == first
        assert len(json.loads(index.read_text())) == 2

    def test_files_that_are_gone_are_forgotten(self, model, tmp_path):
        folder = model()
        Checkpoint(folder).content_hash()
        shutil.rmtree(folder)
        Checkpoint(model("tied")).content_hash()
        listed = json.loads((tmp_path / "cache" / "checks" / "digests.json").read_text())
        assert all("tied" in path for path in listed)

    def test_a_cache_that_cannot_be_written_is_only_said(self, model, tmp_path, monkeypatch, caplog):
        monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
        (tmp_path / "cache" / "checks" / "digests.json").mkdir(parents=True)
        assert len(Checkpoint(model()).content_hash()) == 64
        assert "Cannot write" in caplog.text


def test_bits_of_a_type_that_is_not_read(tmp_path):
    write_raw(tmp_path / SAFETENSORS, {"a": entry("F64", (1,))}, bytes(8))
    with pytest.raises(CheckpointError, match="tensor a has type F64"):
        TensorFile.open(tmp_path / SAFETENSORS).bits("a")

import errno
import json
import os
import shutil
import threading
from importlib import resources

import numpy as np
import pytest

from heterollm.base import CacheError, CheckpointError, EngineError, OptionError
from heterollm.kernels.formats import QuantizedTensor, quantize, row_steps, weight_format
from heterollm.kernels.ops import WeightFormat
from heterollm.model import Checkpoint, ModelConfig, load_weights
from heterollm.model.layout import HEAD_LAYER, linear_names


@pytest.fixture(scope="module")
def folders(tmp_path_factory, write_model):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "llama", "llama", attention_bias=True, mlp_bias=True)
    write_model(folder / "tied", "llama", tie_word_embeddings=True, intermediate_size=112)
    write_model(folder / "qwen2", "qwen2", dtype="bfloat16", max_shard_size="60KB")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of quantised weights in an empty cache, whose name has a space and other letters."""
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "mon cache é 缓存"))
    return tmp_path / "mon cache é 缓存" / "weights"


def load(folder, **options):
    return load_weights(Checkpoint(folder), ModelConfig.from_folder(folder), **options)


def files(cache):
    """Everything in the folder but lock files."""
    return sorted(path for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def assert_same(first, second):
    one, other = dict(first.reference_state_dict()), dict(second.reference_state_dict())
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("family", ["llama", "tied", "qwen2"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_each_weight_is_the_quantised_tensor(folders, cache, family, symmetric):
    checkpoint = Checkpoint(folders / family)
    weights = load(folders / family, group_size=32, symmetric=symmetric)
    for spec in weights.specs:
        members = weights.linear(spec.layer, spec.group)
        names = linear_names(weights.config, spec.layer)[spec.group]
        assert len(members) == len(names) == len(spec.members)
        for weight, name, member in zip(members, names.values(), spec.members, strict=True):
            assert isinstance(weight, QuantizedTensor)
            assert (weight.rows, weight.columns) == (member.rows, spec.columns)
            assert weight_format(weight) == spec.weight
            form = spec.weight
            expected = quantize(
                checkpoint.read(name), bits=form.bits, block=form.block, symmetric=form.symmetric
            )
            np.testing.assert_array_equal(weight.codes, expected.codes)
            np.testing.assert_array_equal(weight.scales, expected.scales)
            if not form.symmetric:
                np.testing.assert_array_equal(weight.zero_points, expected.zero_points)
    assert weight_format(weights.embedding) == weight_format(weights.head) == WeightFormat(8, 32)
    assert (weights.head is weights.embedding) == (family == "tied")
    assert weights.linear(HEAD_LAYER, "head") == (weights.head,)


def test_stepped_scales_have_a_cache_file_of_their_own(folders, cache):
    free = load(folders / "llama")
    stepped = load(folders / "llama", scales="stepped")
    assert free.content_key != stepped.content_key
    assert len(files(cache)) == 2
    checkpoint = Checkpoint(folders / "llama")
    for spec in stepped.specs:
        assert (spec.weight.scales == "stepped") == (spec.group != "head")
        names = linear_names(stepped.config, spec.layer)[spec.group]
        for weight, name in zip(stepped.linear(spec.layer, spec.group), names.values(), strict=True):
            assert weight_format(weight) == spec.weight
            if spec.weight.scales == "stepped":
                assert row_steps(weight.scales).reaches_largest.all()
                values = checkpoint.read(name)
                expected = quantize(values, bits=4, block=spec.weight.block, scale_kind="stepped")
                np.testing.assert_array_equal(weight.codes, expected.codes)
                np.testing.assert_array_equal(weight.scales, expected.scales)
    assert weight_format(stepped.embedding) == WeightFormat(8, 32)
    assert_same(load(folders / "llama", scales="stepped"), stepped)  # from the cache
    assert len(files(cache)) == 2


def test_each_tensor_has_one_scale_at_w8a8(folders, cache):
    folder = folders / "llama"
    weights = load(folder, precision="w8a8")
    assert len({load(folder, precision=name).content_key for name in ("w4a16", "w8a8", "fp16")}) == 3
    checkpoint = Checkpoint(folder)
    for spec in weights.specs:
        assert spec.weight.bits == 8
        assert (spec.weight.scales == "tensor") == (spec.group != "head")
        names = linear_names(weights.config, spec.layer)[spec.group]
        for weight, name in zip(weights.linear(spec.layer, spec.group), names.values(), strict=True):
            assert weight_format(weight) == spec.weight
            if spec.weight.scales == "tensor":
                assert len(np.unique(weight.scales)) == 1
                expected = quantize(checkpoint.read(name), bits=8, block=weight.block, scale_kind="tensor")
                np.testing.assert_array_equal(weight.codes, expected.codes)
                np.testing.assert_array_equal(weight.scales, expected.scales)
    assert weight_format(weights.embedding) == WeightFormat(8, 32)
    assert_same(load(folder, precision="w8a8"), weights)  # from the cache


def test_the_one_scale_is_that_of_all_slabs(folders, cache, monkeypatch):
    whole = load(folders / "llama", precision="w8a8")
    monkeypatch.setattr("heterollm.model.weight_cache.SLAB_WEIGHTS", 64 * 7)
    monkeypatch.setenv("HETEROLLM_CACHE", str(cache / "other"))
    assert_same(load(folders / "llama", precision="w8a8"), whole)


def test_norms_and_biases_stay_as_they_are(folders, cache):
    for family in ("llama", "qwen2"):
        checkpoint = Checkpoint(folders / family)
        weights = load(folders / family)
        np.testing.assert_array_equal(weights.final_norm, checkpoint.read("model.norm.weight"))
        for layer in (0, 1):
            prefix = f"model.layers.{layer}"
            attention = checkpoint.read(f"{prefix}.input_layernorm.weight")
            np.testing.assert_array_equal(weights.norm(layer, "attention"), attention)
            feed_forward = checkpoint.read(f"{prefix}.post_attention_layernorm.weight")
            np.testing.assert_array_equal(weights.norm(layer, "feed_forward"), feed_forward)
            for member, bias in zip("qkv", weights.bias(layer, "qkv"), strict=True):
                expected = checkpoint.read(f"{prefix}.self_attn.{member}_proj.bias")
                assert np.abs(expected).max() > 0
                np.testing.assert_array_equal(bias, expected)
    assert load(folders / "qwen2").bias(0, "o") == ()
    assert load(folders / "tied").bias(0, "gate_up") == ()
    assert load(folders / "llama").bias(1, "gate_up")[1].shape == (96,)
    assert load(folders / "llama").bias(HEAD_LAYER, "head") == ()


@pytest.mark.parametrize(
    "options", [{}, {"precision": "fp16"}, {"precision": "fp16", "float_dtype": "float32"}]
)
@pytest.mark.parametrize("family", ["llama", "tied", "qwen2"])
def test_the_reference_has_the_names_and_nearly_the_values_of_the_checkpoint(folders, cache, family, options):
    checkpoint = Checkpoint(folders / family)
    weights = load(folders / family, **options)
    state = dict(weights.reference_state_dict())
    assert len(state) == sum(1 for _ in weights.reference_state_dict())
    assert set(state) == set(checkpoint.names)
    for name, values in state.items():
        expected = checkpoint.read(name)
        assert values.dtype == np.float32
        error = float(((values - expected) ** 2).sum() / (expected**2).sum())
        if not options:
            assert error < (0.02 if "proj.weight" in name else 2e-4)
            assert (error > 1e-6) == (expected.ndim == 2)
        elif options.get("float_dtype"):
            assert error == 0
        else:
            assert error < 1e-7
    assert weights.size_bytes > sum(spec.weight_bytes() for spec in weights.specs)


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 16), (np.float32, 32)])
def test_float_weights_are_not_cached(folders, cache, dtype, bits):
    weights = load(folders / "qwen2", precision="fp16", float_dtype=dtype)
    assert files(cache) == []
    assert weights.notes == ()
    for weight in (*weights.linear(1, "qkv"), weights.embedding, weights.head):
        assert weight.dtype == dtype
    for spec in weights.specs:
        assert spec.weight == WeightFormat(bits)
    assert weights.linear(0, "down")[0].shape == (64, 96)


def test_a_tied_head_is_one_object_in_floats_too(folders, cache):
    weights = load(folders / "tied", precision="fp16")
    assert weights.head is weights.embedding
    assert weights.linear(HEAD_LAYER, "head")[0] is weights.embedding


def test_the_second_load_comes_from_the_cache(folders, cache):
    seen = []
    first = load(folders / "llama", progress=lambda done, total: seen.append((done, total)))
    (path,) = files(cache)
    stamp = path.stat().st_mtime_ns
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    second = load(folders / "llama", progress=lambda done, total: seen.append((done, total)))
    assert seen == []
    assert path.stat().st_mtime_ns == stamp
    assert first.content_key == second.content_key
    assert_same(first, second)


def test_what_changes_the_values_changes_the_key(folders, cache, monkeypatch):
    keys = {
        load(folders / family, **options).content_key
        for family in ("llama", "qwen2")
        for options in (
            {},
            {"group_size": 16},
            {"symmetric": False},
            {"precision": "fp16"},
            {"precision": "fp16", "float_dtype": np.float32},
        )
    }
    monkeypatch.setattr("heterollm.model.weight_loading.QUANTIZER_VERSION", 99)
    keys.add(load(folders / "llama").content_key)
    assert len(keys) == 11
    assert len(files(cache)) == 7


def test_a_copy_elsewhere_shares_the_cached_file(folders, cache, tmp_path):
    first = load(folders / "llama")
    copy = shutil.copytree(folders / "llama", tmp_path / "copy")
    assert load(copy).content_key == first.content_key
    assert len(files(cache)) == 1


def test_smaller_blocks_are_noted_and_said(folders, cache, caplog):
    weights = load(folders / "tied", group_size=64)
    assert weights.notes == ("Weights with 112 inputs (down) have blocks of 16: 64 does not divide 112.",)
    assert [record.getMessage() for record in caplog.records] == list(weights.notes)
    assert weights.linear(0, "down")[0].block == 16
    assert weights.linear(0, "o")[0].block == 64
    assert load(folders / "llama", group_size=32).notes == ()


def test_impossible_group_sizes(folders, cache):
    for group_size in (8, 48, 0):
        with pytest.raises(OptionError, match=str(group_size)):
            load(folders / "llama", group_size=group_size)
    assert files(cache) == []


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(bytes(content))


def test_a_damaged_cache_is_made_again(folders, cache, caplog):
    first = load(folders / "qwen2", symmetric=False)
    (path,) = files(cache)
    sound = path.read_bytes()
    header_end = 8 + int.from_bytes(sound[:8], "little")
    flipped = [0, 3, 9, 40, header_end // 2, header_end, (header_end + len(sound)) // 2, len(sound) - 1]
    flipped += np.random.default_rng(0).integers(header_end, len(sound), 10).tolist()
    damages = [lambda position=position: flip(path, position) for position in flipped]
    damages += [lambda size=size: os.truncate(path, size) for size in (0, 5, header_end, len(sound) - 1)]
    damages += [lambda: path.write_bytes(b"garbage" * 100), lambda: path.write_bytes(sound + b"more")]
    for damage in damages:
        damage()
        assert path.read_bytes() != sound
        caplog.clear()
        again = load(folders / "qwen2", symmetric=False)
        assert "damaged and are made again" in caplog.text
        assert path.read_bytes() == sound
    assert_same(first, again)
    assert len(files(cache)) == 1


def test_a_cache_of_other_weights_under_this_name_is_made_again(folders, cache, caplog):
    load(folders / "llama")
    (ours,) = files(cache)
    sound = ours.read_bytes()
    load(folders / "llama", symmetric=False)
    (other,) = set(files(cache)) - {ours}
    shutil.copy(other, ours)
    load(folders / "llama")
    assert "belongs to other weights" in caplog.text
    assert ours.read_bytes() == sound


def test_interrupting_leaves_nothing_behind(folders, cache):
    calls = []

    def interrupt(done, total):
        calls.append(done)
        if len(calls) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(folders / "llama", progress=interrupt)
    assert len(calls) == 12
    assert files(cache) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quantize")]
    assert len(load(folders / "llama").specs) == 9
    assert len(files(cache)) == 1


def test_cancelling_leaves_nothing_behind(folders, cache):
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(EngineError, match="stopped"):
        load(folders / "llama", cancelled=cancelled)
    assert files(cache) == []


def test_a_full_disk(folders, cache, monkeypatch):
    def full(_handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("heterollm.model.tensor_file.os.fsync", full)
        with pytest.raises(CacheError, match="the disk is full"):
            load(folders / "llama")
    assert files(cache) == []
    load(folders / "llama")
    assert len(files(cache)) == 1


def test_a_cache_folder_that_cannot_be_made(folders, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "file"))
    with pytest.raises(CacheError, match="HETEROLLM_CACHE"):
        load(folders / "llama")


def overwrite(folder, name, place, value):
    """Set one element of a float32 tensor in the file."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    start = 8 + length + header[name]["data_offsets"][0] + 4 * place
    content[start : start + 4] = np.float32(value).tobytes()
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_value_that_is_no_number_is_named(folders, cache, tmp_path, name):
    folder = shutil.copytree(folders / "llama", tmp_path / "copy")
    overwrite(folder, name, 17, np.nan)
    for precision in ("w4a16", "fp16"):
        with pytest.raises(CheckpointError, match=name):
            list(load(folder, precision=precision).reference_state_dict())
    assert files(cache) == []


def test_values_too_large_for_a_format_are_named(folders, cache, tmp_path):
    name = "model.layers.0.self_attn.v_proj.weight"
    folder = shutil.copytree(folders / "llama", tmp_path / "copy")
    overwrite(folder, name, 100, 70000.0)
    with pytest.raises(CheckpointError, match=rf"{name} holds values beyond 65504"):
        load(folder, precision="fp16").linear(0, "qkv")
    exact = load(folder, precision="fp16", float_dtype=np.float32)
    assert exact.linear(0, "qkv")[2].max() == 70000
    assert load(folder).linear(0, "qkv")[2].dequantize().max() == pytest.approx(70000, rel=0.05)
    overwrite(folder, name, 100, 1e9)
    with pytest.raises(CheckpointError, match=rf"Tensor {name}: A weight of magnitude 1e\+09"):
        load(folder)


def test_a_configuration_that_disagrees_is_refused_before_any_work(folders, cache, tmp_path):
    folder = shutil.copytree(folders / "llama", tmp_path / "copy")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="lacks tensors"):
        load(folder)
    assert files(cache) == []


def test_two_threads_make_the_file_once(folders, cache):
    results = []
    threads = [threading.Thread(target=lambda: results.append(load(folders / "llama"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for other in results[1:]:
        assert_same(results[0], other)
    assert len(files(cache)) == 1


def test_large_tensors_are_quantised_in_slabs(folders, cache, monkeypatch):
    whole = load(folders / "qwen2", symmetric=False, group_size=16)
    (path,) = files(cache)
    content = path.read_bytes()
    path.unlink()
    monkeypatch.setattr("heterollm.model.weight_cache.SLAB_WEIGHTS", 64 * 7)
    assert_same(load(folders / "qwen2", symmetric=False, group_size=16), whole)
    assert path.read_bytes() == content


def test_the_bundled_model_keeps_its_values(cache):
    folder = str(resources.files("heterollm.data.tiny_python_lm"))
    checkpoint = Checkpoint(folder)
    limits = {(32, True): 0.0067, (64, True): 0.0083, (128, True): 0.0097, (32, False): 0.0062}
    for (group_size, symmetric), limit in limits.items():
        weights = load(folder, group_size=group_size, symmetric=symmetric)
        error, energy = 0.0, 0.0
        for name, values in weights.reference_state_dict():
            if name.endswith("proj.weight"):
                expected = checkpoint.read(name)
                error += float(((values - expected) ** 2).sum())
                energy += float((expected**2).sum())
        assert 0.9 * limit < error / energy < limit

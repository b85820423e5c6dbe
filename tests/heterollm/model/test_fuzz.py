"""Damaged files: 10,000 seeded mutations of everything that is read from disk.

Each either loads as an independent reading of the same bytes says, or raises a HeteroLLMError. A fifth runs
by default; `pytest -m slow tests/heterollm/model/test_fuzz.py` runs all.
"""

import contextlib
import json
import math
import random
import shutil
import signal
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import safetensors
from own_code import OWN_CODE
from safetensors.numpy import save_file

from heterollm.base import CheckpointError, HeteroLLMError, PlanError
from heterollm.kernels.npu.qnn_binaries import ContextBinary
from heterollm.model import AttentionBlock, Checkpoint, ModelConfig, load_weights, op_specs, rope_tables
from heterollm.model.families import FAMILIES
from heterollm.model.layout import expected_tensors
from heterollm.model.tensor_file import TensorFile
from heterollm.solver import Plan, level_plan
from heterollm.text import Tokenizer

MUTATIONS = 10_000
STRIDE = 5
LIMIT_S = 10
LIMIT_BYTES = 1 << 30

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
    "pad_token_id": None,
}
ROPES = (
    {"rope_type": "default", "rope_theta": 5000.0},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
)
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 5], "temperature": 0.7}


class Hang(BaseException):
    """The time for one mutation is over."""


# -- mutations ---------------------------------------------------------------------------------------

DEEP, HUGE, TWICE = "@@deep@@", "@@huge@@", "@@twice@@"
STRANGE = (
    *(None, True, False, "", "x", "\0", "\ud800", "é" * 300, "a/b", "../x", DEEP, HUGE, [], {}, [[]]),
    *(0, 1, 2, 3, -1, -(2**63), 2**31, 2**60, 2**64, 10**30, 10**400, 0.5, -0.0, 1e-320, 1e38, 1e300, 1e999),
    *(math.nan, -math.inf, [1, 2], [None], {"a": 1}, "F16", "I8", "1", [2**60, 2**60], list(range(1, 70))),
)


def mutate_bytes(rng, data):
    """Return bytes with one to three flips, cuts, insertions or repetitions."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 1, 2, 8, 64)))
        match rng.randrange(7):
            case 0 | 1 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                del data[place:]
            case 3:
                data[place:place] = rng.randbytes(rng.choice((1, 2, 8)))
            case 4:
                data[place:place] = rng.choice(
                    (b"\xff\xfe", b"\xc3", b"\0" * 9, b"{", b"]", b'"', b",,", b"-9")
                )
            case 5:
                del data[place:end]
            case _:
                data[place:place] = data[place:end]
    return bytes(data)


def nodes(value):
    """Yield every object or list in a value."""
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from nodes(item)


def mutate_json(rng, text):
    """Return JSON text with one or two fields of wrong type or value, missing, renamed or repeated."""
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 1, 2))):
        node = rng.choice([node for node in nodes(value) if node] or [value])
        if not node:
            break
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        old = node[key]
        match rng.randrange(8):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[rng.choice((key + "x", key[:-1], key.upper(), "\ud800", "a" * 5000))] = node.pop(key)
            case 2 if isinstance(node, dict):
                node[TWICE + key] = rng.choice((old, rng.choice(STRANGE)))
            case 3 if type(old) in (int, float):
                node[key] = rng.choice((old + 1, old - 1, old * 2, -old, float(old), str(old), [old]))
            case 4:
                node[key] = rng.choice(list(node.values()) if isinstance(node, dict) else node)
            case _:
                node[key] = rng.choice(STRANGE)
    text = json.dumps(value, indent=rng.choice((None, 1)))
    text = text.replace(f'"{DEEP}"', "[" * 30_000 + "]" * 30_000).replace(f'"{HUGE}"', "9" * 5000)
    return text.replace(TWICE, "").encode()


def mutate(rng, data):
    return mutate_json(rng, data) if rng.random() < 0.6 else mutate_bytes(rng, data)


def plain_json(data):
    """Return the value of JSON text that names nothing twice."""

    def unique(pairs):
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    return json.loads(data.decode(), object_pairs_hook=unique)


# -- the tiny model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    folder.mkdir()
    generator = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (40, 32), "lm_head.weight": (40, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.{name}_proj.weight": (rows, 32)
            for name, rows in zip("qkvo", (32, 16, 16, 32), strict=True)
        }
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (48, 32) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (32, 48)
        shapes |= {f"{prefix}{name}_layernorm.weight": (32,) for name in ("input", "post_attention")}
    tensors = {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_parameters": ROPES[0]}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, model):
    """The same model in three files with an index."""
    folder = tmp_path_factory.mktemp("fuzz") / "sharded"
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    checkpoint = Checkpoint(model)
    names = sorted(checkpoint.names)
    weight_map = {}
    for index in range(3):
        shard = f"model-{index + 1:05}-of-00003.safetensors"
        part = {name: checkpoint.read(name) for name in names[index::3]}
        save_file(part, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def values(checkpoint):
    return {name: checkpoint.read(name) for name in checkpoint.names}


def assert_equal_values(first, second):
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


# -- what is damaged: each a function of a source of randomness that applies one mutation -------------


class Files:
    """What a target gets: a folder to write in, and the models."""

    def __init__(self, folder, model, sharded):
        self.folder, self.model, self.sharded = folder, model, sharded


def safetensors_header(files):
    path = files.folder / "one.safetensors"
    tensors = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.arange(5, dtype=np.float16),
        "c": np.arange(8, dtype=np.uint8).reshape(2, 2, 2),
        "empty": np.zeros((0, 4), np.float32),
    }
    save_file(tensors, path, {"format": "pt", "key": "0"})
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = whole[8 : 8 + size], whole[8 + size :]

    def apply(rng):
        if rng.random() < 0.5:
            text = mutate_json(rng, header)
            claimed = rng.choice((len(text),) * 6 + (2**60, 2**63, len(text) - 1, 10**8, len(text) + 8))
            mutated = claimed.to_bytes(8, "little") + text + data
        else:
            mutated = mutate_bytes(rng, whole[: 8 + size]) + data
        path.write_bytes(mutated)
        file = TensorFile.open(path)
        exact = dict(safetensors.deserialize(mutated))
        assert file.entries.keys() == exact.keys()
        for name, entry in file.entries.items():
            assert (entry.dtype, list(entry.shape)) == (exact[name]["dtype"], exact[name]["shape"])
            assert bytes(file.data[entry.start : entry.stop]) == bytes(exact[name]["data"])
            with contextlib.suppress(CheckpointError):
                assert file.bits(name).shape == entry.shape

    return apply


COUNTS = {
    "hidden_size": "hidden_size",
    "layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
}
OF_BLOCKS = ("intermediate_size", "num_attention_heads")
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def check_config(config, data, generation):
    """Compare a configuration with what the JSON texts say, field by field."""
    stated = plain_json(data)
    assert stated["model_type"] == config.model_type == "llama"
    for field, name in COUNTS.items():
        assert type(stated[name]) is int
        assert getattr(config, field) == stated[name] >= 1
    counts = config.ffn.width, config.attention.heads
    assert counts == tuple(stated[name] for name in OF_BLOCKS)
    assert min(counts) >= 1
    kv_heads, head_dim = stated.get("num_key_value_heads"), stated.get("head_dim")
    assert config.attention.kv_heads == (config.attention.heads if kv_heads is None else kv_heads)
    assert config.attention.head_dim == (
        config.hidden_size // config.attention.heads if head_dim is None else head_dim
    )
    assert config.rms_norm_eps == (stated.get("rms_norm_eps") or 1e-6)
    assert config.tie_word_embeddings is (stated.get("tie_word_embeddings") or False)
    assert config.ffn.biased is (stated.get("mlp_bias") or False)
    assert config.attention.qkv_bias is config.attention.o_bias is (stated.get("attention_bias") or False)
    for name, ids in (("bos_token_id", config.bos_ids), ("eos_token_id", config.eos_ids)):
        first = plain_json(generation)
        source = stated if first.get(name) is None else first
        entry = source.get(name, 1 if name == "bos_token_id" else 2)
        assert set(ids) == set(entry if isinstance(entry, list) else [entry]) - {None, -1}
    for table in rope_tables(config.rope, config.attention.head_dim, 16):
        assert table.shape == (16, config.attention.head_dim // 2)
        assert np.isfinite(table).all()


def config_file(files):
    folder = files.folder / "config"
    folder.mkdir()
    original = Checkpoint(files.model)

    def apply(rng):
        data = mutate(rng, json.dumps(CONFIG | {"rope_parameters": rng.choice(ROPES)}).encode())
        (folder / "config.json").write_bytes(data)
        (folder / "generation_config.json").write_text(json.dumps(GENERATION))
        config = ModelConfig.from_folder(folder)
        check_config(config, data, json.dumps(GENERATION).encode())
        with contextlib.suppress(CheckpointError):
            original.validate(config)

    return apply


def generation_file(files):
    folder = files.folder / "generation"
    folder.mkdir()
    config_text = json.dumps(CONFIG).encode()
    (folder / "config.json").write_bytes(config_text)

    def apply(rng):
        data = mutate(rng, json.dumps(GENERATION).encode())
        (folder / "generation_config.json").write_bytes(data)
        check_config(ModelConfig.from_folder(folder), config_text, data)

    return apply


def tokenizer_files(files):
    import tokenizers

    source = Path(str(resources.files("heterollm.data.tiny_python_lm")))
    folder = files.folder / "tokenizer"
    folder.mkdir()
    config_text = (source / "tokenizer_config.json").read_bytes()
    tokens = json.loads((source / "tokenizer.json").read_text("utf-8"))
    # A small part of the vocabulary loads fast and breaks alike.
    vocabulary = tokens["model"]["vocab"]
    kept = dict(sorted(vocabulary.items(), key=lambda item: item[1])[:320])
    tokens["model"]["vocab"] = kept
    tokens["model"]["merges"] = [
        pair
        for pair in tokens["model"]["merges"]
        if all(part in kept for part in (pair if isinstance(pair, list) else pair.split(" ")))
        and "".join(pair if isinstance(pair, list) else pair.split(" ")) in kept
    ]
    tokens_text = json.dumps(tokens).encode()

    def apply(rng):
        which = rng.choice(("tokenizer.json", "tokenizer.json", "tokenizer_config.json"))
        text = tokens_text if which == "tokenizer.json" else config_text
        data = mutate(rng, text)
        (folder / "tokenizer.json").write_bytes(tokens_text)
        (folder / "tokenizer_config.json").write_bytes(config_text)
        (folder / which).write_bytes(data)
        tokenizer = Tokenizer.from_folder(folder)
        for sample in ("def f(x):\n    return x", "é漢🙂 <|endoftext|>"):
            ids = tokenizer.encode(sample)
            assert all(type(index) is int and 0 <= index < tokenizer.vocab_size for index in ids)
            text = tokenizer.decode(ids)
            stream = tokenizer.stream_decoder()
            assert "".join([*map(stream.push, ids), stream.finish()]) == text
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
        if which == "tokenizer.json":
            exact = tokenizers.Tokenizer.from_str(data.decode())
            exact.no_truncation()
            assert tokenizer.encode("a b", add_bos=False) == exact.encode("a b", add_special_tokens=False).ids

    return apply


def index_file(files):
    exact = values(Checkpoint(files.model))
    config = ModelConfig.from_folder(files.model)
    path = files.sharded / "model.safetensors.index.json"
    text = path.read_bytes()

    def apply(rng):
        try:
            path.write_bytes(mutate(rng, text))
            checkpoint = Checkpoint(files.sharded)
            checkpoint.validate(config)
            assert_equal_values(values(checkpoint), exact)
        finally:
            path.write_bytes(text)

    return apply


def cached_weights(files):
    """Whatever happens to the cache, the weights are what they were."""
    root = files.folder / "cache"
    checkpoint, config = Checkpoint(files.model), ModelConfig.from_folder(files.model)

    def tensors():
        weights = load_weights(checkpoint, config)
        return {name: value.copy() for name, value in weights.reference_state_dict()}

    exact = tensors()
    (path,) = (root / "weights").glob("*.safetensors")
    digests = root / "checks" / "digests.json"
    good = {path: path.read_bytes(), digests: digests.read_bytes()}
    size = int.from_bytes(good[path][:8], "little")
    header, data = good[path][8 : 8 + size], good[path][8 + size :]

    def apply(rng):
        for name, content in good.items():
            name.write_bytes(content)
        if rng.random() < 0.2:
            digests.write_bytes(mutate(rng, good[digests]))
        elif rng.random() < 0.4:
            text = mutate_json(rng, header)
            path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        else:
            path.write_bytes(mutate_bytes(rng, good[path]))
        assert_equal_values(tensors(), exact)

    return apply


def plan_file(files):
    config = ModelConfig.from_folder(files.model)
    specs = op_specs(config, "w4a16", 32, True)
    plan = level_plan(
        "layer", specs, device="host", precision="w4a16", standard_lengths=(1, 32, 64), chunk_length=64
    )
    data = json.loads(plan.to_json())
    data["entries"][0]["placement"] |= {
        "form": "matmul_nbits",
        "predicted_us": 12.5,
        "rejected": [{"description": "gpu", "predicted_us": 20.0}],
    }
    text = json.dumps(data).encode()
    path = files.folder / "plan.json"

    def apply(rng):
        mutated = mutate(rng, text)
        path.write_bytes(mutated)
        loaded = Plan.load(path)
        stated = plain_json(mutated)
        for entry in stated["entries"]:
            placement = {"form": None, "predicted_us": None, "rejected": []} | entry["placement"]
            placement["rejected"] = [
                {"of_ffn": False, "error_us": 0.0} | other for other in placement["rejected"]
            ]
            entry["placement"] = placement
        # What the NPU holds follows from the entries where nothing is stated.
        own = json.loads(loaded.to_json())
        assert own == stated | {"slices": stated["slices"] or own["slices"]}
        for spec in specs:
            with contextlib.suppress(PlanError):
                loaded.placement("prefill", 64, spec)

    return apply


def context_binary(files):
    """A damaged graph is never taken for sound."""
    stored = ContextBinary({"layer": 0, "ranges": [[0, 64]], "soc": "57"}, {"qairt": "2.51"})

    def compile_into(folder, models):
        models[0].write_bytes(b"wrapper" * 9)
        (folder / stored.binary.name).write_bytes(bytes(range(256)))

    stored.build(compile_into)
    good = {path: path.read_bytes() for path in (stored.manifest, stored.model, stored.binary)}

    def apply(rng):
        path = rng.choice((stored.manifest, stored.manifest, stored.manifest, stored.model, stored.binary))
        for name, content in good.items():
            name.write_bytes(content)
        data = mutate(rng, good[path]) if path == stored.manifest else mutate_bytes(rng, good[path])
        path.write_bytes(data)
        if stored.problem() is None:
            if path == stored.manifest:
                assert plain_json(data) == plain_json(good[path])
            else:
                assert data == good[path]
            return
        stored.build(compile_into)
        assert stored.problem() is None

    return apply


TARGETS = (
    safetensors_header,
    config_file,
    generation_file,
    tokenizer_files,
    index_file,
    cached_weights,
    plan_file,
    context_binary,
)


# -- the runs ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit():
    if sys.platform == "win32":
        yield
        return

    def expire(*_):
        raise Hang(f"one mutation takes more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_bytes():
    if sys.platform != "linux":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(target, files, seeds):
    """Apply the mutations of the given seeds; return how many loaded and how many were refused."""
    apply = target(files)
    before = peak_bytes()
    loaded = refused = 0
    with time_limit():
        for seed in seeds:
            if sys.platform != "win32":
                signal.alarm(LIMIT_S)
            try:
                apply(random.Random(f"{target.__name__} {seed}"))
                loaded += 1
            except HeteroLLMError as error:
                assert str(error)  # noqa: PT017 - any message will do, none will not
                refused += 1
            except BaseException as error:
                error.add_note(f"{target.__name__}, seed {seed}")
                raise
    assert peak_bytes() - before < LIMIT_BYTES
    return loaded, refused


@pytest.fixture
def files(tmp_path, monkeypatch, model, sharded):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))
    return Files(tmp_path, model, sharded)


# The two that hide damage by making the file again refuse nothing.
MENDED = (cached_weights, context_binary)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_a_damaged_file_is_read_rightly_or_refused(files, target):
    loaded, refused = run(target, files, range(0, MUTATIONS // len(TARGETS), STRIDE))
    # Both happen, or the mutations would show nothing.
    assert loaded > 5
    assert refused > 50 or target in MENDED


OF_FAMILY = {
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granitemoehybrid": {"mamba_n_heads": 2, "layer_types": ["attention"] * 2},
    **{family: {"layer_types": ["conv", "full_attention"]} for family in ("lfm2_moe", "lfm3")},
    **{
        family: {"layer_types": ["linear_attention", "full_attention"]}
        for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    },
}


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 150), marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OWN_CODE])
def test_a_damaged_configuration_of_any_family_fails_cleanly(family, seeds, tmp_path):
    """Without an independent reading: what loads must be computable."""
    transformers = pytest.importorskip("transformers")
    shape = {name: CONFIG[name] for name in (*COUNTS.values(), *OF_BLOCKS)}
    shape |= {"num_key_value_heads": 2, "head_dim": 8, **OF_FAMILY.get(family, {})}
    sound = transformers.AutoConfig.for_model(family, **shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    text = json.dumps(json.loads(sound.to_json_string()))
    assert ModelConfig.from_dict(json.loads(text)).model_type == family
    path = tmp_path / "config.json"
    loaded = refused = 0
    with time_limit():
        for seed in seeds:
            if sys.platform != "win32":
                signal.alarm(LIMIT_S)
            try:
                path.write_bytes(mutate_json(random.Random(f"{family} {seed}"), text))
                config = ModelConfig.from_folder(tmp_path)
                for precision in ("w4a16", "fp16"):
                    op_specs(config, precision, 32, True)
                expected_tensors(config)
                for rope in {block.rope for block in config.blocks(AttentionBlock).values()} - {None}:
                    for table in rope_tables(rope, config.attention.rotary_dim, 16):
                        assert np.isfinite(table).all()
                loaded += 1
            except HeteroLLMError:
                refused += 1
            except BaseException as error:
                error.add_note(f"{family}, seed {seed}")
                raise
    assert loaded > len(seeds) // 30
    assert refused > len(seeds) // 5


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_every_mutation_is_read_rightly_or_refused(files, target):
    started = time.monotonic()
    loaded, refused = run(target, files, range(MUTATIONS // len(TARGETS)))
    print(f"{target.__name__}: {loaded} loaded, {refused} refused, {time.monotonic() - started:.1f} s")

"""GGUF files against the gguf package's own writer, names and dequantisation."""

import dataclasses
import itertools
import json
import math
import random
import shutil
import struct

import numpy as np
import pytest

from heterollm.base import CheckpointError, HeteroLLMError, UnsupportedModelError
from heterollm.kernels.ops import WeightFormat
from heterollm.model import (
    Checkpoint,
    ModelConfig,
    Pooling,
    find_model,
    load_weights,
    read_pooling,
    rope_tables,
)
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.stored.affine_blocks import canonical
from heterollm.model.stored.gguf_blocks import BLOCK_TYPES
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.text import Tokenizer

gguf = pytest.importorskip("gguf")
from gguf_writer import CONVERTERS, OVERRIDES, PLAIN, random_blocks, rewritten, write_gguf  # noqa: E402
from own_code import OWN_CODE  # noqa: E402

Types = gguf.GGMLQuantizationType
BLOCKS = [kind for kind in BLOCK_TYPES.values() if kind.dtype is None]
MIXTURES = ("mixtral", "qwen3_moe", "olmoe")
OTHER_TYPES = ("mistral", "granitemoehybrid", "gemma4_unified_text", "qwen3_next", "exaone", "glm4_moe_lite")
"""Families whose files are read as another one that computes the same."""
ROUNDED = ("falcon_h1", "nemotron_h", "deepseek_v2", "gemma3n_text")
"""Families whose files have weights times factors of the configuration, or factors of blocks in float32."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64, **PLAIN}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HETEROLLM_CACHE", str(tmp_path / "cache"))


def noise_db(values, wanted):
    error = np.square(values - wanted, dtype=np.float64).sum()
    return math.inf if error == 0 else 10 * math.log10(np.square(wanted, dtype=np.float64).sum() / error)


# ---- values ---------------------------------------------------------------------------------------------


def dequantized(data, kind):
    """Return the values of the gguf package, which lacks those of Q1_0: a sign for each of 128 elements."""
    if kind.name != "Q1_0":
        return gguf.dequantize(data, Types[kind.name])
    found = []
    for block in data.reshape(-1, kind.block_bytes):
        scale = block[:2].view("<f2")[0].astype(np.float32)
        found.append([scale if block[2 + at // 8] >> at % 8 & 1 else -scale for at in range(128)])
    return np.array(found, np.float32).reshape(len(data), -1)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_values_are_those_of_gguf(kind):
    data = random_blocks(kind, 48, 512)
    wanted = dequantized(data, kind)
    assert np.array_equal(kind.blocks(data).values(), wanted)
    damaged = np.random.default_rng(1).integers(0, 256, data.shape, np.uint8)
    with np.errstate(all="ignore"):
        wanted = dequantized(damaged, kind)
    assert np.array_equal(kind.blocks(damaged).values(), wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "weight", "least_db"),
    [
        ("Q4_0", WeightFormat(4, 32), math.inf),
        ("Q4_0", WeightFormat(4, 16, symmetric=False), math.inf),
        ("Q5_0", WeightFormat(8, 32), math.inf),
        ("Q8_0", WeightFormat(8, 32), math.inf),
        ("Q6_K", WeightFormat(8, 16), 72),
        ("Q3_K", WeightFormat(4, 16), 72),
        ("Q2_K", WeightFormat(4, 16, symmetric=False, minimum=True), 60),
        ("IQ4_NL", WeightFormat(8, 32), math.inf),
        ("TQ1_0", WeightFormat(4, 128), math.inf),
        ("TQ2_0", WeightFormat(4, 128), math.inf),
        ("MXFP4", WeightFormat(8, 32), math.inf),
        ("Q1_0", WeightFormat(4, 128), math.inf),
        ("Q4_0", WeightFormat(4, 32, symmetric=False, minimum=True), math.inf),
        ("Q4_1", WeightFormat(4, 32, symmetric=False, minimum=True), math.inf),
        ("Q5_1", WeightFormat(8, 32, symmetric=False, minimum=True), math.inf),
        ("Q4_K", WeightFormat(4, 32, symmetric=False, minimum=True), 66),
        ("Q5_K", WeightFormat(8, 32, symmetric=False, minimum=True), 66),
        ("Q6_K", WeightFormat(8, 16, symmetric=False, minimum=True), 72),
    ],
)
def test_canonical_tensors_hold_the_values(name, weight, least_db):
    """Of trained weights: about as many values on either side of zero."""
    rng = np.random.default_rng(5)
    kind = next(kind for kind in BLOCKS if kind.name == name)
    if name.endswith("_K") or name in ("IQ4_NL", "Q1_0"):
        blocks = kind.blocks(random_blocks(kind, 64, 512))
        if blocks.minimums is not None:
            middle = (1 << kind.bits) / 2
            shifts = rng.uniform(0.8, 1.2, blocks.scales.shape).astype(np.float32)
            blocks = dataclasses.replace(blocks, minimums=-middle * shifts * blocks.scales)
    else:
        blocks = kind.blocks(gguf.quantize(rng.standard_normal((64, 512), np.float32), Types[name]))
    held = canonical(blocks, weight)
    assert held.format == weight
    assert noise_db(held.dequantize(), blocks.values()) >= least_db


def test_constant_and_extreme_blocks_keep_their_values():
    kind = BLOCK_TYPES[Types.Q4_1]
    values = np.zeros((3, 64), np.float32)
    values[1], values[2, :32] = 0.25, np.linspace(1000, 1001, 32)
    blocks = kind.blocks(gguf.quantize(values, Types.Q4_1))
    held = canonical(blocks, WeightFormat(4, 16, symmetric=False, minimum=True)).dequantize()
    assert np.array_equal(held, blocks.values())
    assert (held[1] == 0.25).all()


def test_formats_that_cannot_hold_the_integers_are_refused():
    blocks = BLOCK_TYPES[Types.Q8_0].blocks(random_blocks(BLOCK_TYPES[Types.Q8_0], 4, 64))
    assert canonical(blocks, WeightFormat(4, 32)) is None
    assert canonical(blocks, WeightFormat(8, 64)) is None
    minimums = BLOCK_TYPES[Types.Q4_1].blocks(random_blocks(BLOCK_TYPES[Types.Q4_1], 4, 64))
    assert canonical(minimums, WeightFormat(8, 32)) is None


# ---- models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [one for one in CONVERTERS if one not in (*OWN_CODE, *OTHER_TYPES, *ROUNDED)],
)
def test_a_file_has_the_tensors_and_settings_of_its_checkpoint(family, checkpoint, tmp_path):
    folder = checkpoint(family, **OVERRIDES.get(family, {}))
    path = write_gguf(folder, tmp_path / f"{family}.gguf", Types.F32, Types.F32)
    source, found = Checkpoint(folder), Checkpoint(path)
    config, own = ModelConfig.from_folder(folder), ModelConfig.from_folder(found.folder)
    source.validate(config)
    found.validate(own)
    norm_offset = np.float32(config.norm_offset)
    for name in found.names:
        values, wanted = found.read(name) + norm_offset, source.read(name) + norm_offset
        # The file has the exponential of a decay.
        alike = np.allclose(values, wanted, 1e-6, 1e-6) if "A_log" in name else np.array_equal(values, wanted)
        assert alike, name
    embedding = next(name for name in found.names if "embed" in name)
    assert found.read(embedding, (3, 7)).shape == (4, own.hidden_size)
    apart = ("rope", "per_layer", "bos_ids", "eos_ids", "pad_id")
    for field in dataclasses.fields(config):
        if field.name not in apart:
            value = getattr(config, field.name)
            assert getattr(own, field.name) == (
                pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
            ), field.name
    for layer, stated in zip(own.per_layer, config.per_layer, strict=True):
        for ours, theirs in zip(layer.blocks, stated.blocks, strict=True):
            if not isinstance(theirs, AttentionBlock):
                assert ours == theirs
                continue
            for length in (20, 200) if ours.rope or theirs.rope else ():
                tables = (rope_tables(one.rope, one.rotary_dim, length) for one in (ours, theirs))
                assert np.allclose(*tables, atol=3e-5)
            assert ours.scale == pytest.approx(theirs.scale, rel=1e-6)
            if theirs.query_growth is not None:
                growth = dataclasses.astuple(theirs.query_growth)
                assert dataclasses.astuple(ours.query_growth) == pytest.approx(growth, rel=1e-6)
            apart = {one: getattr(theirs, one) for one in ("rope", "scale", "query_growth")}
            assert dataclasses.replace(ours, **apart) == theirs


def test_logits_are_those_of_the_checkpoint(checkpoint, host_llm, token_ids, tmp_path):
    folder = checkpoint("llama", **PLAIN)
    path = write_gguf(folder, tmp_path / "float.gguf", Types.F32, Types.F32)
    ids = token_ids(24)
    own, wanted = (
        host_llm(model, plan="gpu", precision="fp16").session().prefill(ids, all_logits=True)
        for model in (path, folder)
    )
    assert np.array_equal(own, wanted)


MIXED = (("attn_v", Types.Q6_K), ("blk.0.ffn_down", Types.Q6_K), ("blk.1.attn_output", Types.F16))
"""Like Q4_K_M, with a float."""


@pytest.mark.parametrize(
    ("kind", "head", "others", "least_db"),
    [
        ("Q4_0", "Q8_0", (), 90),
        ("Q4_1", "Q8_0", (), 90),
        ("Q4_K", "Q6_K", MIXED, 50),
    ],
)
def test_logits_are_those_of_the_stored_values(
    kind, head, others, least_db, checkpoint, host_llm, half_rows_plan, token_ids, tmp_path
):
    """On both processors, alone and together."""
    path = write_gguf(checkpoint("llama", **WIDE), tmp_path / "model.gguf", Types[kind], Types[head], others)
    ids = token_ids(40)

    def logits(**options):
        session = host_llm(path, **options).session()
        prompt = session.prefill(ids[:36], all_logits=True)
        return np.concatenate([prompt, [session.decode(token) for token in ids[36:]]])

    wanted = logits(plan="gpu", precision="fp16")
    cut = half_rows_plan(host_llm(path, plan="gpu"))
    for plan in ("gpu", "npu", cut):
        assert noise_db(logits(plan=plan), wanted) >= least_db, plan
    if kind == "Q4_1":
        rounded = [logits(plan=plan, precision="w4a8") for plan in ("gpu", "npu")]
        assert noise_db(rounded[0], rounded[1]) > 30 > noise_db(rounded[0], wanted) > 20


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "olmoe" else pytest.mark.slow) for one in MIXTURES]
)
def test_mixtures_have_the_logits_of_their_stored_values(family, checkpoint, host_llm, token_ids, tmp_path):
    """Experts in 4 bits with minimums, down in a type of its own; and floats as in the checkpoint."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, **OVERRIDES[family]}
    folder = checkpoint(family, **sizes, **({"moe_intermediate_size": 256} if family == "qwen3_moe" else {}))
    others = (("ffn_down_exps", Types.Q4_1), ("attn_v", Types.Q6_K))
    path = write_gguf(folder, tmp_path / "experts.gguf", Types.Q4_K, Types.Q8_0, others)
    model = host_llm(path, plan="gpu")
    assert str(model._weights.experts[0].weight) == "int4 block 32 with minimums"
    ids = token_ids(24)
    held, wanted = (
        host_llm(path, plan="gpu", precision=precision).session().prefill(ids, all_logits=True)
        for precision in ("w4a16", "fp16")
    )
    assert noise_db(held, wanted) >= 45
    floats = write_gguf(folder, tmp_path / "floats.gguf", Types.F32, Types.F32)
    own, wanted = (
        host_llm(one, plan="gpu", precision="fp16").session().prefill(ids) for one in (floats, folder)
    )
    assert noise_db(own, wanted) >= 90


def test_notes_say_what_is_requantised(checkpoint, tmp_path):
    others = (("attn_v", Types.Q6_K), ("ffn_down", Types.Q5_0))
    path = write_gguf(checkpoint("llama", **WIDE), tmp_path / "mixed.gguf", Types.Q4_1, Types.Q6_K, others)

    def loaded():
        source = Checkpoint(path)
        return load_weights(source, ModelConfig.from_folder(source.folder))

    weights = loaded()
    assert [str(spec.weight) for spec in weights.specs[:4]] == [
        "int8 block 16 with minimums",
        *("int4 block 32 with minimums",) * 2,
        "int8 block 32",
    ]
    said = {note.partition(":")[0]: note for note in weights.notes}
    assert "at least 7" in said["2 tensors of Q6_K as int8 block 16"]
    assert "at least 7" in said["2 tensors of Q6_K as int8 block 16 with minimums"]
    for exact in ("4 tensors of Q4_1 as int8 block 16", "6 tensors of Q4_1 as int4 block 32"):
        assert "bit for bit" in said[f"{exact} with minimums"]
    assert "bit for bit" in said["2 tensors of Q5_0 as int8 block 32"]
    assert loaded().notes == weights.notes  # from the cache


def test_4_bit_files_stay_4_bit_and_exact(checkpoint, tmp_path):
    path = write_gguf(checkpoint("qwen2", **WIDE), tmp_path / "four.gguf", Types.Q4_0, Types.Q4_0)
    source = Checkpoint(path)
    weights = load_weights(source, ModelConfig.from_folder(source.folder), group_size=128)
    assert {str(spec.weight) for spec in weights.specs} == {"int4 block 32", "int8 block 32"}
    assert all("bit for bit" in note for note in weights.notes)
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        assert np.array_equal(weights.linears[name].dequantize(), source.read(name))


def test_a_file_is_a_model_of_its_own_name(checkpoint, tmp_path):
    path = write_gguf(checkpoint("qwen2", **PLAIN), tmp_path / "My Model.gguf")
    assert find_model(path).name == "My Model"
    folder = Checkpoint(path).folder
    first = Checkpoint(path).content_hash()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert Checkpoint(path).content_hash() != first
    path.rename(path.with_name("other"))
    assert find_model(path.with_name("other")).name == "other"
    with pytest.raises(CheckpointError, match=r"My Model\.gguf"):
        Checkpoint(folder)


# ---- tokenizers -----------------------------------------------------------------------------------------

TEXTS = ("def f(x):\n    return x ** 2\n", "naïve 模型 🙂", "  two  spaces ", "", "1234567 it's")


def test_a_byte_level_tokenizer_gives_the_same_ids(checkpoint, tmp_path):
    folder = checkpoint("qwen2", **PLAIN)
    own = Tokenizer.from_folder(Checkpoint(write_gguf(folder, tmp_path / "a.gguf")).folder)
    wanted = Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = own.encode(text, add_bos=False)
        assert ids == wanted.encode(text, add_bos=False)
        assert own.decode(ids) == text
    assert own.has_chat_template
    assert own.apply_chat_template([{"role": "user", "content": "f"}]) == own.encode("[f]", add_bos=False)


def test_a_file_that_pools_has_embeddings_and_an_end_token(checkpoint, host_llm, tmp_path):
    folder = shutil.copytree(checkpoint("qwen2", **PLAIN), tmp_path / "model")
    plain = write_gguf(folder, tmp_path / "plain.gguf", Types.F32, Types.F32)
    changes = {"pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    path = rewritten(plain, tmp_path / "last.gguf", changes)
    assert read_pooling(Checkpoint(path).folder) == Pooling("last", normalized=True)
    llm = host_llm(path, plan="gpu")
    ids = llm.embedding_ids("def f(x):")
    assert ids[-1] in llm.tokenizer.eos_ids
    assert ids[:-1].tolist() == llm.tokenizer.encode("def f(x):")
    (found,) = llm.embed(["def f(x):"])
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "Normalize", "path": "2"}]))
    assert np.allclose(host_llm(folder, plan="gpu").embed([ids.tolist()])[0], found, atol=1e-6)
    mean = rewritten(plain, tmp_path / "mean.gguf", {"pooling_type": 1})
    assert read_pooling(Checkpoint(mean).folder) == Pooling("mean", normalized=True)
    for other in (0, 2, 4):
        path = rewritten(plain, tmp_path / f"{other}.gguf", {"pooling_type": other})
        assert read_pooling(Checkpoint(path).folder) is None
    alone = rewritten(plain, tmp_path / "end.gguf", {"tokenizer.ggml.add_eos_token": True})
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.add_eos_token"):
        Checkpoint(alone)


def greedy_sentencepiece(text, scores):
    """llama.cpp's algorithm: join the neighbours that make the best token, the first of equals."""
    parts = list(text)
    while True:
        joined = (left + right for left, right in itertools.pairwise(parts))
        pairs = [(scores.get(part, -math.inf), -at) for at, part in enumerate(joined)]
        best, at = max(pairs, default=(-math.inf, 0))
        if best == -math.inf:
            return parts
        parts[-at : -at + 2] = [parts[-at] + parts[-at + 1]]


def test_a_sentencepiece_tokenizer_joins_the_best_tokens(checkpoint, tmp_path):
    rng = random.Random(4)
    letters = "\u2581abc"
    pieces = {"".join(rng.choices(letters, k=length)) for length in (2, 2, 3, 3, 4, 5) for _ in range(12)}
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{value:02X}>" for value in range(256)),
        *letters,
        *sorted(pieces),
    ]
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [float(-rank) for rank in range(len(tokens))]
    rng.shuffle(scores)
    path = tmp_path / "spm.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    from heterollm.model.stored.gguf_tokenizer import gguf_tokenizer

    found = gguf_tokenizer(path, GgufFile.open(path).metadata)
    (tmp_path / "tokenizer.json").write_text(found.tokenizer)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found.config))
    own = Tokenizer.from_folder(tmp_path)
    known = {token: scores[tokens.index(token)] for token in pieces}
    for _ in range(50):
        text = "".join(rng.choices("abc ", k=rng.randrange(1, 12)))
        wanted = greedy_sentencepiece("\u2581" + text.replace(" ", "\u2581"), known)
        ids = own.encode(text)
        assert [tokens[index] for index in ids] == ["<s>", *wanted]
        assert own.decode(ids) == text
    assert own.decode(own.encode("aé")) == "aé"


# ---- damage ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_file(checkpoint, tmp_path_factory):
    folder = checkpoint("llama", **PLAIN)
    return write_gguf(folder, tmp_path_factory.mktemp("small") / "small.gguf", Types.Q8_0).read_bytes()


def opened(path):
    found = Checkpoint(path)
    found.validate(ModelConfig.from_folder(found.folder))


def test_a_file_that_is_cut_short_is_refused(small_file, tmp_path):
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 4, 8, 23, 24, 60, 1000, 40_000, len(small_file) // 2, len(small_file) - 1):
        path.write_bytes(small_file[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            opened(path)


def test_changed_headers_give_an_error_or_a_model(small_file, tmp_path):
    """Counts, lengths, types and offsets of any size; nothing but heterollm's own errors."""
    rng = random.Random(11)
    path = tmp_path / "changed.gguf"
    header = GgufFile.open(written(path, small_file)).parts[0].header_bytes
    places = [*range(4, 400), *range(header - 1500, header)]
    for _ in range(120):
        data = bytearray(small_file)
        at = rng.choice(places)
        value = rng.choice([0, 1, 7, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.getrandbits(64)])
        size = rng.choice([1, 4, 8])
        data[at : at + size] = struct.pack("<Q", value)[:size]
        said = ""
        try:
            opened(written(path, data))
        except HeteroLLMError as error:
            said = error.message
        assert said.isprintable()


def written(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"general.architecture": "qwen2", "qwen2.expert_count": 8}, "architecture 'qwen2' with experts"),
        ({"general.architecture": "dbrx", "dbrx.expert_count": 8}, "architecture 'dbrx' with experts"),
        (
            {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.expert_gating_func": 2},
            "llama.expert_gating_func = 2",
        ),
        ({"split.count": 3}, "one of 3 parts .* its name is none"),
        ({"llama.rope.scaling.type": "su"}, "RoPE scaling 'su'"),
        ({"llama.embedding_length": 0}, "embedding_length is 0"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'"),
        ({"tokenizer.ggml.pre": "martian"}, "the rule 'martian'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, said, tmp_path):
    path = tmp_path / "odd.gguf"
    counts = (
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "context_length",
    )
    fields = {
        "general.architecture": "llama",
        **{f"llama.{name}": 32 for name in counts},
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": [],
        **changes,
    }
    writer = gguf.GGUFWriter(path, str(fields.pop("general.architecture")))
    for name, value in fields.items():
        if isinstance(value, list):
            if value:
                writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((1, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        Checkpoint(path)

"""Writes checkpoints as GGUF files, with the gguf package's names, as llama.cpp's converters do."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors.numpy import load_file

from heterollm.model import ModelConfig, rope_tables
from heterollm.model.stored.gguf_blocks import BLOCK_TYPES
from heterollm.model.stored.gguf_file import GgufFile

Types = gguf.GGMLQuantizationType
Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
Pairs = Iterable[tuple[str, np.ndarray]]

PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
MIXTURES = (
    *("mixtral", "qwen3_moe", "olmoe", "mellum", "phimoe", "granitemoe", "granitemoeshared", "gpt_oss"),
)
STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
OVERRIDES: dict[str, dict[str, Any]] = {
    # GGUF has no field for these.
    "gemma2": {"query_pre_attn_scalar": 56},
    "gemma3_text": {"query_pre_attn_scalar": 48},
    "mistral": {"sliding_window": None},
    "exaone4": {
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": {"sliding_window": None},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_moe": {"attention_bias": False, "use_sliding_window": False},
    "olmoe": {"attention_bias": False, "clip_qkv": None},
    "phimoe": {"router_jitter_noise": 0.01},
    "starcoder2": {"sliding_window": None},
    "granitemoehybrid": {"intermediate_size": 208},
    "smollm3": {
        "no_rope_layers": [1, 1],
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
}


# ---- metadata -------------------------------------------------------------------------------------------


def multipliers(writer: Any, config: Config) -> None:
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def granite_4(writer: Any, config: Config) -> None:
    multipliers(writer, config)
    writer.add_ssm_conv_kernel(4)  # written without recurrent layers, too
    writer.add_ssm_inner_size(256)
    writer.add_rope_scaling_finetuned(True)
    writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])


def minicpm_multipliers(writer: Any, config: Config) -> None:
    writer.add_embedding_scale(float(config["scale_emb"]))
    writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])


def window(writer: Any, config: Config) -> None:
    if config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])


def soft_caps(writer: Any, config: Config) -> None:
    window(writer, config)
    if config["attn_logit_softcapping"]:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def pattern(writer: Any, config: Config) -> None:
    writer.add_array(
        f"{writer.arch}.attention.sliding_window_pattern", [k.startswith("s") for k in config["layer_types"]]
    )
    writer.add_float32(
        f"{writer.arch}.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"]
    )


def gemma3(writer: Any, config: Config) -> None:
    soft_caps(writer, config)
    pattern(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])


def expert_width(writer: Any, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def mellum(writer: Any, config: Config) -> None:
    expert_width(writer, config)
    window(writer, config)
    pattern(writer, config)


def parallel(writer: Any, config: Config) -> None:
    writer.add_parallel_residual(config["use_parallel_residual"])


def convolutions(writer: Any, config: Config) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])


# ---- tensors --------------------------------------------------------------------------------------------


def as_they_are(tensors: Tensors, _config: Config) -> Pairs:
    return tensors.items()


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as LlamaModel.permute orders them."""
    split = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def in_pairs(tensors: Tensors, config: Config) -> Pairs:
    """q and k of Llama and others whose RoPE rotates neighbours in llama.cpp, and not in transformers."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in tensors.items():
        module = name.split(".")[-2]
        yield name, permuted(values, heads[module]) if module in heads else values


def one_more(tensors: Tensors, _config: Config) -> Pairs:
    """Norms with 1 + w in place of w."""
    for name, values in tensors.items():
        yield name, values + np.float32(1) if name.endswith("norm.weight") else values


def without_groups(tensors: Tensors, config: Config) -> Pairs:
    """InternLM2's wqkv, taken apart."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, values in tensors.items():
        if "wqkv" not in name:
            yield name, values
            continue
        layer, ending = name.split(".")[2], name.rpartition(".")[2]
        groups = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
        q, k, v = (part.reshape(-1, *values.shape[1:]) for part in np.split(groups, [-2, -1], 1))
        yield f"blk.{layer}.attn_q.{ending}", permuted(q, heads)
        yield f"blk.{layer}.attn_k.{ending}", permuted(k, kv_heads)
        yield f"blk.{layer}.attn_v.{ending}", v


def granite_experts(tensors: Tensors, config: Config) -> Pairs:
    """Granite's stacks of gate and up, taken apart."""
    dense = not config.get("num_local_experts")
    for name, values in in_pairs(tensors, config):
        layer = name.split(".")[2] if ".layers." in name else ""
        if "input_linear" in name:
            ending = "exps" if "sparse" in name else "shexp"
            for member, half in zip(("gate", "up"), np.split(values, 2, -2), strict=True):
                yield f"blk.{layer}.ffn_{member}{'' if dense else f'_{ending}'}.weight", half
        elif dense and "shared_mlp.output_linear" in name:
            yield f"blk.{layer}.ffn_down.weight", values
        else:
            yield name, values


def gpt_oss(writer: Any, config: Config) -> None:
    window(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def alternating(tensors: Tensors, _config: Config) -> Pairs:
    """gpt-oss' stacks, whose gate and up alternate and whose inputs come first."""
    for name, values in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)
        if match is None:
            yield f"{name}.weight" if name.endswith(".sinks") else name, values
            continue
        members = ("gate", "up") if match[2] == "gate_up" else ("down",)
        for first, member in enumerate(members):
            own = values[..., first :: len(members)]
            ending, own = ("bias", own) if match[3] else ("weight", own.swapaxes(1, 2))
            yield f"blk.{match[1]}.ffn_{member}_exps.{ending}", np.ascontiguousarray(own)


def flat_taps(tensors: Tensors, _config: Config) -> Pairs:
    for name, values in tensors.items():
        yield name, values[:, 0] if "conv.conv" in name else values


class Converter(NamedTuple):
    """What llama.cpp's converter of a model type writes.

    Args:
        stated: Value of ``general.architecture``.
        metadata: Adds the fields that other architectures lack.
        tensors: Yields the tensors, under the checkpoint's names or llama.cpp's.
        epsilon: Field of ``config.json`` for the number added in norms.
        centered: Whether it is written as that of LayerNorm.
        names: The architecture with the package's names, where it lacks the own one.
    """

    stated: str
    metadata: Callable[[Any, Config], None] = lambda _writer, _config: None
    tensors: Callable[[Tensors, Config], Pairs] = as_they_are
    epsilon: str = "rms_norm_eps"
    centered: bool = False
    names: str = ""


CONVERTERS = {
    "llama": Converter("llama", tensors=in_pairs),
    "mistral": Converter("mistral3", tensors=in_pairs),
    "smollm3": Converter("smollm3", tensors=in_pairs),
    "arcee": Converter("arcee", tensors=in_pairs),
    "internlm2": Converter("internlm2", tensors=without_groups),
    "minicpm": Converter("minicpm", minicpm_multipliers, in_pairs),
    "qwen2": Converter("qwen2"),
    "qwen3": Converter("qwen3"),
    "phi": Converter("phi2", epsilon="layer_norm_eps", centered=True),
    "phi3": Converter("phi3", window),
    "gemma": Converter("gemma", tensors=one_more),
    "gemma2": Converter("gemma2", soft_caps, one_more),
    "gemma3_text": Converter("gemma3", gemma3, one_more),
    "granite": Converter("granite", multipliers, in_pairs),
    "stablelm": Converter("stablelm", parallel, epsilon="layer_norm_eps", centered=True),
    "seed_oss": Converter("seed_oss"),
    "ernie4_5": Converter("ernie4_5"),
    "glm": Converter("chatglm"),
    "glm4": Converter("glm4"),
    "starcoder2": Converter("starcoder2", epsilon="norm_epsilon", centered=True),
    "nemotron": Converter("nemotron", tensors=one_more, epsilon="norm_eps", centered=True),
    "olmo2": Converter("olmo2"),
    "exaone4": Converter("exaone4"),
    "lfm2": Converter("lfm2", convolutions, flat_taps, "norm_eps"),
    "mixtral": Converter("llama", tensors=in_pairs),
    "qwen3_moe": Converter("qwen3moe", expert_width),
    "olmoe": Converter("olmoe"),
    "mellum": Converter("mellum", mellum, names="qwen3moe"),
    "phimoe": Converter("phimoe", window),
    "gpt_oss": Converter("gpt-oss", gpt_oss, alternating),
    "granitemoe": Converter("granitemoe", multipliers, granite_experts),
    "granitemoeshared": Converter("granitemoe", multipliers, granite_experts),
    "granitemoehybrid": Converter("granite", granite_4, granite_experts),
}
"""By model type."""


def write_gguf(
    folder: Path,
    path: Path,
    kind: Types = Types.F16,
    head: Types = Types.F16,
    others: Iterable[tuple[str, Types]] = (),
    stated: str = "",
) -> Path:
    """Write a checkpoint as GGUF.

    Args:
        folder: The checkpoint.
        path: The file.
        kind: Type of the weights.
        head: Type of embedding and head.
        others: Pairs of a part of tensors' names and their type.
        stated: The architecture, where another has the same tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    converter = CONVERTERS[config["model_type"]]
    if stated:
        converter = converter._replace(stated=stated)
    writer = gguf.GGUFWriter(path, converter.stated)
    write_sizes(writer, config)
    epsilon = config[converter.epsilon]
    (writer.add_layer_norm_eps if converter.centered else writer.add_layer_norm_rms_eps)(epsilon)
    write_rope(writer, config, folder)
    converter.metadata(writer, config)
    write_tokenizer(writer, folder)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        numbers[converter.names or converter.stated], config["num_hidden_layers"]
    )
    loaded = load_file(folder / "model.safetensors")
    floats = {name: values.astype(np.float32) for name, values in loaded.items()}
    for name, values in converter.tensors(stacked(floats), config):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        own = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert own, f"the package has no name for {name}"
        write_tensor(writer, own, values, kind, head, others)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_sizes(writer: Any, config: Config) -> None:
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = config["intermediate_size"]
    if config["model_type"] == "lfm2":
        key_heads = [0 if kind == "conv" else key_heads for kind in config["layer_types"]]
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = multiple * ((width + multiple - 1) // multiple)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(width)
    if config["model_type"] in MIXTURES or config.get("num_local_experts"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def write_rope(writer: Any, config: Config, folder: Path) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope.get("rope_type") == "llama3":
        loaded = ModelConfig.from_folder(folder).rope
        wavelengths = rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        _, sin = rope_tables(loaded, head_dim, 2)
        factors = 1 / (np.arcsin(np.clip(sin[1].astype(np.float64), -1, 1)) * wavelengths)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
        original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(longrope_factor(config["max_position_embeddings"], original))


def longrope_factor(context: int, original: int) -> float:
    return math.sqrt(1 + math.log(context / original) / math.log(original))


OVERRIDES["phimoe"]["rope_parameters"] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.5 + 0.2 * pair for pair in range(16)],
    "long_factor": [1.5 + 0.2 * pair for pair in range(16)],
    **dict.fromkeys(("short_mscale", "long_mscale"), longrope_factor(2048, 32)),
}


def write_tensor(
    writer: Any, own: str, values: np.ndarray, kind: Types, head: Types, others: Iterable[tuple[str, Types]]
) -> None:
    if values.ndim == 1 or own.endswith("exps.bias") or "gate_inp" in own or "shortconv.conv" in own:
        writer.add_tensor(own, values)
        return
    chosen = head if own in ("token_embd.weight", "output.weight") else kind
    chosen = next((other for part, other in others if part in own), chosen)
    if chosen in (Types.Q4_K, Types.Q6_K):
        data = random_blocks(BLOCK_TYPES[chosen], math.prod(values.shape[:-1]), values.shape[-1])
        data = data.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quantize(values, chosen)
    writer.add_tensor(own, data, raw_dtype=chosen)


def stacked(tensors: Tensors) -> Tensors:
    """The tensors with each layer's experts as one, under llama.cpp's names."""
    found, stacks = {}, {}
    for name, values in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\..*experts\.\d+\.(\w+)\.weight", name)
        if match:
            member = STACKS.get(match[2], match[2].removesuffix("_proj"))
            stacks.setdefault(f"blk.{match[1]}.ffn_{member}_exps.weight", {})[name] = values
        else:
            found[name] = values
    numbered = {
        own: sorted(parts, key=lambda name: int(name.rpartition("experts.")[2].partition(".")[0]))
        for own, parts in stacks.items()
    }
    return found | {own: np.stack([tensors[name] for name in names]) for own, names in numbered.items()}


def write_tokenizer(writer: Any, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {**content["model"]["vocab"], **special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3 if token in special else 1 for token in sorted(vocab, key=vocab.get)])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    if "eos_token" in config:
        writer.add_eos_token_id(vocab[config["eos_token"]])
    writer.add_chat_template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")


def random_blocks(kind: Any, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes, with scales in the range of trained weights."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * columns // kind.block, kind.block_bytes), np.uint8)
    places = {
        **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "MXFP4": (),
    }
    if kind.name == "MXFP4":
        data[:, 0] = rng.integers(115, 125, len(data))
    for place in places.get(kind.name, (0,)):
        scales = (rng.uniform(0.5, 2, len(data)) * 1e-2).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


# ---- changed files --------------------------------------------------------------------------------------

GLOBAL = ("general", "tokenizer", "split", "quantize", "mradermacher", "llama")
"""Name spaces that are not short here."""


def key(name: str, stated: str) -> str:
    """The full name of a field; names of the architecture's own are short here."""
    return name if name.partition(".")[0] in GLOBAL else f"{stated}.{name}"


def rewritten(
    source: Path, target: Path, changes: dict[str, Any], tensors: dict[str, Any] | None = None
) -> Path:
    """Write a GGUF file again with other metadata and tensors; None removes one."""
    file = GgufFile.open(source)
    stated = str(file.metadata["general.architecture"])
    values = {**file.metadata, **{key(name, stated): value for name, value in changes.items()}}
    writer = gguf.GGUFWriter(target, stated)
    alignment = values.pop("general.alignment", None)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    del values["general.architecture"]
    for name, value in values.items():
        if value is not None:
            add_value(writer, name, value)
    kept = {name: file.bits(name).view("<f4").reshape(entry.shape) for name, entry in file.entries.items()}
    for name, data in {**kept, **(tensors or {})}.items():
        if data is not None:
            writer.add_tensor(name, np.asarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def add_value(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        (writer.add_string if isinstance(value, str) else writer.add_array)(name, value)

"""InternLM 2 and 3, by the code of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.model.family import BIASES, Family, TensorNames
from heterollm.model.json_fields import JsonFields


def internlm3_biases(fields: JsonFields) -> dict[str, object]:
    """Return the biases under InternLM3's own names, which transformers reads, too; both must be equal."""
    names = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
    found = {name: fields.flag(own, fields.flag(name, False)) for name, own in names.items()}
    if len({*found.values()}) > 1:
        raise fields.fail("qkv_bias", f"{found['mlp_bias']}, as bias")
    return dict[str, object](found)


INTERNLMS: Final[Mapping[str, Family]] = {
    "internlm2": Family(
        name="InternLM2",
        covers="InternLM2 and 2.5",
        architecture="InternLM2ForCausalLM",
        tensors=TensorNames(
            {
                "qkv": dict.fromkeys(("q", "k", "v"), "attention.wqkv"),
                "o": {"o": "attention.wo"},
                "gate_up": {"gate": "feed_forward.w1", "up": "feed_forward.w3"},
                "down": {"down": "feed_forward.w2"},
            },
            {"attention": "attention_norm", "feed_forward": "ffn_norm"},
            embedding="model.tok_embeddings",
            head="output",
        ),
        biases=dict.fromkeys(("qkv", "o"), "bias"),
        grouped_heads=True,
        published_code=("modeling_internlm2.InternLM2ForCausalLM",),
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "internlm3": Family(
        name="InternLM3",
        covers="InternLM3 8B",
        # transformers computes it as a Llama; published files name their own class.
        architecture="LlamaForCausalLM",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        derived=internlm3_biases,
        follows=frozenset({"qkv_bias", "bias"}),
        biases=BIASES,
        published_code=("modeling_internlm3.InternLM3ForCausalLM",),
        bos_ids=(1,),
        eos_ids=(2,),
    ),
}

"""The fields of a LoRA adapter's ``adapter_config.json``."""

from __future__ import annotations

from typing import Final

from heterollm.model.fields.table import FieldTable, rows

LORA: Final = "PEFT, LoraConfig"
BASE: Final = "PEFT, PeftConfig"
HISTORY: Final = "the file's history"

ADAPTER_FIELDS: Final = FieldTable(
    "adapter_config.json",
    (
        *rows("read", BASE, {"peft_type": "LORA, in capitals as PEFT demands; others are refused"}),
        *rows(
            "read",
            LORA,
            {
                "r": "rank; by default 8",
                "lora_alpha": "factor over the rank; by default 8",
                "use_rslora": "whether the factor is over the root of the rank",
                "rank_pattern": "ranks of modules, by regular expressions; the first that matches counts",
                "alpha_pattern": "alphas of modules, as rank_pattern",
                "target_modules": "modules with factors, and no others; endings of names, a pattern, "
                "or all-linear",
                "exclude_modules": "modules that must have none, as target_modules",
                "layers_to_transform": "layers that may have factors",
                "layers_pattern": "name of the list of layers that layers_to_transform counts",
                "init_lora_weights": "true, false, gaussian, eva, orthogonal and mica leave the model's "
                "weights; pissa and olora change them, as PEFT does when it loads the adapter; "
                "pissa_niter_N, corda, loftq and lora_ga are refused",
            },
        ),
        *rows(
            "none",
            BASE,
            {
                "base_model_name_or_path": HISTORY,
                "revision": HISTORY,
                "peft_version": HISTORY,
                "auto_mapping": HISTORY,
                "inference_mode": "training",
            },
        ),
        *rows(
            "none",
            LORA,
            {
                "lora_dropout": "training",
                "fan_in_fan_out": "PEFT ignores it for linears",
                "megatron_core": "megatron_config counts",
                "qalora_group_size": "use_qalora counts",
                "runtime_config": "how PEFT computes",
                "ensure_weight_tying": "adapters of tied modules are refused with these",
                **dict.fromkeys(
                    ("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
                    "init_lora_weights counts",
                ),
                "velora_config": "training",
            },
        ),
        *rows(
            "refused",
            BASE,
            {"task_type": "an adapter of other than a causal language model"},
            neutral=("CAUSAL_LM",),
        ),
        *rows("refused", LORA, {"bias": "trained biases"}, neutral=("none",)),
        *rows(
            "refused",
            LORA,
            {
                "use_dora": "DoRA, which scales the merged weights",
                "modules_to_save": "whole modules beside the differences",
                "trainable_token_indices": "trained tokens",
                "target_parameters": "stacked experts",
                "use_bdlora": "block-diagonal factors",
                "use_qalora": "factors of pooled inputs (QA-LoRA)",
                "alora_invocation_tokens": "activation by tokens of the prompt (aLoRA)",
                "layer_replication": "replicated layers",
                "lora_bias": "biases",
                "megatron_config": "modules of Megatron",
                "arrow_config": "a router between adapters (Arrow)",
                "kasa_config": "weights without their smallest singular values (KaSA)",
                "monteclora_config": "factors that are drawn at random (MonteCLoRA)",
            },
            neutral=(False, {}, []),
        ),
    ),
)

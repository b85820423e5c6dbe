"""The fields of ``quantization_config`` in ``config.json``, and the methods that are not read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.model.fields.table import FieldTable, rows

GPTQ: Final = "transformers, GPTQConfig; GPTQModel, QuantizeConfig; AutoGPTQ, BaseQuantizeConfig"
AWQ: Final = "transformers, AwqConfig; AutoAWQ, AwqConfig"
COMPRESSED: Final = "compressed-tensors, QuantizationConfig; transformers, CompressedTensorsConfig"
MXFP4: Final = "transformers, Mxfp4Config"
BITNET: Final = "transformers, BitNetQuantConfig"
SCHEME: Final = "compressed-tensors, QuantizationScheme"
ARGS: Final = "compressed-tensors, QuantizationArgs"
MADE: Final = "how the integers were made"
RUN: Final = "how transformers computes"
TENSORS: Final = "the tensors of the files state which linears are packed"

COMMON: Final = (
    *rows(
        "read",
        GPTQ,
        {"quant_method": "gptq, awq, compressed-tensors, mxfp4 or bitnet, in any case; no other"},
    ),
    *rows("none", GPTQ, {"modules_to_not_convert": TENSORS}),
)

GPTQ_FIELDS: Final = FieldTable(
    "quantization_config of GPTQ",
    (
        *COMMON,
        *rows(
            "read",
            GPTQ,
            {
                "bits": "4 or 8",
                "group_size": "inputs of a group; -1 for all",
                "sym": "whether the zero point is the middle code; by default yes",
                "desc_act": "whether groups are no ranges of inputs; the index in the files says which",
                "checkpoint_format": "gptq, whose zero points are one less, or gptq_v2; in any case",
                "format": "newer name of checkpoint_format, which precedes it",
            },
        ),
        *rows(
            "none",
            GPTQ,
            {
                **dict.fromkeys(
                    ("modules_in_block_to_quantize", "block_name_to_quantize", "lm_head"), TENSORS
                ),
                "module_name_preceding_first_block": TENSORS,
                "meta": "the writer and its version",
                "static_groups": "the index in the files states the groups",
                "act_group_aware": "the index in the files states the groups",
                **dict.fromkeys(
                    (
                        *("damp_percent", "damp_auto_increment", "true_sequential", "tokenizer", "dataset"),
                        *("batch_size", "model_seqlen", "pad_token_id", "mse", "v2", "v2_alpha", "gptaq"),
                        *("gptaq_alpha", "hessian", "fail_safe", "failsafe", "hyb_act", "mock_quantization"),
                        *("parallel_packing", "offload_to_disk", "offload_to_disk_path", "vram_strategy"),
                        *("gc_mode", "device", "compute_device_filter", "process", "calibration_data_device"),
                    ),
                    MADE,
                ),
                **dict.fromkeys(("model_name_or_path", "model_file_base_name"), "the file's history"),
                **dict.fromkeys(
                    (
                        *("backend", "max_input_length", "cache_block_outputs", "use_cuda_fp16"),
                        *("use_exllama", "disable_exllama", "exllama_config"),
                    ),
                    RUN,
                ),
            },
        ),
        *rows(
            "refused",
            GPTQ,
            {
                "dynamic": "linears whose bits or groups differ",
                "adapter": "an adapter that restores what the integers lost",
                "rotation": "weights of a rotated stream",
                "is_marlin_format": "words in the order of Marlin",
            },
            neutral=(False, {}, ""),
        ),
        *rows("refused", GPTQ, {"pack_dtype": "words of other than 32 bits"}, neutral=("int32",)),
    ),
)

AWQ_FIELDS: Final = FieldTable(
    "quantization_config of AWQ",
    (
        *COMMON,
        *rows(
            "read",
            AWQ,
            {
                "bits": "4 or 8; by default 4",
                "group_size": "inputs of a group; -1 for all",
                "zero_point": "whether groups have zero points; by default yes",
                "version": "gemm, in any case; other orders of the words are refused",
                "format": "newer name of version, which precedes it",
            },
        ),
        *rows(
            "none",
            AWQ,
            {
                "sym": "zero_point says so",
                "desc_act": "AWQ has its groups in order",
                "meta": "the writer and its version",
                **dict.fromkeys(
                    (
                        *("do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"),
                        *("max_input_length", "cache_block_outputs"),
                    ),
                    RUN,
                ),
                **dict.fromkeys(
                    (
                        *("damp_percent", "true_sequential", "tokenizer", "dataset", "batch_size"),
                        *("model_seqlen", "pad_token_id", "act_group_aware"),
                    ),
                    MADE,
                ),
                **dict.fromkeys(
                    (
                        *("modules_in_block_to_quantize", "block_name_to_quantize"),
                        "module_name_preceding_first_block",
                    ),
                    TENSORS,
                ),
            },
        ),
        *rows(
            "refused",
            AWQ,
            {"backend": "words in the order of llm-awq"},
            neutral=("auto", "autoawq", "exllama", "exllama_v1", "exllama_v2", "ipex", "gemm", "marlin"),
        ),
    ),
)

COMPRESSED_FIELDS: Final = FieldTable(
    "quantization_config of compressed-tensors",
    (
        *COMMON,
        *rows("read", COMPRESSED, {"format": "pack-quantized, in any case; others are refused"}),
        *rows(
            "read",
            ARGS,
            {
                "config_groups.*.weights.num_bits": "4 or 8",
                "config_groups.*.weights.type": "int, in any case; others are refused",
                "config_groups.*.weights.symmetric": "whether the zero point is 0; by default yes",
                "config_groups.*.weights.group_size": "inputs of a group; -1 or none for all",
                "config_groups.*.weights.strategy": "group or channel, in any case; others are refused",
                "config_groups.*.weights.actorder": "whether groups are no ranges of inputs; "
                "the index in the files says which",
            },
        ),
        *rows(
            "read", SCHEME, {"config_groups.*.format": "format of the group, which must be that of the file"}
        ),
        *rows(
            "none",
            ARGS,
            {
                "config_groups.*.weights.observer": MADE,
                "config_groups.*.weights.observer_kwargs*": MADE,
                "config_groups.*.weights.scale_dtype": "the files state the type of the scales",
                "config_groups.*.weights.zp_dtype": "the files state the type of the zero points",
            },
        ),
        *rows("none", SCHEME, {"config_groups.*.targets": TENSORS}),
        *rows(
            "none",
            COMPRESSED,
            {
                "ignore": TENSORS,
                "quantization_status": TENSORS,
                "global_compression_ratio": "a figure about the file",
                "version": "the writer's version",
                **dict.fromkeys(("run_compressed", "dequantize", "use_optimized_inference"), RUN),
                "sparsity_config.targets": "sparsity_config.format counts",
                "sparsity_config.ignore": "sparsity_config.format counts",
                "sparsity_config.global_sparsity": "a figure about the file",
                "sparsity_config.sparsity_structure": "a figure about the file",
                "sparsity_config.registry_requires_subclass": "the writer's bookkeeping",
            },
        ),
        *rows(
            "refused",
            ARGS,
            {"config_groups.*.weights.dynamic": "scales that are computed as the model runs"},
            neutral=(False,),
        ),
        *rows("refused", ARGS, {"config_groups.*.weights.block_structure": "blocks of rows and inputs"}),
        *rows(
            "refused",
            SCHEME,
            {
                "config_groups.*.input_activations*": "quantised inputs",
                "config_groups.*.output_activations*": "quantised outputs",
            },
        ),
        *rows(
            "refused",
            COMPRESSED,
            {"sparsity_config.format": "weights with zeros left out"},
            neutral=("dense",),
        ),
        *rows(
            "refused",
            COMPRESSED,
            {
                "kv_cache_scheme*": "a quantised cache; here `--kv-bits`",
                "transform_config*": "weights of a rotated stream",
                "moe_sparsity_config*": "experts that are left out",
            },
            neutral=({}, []),
        ),
    ),
)

MXFP4_FIELDS: Final = FieldTable(
    "quantization_config of MXFP4", (*COMMON, *rows("none", MXFP4, {"dequantize": RUN}))
)

BITNET_FIELDS: Final = FieldTable(
    "quantization_config of BitNet",
    (
        *rows(
            "read",
            BITNET,
            {
                "quant_method": "bitnet, in any case",
                "linear_class": "autobitlinear, whose scale is a factor, or bitlinear, where it divides",
                "quantization_mode": "offline, or online: floats, rounded by the mean of their magnitudes",
                "modules_to_not_convert": "linears that online leaves floats",
            },
        ),
        *rows("none", BITNET, {"rms_norm_eps": "of norms that use_rms_norm adds"}),
        *rows("refused", BITNET, {"use_rms_norm": "a norm before each linear"}, neutral=(False,)),
    ),
)

QUANTIZATION_FIELDS: Final[Mapping[str, FieldTable]] = MappingProxyType(
    {
        "gptq": GPTQ_FIELDS,
        "awq": AWQ_FIELDS,
        "compressed-tensors": COMPRESSED_FIELDS,
        "mxfp4": MXFP4_FIELDS,
        "bitnet": BITNET_FIELDS,
    }
)
"""Tables by ``quant_method``."""

FOREIGN_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aqlm": "codes of several codebooks (AQLM)",
        "auto-round": "integers of AutoRound in its own formats",
        "bitsandbytes": "numbers of bitsandbytes (NF4, FP4 or LLM.int8)",
        "bitsandbytes_4bit": "numbers of bitsandbytes (NF4, FP4)",
        "bitsandbytes_8bit": "numbers of bitsandbytes (LLM.int8)",
        "compressed_tensors": "a name that transformers does not know; it writes compressed-tensors",
        "eetq": "integers of EETQ in the order of its kernels",
        "exl2": "integers of ExLlamaV2",
        "exl3": "integers of ExLlamaV3",
        "fbgemm_fp8": "floats of 8 bits with quantised inputs (FBGEMM)",
        "fouroversix": "floats of 4 bits (Four over Six)",
        "fp8": "floats of 8 bits with scales of blocks (FP8)",
        "fp_quant": "floats of 4 bits of a rotated stream (FP-Quant)",
        "gemma": "integers of Gemma's own format",
        "higgs": "codes of a rotated stream (HIGGS)",
        "hqq": "integers of HQQ with scales of floats",
        "ipex": "integers in the order of Intel's kernels",
        "marlin": "integers in the order of Marlin's kernels",
        "metal": "integers in the order of Metal's kernels",
        "modelopt": "floats of NVIDIA's ModelOpt (FP8 or NVFP4)",
        "mxfp8": "floats of 8 bits with shared exponents (MXFP8)",
        "nvfp4": "floats of 4 bits with scales of FP8 (NVFP4)",
        "quanto": "tensors of Quanto",
        "quark": "numbers of AMD's Quark",
        "sinq": "integers with scales of rows and columns (SINQ)",
        "spqr": "integers and outliers (SpQR)",
        "torchao": "tensors of torchao",
        "vptq": "codes of vectors (VPTQ)",
    }
)
"""Other values of ``quant_method`` and the numbers that they stand for."""

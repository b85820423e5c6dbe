"""Writes a Llama checkpoint's quantised weights as one ONNX decoder for onnxruntime-genai.

The graph is the one that its own model builder makes (MatMulNBits, GroupQueryAttention, skip norms; see
https://github.com/microsoft/onnxruntime-genai), but the weights are those that heterollm computes with, bit
for bit: its layout of 4-bit blocks is MatMulNBits' own. Embedding and head have 8 bits there and are written
out in float32 here, equal values again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from heterollm.base import atomic_path, locked
from heterollm.benchmarks.plain_llama import BLOCK, check_plain_llama
from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.ops import Group
from heterollm.model import Checkpoint, ModelConfig, ModelWeights, load_weights

__all__ = ["write_onnx"]

CONTRIB: Final = "com.microsoft"
OPSETS: Final = (("", 21), (CONTRIB, 1))
IR_VERSION: Final = 10
GRAPH: Final = "model.onnx"
DATA: Final = "model.onnx.data"
CONFIG: Final = "genai_config.json"
MEMBERS: Final[dict[Group, tuple[str, ...]]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}


def write_onnx(checkpoint: Path, folder: Path, *, integer_inputs: bool, context: int, threads: int) -> Path:
    """Write the graph, its weights and ``genai_config.json``; the graph only if no newer one is there.

    Args:
        checkpoint: Folder of the checkpoint.
        folder: Where to write.
        integer_inputs: Whether linears round their inputs to int8 (MatMulNBits' accuracy level 4).
        context: Positions of the KV cache.
        threads: Threads of a session.

    Returns:
        The folder.

    Raises:
        UnsupportedModelError: The model has what this graph does not describe.
        HeteroLLMError: The checkpoint cannot be read, or the files not be written.
    """
    config = ModelConfig.from_folder(checkpoint)
    check_plain_llama(config, "ONNX")
    newest = max(file.stat().st_mtime for file in checkpoint.glob("*.safetensors"))
    graph = folder / GRAPH
    with locked(graph):
        if not graph.is_file() or graph.stat().st_mtime < newest:
            weights = load_weights(
                Checkpoint(checkpoint), config, precision="w4a16", group_size=BLOCK, symmetric=True
            )
            model = _Decoder(weights, accuracy_level=4 if integer_inputs else 1).model()
            folder.mkdir(parents=True, exist_ok=True)
            onnx.save_model(
                model, graph, save_as_external_data=True, all_tensors_to_one_file=True, location=DATA
            )
        with atomic_path(folder / CONFIG) as temporary:
            temporary.write_text(json.dumps(_genai_config(config, context, threads), indent=1), "utf-8")
    return folder


class _Decoder:
    """Collects the nodes and weights of the graph."""

    def __init__(self, weights: ModelWeights, *, accuracy_level: int) -> None:
        self._weights = weights
        self._config = weights.config
        self._accuracy_level = accuracy_level
        self._nodes: list[onnx.NodeProto] = []
        self._tensors: list[TensorProto] = []

    def model(self) -> onnx.ModelProto:
        """Return the whole model."""
        config = self._config
        self._add(
            "ReduceSum", ["attention_mask", self._constant("axis_1", np.array([1]))], ["length"], keepdims=0
        )
        self._add("Sub", ["length", self._constant("one", np.array(1))], ["last"])
        self._add("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32)
        self._add("Shape", ["attention_mask"], ["mask_shape"])
        self._add("Gather", ["mask_shape", self._constant("index_1", np.array(1))], ["total"], axis=0)
        self._add("Cast", ["total"], ["total_length"], to=TensorProto.INT32)
        assert isinstance(self._weights.embedding, QuantizedTensor)
        table = self._constant("embedding", self._weights.embedding.dequantize())
        self._add("Gather", [table, "input_ids"], ["hidden"], axis=0)
        self._rope()
        self._norm("hidden", self._weights.norm(0, "attention"), "normed.0")
        residual, normed = "hidden", "normed.0"
        for layer in range(config.layers):
            residual, normed = self._layer(layer, residual, normed)
        # Logits of the last position alone, as every other engine computes.
        self._add("Slice", [normed, *self._last_row()], ["last_row"])
        self._head("last_row")
        return self._assembled()

    def _layer(self, layer: int, residual: str, normed: str) -> tuple[str, str]:
        config, name = self._config, f"layer.{layer}"
        for member in MEMBERS["qkv"]:
            self._linear(layer, "qkv", member, normed)
        attention = [f"{name}.{member}" for member in MEMBERS["qkv"]]
        attention += [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        self._add(
            "GroupQueryAttention",
            [*attention, "seqlens_k", "total_length", "cosine", "sine"],
            [f"{name}.attention", f"present.{layer}.key", f"present.{layer}.value"],
            domain=CONTRIB,
            num_heads=config.heads,
            kv_num_heads=config.kv_heads,
            scale=config.attention_scale,
            do_rotary=1,
        )
        self._linear(layer, "o", "o", f"{name}.attention")
        feed_forward = self._weights.norm(layer, "feed_forward")
        middle = self._skip_norm(residual, f"{name}.o", feed_forward, f"{name}.middle")
        for member in MEMBERS["gate_up"]:
            self._linear(layer, "gate_up", member, middle[1])
        self._add("Sigmoid", [f"{name}.gate"], [f"{name}.sigmoid"])
        self._add("Mul", [f"{name}.gate", f"{name}.sigmoid"], [f"{name}.silu"])
        self._add("Mul", [f"{name}.silu", f"{name}.up"], [f"{name}.activated"])
        self._linear(layer, "down", "down", f"{name}.activated")
        last = layer == config.layers - 1
        norm = self._weights.final_norm if last else self._weights.norm(layer + 1, "attention")
        return self._skip_norm(middle[0], f"{name}.down", norm, f"{name}.end")

    def _linear(self, layer: int, group: Group, member: str, source: str) -> None:
        weight = self._weights.linear(layer, group)[MEMBERS[group].index(member)]
        assert isinstance(weight, QuantizedTensor)
        name = f"layer.{layer}.{member}"
        codes = self._constant(f"{name}.codes", weight.codes)
        scales = self._constant(f"{name}.scales", weight.scales.astype(np.float32).ravel())
        self._add(
            "MatMulNBits",
            [source, codes, scales],
            [name],
            domain=CONTRIB,
            K=weight.columns,
            N=weight.rows,
            bits=weight.bits,
            block_size=weight.block,
            accuracy_level=self._accuracy_level,
        )

    def _head(self, source: str) -> None:
        weight = self._weights.head
        assert isinstance(weight, QuantizedTensor)
        transposed = np.ascontiguousarray(weight.dequantize().T)
        self._add("MatMul", [source, self._constant("head", transposed)], ["logits"])

    def _norm(self, source: str, weight: NDArray[np.float32], target: str) -> None:
        scale = self._constant(f"{target}.weight", np.array(weight, np.float32))
        epsilon = self._config.rms_norm_eps
        self._add(
            "SimplifiedLayerNormalization", [source, scale], [target], axis=-1, epsilon=epsilon, stash_type=1
        )

    def _skip_norm(
        self, residual: str, delta: str, weight: NDArray[np.float32], name: str
    ) -> tuple[str, str]:
        """Add to the residual stream and norm it; return both."""
        scale = self._constant(f"{name}.weight", np.array(weight, np.float32))
        outputs = [f"{name}.normed", "", "", f"{name}.residual"]
        self._add(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, scale],
            outputs,
            domain=CONTRIB,
            epsilon=self._config.rms_norm_eps,
        )
        return outputs[3], outputs[0]

    def _rope(self) -> None:
        config = self._config
        half = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
        angles = np.outer(np.arange(config.max_positions), config.rope.base**-half)
        self._constant("cosine", np.cos(angles).astype(np.float32))
        self._constant("sine", np.sin(angles).astype(np.float32))

    def _last_row(self) -> list[str]:
        largest = np.iinfo(np.int64).max
        values = {"start": -1, "end": largest, "axis": 1}
        return [self._constant(f"slice.{name}", np.array([value])) for name, value in values.items()]

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        self._tensors.append(
            numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), name)
        )
        return name

    def _add(
        self,
        kind: str,
        inputs: list[str],
        outputs: list[str],
        *,
        domain: str = "",
        **attributes: Any,  # noqa: ANN401 - whatever the operator takes
    ) -> None:
        name = f"{kind}.{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, outputs, name, domain=domain, **attributes))

    def _assembled(self) -> onnx.ModelProto:
        config = self._config
        floats, whole = TensorProto.FLOAT, TensorProto.INT64
        inputs = [
            helper.make_tensor_value_info("input_ids", whole, ["batch", "tokens"]),
            helper.make_tensor_value_info("attention_mask", whole, ["batch", "all"]),
        ]
        outputs = [helper.make_tensor_value_info("logits", floats, ["batch", 1, config.vocab_size])]
        for layer in range(config.layers):
            for kind in ("key", "value"):
                for values, name, length in (
                    (inputs, f"past_key_values.{layer}.{kind}", "past"),
                    (outputs, f"present.{layer}.{kind}", "all"),
                ):
                    shape: list[str | int | None] = ["batch", config.kv_heads, length, config.head_dim]
                    values.append(helper.make_tensor_value_info(name, floats, shape))
        graph = helper.make_graph(self._nodes, "decoder", inputs, outputs, self._tensors)
        opsets = [helper.make_opsetid(domain, version) for domain, version in OPSETS]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _genai_config(config: ModelConfig, context: int, threads: int) -> dict[str, Any]:
    return {
        "model": {
            "type": "llama",
            "bos_token_id": 0,
            # A token that no prompt of a bench ends at: nothing here generates by itself.
            "eos_token_id": config.vocab_size - 1,
            "pad_token_id": config.vocab_size - 1,
            "context_length": context,
            "vocab_size": config.vocab_size,
            "decoder": {
                "filename": GRAPH,
                "session_options": {"intra_op_num_threads": threads, "provider_options": []},
                "head_size": config.head_dim,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.heads,
                "num_hidden_layers": config.layers,
                "num_key_value_heads": config.kv_heads,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": context, "past_present_share_buffer": True, "do_sample": False},
    }

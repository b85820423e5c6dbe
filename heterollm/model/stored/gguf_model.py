"""The tensors of a GGUF file by their Hugging Face names.

llama.cpp's changes of tensors: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.model.stored.affine_blocks import AffineBlocks
from heterollm.model.stored.gguf_blocks import BlockType, block_type
from heterollm.model.stored.gguf_config import GEMMA, architecture_of
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.model.stored.gguf_names import (
    EXPERTS,
    GEMMA_MODULES,
    LAYER_TENSOR,
    LONE_EXPERT,
    MODULES,
    ROUTERS,
    TOP_MODULES,
)
from heterollm.model.stored.gguf_rope import ROPE_TENSORS


class GgufTensors:
    """The tensors of a GGUF file by their Hugging Face names.

    Args:
        file: The file.
        notes: Assumptions about its metadata, and fields that have no effect here.

    Raises:
        UnsupportedModelError: The architecture is not supported.
    """

    def __init__(self, file: GgufFile, notes: tuple[str, ...] = ()) -> None:
        self.path = file.path
        self.notes = notes
        self._file = file
        self._architecture = architecture_of(file)
        stated = str(file.metadata["general.architecture"])
        modules = {**MODULES, **(GEMMA_MODULES if stated in GEMMA else {})}
        if stated == "phi3":
            modules = {**modules, "ffn_up": "mlp.gate_up_proj"}
        self._heads = {
            "attn_q": file.count("attention.head_count"),
            "attn_k": file.count("attention.head_count_kv", "attention.head_count"),
        }
        kind = self._architecture.model_type
        if kind in EXPERTS:
            modules = {**modules, "ffn_gate_inp": ROUTERS[kind]}
        stacks = EXPERTS.get(kind, {})
        top = {**TOP_MODULES}
        if "token_embd.weight" not in file.entries:
            top["output"] = top["token_embd"]  # a tied embedding under the head's name
        self._names: dict[str, str] = {}
        self._experts: dict[str, int] = {}
        for own, entry in file.entries.items():
            match = LAYER_TENSOR.fullmatch(own)
            if match and match[2] in stacks and len(entry.shape) == len(("expert", "row", "column")):
                for expert in range(entry.shape[0]):
                    name = f"model.layers.{match[1]}.{stacks[match[2]].format(expert)}.{match[3]}"
                    self._names[name], self._experts[name] = own, expert
            elif (lone := LONE_EXPERT.fullmatch(own)) and stacks:
                module = stacks[f"{lone[2]}_exps"].format(lone[3])
                self._names[f"model.layers.{lone[1]}.{module}.weight"] = own
            elif own not in ROPE_TENSORS:
                self._names[_hugging_face_name(own, modules, top)] = own

    @property
    def names(self) -> Collection[str]:
        """The name of every tensor."""
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        shape = self._file.entries[self._names[name]].shape
        return shape[1:] if name in self._experts else shape

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor in the file."""
        entry = self._file.entries[self._names[name]]
        return (entry.stop - entry.start) // (entry.shape[0] if name in self._experts else 1)

    def kind(self, name: str) -> str:
        """Return the type of a tensor, as llama.cpp spells it."""
        return self._file.entries[self._names[name]].kind

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is stored as integers."""
        return self._type(name).dtype is None

    def blocks(self, name: str, rows: tuple[int, int]) -> AffineBlocks:
        """Return rows ``[start, stop)`` of a quantised tensor."""
        return self._type(name).blocks(self._rows(name, rows))

    def read(self, name: str, rows: tuple[int, int] | None) -> NDArray[np.float32]:
        """Return a tensor, or rows ``[start, stop)`` of its matrix, as float32."""
        shape, kind = self.shape(name), self._type(name)
        data = self._rows(name, rows or (0, math.prod(shape[:-1])))
        values = (
            kind.blocks(data).values() if kind.dtype is None else data.view(kind.dtype).astype(np.float32)
        )
        if name.endswith("norm.weight"):
            values = values - np.float32(self._architecture.norm_offset)
        return values if rows is not None else values.reshape(shape)

    def _type(self, name: str) -> BlockType:
        return block_type(self.kind(name))

    def _rows(self, name: str, rows: tuple[int, int]) -> NDArray[np.uint8]:
        own = self._names[name]
        data = self._file.bits(own)
        if name in self._experts:
            count = self.shape(name)[0]
            data = data[self._experts[name] * count :][:count]
        match = LAYER_TENSOR.fullmatch(own)
        if match is None or match[2] not in self._heads or not self._architecture.permuted:
            return np.ascontiguousarray(data[rows[0] : rows[1]])
        if match[3] == "bias":  # one row, of which each element moves
            values = data.reshape(self.shape(name)[0], -1)
            return values[self._unpaired(match[2], len(values))].reshape(1, -1)
        return data[self._unpaired(match[2], len(data))[rows[0] : rows[1]]]

    def _unpaired(self, module: str, rows: int) -> NDArray[np.intp]:
        """Return where in the file the rows lie whose halves of a head follow each other."""
        heads = self._heads[module]
        if rows % (2 * heads):
            raise CheckpointError(f"{self.path}: {module} has {rows} rows, which {heads} heads cannot share.")
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _hugging_face_name(name: str, modules: Mapping[str, str], top: Mapping[str, str]) -> str:
    match = LAYER_TENSOR.fullmatch(name)
    if match and match[2] in modules:
        return f"model.layers.{match[1]}.{modules[match[2]]}.{match[3]}"
    module, _, ending = name.rpartition(".")
    return f"{top[module]}.{ending}" if module in top else name

"""The tensors of safetensors files by their names in the model, whatever the files call them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final, TypeAlias

from numpy.typing import NDArray

from heterollm.model.config import ModelConfig
from heterollm.model.family import Mixture
from heterollm.model.stored import PackedLinears, PackedTensor, StackedExperts, TernaryLinears
from heterollm.model.stored_formats import normalized_quantization
from heterollm.model.tensor_file import TensorFile
from heterollm.model.wrappers import text_names

NamedTensors: TypeAlias = dict[str, TensorFile]
"""The file of each tensor, by the tensor's name in the model."""

PackedWeights: TypeAlias = StackedExperts | PackedLinears | TernaryLinears
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BARE: Final = "model."
"""The prefix that tensors of a model without a head lack."""


def text_part(files: NamedTensors) -> NamedTensors:
    """Return the tensors of the text part of a model with others, by their names in a model of text."""
    return {own: _renamed(files[name], name, own) for name, own in text_names(files).items()}


def name_bare_part(files: NamedTensors, folder: Path) -> NamedTensors:
    """Give the tensors of a model that was saved without its head their names in one with a head.

    Models for embeddings have such files. They need no head: where it is not tied, the embedding stands
    for it.
    """
    bare = EMBEDDING.removeprefix(BARE)
    if bare not in files or EMBEDDING in files:
        return files
    found = {BARE + name: _renamed(file, name, BARE + name) for name, file in files.items()}
    if not ModelConfig.from_folder(folder).tie_word_embeddings:
        found[HEAD] = _renamed(files[bare], bare, HEAD)
    return found


def name_tied_embedding(files: NamedTensors, folder: Path) -> NamedTensors:
    """Give an embedding that a file has under the name of the tied head alone its own name.

    transformers loads such checkpoints too: it ties in either direction.
    """
    if HEAD not in files or EMBEDDING in files or not (folder / "config.json").is_file():
        return files
    if not ModelConfig.from_folder(folder).tie_word_embeddings:
        return files
    file = files[HEAD]
    entries = {**file.entries, EMBEDDING: file.entries[HEAD]}
    others = {name: own for name, own in files.items() if name != HEAD}
    return others | {EMBEDDING: dataclasses.replace(file, entries=entries)}


def packed_weights(
    files: NamedTensors, folder: Path, mixture: Mixture | None, quantization: object
) -> PackedWeights | None:
    """Return the weights that packed tensors of linears, or of all experts, stand for; None without such.

    Args:
        files: All tensors.
        folder: Folder of the checkpoint.
        mixture: The experts of the family.
        quantization: The section of ``config.json``; None without.
    """
    tensors = {
        name: PackedTensor(entry.dtype, entry.shape, entry.stop - entry.start)
        for name, file in files.items()
        for entry in [file.entries[name]]
    }

    def bits(name: str) -> NDArray[Any]:
        return files[name].bits(name)

    packed: PackedWeights
    if mixture is not None and (stacks := mixture.alternating or mixture.inputs_first):
        turns = bool(mixture.alternating)
        packed = StackedExperts(folder, tensors, bits, stacks, alternating=turns)
    elif isinstance(quantization, dict):
        own = normalized_quantization(quantization)
        method = TernaryLinears if own["quant_method"] == "bitnet" else PackedLinears
        packed = method(folder, tensors, bits, own)
    else:
        return None
    return packed if packed.names else None


def _renamed(file: TensorFile, name: str, own: str) -> TensorFile:
    return dataclasses.replace(file, entries={own: file.entries[name]})

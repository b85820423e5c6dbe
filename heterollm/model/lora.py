"""LoRA adapters in PEFT's format: differences of linears' weights, of low rank.

Format and formulas: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.formats import as_float32
from heterollm.model.fields import ADAPTER_FIELDS
from heterollm.model.json_fields import JsonFields, read_json_object
from heterollm.model.lora_targets import is_target, module_number
from heterollm.model.tensor_file import TensorFile

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
SPARE_DIRECTIONS: Final = 8
TINY: Final = float(np.finfo(np.float64).tiny)
SINGULAR_ERROR: Final = 1e-9
"""Largest error of the largest singular vectors, times the largest value; that of float32 is 6e-8."""
FACTOR: Final = re.compile(r"(.+)\.lora_([AB])\.weight")

PLAIN: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of ``init_lora_weights`` that leave the model's weights as they are."""

FIX_MERGE: Final = "Merge it into its model with PEFT's merge_and_unload, then save_pretrained."
FIX_CONVERT: Final = "Convert it with PEFT: save_pretrained with path_initial_model_for_weight_conversion."

Weight: TypeAlias = Callable[[], NDArray[np.float32]]
"""Reads a weight ``[n, k]`` of the model without the adapter."""


class Factors(NamedTuple):
    """The difference of a weight ``[n, k]`` is ``scale * b @ a``.

    Args:
        a: float32 ``[r, k]``.
        b: float32 ``[n, r]``.
        scale: ``alpha / r``, or with ``use_rslora`` ``alpha / sqrt(r)``.
    """

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float


class LoraAdapter:
    """The differences that an adapter makes, by the names of the weights in the model's checkpoint.

    Attributes:
        paths: The files.
        factors: Those of each weight.
        initial: Initialisation that takes a part off the model's weights; "" for none.
        notes: Remarks for the user.
    """

    def __init__(self, folder: Path | str) -> None:
        """Read an adapter.

        Raises:
            CheckpointError: A file is missing or damaged, or the files contradict each other.
            UnsupportedModelError: The adapter is no LoRA of linears alone.
        """
        self.folder = Path(folder)
        self.paths = (self.folder / CONFIG, self.folder / WEIGHTS)
        for path in self.paths:
            if not path.is_file():
                raise CheckpointError(
                    f"{path} is missing.", fix="Name the folder that PEFT's save_pretrained wrote."
                )
        config = JsonFields(read_json_object(self.paths[0]), str(self.paths[0]))
        self.initial, self.notes = self._check(config)
        self.factors: Mapping[str, Factors] = self._read(config)
        self._taken: dict[str, Factors] = {}

    def check(self, shapes: Mapping[str, tuple[int, ...]], integers: Collection[str] = ()) -> None:
        """Check that the adapter is one of a checkpoint.

        Args:
            shapes: The shape of each of the checkpoint's tensors.
            integers: Weights of the adapter that the checkpoint stores as integers.

        Raises:
            CheckpointError: The checkpoint lacks a weight, or it has another shape.
            UnsupportedModelError: The initialisation changes integers, which PEFT refuses, too.
        """
        if self.initial and integers:
            raise UnsupportedModelError(
                f"{self.folder} was initialised by {self.initial}, which changes weights that the model "
                f"stores as integers, such as {min(integers)}.",
                fix=f"Take the model in floats. {FIX_CONVERT}",
            )
        for name, own in self.factors.items():
            wanted = (len(own.b), own.a.shape[1])
            if name not in shapes:
                raise CheckpointError(
                    f"{self.folder} changes {name.removesuffix('.weight')}, which the model lacks.",
                    fix="Take the adapter with the model that it was trained on.",
                )
            if shapes[name] != wanted:
                raise CheckpointError(
                    f"{self.folder} changes {name} of shape {list(wanted)}, but the model's has shape "
                    f"{list(shapes[name])}.",
                    fix="Take the adapter with the model that it was trained on.",
                )

    def add(
        self, name: str, rows: tuple[int, int] | None, values: NDArray[np.float32], weight: Weight
    ) -> None:
        """Add an adapter's difference to the rows ``[start, stop)`` of a weight, in place.

        Args:
            name: The weight.
            rows: Its rows; None for all.
            values: They.
            weight: Reads the whole weight.
        """
        own = self.factors.get(name)
        if own is None:
            return
        parts = [own]
        if self.initial:
            if name not in self._taken:
                self._taken[name] = INITIAL[self.initial](weight(), own)
            parts.append(self._taken[name])
        for part in parts:
            values += (part.b[slice(*rows)] if rows else part.b) @ part.a * np.float32(part.scale)

    def _check(self, config: JsonFields) -> tuple[str, tuple[str, ...]]:
        """Return the initialisation that changes the model's weights, or "", and notes.

        Raises:
            UnsupportedModelError: The adapter is no LoRA of linears alone.
        """
        refused, notes = ADAPTER_FIELDS.examine(config.values, str(self.paths[0]))
        kind, initial = config.get("peft_type"), config.get("init_lora_weights")
        if kind != "LORA":
            refused = (f"{self.paths[0]}: peft_type = {kind!r:.40} is not supported: only LORA is read.",)
        if refused:
            raise UnsupportedModelError(refused[0], fix=FIX_MERGE)
        # PEFT compares some names without regard to case, and refuses others in capitals.
        named = initial.lower() if isinstance(initial, str) else initial
        if named is None or any(named is one or (named == one and isinstance(named, str)) for one in PLAIN):
            return "", notes
        if not isinstance(named, str) or named not in INITIAL:
            raise UnsupportedModelError(
                f"{self.paths[0]}: init_lora_weights = {initial!r:.40} is not supported: it changes "
                "the model's weights in a way that the adapter's files do not hold.",
                fix=FIX_CONVERT,
            )
        took = (
            f"{self.folder}: the initial factors ({named}) are taken off the model's weights, as PEFT does."
        )
        return named, (*notes, took)

    def _read(self, config: JsonFields) -> dict[str, Factors]:
        file = TensorFile.open(self.paths[1])
        found: dict[str, dict[str, NDArray[np.float32]]] = {}
        for name in file.entries:
            match = FACTOR.fullmatch(name.removeprefix(PREFIX))
            if match is None:
                raise UnsupportedModelError(f"{file.path}: tensor {name} is no factor of a linear's LoRA.")
            if ".experts." in match[1]:
                raise UnsupportedModelError(
                    f"{file.path} changes experts ({match[1]}), which is not supported."
                )
            values = as_float32(file.bits(name))
            if values.ndim != 2 or not np.isfinite(values).all():
                raise CheckpointError(f"{file.path}: tensor {name} is no finite matrix.")
            found.setdefault(match[1], {})[match[2]] = values
        for module in found:
            if not is_target(config, module):
                raise CheckpointError(
                    f"{file.path} has factors of {module}, which {CONFIG} does not name.",
                    fix="PEFT ignores them; take them out, or name the module.",
                )
        targets = config.get("target_modules")
        for target in targets if isinstance(targets, list) else ():
            if not any(module == target or module.endswith(f".{target}") for module in found):
                raise CheckpointError(f"{file.path} has no factors of the target module {target!r:.80}.")
        if not found:
            raise CheckpointError(f"{file.path} has no factors.")
        return {
            f"{module}.weight": self._factors(module, own, config) for module, own in sorted(found.items())
        }

    def _factors(self, module: str, own: Mapping[str, NDArray[np.float32]], config: JsonFields) -> Factors:
        a, b = own.get("A"), own.get("B")
        if a is None or b is None or len(a) != b.shape[1]:
            raise CheckpointError(f"{self.paths[1]}: the factors of {module} do not fit together.")
        rank = module_number(config, "r", "rank_pattern", module)
        if len(a) != rank:
            raise CheckpointError(f"{self.paths[1]}: {module} has rank {len(a)}, but {CONFIG} says {rank:g}.")
        alpha = module_number(config, "lora_alpha", "alpha_pattern", module)
        return Factors(a, b, alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank))


def pissa(weight: NDArray[np.float32], rank: int) -> Factors:
    """Return the part of a weight along its largest singular values, to be taken off.

    Args:
        weight: ``[n, k]``.
        rank: Number of singular values.
    """
    u, s, v = _largest(weight.astype(np.float64), rank)
    return Factors(v[:rank].astype(np.float32), (u[:, :rank] * s[:rank]).astype(np.float32), -1.0)


def _largest(wide: NDArray[np.float64], rank: int) -> tuple[NDArray[np.float64], ...]:
    """Return the largest singular values and their vectors, as :func:`numpy.linalg.svd` does.

    The block Krylov method (Musco and Musco, https://arxiv.org/abs/1504.05477), until the vectors fit; all
    values at once where that takes half of the directions.
    """
    block = wide @ np.random.default_rng(0).standard_normal((wide.shape[1], rank + SPARE_DIRECTIONS))
    basis, rows = block[:, :0], wide[:0]
    while 2 * (basis.shape[1] + block.shape[1]) <= min(wide.shape):
        for _ in range(2):  # once leaves rounding errors
            block = np.linalg.qr(block - basis @ (basis.T @ block))[0]
        own = block.T @ wide
        basis, rows = np.hstack([basis, block]), np.vstack([rows, own])
        squares, inner = np.linalg.eigh(rows @ rows.T)
        s, inner = np.sqrt(np.maximum(squares[: -rank - 1 : -1], TINY)), inner[:, : -rank - 1 : -1]
        u, v = basis @ inner, (inner / s).T @ rows
        if np.abs(wide @ v.T - u * s).max() <= SINGULAR_ERROR * s[0]:
            return u, s, v
        block = wide @ own.T
    return np.linalg.svd(wide, full_matrices=False)


def olora(weight: NDArray[np.float32], rank: int, scale: float) -> Factors:
    """Return the part of a weight in the span of its first columns, to be taken off.

    Args:
        weight: ``[n, k]``.
        rank: Number of columns.
        scale: That of the adapter.
    """
    wide = weight.astype(np.float64)
    q = np.linalg.qr(wide[:, :rank])[0]
    return Factors((q.T @ wide).astype(np.float32), q.astype(np.float32), -scale)


INITIAL: Final[Mapping[str, Callable[[NDArray[np.float32], Factors], Factors]]] = MappingProxyType(
    {
        "pissa": lambda weight, own: pissa(weight, len(own.a)),
        "olora": lambda weight, own: olora(weight, len(own.a), own.scale),
    }
)
"""Values of ``init_lora_weights`` that change the model's weights, with what PEFT takes off them."""

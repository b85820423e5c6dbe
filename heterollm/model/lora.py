"""LoRA adapters in PEFT's format: differences of linears' weights, of low rank.

Format and formulas: https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.model.json_fields import JsonFields, read_json_object
from heterollm.model.tensor_file import TensorFile

__all__ = ["LoraAdapter"]

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
PREFIX: Final = "base_model.model."
FACTOR: Final = re.compile(r"(.+)\.lora_([AB])\.weight")

REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "use_dora": "DoRA, which scales the merged weights",
        "modules_to_save": "whole modules beside the differences (modules_to_save)",
        "trainable_token_indices": "trained tokens (trainable_token_indices)",
        "target_parameters": "stacked experts (target_parameters)",
        "use_bdlora": "block-diagonal factors",
        "alora_invocation_tokens": "activation by tokens of the prompt (aLoRA)",
        "layer_replication": "replicated layers (layer_replication)",
        "lora_bias": "biases (lora_bias)",
    }
)
"""Settings of which each makes an adapter more than differences of linears."""


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
        self._check(config)
        self.factors: Mapping[str, Factors] = self._read(config)

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the adapter is one of a checkpoint.

        Args:
            shapes: The shape of each of the checkpoint's tensors.

        Raises:
            CheckpointError: The checkpoint lacks a weight, or it has another shape.
        """
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

    def add(self, name: str, rows: tuple[int, int] | None, values: NDArray[np.float32]) -> None:
        """Add an adapter's difference to the rows ``[start, stop)`` of a weight, in place."""
        own = self.factors.get(name)
        if own is not None:
            values += (own.b[slice(*rows)] if rows else own.b) @ own.a * np.float32(own.scale)

    def _check(self, config: JsonFields) -> None:
        kind = config.get("peft_type")
        reasons = [text for field, text in REFUSED.items() if config.get(field)]
        if kind != "LORA":
            reasons = [f"the method {kind!r:.40}"]
        if config.get("bias") not in (None, "none"):
            reasons.append(f"trained biases (bias: {config.get('bias')!r:.40})")
        if reasons:
            raise UnsupportedModelError(
                f"{self.folder} is an adapter with {' and '.join(reasons)}; only LoRA of linears is read.",
                fix="Merge it into its model with PEFT's merge_and_unload, then save_pretrained.",
            )

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
            values = file.bits(name).astype(np.float32)
            if values.ndim != 2 or not np.isfinite(values).all():
                raise CheckpointError(f"{file.path}: tensor {name} is no finite matrix.")
            found.setdefault(match[1], {})[match[2]] = values
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
        rank = self._number(config, "r", "rank_pattern", module)
        if len(a) != rank:
            raise CheckpointError(f"{self.paths[1]}: {module} has rank {len(a)}, but {CONFIG} says {rank:g}.")
        alpha = self._number(config, "lora_alpha", "alpha_pattern", module)
        return Factors(a, b, alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank))

    def _number(self, config: JsonFields, field: str, pattern: str, module: str) -> float:
        """Return a number of a module: that of the first pattern that matches its end, or the common one."""
        patterns: Mapping[str, Any] = config.section(pattern)
        for text, value in patterns.items():
            try:
                matches = re.fullmatch(rf"(.*\.)?({text})", module)
            except re.error:
                raise config.fail(pattern, "regular expressions") from None
            if matches and isinstance(value, int | float) and value > 0:
                return float(value)
        return config.positive(field)

"""Sizes of well-known models by name, from their published ``config.json`` files.

A file of an unsupported family is approximated by the closest Llama, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from heterollm.base import CheckpointError, Progress, UnsupportedModelError, silent
from heterollm.data import BUNDLED_NAME
from heterollm.kernels.ops import Precision, Scales
from heterollm.model.checkpoint_folder import checkpoint_folder
from heterollm.model.closest import closest_config
from heterollm.model.config import ModelConfig
from heterollm.model.hub_names import parse_hub_name
from heterollm.model.json_fields import read_json_object
from heterollm.model.known_sizes import DEVICE_ROWS, ROWS
from heterollm.model.shape import ModelShape, model_shape, read_config
from heterollm.model.stored import foreign_format, gguf_folder, is_gguf

ACTIVATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "apertus": "xielu",
        "bitnet": "relu2",
        "gemma": "gelu_pytorch_tanh",
        "gpt_neox": "gelu",
        "phi": "gelu_new",
        "phonelm": "relu",
    }
)
"""Activations by model type, where they are not SiLU."""


class ModelSize(NamedTuple):
    """The numbers of a configuration that determine its time, named as in :class:`ModelConfig`.

    In a mixture ``intermediate`` is the width of an expert, each token chooses ``chosen`` of ``experts``, and
    ``shared`` is the width of the network that computes every token.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head_dim: int
    positions: int
    experts: int = 0
    chosen: int = 0
    shared: int = 0

    def config(self, kind: str = "llama", more: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the configuration of a model of this size.

        Args:
            kind: The ``model_type``.
            more: Further fields of the type.
        """
        local = kind in ("gpt_oss", "mixtral", "phimoe", "granitemoehybrid")
        count = "num_local_experts" if local else "num_experts"
        mixture = {
            **({"moe_intermediate_size": self.intermediate} if kind in ("qwen2_moe", "qwen3_moe") else {}),
            **({"shared_expert_intermediate_size": self.shared} if self.shared else {}),
            count: self.experts,
            "num_experts_per_tok": self.chosen,
            "norm_topk_prob": kind == "qwen3_moe",
        }
        return ModelConfig.from_dict(
            {
                "model_type": kind,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "head_dim": self.head_dim,
                "vocab_size": self.vocabulary,
                "max_position_embeddings": self.positions,
                "tie_word_embeddings": self.tied,
                "rms_norm_eps": 1e-5,
                "hidden_act": ACTIVATIONS.get(kind, "silu"),
                # Other windows are as long as the context, and no answer is generated.
                "sliding_window": None,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **(mixture if self.experts else {}),
                **({"attention_bias": True, "lm_head_bias": True} if kind == "phimoe" else {}),
                **({"partial_rotary_factor": 0.4} if kind == "phi" else {}),
                # All sizes have values as wide as queries, in heads of 128.
                **(
                    {"linear_num_value_heads": self.heads * self.head_dim // 128}
                    if kind == "qwen3_5_text"
                    else {}
                ),
                **(more or {}),
            }
        )

    def shape(
        self,
        name: str,
        precision: Precision = "w4a16",
        *,
        group_size: int = 32,
        float_bits: Literal[16, 32] = 16,
    ) -> ModelShape:
        """Return the shape of a Llama of this size; see :func:`heterollm.model.shape.model_shape`."""
        return model_shape(
            self.config(), name, precision=precision, group_size=group_size, float_bits=float_bits
        )


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that the program knows by name.

    Args:
        kind: The ``model_type``.
        size: The numbers.
        source: The repository on https://huggingface.co that publishes them.
        more: Further fields of the type.
    """

    kind: str
    size: ModelSize
    source: str
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        """The configuration."""
        return self.size.config(self.kind, self.more)


def _known(kind: str, source: str, numbers: Sequence[Any]) -> KnownModel:
    """Return the model of a row, which may end in further fields of its type."""
    more = numbers[-1] if isinstance(numbers[-1], Mapping) else {}
    stated = [number for number in numbers if number is not more]
    return KnownModel(kind, ModelSize._make((*stated, 0, 0, 0)[: len(ModelSize._fields)]), source, more)


KNOWN_MODELS: Final[Mapping[str, KnownModel]] = MappingProxyType(
    {name: _known(kind, source, numbers) for name, kind, source, *numbers in (*ROWS, *DEVICE_ROWS)}
)
"""Models by name."""

DEFAULT_MODELS: Final = (
    ("TinyLlama-1.1B", "tinyllama-1.1b"),
    ("Qwen2.5-0.5B", "qwen2.5-0.5b"),
    ("Llama-3.2-3B", "llama-3.2-3b"),
)
"""Models to measure by default, smallest first: narrow and wide layers, few and many rows in the head, and
inputs of 896 that the larger blocks do not divide evenly into tiles."""


def default_shapes(
    precision: Precision = "w4a16",
    *,
    group_size: int = 32,
    float_bits: Literal[16, 32] = 16,
    scales: Scales = "free",
) -> tuple[ModelShape, ...]:
    """Return the shapes of :data:`DEFAULT_MODELS`; the arguments are those of :func:`model_shape`."""
    return tuple(
        model_shape(
            KNOWN_MODELS[key].config,
            name,
            precision=precision,
            group_size=group_size,
            float_bits=float_bits,
            scales=scales,
        )
        for name, key in DEFAULT_MODELS
    )


class FoundModel(NamedTuple):
    """A model's name, configuration and approximation, which is empty without one."""

    name: str
    config: ModelConfig
    note: str


def find_model(name_or_path: str | Path, *, closest: bool = True, progress: Progress = silent) -> FoundModel:
    """Return the configuration of a known model, a folder, a ``config.json``, the bundled or a hub's model.

    Args:
        name_or_path: A name in :data:`KNOWN_MODELS`, in any case, unless a folder has it; a folder with a
            ``config.json``; such a file; a GGUF file; the name of the bundled model; or a hub name with its
            owner, of which only the configuration or the GGUF file is fetched.
        closest: Whether the closest Llama may approximate a model of an unsupported family, for uses in
            which only shapes count.
        progress: Called with the bytes done and the total while files are fetched.

    Raises:
        CheckpointError: There is no such model, or the file is not sound.
        UnsupportedModelError: The family is not supported, and no Llama approximates it.
    """
    known = KNOWN_MODELS.get(str(name_or_path).lower())
    if known is not None and not Path(name_or_path, "config.json").is_file():
        return FoundModel(str(name_or_path).lower(), known.config, "")
    try:
        path = Path(name_or_path).expanduser()
        if is_gguf(path):
            path = gguf_folder(path)
        text = str(name_or_path)
        by_name = not path.exists() and (
            text == BUNDLED_NAME or ("/" in text and parse_hub_name(text) is not None)
        )
        if by_name:
            path = checkpoint_folder(name_or_path, weights=False, progress=progress)
        if path.exists() and not (path / "config.json").is_file() and (other := foreign_format(path)):
            raise other
        if path.is_dir():
            name = text if by_name else path.resolve().name
            file = path / "config.json"
        elif path.is_file():
            name, file = path.resolve().parent.name or path.stem, path
        else:
            raise CheckpointError(
                f"There is no folder {str(name_or_path)!r:.200}.",
                fix=f"Name the folder that holds config.json, or a known model: {', '.join(KNOWN_MODELS)}.",
            )
        try:
            config = read_config(path) if path.is_dir() else ModelConfig.from_dict(read_json_object(file))
        except UnsupportedModelError:
            if not closest:
                raise
            return FoundModel(name, *closest_config(read_json_object(file)))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"Cannot read {str(name_or_path)!r:.200}: {error}.") from error
    return FoundModel(name, config, "")

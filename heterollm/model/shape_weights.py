"""A model without its weights: every shape and format, for a device that computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterollm.kernels.formats import shape_only_array, shape_only_weight
from heterollm.kernels.ops import OpSpec
from heterollm.model.config import ModelConfig
from heterollm.model.layout import HEAD_LAYER, embedding_name, expected_tensors, linear_names
from heterollm.model.weights import ModelWeights

__all__ = ["shape_only_weights"]


def shape_only_weights(config: ModelConfig, specs: Sequence[OpSpec]) -> ModelWeights:
    """Return weights that have shapes and formats alone; every number in them is the same zero.

    Args:
        config: The model.
        specs: Every group of it, the head last.
    """
    shapes = expected_tensors(config)
    formats = {embedding_name(config): specs[-1].weight}
    for spec in specs:
        formats.update(dict.fromkeys(linear_names(config, spec.layer)[spec.group].values(), spec.weight))
    linears = {
        name: shape_only_weight(shapes[name][0], shapes[name][1], weight) for name, weight in formats.items()
    }
    floats = {
        name: shape_only_array(shape, np.float32) for name, shape in shapes.items() if name not in formats
    }
    embedding = linears[embedding_name(config)]
    head = linears[linear_names(config, HEAD_LAYER)["head"]["head"]]
    sizes = [weight.weight_bytes(*shapes[name]) for name, weight in formats.items()]
    return ModelWeights(
        config=config,
        specs=tuple(specs),
        content_key="shapes alone",
        notes=(),
        size_bytes=sum(sizes) + 4 * sum(values.size for values in floats.values()),
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else head,
        linears=linears,
        floats=floats,
    )

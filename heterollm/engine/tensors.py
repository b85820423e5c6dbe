"""A model's norms, biases, RoPE tables and learned positions on the OpenCL device."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import GpuRuntime
from heterollm.kernels.operators import Mixing
from heterollm.kernels.ops import Group, Slopes
from heterollm.model import (
    INNER_NORMS,
    LAYER_SCALE,
    STREAM_CORRECTION,
    STREAM_PREDICTION,
    STREAM_ROUTER,
    STREAM_ROUTER_NORM,
    STREAM_SCALE,
    AttentionBlock,
    DeltaNetBlock,
    FfnBlock,
    LatentAttentionBlock,
    MambaBlock,
    ModelWeights,
    Norm,
    QueryGrowth,
    RopeConfig,
    ShortConvBlock,
    rope_tables,
)


class StreamTensors(NamedTuple):
    """The weights by which a layer mixes its streams.

    Args:
        predicts: Weights of the prediction.
        corrects: Weights of the correction.
        scale: float32 ``[hidden]``, factors on the stream that meets the layer's own embedding.
    """

    predicts: Mixing
    corrects: Mixing
    scale: Any  # pyopencl is not typed


class GlueTensors:
    """Uploads norms, biases, RoPE tables and learned positions once; layers with the same RoPE share tables.

    Attributes:
        final_norm: Factors of the norm before the head, then its bias if it has one.
        positions: Learned positions, float32 ``[context, hidden]``; None in a model without.
    """

    def __init__(self, runtime: GpuRuntime, weights: ModelWeights, context: int) -> None:
        config = weights.config
        offset = np.float32(config.norm_offset)
        self._runtime, self._weights = runtime, weights
        # The head is linear, so that its norm can scale the logits.
        final_norm = weights.final_norm + np.float32(config.final_norm_offset)
        final_norm *= np.float32(config.logit_scale)
        self.final_norm: Any = self._uploaded(final_norm, weights.final_norm_bias)
        learned = weights.positions
        self.positions: Any = None if learned is None else runtime.upload(learned[:context])
        self._norms: dict[tuple[int, Norm], Any] = {}
        self._head_norms: dict[int, Any] = {}
        self._biases: dict[tuple[int, Group, int], Any] = {}
        self._growths: dict[QueryGrowth, Any] = {}
        self._ropes: dict[tuple[RopeConfig | None, int], tuple[Any, Any]] = {}
        for number, layer in enumerate(config.per_layer):
            for stage in layer.stages:
                inner = (norm for block in stage.blocks for norm in block.norms() if norm in INNER_NORMS)
                for norm in (*stage.norms, *inner):
                    factors = weights.norm(number, norm) + offset
                    self._norms[number, norm] = self._uploaded(factors, weights.norm_bias(number, norm))
        for number, block in config.blocks(AttentionBlock).items():
            if block.head_norms:
                heads = [weights.norm(number, norm) for norm in block.norms_of_heads()]
                self._head_norms[number] = runtime.upload(np.concatenate(heads) + offset)
            if (key := (block.rope, block.rotary_dim)) not in self._ropes:
                tables = _tables(*key, context)
                self._ropes[key] = runtime.upload(tables[0]), runtime.upload(tables[1])
            if (growth := block.query_growth) is not None and growth not in self._growths:
                self._growths[growth] = runtime.upload(growth.factors(context))
        self._taps: dict[int, Any] = {
            number: runtime.upload(_taps(weights, number))
            for number in (*config.blocks(ShortConvBlock), *config.blocks(DeltaNetBlock))
        }
        self._nets: dict[int, tuple[Any, Any]] = {
            number: (
                runtime.upload(_rates(weights, number)),
                runtime.upload(weights.other(number, "gated_norm")) if block.normed else None,
            )
            for number, block in config.blocks(DeltaNetBlock).items()
        }
        self._streams: dict[int, StreamTensors] = {}
        self._latents: dict[int, tuple[Any, Any, Any, Any]] = {}
        self._sinks: dict[int, Any] = {
            number: runtime.upload(weights.other(number, "sinks"))
            for number, block in config.blocks(AttentionBlock).items()
            if block.sinks
        }
        self._token_gates: dict[int, Any] = {
            number: runtime.upload(weights.other(number, "token_gate")[0])
            for number, block in config.blocks(FfnBlock).items()
            if block.token_gated
        }
        for spec in weights.specs:
            self.bias(spec.layer, spec.group)

    def norm(self, layer: int, norm: Norm | None) -> Any:  # noqa: ANN401 - pyopencl is not typed
        """Return a norm's factors, then its bias if it has one, float32 ``[hidden]``; None for no norm."""
        return None if norm is None else self._norms[layer, norm]

    def gain(self, layer: int) -> float:
        """Return the factor on the residual stream at the end of a layer."""
        is_scaled = self._weights.config.per_layer[layer].is_scaled
        return float(self._weights.other(layer, LAYER_SCALE)[0]) if is_scaled else 1.0

    def head_norms(self, layer: int) -> Any:  # noqa: ANN401
        """Return the factors of q and then of k, float32, of a head or of all; None without such norms."""
        return self._head_norms.get(layer)

    def taps(self, layer: int) -> Any:  # noqa: ANN401
        """Return the weights of a convolution, float32 ``[taps, width]``, that of a token itself last.

        Those of a state space have a row of biases behind them.
        """
        return self._taps[layer]

    def net(self, layer: int) -> tuple[Any, Any]:
        """Return rates and shifts of a delta net's decay, float32 ``[2, heads]``, and its norm's factors.

        In a state space a third row has the factors of values in the output; there may be no norm.
        """
        return self._nets[layer]

    def latent(self, layer: int, dtype: np.dtype[Any]) -> tuple[Any, Any, Any, Any]:
        """Return what latent attention multiplies by, and the weights of its norms.

        Args:
            layer: Decoder layer.
            dtype: The activation type.

        Returns:
            Weights ``[heads, latent_dim, plain_dim]`` of queries and ``[heads, value_dim, latent_dim]`` of
            outputs in the activation type; float32 of the norm of latent vectors and, or None, of queries.
        """
        if layer not in self._latents:
            block = self._weights.config.per_layer[layer].find(LatentAttentionBlock)
            assert block is not None  # the layer has it
            rows = self._weights.other(layer, "latent_weights").reshape(block.heads, -1, block.latent_dim)
            keys, values = np.split(rows, [block.plain_dim], axis=1)
            both = (np.ascontiguousarray(keys.swapaxes(1, 2)), np.ascontiguousarray(values))
            roles = ("latent_norm", *(("latent_query_norm",) if block.query_rank else ()))
            made = (*(one.astype(dtype) for one in both), *(self._weights.other(layer, own) for own in roles))
            first, second, norm, *query = (self._runtime.upload(one) for one in made)
            self._latents[layer] = first, second, norm, query[0] if query else None
        return self._latents[layer]

    def streams(self, layer: int) -> StreamTensors:
        """Return the weights by which a layer mixes its streams, of a model that has several."""
        if layer not in self._streams:
            weights, hidden = self._weights, self._weights.config.hidden_size
            streams = weights.config.per_layer[layer].streams
            assert streams is not None  # the model has several
            # The router reads the norm's output over its width.
            router = weights.other(layer, STREAM_ROUTER) * weights.other(layer, STREAM_ROUTER_NORM) / hidden
            router, predicts, corrects, scale = (
                self._runtime.upload(np.ascontiguousarray(values, np.float32))
                for values in (
                    router,
                    weights.other(layer, STREAM_PREDICTION),
                    weights.other(layer, STREAM_CORRECTION),
                    weights.other(layer, STREAM_SCALE) if streams.scaled else np.ones(hidden),
                )
            )
            self._streams[layer] = StreamTensors(Mixing(router, predicts), Mixing(router, corrects), scale)
        return self._streams[layer]

    def token_gate(self, layer: int) -> Any:  # noqa: ANN401
        """Return the weights of a gate of whole tokens, float32 ``[hidden]``."""
        return self._token_gates[layer]

    def slopes(self, layer: int) -> Slopes:
        """Return the numbers of xIELU of a layer's network."""
        return self._weights.slopes(layer)

    def sinks(self, layer: int) -> Any:  # noqa: ANN401
        """Return the scores of heads that belong to no key, float32 ``[heads]``; None without."""
        return self._sinks.get(layer)

    def bias(self, layer: int, group: Group, start: int = 0) -> Any:  # noqa: ANN401
        """Return the float32 biases of a group's members, from ``start`` on of each; None without bias."""
        key = layer, group, start
        if key not in self._biases:
            rows = [member[start:] for member in self._weights.bias(layer, group)]
            self._biases[key] = self._runtime.upload(np.concatenate(rows)) if rows else None
        return self._biases[key]

    def _uploaded(self, factors: NDArray[np.float32], bias: NDArray[np.float32] | None) -> Any:  # noqa: ANN401
        if self._weights.config.centered_norms and bias is None:
            bias = np.zeros_like(factors)
        return self._runtime.upload(factors if bias is None else np.concatenate([factors, bias]))

    def query_scales(self, block: AttentionBlock) -> Any:  # noqa: ANN401
        """Return the factors of queries by position, float32 ``[context]``; None if they do not grow."""
        return None if block.query_growth is None else self._growths[block.query_growth]

    def rope(self, block: AttentionBlock) -> tuple[Any, Any]:
        """Return cosine and sine, float32 ``[context, rotary_dim / 2]``; placeholders without RoPE."""
        return self._ropes[block.rope, block.rotary_dim]


def _rates(weights: ModelWeights, layer: int) -> NDArray[np.float32]:
    skips = ("skip",) if weights.config.per_layer[layer].find(MambaBlock) else ()
    others = (weights.other(layer, role) for role in ("decay_shift", *skips))
    return np.stack([-np.exp(weights.other(layer, "decay")), *others])


def _taps(weights: ModelWeights, layer: int) -> NDArray[np.float32]:
    taps = weights.other(layer, "taps")[:, 0].T
    space = weights.config.per_layer[layer].find(MambaBlock)
    if space is not None:
        bias = weights.other(layer, "taps_bias") if space.biased else np.zeros_like(taps[0])
        # A file has x, B and C in this order.
        values, keys, queries = np.split(
            np.concatenate([taps, bias[None]]),
            [space.shape.value_columns, (space.shape.value_columns + space.shape.channels) // 2],
            axis=1,
        )
        taps = np.concatenate([queries, keys, values], axis=1)
    return np.ascontiguousarray(taps)


def _tables(
    rope: RopeConfig | None, rotary_dim: int, context: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if rope is None:
        return np.zeros(1, np.float32), np.zeros(1, np.float32)
    return rope_tables(rope, rotary_dim, context)

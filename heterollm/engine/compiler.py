"""Turns a plan into flat lists of prepared calls, one list per phase and length.

Everything a pass needs is decided and bound here: kernels with their arguments set, NPU graphs with their
memory bound, waits where a processor hands over to the other. Running a pass is calling the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from heterollm.base import Progress
from heterollm.engine.passes import CompiledPass, PassRequest, Placed
from heterollm.engine.placing import Call, Part, Placer
from heterollm.engine.slot_check import SlotCheck
from heterollm.engine.slots import INPUT_SLOTS, pool_sizes
from heterollm.engine.tensors import SmallTensors
from heterollm.engine.waits import HandOvers
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    STEP_WORDS,
    GpuLayers,
    GpuLinear,
    HeadShape,
    KvLayer,
    Launch,
    Rotation,
    RoundedInputs,
    Scores,
    Segments,
    SharedArray,
    merge_launches,
)
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.kernels.sync import Pool
from heterollm.model import ModelWeights, Norm
from heterollm.solver import Plan

__all__ = ["Compiler"]


class Compiler:
    """Compiles passes of one model, plan and device.

    Args:
        device: The opened device.
        weights: The model's weights; packed for the GPU here.
        plan: Who computes what.
        context: Positions of a session.
        progress: Called with a stage's name, steps done and steps in all.
        hand_overs: How the parts wait for each other.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        context: int,
        progress: Progress,
        hand_overs: HandOvers,
    ) -> None:
        self._device = device
        self._weights = weights
        self._config = weights.config
        self._plan = plan
        self._context = context
        self._runtime = device.gpu
        self._layers = GpuLayers(device.gpu, device.activation_dtype, device.cache_dtype)
        self._hand_overs = hand_overs
        self._check = SlotCheck.from_environment(device.gpu)
        self._placer = Placer(
            device, weights, after_every_operator=hand_overs.after_every_operator, check=self._check
        )
        sizes = pool_sizes(self._config, weights.specs, plan, device.activation_dtype.itemsize)
        self.pool = Pool(device.gpu, sizes)
        self.tokens = device.gpu.shared((plan.chunk_length,), np.int32)
        self.step = device.gpu.shared((STEP_WORDS,), np.int32)
        self._specs = {(spec.layer, spec.group): spec for spec in weights.specs}
        self._linears: dict[tuple[int, Group], GpuLinear] = {}
        for done, spec in enumerate(weights.specs):
            progress("Packing weights for the GPU", done, len(weights.specs))
            members = weights.linear(spec.layer, spec.group)
            self._linears[spec.layer, spec.group] = GpuLinear.pack(
                device.gpu,
                members,
                activation_dtype=device.activation_dtype,
                integer_inputs=spec.integer_inputs,
            )
        progress("Packing weights for the GPU", len(weights.specs), len(weights.specs))
        if weights.embedding is weights.head:
            self._embedding = self._linears[-1, "head"]
        else:
            self._embedding = GpuLinear.pack(
                device.gpu, [weights.embedding], activation_dtype=device.activation_dtype
            )
        self._small = SmallTensors(device.gpu, weights, context)

    def close(self) -> None:
        """Drop the packed weights; nothing compiled may run afterwards."""
        self._linears.clear()
        self._placer.clear()
        del self._embedding, self._small

    def leave_npu(self) -> None:
        """Compile for the GPU alone from now on; what was compiled before must not run any more."""
        self._plan = self._plan.without_npu()
        self._placer.clear()

    # -- passes --------------------------------------------------------------------------------------

    def compile_pass(self, phase: Phase, tokens: int, bucket: int, cache: SharedArray) -> CompiledPass:
        """Return the calls that take ``tokens`` tokens through all layers, head excepted.

        Args:
            phase: Which placements of the plan to use.
            tokens: Length of the pass.
            bucket: Positions that the grids of a decode pass must cover.
            cache: A session's KV cache to bind at first.
        """
        config, layers, pool, small = self._config, self._layers, self.pool, self._small
        request = self._request(phase, tokens, [spec for spec in self._weights.specs if spec.layer >= 0])
        calls, end_operator = request.calls, self._placer.end_operator
        compiled = CompiledPass(calls, bound_cache=cache)
        scale = config.embedding_scale
        calls.append(self._embedding.embed_launch(self.tokens, pool["residual"], count=tokens, scale=scale))
        end_operator(calls)
        delta: Segments | None = None
        shape = HeadShape(config.heads, config.kv_heads, config.head_dim, self._context)
        for layer, features in enumerate(config.per_layer):
            here = self._placed(request, layer, "qkv")
            rounded = self._rounded(here)
            self._norm(request, layer, "attention", delta, rounded)
            qkv = self._linear(request, here, rounded)
            here = self._placed(request, layer, "o")
            rounded = self._rounded(here)
            rope = layers.rope_and_store(
                qkv,
                small.bias(layer, "qkv"),
                pool["query"],
                KvLayer(cache, layer),
                self.step,
                shape=shape,
                rotation=Rotation(
                    *small.rope(features.rope),
                    dim=config.rotary_dim if features.rope else 0,
                    norms=small.head_norms(layer),
                    epsilon=config.rms_norm_eps,
                ),
                tokens=tokens,
            )
            attend = layers.attention(
                pool["query"],
                KvLayer(cache, layer),
                pool["attention_output"],
                self.step,
                shape=shape,
                scores=Scores(config.attention_scale, features.window, config.attention_soft_cap),
                tokens=tokens,
                bucket=bucket,
                rounded=rounded,
            )
            calls.append(rope)
            end_operator(calls)
            calls += attend
            end_operator(calls)
            compiled.cache_launches += [rope, attend[0]]
            delta = self._linear(request, here, rounded)
            delta = self._feed_forward(request, layer, delta)
        compiled.output = delta
        merged = self._placer.merges(tokens)
        if self._check is not None:
            compiled.calls = self._check.checked(calls, self.pool, f"{phase} of {tokens}", merged=merged)
        if merged:
            compiled.merge(self._runtime)
        return compiled

    def compile_head(self, phase: Phase, rows: int, output: Segments) -> list[Call]:
        """Return the calls from the last layer's output to the logits of ``rows`` positions."""
        config, pool = self._config, self.pool
        request = self._request(phase, rows, [self._specs[-1, "head"]])
        calls, end_operator = request.calls, self._placer.end_operator
        here = self._placed(request, -1, "head")
        rounded = self._rounded(here)
        calls.append(
            self._layers.final_norm(
                pool["residual"],
                self._small.final_norm,
                pool["head_input"],
                self.step,
                hidden=config.hidden_size,
                rows=rows,
                epsilon=config.rms_norm_eps,
                delta=output,
                rounded=rounded,
                **self._delta_options(config.layers - 1, "down"),
            )
        )
        end_operator(calls)
        if not here.placement.npu_lengths:
            linear = self._linears[-1, "head"]
            options: dict[str, Any] = {"output_dtype": np.float32, "rounded": rounded, "label": "head"}
            calls.append(linear.launch(pool["head_input"], pool["logits"], tokens=rows, **options))
        else:
            segments = self._linear(request, here, rounded)
            calls.append(self._layers.join_logits(segments, pool["logits"], rows=rows))
        end_operator(calls)
        cap, vocabulary = config.logit_soft_cap, config.vocab_size
        if cap:
            calls.append(self._layers.soft_cap(pool["logits"], cap, rows=rows, vocabulary=vocabulary))
        end = request.hand_overs.before("end") if self._plan.uses_npu else None
        calls += self._placer.end(end, rows)
        merged = self._placer.merges(rows)
        if self._check is not None:
            written = (output.a, output.b, pool["residual"])
            calls = self._check.checked(calls, pool, f"head of {rows}", written, merged=merged)
        return merge_launches(self._runtime, calls) if merged else calls

    # -- pieces --------------------------------------------------------------------------------------

    def _request(self, phase: Phase, tokens: int, specs: Sequence[OpSpec]) -> PassRequest:
        operators = self._plan.operators(phase, tokens, specs, rows=tokens)
        placements = {(spec.layer, spec.group): (spec, placement) for spec, placement in operators}
        return PassRequest(phase, tokens, placements, self._hand_overs.of_pass(phase, tokens))

    def _norm(
        self,
        request: PassRequest,
        layer: int,
        norm: Literal["attention", "feed_forward"],
        delta: Segments | None,
        rounded: RoundedInputs | None,
    ) -> None:
        place = layer if norm == "feed_forward" else layer - 1
        group: Group = "o" if norm == "feed_forward" else "down"
        request.calls.append(
            self._layers.rms_norm(
                self.pool["residual"],
                self._small.norm(layer, norm),
                self.pool["linear_input"],
                hidden=self._config.hidden_size,
                tokens=request.tokens,
                epsilon=self._config.rms_norm_eps,
                delta=delta,
                rounded=rounded,
                **self._delta_options(place, group),
            )
        )
        self._placer.end_operator(request.calls)

    def _delta_options(self, layer: int, group: Group) -> dict[str, Any]:
        """Return the bias of what a group adds to the residual and the weight of its norm."""
        norm: Norm = "attention_output" if group == "o" else "feed_forward_output"
        return {"bias": self._small.bias(layer, group), "post": self._small.norm(layer, norm)}

    def _placed(self, request: PassRequest, layer: int, group: Group) -> Placed:
        return Placed(*request.placements[layer, group])

    def _rounded(self, here: Placed) -> RoundedInputs | None:
        """Return where the kernel that writes a group's input leaves the int8 codes; None if it leaves none.

        It does where the GPU computes rows of all tokens. Under a sequence cut the GPU rounds its own few
        while the NPU, which rounds for itself, is at work.
        """
        spec = here.spec
        if not spec.integer_inputs or here.placement.npu_rows == spec.member_rows:
            return None
        slot = INPUT_SLOTS[spec.group]
        codes, blocks = self.pool[f"{slot}_codes"], self.pool[f"{slot}_blocks"]
        return RoundedInputs(codes, blocks, spec.weight.bits, spec.weight.block)

    def _linear(self, request: PassRequest, here: Placed, rounded: RoundedInputs | None) -> Segments:
        linear = self._linears[here.spec.layer, here.spec.group]
        part = self._part(request, here)
        return self._placer.place(request.calls, part, linear, rounded)

    def _part(self, request: PassRequest, here: Placed) -> Part:
        spec, pool = here.spec, self.pool
        prefix = "head_" if spec.group == "head" else ""
        return Part(
            spec,
            here.placement,
            request.tokens,
            pool[INPUT_SLOTS[spec.group]],
            pool[f"{prefix}npu_output"],
            pool[f"{prefix}gpu_output"],
            lambda: request.hand_overs.before(spec.group, spec.layer),
        )

    # -- the feed-forward network --------------------------------------------------------------------

    def _feed_forward(self, request: PassRequest, layer: int, delta: Segments) -> Segments:
        """Append a layer's feed-forward network, its norm included, and return where its output lies."""
        if (layer, "ffn") in request.placements:
            return self._feed_forward_block(request, self._placed(request, layer, "ffn"), delta)
        here = self._placed(request, layer, "gate_up")
        rounded = self._rounded(here)
        self._norm(request, layer, "feed_forward", delta, rounded)
        gate_up = self._linear(request, here, rounded)
        here = self._placed(request, layer, "down")
        rounded = self._rounded(here)
        request.calls.append(self._activation(request, layer, gate_up, rounded))
        self._placer.end_operator(request.calls)
        return self._linear(request, here, rounded)

    def _feed_forward_block(self, request: PassRequest, here: Placed, delta: Segments) -> Segments:
        """As :meth:`_feed_forward`, cut as a whole along the intermediate width: both parts make a sum.

        The GPU's three kernels follow one another in its queue while the NPU runs one graph.
        """
        block = here.spec
        rounded = self._rounded(here)
        self._norm(request, block.layer, "feed_forward", delta, rounded)
        part = self._part(request, here)
        (width, *_), (whole, *_) = here.placement.npu_rows, block.member_rows
        if width == whole:
            return self._placer.place_block(request.calls, part, [])
        assert block.then is not None
        options: dict[str, Any] = {"tokens": request.tokens, "label": part.label}
        gate_up = self._linears[block.layer, "gate_up"].launch(
            part.source, part.gpu_output, kept=((width, whole),) * 2, rounded=rounded, **options
        )
        left = (whole - width,) * 2
        rounded = self._rounded(Placed(block.then, here.placement))
        halves = Segments(part.gpu_output, part.gpu_output, left, (0, 0))
        activation = self._activation(request, block.layer, halves, rounded, start=width)
        # The rows of gate and up have been read by then: the same slot takes the sum.
        down = self._linears[block.layer, "down"].launch(
            self.pool["activated"], part.gpu_output, columns=(width, whole), rounded=rounded, **options
        )
        return self._placer.place_block(request.calls, part, [gate_up, activation, down])

    def _activation(
        self,
        request: PassRequest,
        layer: int,
        gate_up: Segments,
        rounded: RoundedInputs | None,
        *,
        start: int = 0,
    ) -> Launch:
        """Return the activation of the rows of gate and up from one on."""
        return self._layers.gated_activation(
            gate_up,
            self.pool["activated"],
            tokens=request.tokens,
            intermediate=gate_up.rows[0],
            activation=self._config.activation,
            bias=self._small.gate_up_bias(layer, start),
            rounded=rounded,
        )

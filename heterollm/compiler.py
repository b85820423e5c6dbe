"""Turns a plan into flat lists of prepared calls, one list per phase and length.

Everything a pass needs is decided and bound here: kernels with their arguments set, NPU graphs with their
memory bound, waits where a processor hands over to the other. Running a pass is calling the list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from heterollm.families import Norm
from heterollm.kernels.device import Device
from heterollm.kernels.gpu_layers import STEP_WORDS, GpuLayers, Segments
from heterollm.kernels.gpu_linear import GpuLinear
from heterollm.kernels.merged import MergedLaunch, merge_launches
from heterollm.kernels.npu import NpuGraph
from heterollm.kernels.opencl_launch import Launch
from heterollm.kernels.opencl_memory import SharedArray
from heterollm.kernels.opencl_runtime import OpenClRuntime
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.kernels.pool import Pool
from heterollm.kernels.rounding import RoundedInputs
from heterollm.npu_slices import npu_slice
from heterollm.progress import Progress
from heterollm.slots import HEAD_ROWS, INPUT_SLOTS, pool_sizes
from heterollm.small_tensors import SmallTensors
from heterollm.solver.plan import Placement, Plan
from heterollm.weights import ModelWeights

__all__ = ["HEAD_ROWS", "CompiledPass", "Compiler", "pool_sizes"]

Call: TypeAlias = Callable[[], Any]


@dataclass(slots=True)
class CompiledPass:
    """One pass, ready to run: its calls in order, and the launches that name the session's KV cache."""

    calls: list[Call] = field(default_factory=list)
    cache_launches: list[Launch | MergedLaunch] = field(default_factory=list)
    output: Segments | None = None
    bound_cache: SharedArray | None = None

    def merge(self, runtime: OpenClRuntime) -> None:
        """Make one launch of those that follow each other, where the device gains by it."""
        self.calls = merge_launches(runtime, self.calls)
        left = [launch for launch in self.cache_launches if launch in self.calls]
        self.cache_launches = [*left, *(call for call in self.calls if isinstance(call, MergedLaunch))]

    def bind_cache(self, cache: SharedArray) -> None:
        """Point the launches at a session's cache, if they are not there yet."""
        if self.bound_cache is not cache:
            for launch in self.cache_launches:
                launch.replace(self.bound_cache, cache)
            self.bound_cache = cache


class Compiler:
    """Compiles passes of one model, plan and device.

    Args:
        device: The opened device.
        weights: The model's weights; packed for the GPU here.
        plan: Who computes what.
        context: Positions of a session.
        progress: Called with a stage's name, steps done and steps in all.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        context: int,
        progress: Progress,
    ) -> None:
        self._device = device
        self._weights = weights
        self._config = weights.config
        self._plan = plan
        self._context = context
        self._runtime = device.gpu
        self._layers = GpuLayers(device.gpu, device.activation_dtype, device.cache_dtype)
        self._graphs: dict[tuple[int, Group, tuple[int, ...], str | None, int], NpuGraph] = {}
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
        self._graphs.clear()
        del self._embedding, self._small

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
        compiled = CompiledPass(bound_cache=cache)
        calls = compiled.calls
        scale = config.embedding_scale
        calls.append(self._embedding.embed_launch(self.tokens, pool["residual"], count=tokens, scale=scale))
        delta: Segments | None = None
        shape: dict[str, Any] = {
            "heads": config.heads,
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "capacity": self._context,
            "tokens": tokens,
        }
        for layer, features in enumerate(config.per_layer):
            rounded = self._rounded(phase, tokens, layer, "qkv")
            self._norm(calls, layer, "attention", tokens, delta, rounded)
            qkv = self._linear(calls, phase, tokens, layer, "qkv", rounded)
            rounded = self._rounded(phase, tokens, layer, "o")
            rope = layers.rope_and_store(
                qkv,
                small.bias(layer, "qkv"),
                *small.rope(features.rope),
                pool["query"],
                cache,
                self.step,
                layer=layer,
                rotary_dim=config.rotary_dim if features.rope else 0,
                norms=small.head_norms(layer),
                epsilon=config.rms_norm_eps,
                **shape,
            )
            attend = layers.attention(
                pool["query"],
                cache,
                pool["attention_output"],
                self.step,
                layer=layer,
                bucket=bucket,
                scale=config.attention_scale,
                window=features.window,
                soft_cap=config.attention_soft_cap,
                rounded=rounded,
                **shape,
            )
            calls += [rope, *attend]
            compiled.cache_launches += [rope, attend[0]]
            delta = self._linear(calls, phase, tokens, layer, "o", rounded)
            rounded = self._rounded(phase, tokens, layer, "gate_up")
            self._norm(calls, layer, "feed_forward", tokens, delta, rounded)
            gate_up = self._linear(calls, phase, tokens, layer, "gate_up", rounded)
            rounded = self._rounded(phase, tokens, layer, "down")
            calls.append(
                layers.gated_activation(
                    gate_up,
                    pool["activated"],
                    tokens=tokens,
                    intermediate=config.intermediate_size,
                    activation=config.activation,
                    bias=small.bias(layer, "gate_up"),
                    rounded=rounded,
                )
            )
            delta = self._linear(calls, phase, tokens, layer, "down", rounded)
        compiled.output = delta
        if tokens == 1:
            compiled.merge(self._runtime)
        return compiled

    def compile_head(self, phase: Phase, rows: int, output: Segments) -> list[Call]:
        """Return the calls from the last layer's output to the logits of ``rows`` positions."""
        config, pool = self._config, self.pool
        spec = self._specs[-1, "head"]
        rounded = self._rounded(phase, rows, -1, "head")
        calls: list[Call] = [
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
        ]
        placement = self._plan.placement(phase, rows, spec)
        if not placement.npu_lengths:
            linear = self._linears[-1, "head"]
            options: dict[str, Any] = {"output_dtype": np.float32, "rounded": rounded, "label": "head"}
            calls.append(linear.launch(pool["head_input"], pool["logits"], tokens=rows, **options))
        else:
            slots = pool["head_npu_output"], pool["head_gpu_output"]
            segments = self._place(calls, spec, placement, rows, rounded, *slots)
            calls.append(self._layers.join_logits(segments, pool["logits"], rows=rows))
        cap, vocabulary = config.logit_soft_cap, config.vocab_size
        if cap:
            calls.append(self._layers.soft_cap(pool["logits"], cap, rows=rows, vocabulary=vocabulary))
        calls.append(self._runtime.finish)
        return merge_launches(self._runtime, calls) if rows == 1 else calls

    # -- pieces --------------------------------------------------------------------------------------

    def _norm(
        self,
        calls: list[Call],
        layer: int,
        norm: Literal["attention", "feed_forward"],
        tokens: int,
        delta: Segments | None,
        rounded: RoundedInputs | None,
    ) -> None:
        place = layer if norm == "feed_forward" else layer - 1
        group: Group = "o" if norm == "feed_forward" else "down"
        calls.append(
            self._layers.rms_norm(
                self.pool["residual"],
                self._small.norm(layer, norm),
                self.pool["linear_input"],
                hidden=self._config.hidden_size,
                tokens=tokens,
                epsilon=self._config.rms_norm_eps,
                delta=delta,
                rounded=rounded,
                **self._delta_options(place, group),
            )
        )

    def _delta_options(self, layer: int, group: Group) -> dict[str, Any]:
        """Return the bias of what a group adds to the residual and the weight of its norm."""
        norm: Norm = "attention_output" if group == "o" else "feed_forward_output"
        return {"bias": self._small.bias(layer, group), "post": self._small.norm(layer, norm)}

    def _rounded(self, phase: Phase, tokens: int, layer: int, group: Group) -> RoundedInputs | None:
        """Return where the kernel that writes a group's input leaves the int8 codes; None if it leaves none.

        It does where the GPU computes rows of all tokens. Under a sequence cut the GPU rounds its own few
        while the NPU, which rounds for itself, is at work.
        """
        spec = self._specs[layer, group]
        placement = self._plan.placement(phase, tokens, spec)
        if not spec.integer_inputs or placement.npu_rows == spec.member_rows:
            return None
        slot = INPUT_SLOTS[group]
        codes, blocks = self.pool[f"{slot}_codes"], self.pool[f"{slot}_blocks"]
        return RoundedInputs(codes, blocks, spec.weight.bits, spec.weight.block)

    def _linear(
        self,
        calls: list[Call],
        phase: Phase,
        tokens: int,
        layer: int,
        group: Group,
        rounded: RoundedInputs | None,
    ) -> Segments:
        spec = self._specs[layer, group]
        placement = self._plan.placement(phase, tokens, spec)
        slots = self.pool["npu_output"], self.pool["gpu_output"]
        return self._place(calls, spec, placement, tokens, rounded, *slots)

    def _place(
        self,
        calls: list[Call],
        spec: OpSpec,
        placement: Placement,
        tokens: int,
        rounded: RoundedInputs | None,
        npu_output: SharedArray,
        gpu_output: SharedArray,
    ) -> Segments:
        """Append the calls of one group and return where its output lies.

        The GPU's part is started first and runs while the NPU's graphs run on this thread. The wait before
        it is for the kernel that wrote the input; no wait follows, since the kernels that read the output
        are enqueued after the NPU has returned.
        """
        linear = self._linears[spec.layer, spec.group]
        source = self.pool[INPUT_SLOTS[spec.group]]
        label = f"{spec.layer}.{spec.group}"
        rows = spec.member_rows
        if not placement.npu_lengths:
            calls.append(linear.launch(source, gpu_output, tokens=tokens, rounded=rounded, label=label))
            return Segments(npu_output, gpu_output, rows, (0,) * len(rows))
        row_cut = placement.npu_rows != rows
        covered = min(tokens, sum(placement.npu_lengths))
        slots = source, npu_output
        if row_cut or covered == tokens:
            calls += self._hand_over(*slots)
        if row_cut:
            kept = tuple(zip(placement.npu_rows, rows, strict=True))
            options: dict[str, Any] = {"kept": kept, "rounded": rounded, "label": label}
            calls.append(linear.launch(source, gpu_output, tokens=tokens, **options))
            calls.append(self._runtime.flush)
        elif covered < tokens:
            # A sequence cut leaves one segment: the GPU writes the rows below those of the NPU. Mapped memory
            # must not be written by a kernel, so where the parts are not coherent they take turns.
            calls.append(self._runtime.finish)
            calls.append(
                linear.launch(source, npu_output, tokens=tokens - covered, first_token=covered, label=label)
            )
            calls.append(self._runtime.flush)
            if not source.coherent:
                calls += self._hand_over(*slots)
        calls += self._graph_calls(spec, placement, *slots)
        if not source.coherent:
            calls += [source.release, npu_output.release]
        return Segments(npu_output, gpu_output, rows, placement.npu_rows)

    def _hand_over(self, source: SharedArray, target: SharedArray) -> list[Call]:
        """Return the calls that wait for the kernels before and let the NPU at its two slots.

        The input is mapped for reading only, so that the GPU's part of a row cut may read it meanwhile.
        """
        if source.coherent:
            return [self._runtime.finish]
        return [source.acquire_to_read, target.acquire]

    def _graph_calls(
        self, spec: OpSpec, placement: Placement, source: SharedArray, target: SharedArray
    ) -> list[Call]:
        dtype = self._device.activation_dtype
        rows, total = sum(placement.npu_rows), sum(placement.npu_lengths)
        x = source.view(dtype, (total, spec.columns))
        y = target.view(dtype, (total, rows))
        calls: list[Call] = []
        first = 0
        for length in placement.npu_lengths:
            graph = self._graph(spec, placement, length)
            calls.append(graph.bind(x[first : first + length], y[first : first + length]))
            first += length
        return calls

    def _graph(self, spec: OpSpec, placement: Placement, length: int) -> NpuGraph:
        npu = self._device.npu
        assert npu is not None  # loading has checked the plan
        key = (spec.layer, spec.group, placement.npu_rows, placement.form, length)
        if key not in self._graphs:
            # The slice is dropped: its stacked members would hold the weights once more.
            part = npu_slice(self._weights, spec, placement.npu_rows)
            self._graphs[key] = npu.prepare(part, length, placement.form)  # type: ignore[arg-type]
        return self._graphs[key]

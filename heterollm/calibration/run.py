"""Runs a calibration: windows of text through a model on the GPU alone, then a check of the ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from heterollm.base import (
    CalibrationError,
    InputError,
    OptionError,
    Progress,
    check_target,
    read_text,
    silent,
)
from heterollm.calibration.check import RangeCheck, largest_partial, silu
from heterollm.calibration.decision import Policy, decide
from heterollm.calibration.float_weights import FloatWeights, as_floats
from heterollm.calibration.head_importance import measure_importance
from heterollm.calibration.head_statistics import HeadStatistics
from heterollm.calibration.loss import LossMeter
from heterollm.calibration.observer import ActivationObserver, Floats, LinearStatistics
from heterollm.calibration.range_records import FfnCalibration, StreamCalibration
from heterollm.calibration.records import Calibration, load_calibration
from heterollm.calibration.routing import RoutingStatistics
from heterollm.data import bundled_model
from heterollm.engine import Engine, EngineThread, start_engine
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.ops import Group, OpSpec, Precision, joined_specs
from heterollm.model import Checkpoint, ModelConfig, ModelWeights, load_weights
from heterollm.solver import level_plan
from heterollm.text import Tokenizer, load_tokenizer

CALIBRATION_WINDOWS: Final = 8
WINDOW_TOKENS: Final = 512
CHECKED_TOKENS: Final = 64
"""Tokens of the last window that are computed on their grids."""

SHORTEST_WINDOW: Final = 64

LOSS_WINDOWS: Final = 4
"""Last windows of the text, on which the loss of pruned shadows is measured; no range is of the last one."""

IMPORTANCE_WINDOWS: Final = 2
"""Last windows of the text, on which the loss without each head and layer is measured."""

CALIBRATED: Final[tuple[Precision, ...]] = ("w4a16", "w8a8")
DEFAULT_POLICY: Final = Policy()

Ids: TypeAlias = NDArray[np.int32]

BUILT_IN_CHARACTERS: Final = 40_000
"""Length of the built-in text: the end of the bundled model's held-out text."""


def calibrate(
    model: str | Path,
    texts: Sequence[Path] = (),
    *,
    output: Path,
    windows: int = CALIBRATION_WINDOWS,
    window_tokens: int = WINDOW_TOKENS,
    head_importance: bool = False,
    precision: Precision = "w4a16",
    group_size: int = 32,
    policy: Policy = DEFAULT_POLICY,
    device: str = "host",
    gpu_threads: int | None = None,
    progress: Progress = silent,
) -> Calibration:
    """Measure the magnitudes of a model's activations and write them to a file, after every window.

    Runs of the same model, text and options go on from the file of one that was stopped.

    Args:
        model: A local folder, a GGUF file or a hub name.
        texts: Files of plain text, one after the other; by default a built-in text (Python code).
        output: The file.
        windows: Windows, at most those that the text has; one of them only checks the ranges.
        window_tokens: Tokens of a window, at most those of the model's context. Heads attend to a smaller
            share of the keys of a longer one.
        head_importance: Whether to measure the loss without each head and layer as well, which takes two
            passes for each. A finished file goes on with that.
        precision: ``w4a16``, whose integer graphs have 16-bit activations and stepped scales, or ``w8a8``.
        group_size: Weights that share a scale.
        policy: Which operators have which activations at ``w8a8``. A file that was finished with another
            policy is decided again.
        device: Device whose GPU computes.
        gpu_threads: Threads of the GPU on ``host``.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        OptionError: An option is not legal, or the file cannot be written.
        InputError: A text cannot be read, or is too short.
        CalibrationError: The file is of another model, text or version.
        HeteroLLMError: The checkpoint or the device is not usable.
    """
    if windows < 2:
        raise OptionError(f"A calibration of {windows} windows.", fix="Choose at least 2.")
    if window_tokens < SHORTEST_WINDOW:
        raise OptionError(
            f"A window of {window_tokens} tokens.",
            fix=f"Choose at least {SHORTEST_WINDOW}, better 512 or more.",
        )
    if precision not in CALIBRATED:
        raise OptionError(f"A calibration of {precision}.", fix=f"Choose {' or '.join(CALIBRATED)}.")
    if precision != "w8a8" and policy != DEFAULT_POLICY:
        raise OptionError(f"Decisions about 8-bit activations at {precision}.", fix="Choose w8a8.")
    check_target(output, "calibration")
    checkpoint = Checkpoint(model, progress=progress)
    config = ModelConfig.from_folder(checkpoint.folder)
    tokenizer = load_tokenizer(checkpoint.folder, config.eos_ids)
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer.from_folder(tokenizer.folder)  # raises
    parts = _windows(tokenizer.encode(_text(texts)), min(window_tokens, config.max_positions), windows)
    weights = load_weights(
        checkpoint,
        config,
        group_size=group_size,
        precision=precision,
        scales="stepped" if precision == "w4a16" else "free",
        progress=lambda done, total: progress("Quantising weights", done, total),
    )
    fresh = Calibration(
        weights_key=weights.content_key,
        model=checkpoint.folder.resolve().name,
        text_key=hashlib.sha256(parts.tobytes()).hexdigest(),
        window_tokens=parts.shape[1],
        windows=0,
        windows_planned=len(parts) - 1,
        checked_tokens=0,
        linears=(),
        ffns=(),
        precision=precision,
    )
    state = _continued(output, fresh)
    decided = precision != "w8a8" or policy.made(state.decision)
    if state.complete and decided and (not head_importance or all(one.ranked for one in state.heads)):
        return state
    thread = EngineThread()
    try:
        opened = thread.run(lambda: open_device(device, gpu_threads=gpu_threads, npu_threads=0))
        # Losses and ranges are those without a smaller cache's rounding.
        opened.cache_dtype = opened.activation_dtype
        run = thread.run(lambda: _Run(opened, weights, state, output, progress))
        try:
            return thread.run(lambda: run.finish(parts, policy, head_importance=head_importance))
        finally:
            thread.run(run.close)
    finally:
        thread.close()


class _Run:
    """A calibration on an engine; used on the engine thread."""

    def __init__(
        self, device: Device, weights: ModelWeights, state: Calibration, output: Path, progress: Progress
    ) -> None:
        self._state = state
        self._output = output
        self._progress = progress
        self._weights = weights
        self._floats = FloatWeights(weights)
        self._specs: dict[tuple[int, Group], OpSpec] = {
            (spec.layer, spec.group): spec for spec in weights.specs if spec.group != "head"
        }
        int8 = state.precision == "w8a8"
        earlier = {(one.layer, one.group): one for one in state.linears}
        self._linears = {
            key: LinearStatistics(spec, earlier.get(key), int8=int8) for key, spec in self._specs.items()
        }
        self._heads = HeadStatistics(weights.config, state.heads, state.windows)
        self._routing = RoutingStatistics(weights.experts, state.routing)
        self._activated = {one.layer: one.activated for one in state.ffns}
        self._partial = {one.layer: one.partial for one in state.ffns}
        # A file without streams of its first windows gets none of later ones.
        joined = joined_specs(weights.specs) if state.streams or not state.windows else ()
        self._fusible = {spec.layer for spec in joined if spec.group == "o_ffn"}
        self._streams = {one.layer: (one.stream, one.sums) for one in state.streams}
        self._observer = ActivationObserver(self._specs, device.activation_dtype)
        tokens = state.window_tokens
        plan = level_plan(
            "gpu",
            weights.specs,
            device=device.name,
            precision=state.precision,
            standard_lengths=(),
            chunk_length=tokens,
        )
        self._engine: Engine = start_engine(
            device, weights, plan, tokens, progress, observer=self._observer, allow_slow=True
        )
        self._observer.follow(self._engine)

    def close(self) -> None:
        self._engine.close()

    def finish(self, parts: Ids, policy: Policy, *, head_importance: bool) -> Calibration:
        """Run the remaining windows, then the check, and decide; then measure the importance of heads."""
        total = self._state.windows_planned + 1
        self._observer.reader, self._observer.streams = self._measure, self._measure_stream
        self._observer.heads = self._heads if self._weights.config.has_alike_heads else None
        self._observer.routing = self._routing
        for done in range(self._state.windows, self._state.windows_planned):
            self._progress("Calibrating", done, total)
            self._prefill(parts[done])
            self._save(windows=done + 1)
        self._observer.reader = self._observer.streams = None
        self._observer.heads = self._observer.routing = None
        self._progress("Calibrating", total - 1, total)
        if not self._state.checked_tokens:
            self._check(parts[-1])
        if self._state.precision == "w8a8" and not policy.made(self._state.decision):
            self._decide(parts[-LOSS_WINDOWS:], policy)
        self._progress("Calibrating", total, total)
        if head_importance:
            meter = self._meter(parts[-IMPORTANCE_WINDOWS:], silent)
            for heads in measure_importance(self._state.heads, self._weights, meter, self._progress):
                self._store(heads=heads)
        return self._state

    def _check(self, ids: Ids) -> None:
        """Check the ranges on a window that they do not come from."""
        check = RangeCheck(
            self._weights,
            {(one.layer, one.group): one for one in self._state.linears},
            {one.layer: one for one in self._state.ffns},
            CHECKED_TOKENS,
            {one.layer: one for one in self._state.streams},
        )
        self._observer.reader, self._observer.streams = check.read, check.read_stream
        self._engine.prefill(self._engine.new_cache(), 0, ids, "prefill", None)
        self._store(
            linears=tuple(check.linears.values()),
            ffns=tuple(check.ffns.values()),
            streams=tuple(check.streams.values()),
            checked_tokens=check.checked_tokens,
        )

    def _decide(self, parts: Ids, policy: Policy) -> None:
        linears, decision = decide(self._state.linears, policy, self._meter(parts, self._progress).surprises)
        self._store(linears=linears, decision=decision)

    def _meter(self, parts: Ids, progress: Progress) -> LossMeter:
        vocabulary = self._weights.config.vocab_size
        return LossMeter(self._engine, self._observer, self._floats, vocabulary, parts, progress)

    def _prefill(self, ids: Ids) -> None:
        cache = self._engine.new_cache()
        self._engine.prefill(cache, 0, ids, "prefill", None)
        if self._observer.heads is not None:
            self._heads.add_keys(self._observer.keys(cache, len(ids)))

    def _measure(self, spec: OpSpec, x: Floats, y: Floats) -> None:
        if not (np.isfinite(x).all() and np.isfinite(y).all()):
            raise CalibrationError(
                f"{spec.layer}.{spec.group} has values that are not finite.", fix="The checkpoint is damaged."
            )
        self._linears[spec.layer, spec.group].add(x, y, lambda: self._floats.of(spec))
        config = self._weights.config
        plain = config.activation == "silu" and not self._weights.bias(spec.layer, "gate_up")
        plain &= self._state.precision != "w8a8"  # which has no graphs of whole ffns
        if spec.group == "gate_up" and len(spec.members) == 2 and plain:
            largest = float(np.abs(silu(y[:, : spec.members[0].rows])).max())
            self._activated[spec.layer] = max(self._activated.get(spec.layer, 0.0), largest)
        # A file without sums of its first windows gets none of later ones, which would be too small.
        if spec.group == "down" and spec.layer in self._activated and self._partial.get(spec.layer, 1.0):
            (down,) = self._weights.linear(spec.layer, "down")
            largest = largest_partial(x, as_floats(down))
            self._partial[spec.layer] = max(self._partial.get(spec.layer, 0.0), largest)

    def _measure_stream(self, o: OpSpec, _x: Floats, y: Floats, stream: Floats) -> None:
        if o.layer in self._fusible:
            before = self._streams.get(o.layer, (0.0, 0.0))
            found = float(np.abs(stream).max()), float(np.abs(stream + y).max())
            self._streams[o.layer] = max(before[0], found[0]), max(before[1], found[1])

    def _save(self, windows: int) -> None:
        linears = tuple(one.record() for one in self._linears.values())
        ffns = tuple(
            FfnCalibration(layer, value, self._partial[layer])
            for layer, value in sorted(self._activated.items())
        )
        streams = tuple(
            StreamCalibration(layer, *sizes)
            for layer, sizes in sorted(self._streams.items())
            if layer in self._activated
        )
        heads, routing = self._heads.record(), self._routing.record()
        own = {"linears": linears, "ffns": ffns, "streams": streams, "heads": heads, "routing": routing}
        self._store(windows=windows, **own)

    def _store(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the calibration
        self._state = structs.replace(self._state, **changes)
        self._state.save(self._output)


def _continued(path: Path, fresh: Calibration) -> Calibration:
    """Return the state of a file, or a fresh one if there is none.

    Raises:
        CalibrationError: The file is no calibration, or of other weights, text or windows.
    """
    if not path.exists():
        return fresh
    found = load_calibration(path)
    for field in ("precision", "weights_key", "text_key", "window_tokens", "windows_planned"):
        if getattr(found, field) != getattr(fresh, field):
            raise CalibrationError(
                f"{path} is a calibration of {found.model} with another {field.replace('_', ' ')}.",
                fix="Name another file, or delete this one.",
            )
    if found.windows and len(found.linears) == 0:
        raise CalibrationError(f"{path} has no records of its {found.windows} windows.", fix="Delete it.")
    return found


def _text(texts: Sequence[Path]) -> str:
    if not texts:
        return (bundled_model() / "held_out.txt").read_text("utf-8")[-BUILT_IN_CHARACTERS:]
    return "\n\n".join(map(read_text, texts))


def _windows(ids: Sequence[int], tokens: int, windows: int) -> Ids:
    """Return the first windows of the text ``[windows, tokens]``."""
    count = min(windows, len(ids) // tokens)
    if count < 2:
        raise InputError(
            f"The text has {len(ids)} tokens, and two windows have {2 * tokens}.", fix="Give a longer text."
        )
    return np.array(ids[: count * tokens], np.int32).reshape(count, tokens)

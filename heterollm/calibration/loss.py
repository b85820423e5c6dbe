"""Measures the loss of a model whose linears have other outputs than the engine's kernels give."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from heterollm.base import Progress
from heterollm.calibration.float_weights import FloatWeights
from heterollm.calibration.int8_check import int8_output
from heterollm.calibration.observer import ActivationObserver, Floats, Reader
from heterollm.calibration.range_records import LinearCalibration
from heterollm.engine import Engine
from heterollm.kernels.ops import Group, OpSpec
from heterollm.text import surprises


class LossMeter:
    """Runs text through an engine while a reader replaces outputs of linears.

    Args:
        engine: An engine at level ``gpu``.
        observer: Its observer.
        weights: Float weights of the linears.
        vocabulary: Number of logits.
        windows: Token ids ``[windows, tokens]``.
        progress: Called after each window.
    """

    def __init__(
        self,
        engine: Engine,
        observer: ActivationObserver,
        weights: FloatWeights,
        vocabulary: int,
        windows: NDArray[np.int32],
        progress: Progress,
    ) -> None:
        self._engine = engine
        self._observer = observer
        self._weights = weights
        self._windows = windows
        self._progress = progress
        self._decided: dict[tuple[int, str], LinearCalibration] = {}
        self._logits = np.empty((windows.shape[1], vocabulary), np.float32)
        self._done, self._planned = 0, 0

    def surprises(self, linears: Sequence[LinearCalibration]) -> NDArray[np.float64]:
        """Return the negative log-likelihood of each token with the activations that the records decide.

        Operators of 16 bits keep the engine's floats, which differ from 16 bits much less than 8 bits do.
        """
        self._decided = {(one.layer, one.group): one for one in linears}
        return self.surprises_with(self._replaced)

    def surprises_with(
        self, reader: Reader | None, only: Collection[tuple[int, Group]] | None = None
    ) -> NDArray[np.float64]:
        """Return the negative log-likelihood of each token with a reader.

        Args:
            reader: Replaces outputs; None for the model as it is.
            only: Groups that the reader gets; None for all.
        """
        self._observer.reader, self._observer.only = reader, only
        self._planned += len(self._windows)
        found = []
        for ids in self._windows:
            self._progress("Measuring the loss", self._done, self._planned)
            self._engine.prefill(self._engine.new_cache(), 0, ids, "prefill", self._logits)
            found.append(surprises(self._logits, ids))
            self._done += 1
        self._observer.reader = self._observer.only = None
        return np.concatenate(found)

    def _replaced(self, spec: OpSpec, x: Floats, _y: Floats) -> Floats | None:
        one = self._decided[spec.layer, spec.group]
        if one.int8 is None or one.int8.activations in (None, "int16"):
            return None
        return int8_output(
            x,
            self._weights.of(spec),
            one.int8,
            one.int8.activations,
            inputs=one.inputs,
            outputs=one.outputs,
            member_rows=spec.member_rows,
        )

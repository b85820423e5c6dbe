"""A game beside the model on a simulated GPU.

A due frame waits for the running kernel and precedes all queued kernels, as with a driver that gives the
screen priority but does not preempt kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from heterollm.base import OptionError

GOLDEN: Final = (5**0.5 - 1) / 2
"""The fractional parts of its multiples spread evenly over [0, 1)."""

MOST_FRAMES_PER_S: Final = 1000.0
"""No screen shows more, and each frame costs a simulation step."""

IRREGULAR_FRACTION: Final = 0.5
"""Jitter of a frame's start, as a fraction of the idle time of its period."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A game beside the model.

    Args:
        frames_per_s: Frames per second.
        frame_us: GPU time of a frame.

    Raises:
        OptionError: The frames fill the GPU, or are more than a screen shows.
    """

    frames_per_s: float
    frame_us: float

    def __post_init__(self) -> None:
        if not (self.frames_per_s > 0 and 0 < self.frame_us < 0.95 * self.period_us):
            raise OptionError(
                f"{self.frames_per_s:g} frames a second of {self.frame_us / 1e3:g} ms each leave the GPU "
                "no time.",
                fix="Give a load such as 60fps:5ms, below 95 % of the GPU.",
            )
        if self.frames_per_s > MOST_FRAMES_PER_S:
            raise OptionError(
                f"A game cannot draw {self.frames_per_s:g} frames a second.",
                fix=f"Give at most {MOST_FRAMES_PER_S:g}.",
            )

    def __str__(self) -> str:
        """Return the game as ``--gpu-load`` takes it, such as ``60fps:5ms``."""
        return f"{self.frames_per_s:g}fps:{self.frame_us / 1e3:g}ms"

    @property
    def period_us(self) -> float:
        """Time from one frame to the next."""
        return 1e6 / self.frames_per_s

    def begin_us(self, frame: int) -> float:
        """Return the due time of a frame, counted from 0.

        The jitter stands for the game's own computations. Without it the frames would lock to the model's
        equally regular layers.
        """
        spread_us = IRREGULAR_FRACTION * (self.period_us - self.frame_us)
        return frame * self.period_us + spread_us * (frame * GOLDEN % 1.0)


class Game:
    """The frames of a game; a late frame is dropped when the next one is due.

    Args:
        load: Due times and duration of the frames.

    Attributes:
        due_us: Due time of the present or next frame.
        begin_us: Start of the present frame; infinite if there is none.
        end_us: End of the present frame; infinite if there is none.
    """

    __slots__ = ("_frame", "_load", "begin_us", "due_us", "end_us")

    def __init__(self, load: GpuLoad) -> None:
        self._load = load
        self._frame = 0
        self.due_us = load.begin_us(0)
        self.begin_us = self.end_us = math.inf

    @property
    def is_drawing(self) -> bool:
        """Whether a frame has the GPU."""
        return self.end_us < math.inf

    def next_us(self, at_us: float) -> float:
        """Start a frame if one is due at ``at_us``; return its end, or else the next due time."""
        if self.is_drawing:
            return self.end_us
        if at_us < self.due_us:
            return self.due_us
        self.begin_us, self.end_us = at_us, at_us + self._load.frame_us
        return self.end_us

    def end_frame(self) -> int:
        """End the present frame; return the number of due frames: this one and the dropped ones."""
        first = self._frame
        self._frame += 1
        while self._load.begin_us(self._frame + 1) < self.end_us:
            self._frame += 1
        self.due_us = self._load.begin_us(self._frame)
        self.begin_us = self.end_us = math.inf
        return self._frame - first

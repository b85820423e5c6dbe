"""A game beside the model on a simulated GPU: when it wants the GPU for a frame, and when it gets it.

A GPU does not leave a kernel half done. A frame that is due waits until the kernel that runs has ended, and
goes before those that are queued, as with a driver that gives the screen priority but preempts no kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from heterollm.base import OptionError

__all__ = ["Game", "GpuLoad"]

GOLDEN: Final = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, spread evenly however many are taken."""

MOST_FRAMES_PER_S: Final = 1000.0
"""No screen shows more, and each frame takes a step of the simulation."""

IRREGULAR_FRACTION: Final = 0.5
"""Of the time that a frame leaves: within so much its beginning varies."""


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """A game beside the model.

    Args:
        frames_per_s: Frames that it draws in a second.
        frame_us: GPU time of a frame.

    Raises:
        OptionError: The frames alone would fill the GPU, or are more than a screen shows.
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
                f"A game of {self.frames_per_s:g} frames a second is none.",
                fix=f"Give at most {MOST_FRAMES_PER_S:g}.",
            )

    @property
    def period_us(self) -> float:
        """From one frame to the next."""
        return 1e6 / self.frames_per_s

    def begin_us(self, frame: int) -> float:
        """Return when a frame wants the GPU, the first one being frame 0.

        What a game computes before it draws differs from frame to frame. Without that its frames would fall
        into step with the model's layers, which are as regular, and what they slow would depend on the
        last microsecond of both.

        Args:
            frame: Number of the frame.
        """
        spread_us = IRREGULAR_FRACTION * (self.period_us - self.frame_us)
        return frame * self.period_us + spread_us * (frame * GOLDEN % 1.0)


class Game:
    """The frames of a game, drawn one at a time; one that is late is dropped once the next is due as well.

    Args:
        load: When frames want the GPU, and for how long.

    Attributes:
        due_us: When the frame that is drawn, waits or comes next wants the GPU.
        begin_us: When the frame that is drawn began; infinite where none is.
        end_us: When it will have ended; infinite where none is drawn.
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
        """Begin the frame that is due, if one is; return when it ends, or when the next one is due.

        Args:
            at_us: The time; no kernel runs.
        """
        if self.is_drawing:
            return self.end_us
        if at_us < self.due_us:
            return self.due_us
        self.begin_us, self.end_us = at_us, at_us + self._load.frame_us
        return self.end_us

    def end_frame(self) -> int:
        """End the frame that is drawn; return how many were due: it, and those dropped for it."""
        first = self._frame
        self._frame += 1
        while self._load.begin_us(self._frame + 1) < self.end_us:
            self._frame += 1
        self.due_us = self._load.begin_us(self._frame)
        self.begin_us = self.end_us = math.inf
        return self._frame - first

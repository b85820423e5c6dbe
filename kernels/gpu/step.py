"""The step buffer, from which kernels read the position and the length of a pass.

In a pass of several sessions, each row of it has words of its own. Kernels that compute no session's state
read those of the first row, whose length is that of the pass.
"""

from __future__ import annotations

from typing import Final

STEP_POSITION: Final = 0
"""Index in the step buffer (int32) of the position of the pass's first token."""
STEP_LENGTH: Final = 1
"""Index of the number of tokens of the pass; kernels neither read nor write rows behind them."""
STEP_HEAD_ROW: Final = 2
"""Index of the first row that the head reads."""
STEP_STATE_READ: Final = 3
"""Index of the slot of recurrent state that the pass begins with; it reads none at position 0."""
STEP_STATE_WRITTEN: Final = 4
"""Index of the slot that takes the state behind the pass."""
STEP_WORDS: Final = 16
"""Words of a row, before the tables of its session's pages."""

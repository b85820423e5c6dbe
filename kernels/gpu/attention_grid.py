"""The division of attention into work-groups: tiles of query rows and parts of the context.

Parts are whole pages of the KV cache. The kernel finds their length from the context of the sequence, so that
neither the sums nor the grid depend on other sequences, or on the longest context for which it was compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.gpu.cache_layout import pages_of
from heterollm.kernels.gpu.glue_kernels import Defines
from heterollm.kernels.gpu.heads import HeadShape
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.rounding import RoundedInputs

PREFILL_ROWS: Final[dict[KernelStyle, int]] = {"vector": 32, "simt": 8, "coalesced": 8}
DECODE_ROWS: Final = 8
FEW_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class AttentionGrid:
    """The work-groups of one pass's attention.

    Args:
        shape: Sizes of the heads.
        tokens: Tokens of a sequence in the pass.
        units: Compute units of the device.
        fixed_parts: Parts of the context; None for a number that fits the device.
        rounded: Target of the int8 codes of the output; None for no codes.
    """

    shape: HeadShape
    tokens: int
    units: int
    fixed_parts: int | None
    rounded: RoundedInputs | None

    def tile(self, style: KernelStyle) -> tuple[int, int, int]:
        """Return the query rows of a work-group, and for vectors the rows and vectors of a register tile."""
        # Two multiply-add units with a latency of four cycles need eight independent sums or more; the best
        # use of the 16 registers was measured.
        if self.tokens > 1:
            return PREFILL_ROWS[style], 4, 2
        rows = min(self.shape.group, DECODE_ROWS)
        vectors = 4 if rows <= 2 and self.shape.head_dim % 32 == 0 else 2 if rows <= 6 else 1
        return rows, rows, vectors

    def tiles(self, style: KernelStyle) -> int:
        """Return the tiles of query rows of one key head."""
        return -(-self.tokens * self.shape.group // self.tile(style)[0])

    def parts(self, style: KernelStyle) -> int:
        """Return the parts of the context: several if the heads alone leave compute units idle."""
        if self.fixed_parts is not None or self.tokens > FEW_TOKENS:
            return self.fixed_parts or 1
        groups = self.tiles(style) * self.shape.kv_heads
        if style == "vector":
            # One work-group keeps a core busy; several per core balance the load.
            wanted = 1 if groups % self.units == 0 else -(-4 * self.units // groups)
        else:
            wanted = -(-8 * self.units // groups)
        return max(1, min(wanted, pages_of(self.shape.capacity)))

    @property
    def code_heads(self) -> int:
        """Smallest number of heads that holds whole blocks of codes."""
        head_dim = self.shape.head_dim
        return math.lcm(head_dim, self.rounded.block) // head_dim if self.rounded else 1

    def rounds(self, style: KernelStyle) -> bool:
        """Return whether the attention kernel itself rounds its output.

        Its work-group must write whole blocks of codes: blocks that divide a head, or several heads that
        share a key head and a row tile.
        """
        if self.rounded is None or self.parts(style) > 1:
            return False
        return self.shape.group % self.code_heads == 0 and self.tile(style)[0] % self.code_heads == 0

    def defines(self, style: KernelStyle) -> Defines:
        """Return the defines of the attention kernel."""
        rows, micro, vectors = self.tile(style)
        own: Defines = {"HEAD_DIM": self.shape.head_dim, "ROWS": rows}
        if style == "vector":
            own |= {"MICRO": micro, "VECTORS": vectors}
        else:
            own["GROUP"] = self.shape.group
        if style == "coalesced":
            own["COALESCED"] = 1
        return own | ({"CODE_HEADS": self.code_heads} if self.rounds(style) else {})

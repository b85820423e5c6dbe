"""The rows of a checkpoint's tensor that hold the weight of a linear."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The order of heads, and of the elements of a head, in a tensor of queries, keys or values.

    Args:
        groups: Groups of heads that are stored one after the other.
        stride: Rows of a group.
        first: First row of the member in a group.
        heads: Heads of the member in a group.
        head_dim: Width of a head.
        paired: Elements of a head, from its first, of which RoPE rotates neighbours; the model rotates those
            half of them apart. 0 for none.
    """

    groups: int
    stride: int
    first: int
    heads: int
    head_dim: int
    paired: int = 0

    def ranges(self) -> list[tuple[int, int]]:
        """Return the ranges of rows in the order of the model."""
        rows, found = self.heads * self.head_dim, []
        for start in range(self.first, self.groups * self.stride, self.stride):
            if not self.paired:
                found.append((start, start + rows))
                continue
            for head in range(start, start + rows, self.head_dim):
                for half in (0, 1):
                    found += [(row, row + 1) for row in range(head + half, head + self.paired, 2)]
                if self.paired < self.head_dim:
                    found.append((head + self.paired, head + self.head_dim))
        return found


@dataclass(frozen=True, slots=True)
class TensorRows:
    """The rows ``[start, stop)`` of a tensor that hold a linear's weight, or some in another order."""

    name: str
    start: int
    stop: int
    order: HeadOrder | None = None

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The rows in the order of the model, as ranges ``[start, stop)``."""
        return [(self.start, self.stop)] if self.order is None else self.order.ranges()

    @property
    def count(self) -> int:
        """Number of the rows."""
        own = self.order
        return self.stop - self.start if own is None else own.groups * own.heads * own.head_dim

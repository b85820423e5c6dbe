"""Responses in memory, which later requests continue."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

MOST_RESPONSES: Final = 1024
MOST_RESPONSES_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and the dialogue to its end.

    Args:
        owner: Whose it is: no other's request may read it.
        items: The dialogue without instructions.
        size: Bytes of the dialogue and of the responses in it.
        body: The response.
    """

    owner: str
    items: tuple[Any, ...]
    size: int
    body: dict[str, Any]


class KeptResponses:
    """The latest responses by their ids, within bounds of number and memory; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, KeptResponse] = OrderedDict()
        self._bytes = 0

    def put(self, key: str, response: KeptResponse) -> None:
        """Keep a response, and drop those that were used least recently beyond the bounds."""
        with self._lock:
            self._kept[key] = response
            self._bytes += response.size
            while len(self._kept) > MOST_RESPONSES or self._bytes > MOST_RESPONSES_BYTES:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.size

    def get(self, key: str, owner: str) -> KeptResponse | None:
        """Return a response of an owner; None if there is none."""
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.owner != owner:
                return None
            self._kept.move_to_end(key)
            return found

    def remove(self, key: str, owner: str) -> bool:
        """Forget a response of an owner; return whether there was one."""
        with self._lock:
            found = self._kept.get(key)
            if found is None or found.owner != owner:
                return False
            del self._kept[key]
            self._bytes -= found.size
            return True

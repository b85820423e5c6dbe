"""Results of tests of this machine that a later process need not repeat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from heterollm.base.cache import atomic_path, cache_name, load_or_make
from heterollm.base.cache_place import own_folder
from heterollm.base.errors import CacheError
from heterollm.base.typed_json import decode, decode_json

T = TypeVar("T")


class KeptResult(Generic[T]):
    """A result in a file of the cache.

    Args:
        folder: Name of the cache's folder.
        words: Name of the tested thing.
        key: Whatever the result depends on, as JSON can hold it.
        kind: Type of the result.
    """

    def __init__(self, folder: str, words: str, key: object, kind: type[T]) -> None:
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        self.path: Path = own_folder(folder) / f"{cache_name(words, digest)}.json"
        self._words = words
        self._kind = kind

    def load(self, make: Callable[[], T]) -> T:
        """Return the result; one that is missing or damaged is made again."""
        again = f"testing {self._words} again"
        return load_or_make(self.path, again, read=self.read, make=make, text=_text)

    def keep(self, result: T) -> None:
        """Replace the result.

        Raises:
            CacheError: The cache cannot be written.
        """
        with atomic_path(self.path) as path:
            path.write_text(_text(result), "utf-8")

    def read(self, content: bytes) -> T:
        """Return the result of a file's content.

        Raises:
            CacheError: It is none.
        """
        source = f"The result for {self._words}"
        data = decode_json(content, source=source, error=CacheError)
        return decode(data, self._kind, source=f"{source} is damaged", error=CacheError)


def _text(result: object) -> str:
    return msgspec.json.encode(result).decode()

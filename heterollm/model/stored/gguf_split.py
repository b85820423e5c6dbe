"""GGUF files in several parts, which ``llama-gguf-split`` makes.

The first part has the metadata. Each states its number, the number of parts and that of all tensors:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-model-loader.cpp
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from heterollm.base import CheckpointError
from heterollm.model.stored.gguf_reader import GgufPart, read_part

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
ARCHITECTURE: Final = "general.architecture"
NAME: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
MOST_PARTS: Final = 65_535


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of a split file by that of one; that of a whole file alone."""
    match = NAME.fullmatch(name)
    count = int(match[3]) if match else 1
    if match is None or not 1 < count <= MOST_PARTS:
        return (name,)
    return tuple(f"{match[1]}-{number:05}-of-{match[3]}{match[4]}" for number in range(1, count + 1))


def whole_name(name: str) -> str:
    """Return the name of a file without the numbers of a part, and without ending."""
    match = NAME.fullmatch(name)
    return match[1] if match else name.rpartition(".")[0] or name


def other_parts(first: GgufPart) -> Iterator[GgufPart]:
    """Yield the parts behind the first one of a split file; none of a whole file.

    Raises:
        CheckpointError: The file is not the first part; or another one is missing, is damaged, or belongs
            elsewhere; or parts share a tensor.
        UnsupportedModelError: A tensor has an unsupported type.
    """
    count, number = first.metadata.get(COUNT, 1), first.metadata.get(NUMBER, 0)
    if count in (0, 1):
        return
    names = part_names(first.path.name)
    if type(count) is not int or len(names) != count or number not in range(count):
        raise CheckpointError(
            f"{first.path} is one of {count!r:.20} parts of a GGUF file (split.count), and its name is none "
            "of NAME-00001-of-NUMBER.gguf.",
            fix="Give all parts the names that they were published with.",
        )
    if first.path.name != names[number]:
        raise CheckpointError(
            f"{first.path} is part {number + 1} of {count} (split.no), and its name says another.",
            fix=f"Name it {names[number]}, or download the parts again.",
        )
    if number:
        raise CheckpointError(
            f"{first.path} is part {number + 1} of {count} of a GGUF file.",
            fix=f"Name the first part: {first.path.with_name(names[0])}.",
        )
    found = dict.fromkeys(first.entries, first)
    for at, name in enumerate(names[1:], 1):
        part = _part(first, name, at)
        for tensor in part.entries:
            if tensor in found:
                raise CheckpointError(
                    f"{part.path} has tensor {tensor!r:.80}, and so has {found[tensor].path.name}.",
                    fix="Download both parts again.",
                )
        found |= dict.fromkeys(part.entries, part)
        yield part
    stated = first.metadata.get(TENSORS, len(found))
    if stated != len(found):
        raise CheckpointError(
            f"The {count} parts of {first.path} have {len(found)} tensors, and not the {stated!r:.20} that "
            "it states (split.tensors.count).",
            fix="Download the parts again.",
        )


def _part(first: GgufPart, name: str, number: int) -> GgufPart:
    """Return a further part."""
    path, count = first.path.with_name(name), first.metadata[COUNT]
    if not path.is_file():
        raise CheckpointError(
            f"{first.path} is part 1 of {count}, and {name} is missing.",
            fix=f"Put all {count} parts into {first.path.parent}.",
        )
    part = read_part(path)
    expected = {NUMBER: number, **{key: first.metadata.get(key) for key in (COUNT, TENSORS)}}
    if ARCHITECTURE in part.metadata:
        expected[ARCHITECTURE] = first.metadata.get(ARCHITECTURE)
    for key, value in expected.items():
        if part.metadata.get(key) != value:
            raise CheckpointError(
                f"{path} is not part {number + 1} of {first.path.name}: its {key} is "
                f"{part.metadata.get(key)!r:.40}, not {value!r:.40}.",
                fix="Download the part again.",
            )
    return part

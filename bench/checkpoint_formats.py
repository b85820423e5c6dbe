"""Measures how far weights of quantised checkpoint formats are from the file's values: docs/checkpoints.md.

    pip install gguf
    python bench/checkpoint_formats.py                      every GGUF block type, on random weights
    python bench/checkpoint_formats.py MODEL.gguf           the logits and greedy text of a published file
    python bench/figures.py

Rows are appended to bench/results/checkpoint_formats.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.ops import WeightFormat
from heterollm.llm import LLM
from heterollm.model.stored.affine_blocks import AffineBlocks, canonical
from heterollm.model.stored.gguf_blocks import BLOCK_TYPES, BlockType

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results" / "checkpoint_formats.jsonl"
ROWS, COLUMNS = 256, 1024
PROMPT: Final = "The capital of France is"
TEXT: Final = ROOT / "docs" / "how-the-split-works.md"
TEXT_TOKENS: Final = 128
ANSWER_TOKENS: Final = 32


def block_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each block type: equality with gguf's values, and what the canonical tensor lacks."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)
    for number, kind in BLOCK_TYPES.items():
        if kind.dtype is not None:
            continue
        data = rng.integers(0, 256, (ROWS, COLUMNS // kind.block * kind.block_bytes), np.uint8)
        with np.errstate(all="ignore"):
            wanted = gguf.dequantize(data, gguf.GGMLQuantizationType(number))
        same = np.array_equal(kind.blocks(data).values(), wanted, equal_nan=True)
        held = WeightFormat(4 if kind.name == "Q4_0" else 8, kind.scale_block)
        blocks = quantized(weight, kind)
        found = canonical(blocks, held)
        assert found is not None  # gguf_config chooses this format
        db = sqnr_db(found.dequantize(), blocks.values())
        finite = None if math.isinf(db) else round(db, 1)
        yield {"kind": "blocks", "type": kind.name, "same_values": same, "held": str(held), "db": finite}


def quantized(weight: NDArray[np.float32], kind: BlockType) -> AffineBlocks:
    """Return weights in a block type; superblocks' scales are whole parts of the row's largest."""
    if kind.block == kind.scale_block:
        return kind.blocks(gguf.quantize(weight, gguf.GGMLQuantizationType[kind.name]))
    parts = weight.reshape(ROWS, -1, kind.scale_block)
    if kind.minimum:
        levels = (1 << kind.bits) - 1
        low = np.minimum(parts.min(axis=2), 0)
        scales, minimums = _parts((parts.max(axis=2) - low) / levels, 63), -_parts(-low, 63)
        codes = np.clip(np.rint((parts - minimums[..., None]) / scales[..., None]), 0, levels)
    else:
        half, minimums = 1 << (kind.bits - 1), None
        scales = _parts(np.abs(parts).max(axis=2) / half, 127)
        codes = np.clip(np.rint(parts / scales[..., None]), -half, half - 1)
    return AffineBlocks(codes.astype(np.int8).reshape(weight.shape), scales, minimums, kind.scale_block)


def _parts(values: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    """Return values as whole parts of an FP16 number for each 256 weights."""
    blocks = values.reshape(-1, 8 if most == 63 else 16)
    unit = (blocks.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    parts: NDArray[np.float32] = (unit * np.clip(np.rint(blocks / unit), 1, most)).astype(np.float32)
    return parts.reshape(values.shape)


def file_row(path: Path) -> dict[str, Any]:
    """Return the row of a file: logits and greedy text against its own values in float32, on `host`."""
    logits, texts, notes = [], [], ()
    for precision in ("fp16", "w4a16"):
        with LLM.load(path, device="host", plan="gpu", precision=precision, context=512) as model:
            ids = model.tokenizer.encode(TEXT.read_text("utf-8"))[:TEXT_TOKENS]
            logits.append(model.session().prefill(ids, all_logits=True))
            texts.append(model.generate(PROMPT, max_new_tokens=ANSWER_TOKENS, temperature=0).text)
            notes = model.notes
    db = sqnr_db(logits[1], logits[0])
    agreement = float((logits[0].argmax(axis=1) == logits[1].argmax(axis=1)).mean())
    return {
        "kind": "file",
        "file": path.name,
        "tokens": TEXT_TOKENS,
        "logits_db": round(db, 1),
        "top_1": round(agreement, 4),
        "same_greedy_text": texts[0] == texts[1],
        "text": texts[1],
        "notes": list(notes),
    }


def main() -> None:
    """Measure, print and append."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path)
    asked = parser.parse_args()
    rows = list(block_rows()) if asked.file is None else [file_row(asked.file)]
    with RESULTS.open("a", encoding="utf-8") as results:
        for row in rows:
            print(json.dumps(row))
            results.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

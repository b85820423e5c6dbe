"""Measures how far weights of quantised checkpoint formats are from the file's values: docs/checkpoints.md.

    pip install gguf
    python bench/checkpoint_formats.py                      every GGUF block type, on random weights
    python bench/checkpoint_formats.py MODEL.gguf           logits and greedy text of a file, by plan
    python bench/figures.py

Rows are appended to bench/results/checkpoint_formats.jsonl.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from conditions import script_parser
from numpy.typing import NDArray

from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.ops import Precision
from heterollm.llm import LLM
from heterollm.model.stored.affine_blocks import AffineBlocks, canonical
from heterollm.model.stored.gguf_blocks import BLOCK_TYPES, IQ4_VALUES, BlockType
from heterollm.model.stored.gguf_config import smallest_format
from heterollm.text.likelihood import top_1_agreement

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results" / "checkpoint_formats.jsonl"
ROWS, COLUMNS = 256, 1024
PARTS: Final = {"Q2_K": 15, "Q3_K": 31, "Q4_K": 63, "Q5_K": 63, "Q6_K": 127}
"""Largest scale of a part of a block, as whole parts of the block's own."""
PROMPT: Final = "The capital of France is"
TEXT: Final = ROOT / "docs" / "how-the-split-works.md"
TEXT_TOKENS: Final = 128
DECODED: Final = 8
"""The last of these tokens, which are decoded one by one."""
PLANS: Final = ("gpu", "npu", "layer")
ANSWER_TOKENS: Final = 32


def block_rows() -> Iterator[dict[str, Any]]:
    """Yield a row for each block type: equality with gguf's values, and what the canonical tensor lacks."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((ROWS, COLUMNS), np.float32) * np.float32(0.02)
    for number, kind in BLOCK_TYPES.items():
        if kind.dtype is not None:
            continue
        data = rng.integers(0, 256, (ROWS, COLUMNS // kind.block * kind.block_bytes), np.uint8)
        same = None
        if kind.name != "Q1_0":  # which the package only names
            with np.errstate(all="ignore"):
                wanted = gguf.dequantize(data, gguf.GGMLQuantizationType(number))
            same = np.array_equal(kind.blocks(data).values(), wanted, equal_nan=True)
        held = smallest_format([kind])
        blocks = quantized(weight, kind)
        found = canonical(blocks, held)
        assert found is not None  # gguf_config chooses this format
        db = decibels(found.dequantize(), blocks.values())
        yield {"kind": "blocks", "type": kind.name, "same_values": same, "held": str(held), "db": db}


def quantized(weight: NDArray[np.float32], kind: BlockType) -> AffineBlocks:
    """Return weights in a block type; superblocks' scales are whole parts of the row's largest."""
    if kind.name == "Q1_0":
        scales = np.abs(weight).reshape(ROWS, -1, kind.block).mean(axis=2).astype(np.float16)
        codes = np.where(weight < 0, -1, 1).astype(np.int8)
        return AffineBlocks(codes, scales.astype(np.float32), None, kind.block)
    if kind.name == "IQ4_NL":  # as near as the largest value of a block allows
        parts = weight.reshape(ROWS, -1, kind.block)
        scales = (np.abs(parts).max(axis=2) / 127).astype(np.float16).astype(np.float32)
        nearest = np.abs(parts[..., None] / scales[..., None, None] - IQ4_VALUES).argmin(axis=3)
        return AffineBlocks(IQ4_VALUES[nearest].reshape(weight.shape), scales, None, kind.block)
    if kind.block == kind.scale_block:
        return kind.blocks(gguf.quantize(weight, gguf.GGMLQuantizationType[kind.name]))
    parts = weight.reshape(ROWS, -1, kind.scale_block)
    if kind.minimum:
        levels = (1 << kind.bits) - 1
        low = np.minimum(parts.min(axis=2), 0)
        most, count = PARTS[kind.name], kind.block // kind.scale_block
        scales = _parts((parts.max(axis=2) - low) / levels, most, count)
        minimums = -_parts(-low, most, count)
        codes = np.clip(np.rint((parts - minimums[..., None]) / scales[..., None]), 0, levels)
    else:
        half, minimums = 1 << (kind.bits - 1), None
        scales = _parts(np.abs(parts).max(axis=2) / half, PARTS[kind.name], kind.block // kind.scale_block)
        codes = np.clip(np.rint(parts / scales[..., None]), -half, half - 1)
    return AffineBlocks(codes.astype(np.int8).reshape(weight.shape), scales, minimums, kind.scale_block)


def _parts(values: NDArray[np.float32], most: int, count: int) -> NDArray[np.float32]:
    """Return values as whole parts, up to ``most``, of an FP16 number for each ``count`` of them."""
    blocks = values.reshape(-1, count)
    unit = (blocks.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    parts: NDArray[np.float32] = (unit * np.clip(np.rint(blocks / unit), 1, most)).astype(np.float32)
    return parts.reshape(values.shape)


def file_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file: logits and greedy text against its own values in float32, on `host`."""
    exact, wanted, _ = answers(path, "gpu", "fp16")
    for plan in PLANS:
        logits, text, notes = answers(path, plan, "w4a16")
        yield {
            "kind": "file",
            "file": path.name,
            "plan": plan,
            "tokens": TEXT_TOKENS,
            "prompt_db": decibels(logits[:-DECODED], exact[:-DECODED]),
            "decode_db": decibels(logits[-DECODED:], exact[-DECODED:]),
            "top_1": round(top_1_agreement(logits, exact), 4),
            "same_greedy_text": text == wanted,
            "text": text,
            "notes": list(notes),
        }


def answers(path: Path, plan: str, precision: Precision) -> tuple[NDArray[Any], str, tuple[str, ...]]:
    """Return the logits of a text whose last tokens are decoded, the greedy answer, and the notes."""
    with LLM.load(path, device="host", plan=plan, precision=precision, context=512) as model:
        ids = model.tokenizer.encode(TEXT.read_text("utf-8"))[:TEXT_TOKENS]
        session = model.session()
        prompt = session.prefill(ids[:-DECODED], all_logits=True)
        decoded = [session.decode(token) for token in ids[-DECODED:]]
        text = model.generate(PROMPT, max_new_tokens=ANSWER_TOKENS, temperature=0).text
        return np.concatenate([prompt, decoded]), text, model.notes


def decibels(actual: NDArray[Any], exact: NDArray[Any]) -> float | None:
    """Return the signal-to-error ratio; None if there is no error."""
    db = sqnr_db(actual, exact)
    return None if math.isinf(db) else round(db, 1)


def main() -> None:
    """Measure, print and append."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("file", nargs="?", type=Path)
    asked = parser.parse_args()
    rows = block_rows() if asked.file is None else file_rows(asked.file)
    with RESULTS.open("a", encoding="utf-8") as results:
        for row in rows:
            print(json.dumps(row))
            results.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

"""Logits of the bundled model on the emulator under a plan of every linear on the NPU, or of splits."""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from counts import counts

import heterollm.data
from heterollm import LLM
from heterollm.solver import Plan, model_shape
from heterollm.solver.placements import GPU_ONLY, RowsPlacement
from heterollm.solver.plan_records import PlanEntry

LENGTHS = (1, 20, 40)
DECODED = 2

folder = Path(heterollm.data.__file__).parent / "tiny_python_lm"


def split_plan(specs):
    """Return rows split where members have enough, else the first 32 tokens."""

    def place(spec, tokens):
        rows = tuple(own // 512 * 256 for own in spec.member_rows)
        if all(rows):
            return RowsPlacement(rows, (1 if tokens == 1 else 32 if tokens <= 32 else 64,))
        return RowsPlacement(spec.member_rows, (32,)) if tokens > 32 else GPU_ONLY

    entries = tuple(
        PlanEntry(phase, (tokens, tokens), (spec.layer, spec.layer), spec.group, place(spec, tokens))
        for spec in specs
        for phase in ("prefill", "decode")
        for tokens in range(1, 65)
    )
    return Plan("splits", "emulator", "w4a16", model_shape(specs), 64, entries)


plan = sys.argv[1]
if plan == "splits":
    with LLM.load(folder, device="emulator", plan="gpu") as llm:
        plan = split_plan(llm._weights.specs)
llm = LLM.load(folder, device="emulator", plan=plan)
ids = llm.tokenizer.encode((folder / "held_out.txt").read_text("utf-8")[:1000])
session, logits = llm.session(), []
for length in LENGTHS:
    session.reset()
    logits.append(session.prefill(ids[:length], all_logits=True))
    logits += [session.decode(token)[None] for token in ids[length : length + DECODED]]
npu = llm.device.npu
assert all(np.isfinite(own).all() for own in logits)
print(
    json.dumps(
        {
            "digest": hashlib.sha256(b"".join(own.tobytes() for own in logits)).hexdigest(),
            "edges": str(llm.device.arenas.edges),
            "counts": counts(),
            "handles": npu.memory.handles if npu.memory else 0,
        }
    )
)

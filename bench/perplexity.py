"""What does quantisation cost the bundled model, in perplexity on its held-out text?

Runs the text through the runtime itself (`Session.prefill` with all logits) at each precision: windows of 512
tokens without BOS, each from an empty cache, the mean over the 511 predictions of every window. Nothing is
random. `--reference` adds transformers in float32 on the checkpoint as it is.

    python bench/perplexity.py --reference --out bench/results/perplexity.jsonl
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
from conditions import append_rows, origin, script_parser
from numpy.typing import NDArray

from heterollm.llm import LLM
from heterollm.text import likelihood

WINDOW = 512
WINDOWS = 79
BUNDLED = Path(str(resources.files("heterollm.data.tiny_python_lm")))
VERSIONS = ("numpy", "onnxruntime", "pyopencl", "transformers")

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "fp16": {"precision": "fp16"},
    **{
        f"w4a16 block {block} {'symmetric' if symmetric else 'asymmetric'}": {
            "precision": "w4a16",
            "group_size": block,
            "symmetric": symmetric,
        }
        for block in (32, 64, 128)
        for symmetric in (True, False)
    },
    **{f"w4a16 block {block} stepped": {"group_size": block, "scales": "stepped"} for block in (32, 64)},
    "w4a8 block 32 symmetric": {"precision": "w4a8"},
}


def windows(llm: LLM, count: int) -> list[list[int]]:
    """Return the first windows of the held-out text as token ids."""
    ids = llm.tokenizer.encode((BUNDLED / "held_out.txt").read_text("utf-8"), add_bos=False)
    if len(ids) < count * WINDOW:
        raise SystemExit(f"The held-out text has {len(ids)} tokens, {count * WINDOW} are needed.")
    return [ids[first : first + WINDOW] for first in range(0, count * WINDOW, WINDOW)]


def perplexity(llm: LLM, texts: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of a loaded model on windows of token ids."""
    return likelihood.perplexity(llm_surprises(llm, texts))


def llm_surprises(llm: LLM, texts: Sequence[Sequence[int]]) -> list[NDArray[np.float64]]:
    """Return the surprises of a loaded model on windows of token ids, each from an empty session."""
    session, found = llm.session(), []
    for ids in texts:
        session.reset()
        found.append(likelihood.surprises(session.prefill(ids, all_logits=True), ids))
    return found


def transformers_perplexity(texts: Sequence[Sequence[int]]) -> float:
    """Return what transformers gets in float32 on the checkpoint as it is."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    with torch.no_grad():
        found = [
            likelihood.surprises(model(torch.tensor([list(ids)])).logits[0].numpy(), ids) for ids in texts
        ]
    return likelihood.perplexity(found)


def rows(device: str, plan: str, count: int, reference: bool) -> Iterator[dict[str, Any]]:
    """Yield one result after the other."""
    for name, options in CONFIGURATIONS.items():
        with LLM.load(BUNDLED, device=device, plan=plan, **options) as llm:
            texts = windows(llm, count)
            if reference and name == "fp16":
                yield {"name": "transformers float32", "perplexity": transformers_perplexity(texts)}
            start = time.perf_counter()
            value = perplexity(llm, texts)
            yield {
                "name": name,
                **options,
                "perplexity": value,
                "seconds": time.perf_counter() - start,
                **llm.device.description(),
            }


def main() -> None:
    """Measure every configuration, print a table and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("--device", default="host")
    parser.add_argument("--plan", default="gpu")
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--reference", action="store_true", help="add transformers (needs torch)")
    options = parser.parse_args()
    common = {
        **origin("perplexity"),
        "versions": {name: metadata.version(name) for name in VERSIONS},
        "machine": platform.processor() or platform.machine(),
        "seed": None,
        "plan": options.plan,
        "windows": options.windows,
        "window_tokens": WINDOW,
    }
    print("| weights | perplexity | against the first |")
    print("|---|---:|---:|")
    first = None
    for row in rows(options.device, options.plan, options.windows, options.reference):
        first = first or row["perplexity"]
        change = row["perplexity"] / first - 1
        print(f"| {row['name']} | {row['perplexity']:.4f} | {change:+.2%} |", flush=True)
        append_rows(options.out, {**common, **row})


if __name__ == "__main__":
    main()

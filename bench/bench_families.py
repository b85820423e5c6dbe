"""Which of the 40 families run, and how far are their logits from those of transformers?

Runs the tests that compare a tiny random checkpoint of each supported model type with transformers in float64
(those with code of their own with a model of the same equations), at ``gpu`` and ``layer``; keeps the dB in
bench/results/families.jsonl; and writes docs/families.md again. What runs, which GGUF files are read and what
is missing comes from the program.

    python bench/bench_families.py
    python bench/bench_families.py --types lfm2,glm4
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from conditions import append_rows, origin, script_parser
from family_parity import TESTS, rows
from figures import main as write_figures
from tables.families import LEVELS, LISTED

from heterollm.model.families import FAMILIES

RESULTS: Final = Path(__file__).parent / "results" / "families.jsonl"
OWN_TESTS: Final = "tests/heterollm/model/test_own_code.py::test_logits_are_those_of_the_same_equations"
OWN_CODE: Final = ("internlm2", "phonelm", "minicpm")
NAMES: Final = {
    "llama": "llama with biases",
    "qwen2": "qwen2 with window",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granitemoehybrid with state spaces",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4 in one stream",
}
"""Names of tests by model type, where they differ."""


def supported() -> list[str]:
    """Return the supported model types of the families, each once."""
    return [kind for kind in dict.fromkeys(" ".join(one.types for one in LISTED).split()) if kind in FAMILIES]


def main() -> None:
    """Run the tests, keep the last rows of each type, and write the page."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--types", help="Model types, with commas between them; all that run by default.")
    asked = parser.parse_args().types
    types = asked.split(",") if asked else supported()
    tests = [
        f"{OWN_TESTS if kind in OWN_CODE else TESTS}[{NAMES.get(kind, kind)}-{level}]"
        for kind in types
        for level in LEVELS
    ]
    kinds = {name: kind for kind, name in NAMES.items()}
    found = [{**row, "family": kinds.get(row["family"], row["family"])} for row in rows(tests)]
    kept = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()] if RESULTS.exists() else []
    again = {(row["family"], row["level"]) for row in found}
    kept = [row for row in kept if (row["family"], row["level"]) not in again]
    RESULTS.unlink(missing_ok=True)
    append_rows(RESULTS, *kept, *({**row, "device": "host", **origin("bench_families")} for row in found))
    raise SystemExit(write_figures())


if __name__ == "__main__":
    main()

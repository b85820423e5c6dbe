"""How far are the logits of each family from those of transformers?

Runs the tests that compare random two-layer checkpoints with float64 transformers on the dequantised weights
(`tests/heterollm/model/test_families.py`), and prints the ratio of signal to noise in dB that they record.
They fail below 90 dB.

    python bench/family_parity.py --out bench/results/parity.jsonl
    python bench/family_parity.py --levels gpu,layer --families mixtral,olmoe
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

from conditions import append_rows, origin, script_parser

TESTS: Final = "tests/heterollm/model/test_families.py::test_logits_beyond_the_window"
MIXTURES: Final = "mixtral,qwen3_moe,olmoe,phimoe,granitemoe,granitemoeshared"


def rows(tests: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the dB that tests record, by family and level, which are their parameters in this order."""
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-Im", "pytest", "-q", "-n0", "-m", "", f"--junitxml={report}", *tests]
        done = subprocess.run(command, cwd=root, check=False)  # noqa: S603
        if done.returncode:
            raise SystemExit(done.returncode)
        cases = ET.parse(report).iter("testcase")  # noqa: S314 - pytest has just written it
        for case in cases:
            found = re.search(r"\[(.+)-(\w+)\]$", case.get("name", ""))
            value = case.find("./properties/property[@name='sqnr_db']")
            if found is not None and value is not None:
                yield {"family": found[1], "level": found[2], "sqnr_db": float(value.get("value", "nan"))}


def main() -> None:
    """Run the tests, print a line for each family and level, and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("--families", default=MIXTURES, help="Names of the tests, with commas between them.")
    parser.add_argument("--levels", default="gpu", help="gpu, npu, layer, with commas between them.")
    options = parser.parse_args()
    names = [f"{one}-{level}" for one in options.families.split(",") for level in options.levels.split(",")]
    for row in rows([f"{TESTS}[{name}]" for name in names]):
        print(f"{row['family']:20} {row['level']:6} {row['sqnr_db']:6.1f} dB")
        append_rows(options.out, {**row, "device": "host", **origin("family_parity")})


if __name__ == "__main__":
    main()

"""Says for each platform and Python whether all that heterollm needs has wheels: pip then compiles nothing.

    pip install uv
    python bench/wheels.py --out bench/results/wheels.md

uv resolves the requirements as that platform would, with its markers; nothing is downloaded but descriptions.
Packages that this Python has are not asked for.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from conditions import script_parser

ROOT: Final = Path(__file__).resolve().parents[1]

PLATFORMS: Final = {
    "Linux x86-64, glibc 2.35": "x86_64-manylinux_2_35",
    "Linux aarch64, glibc 2.35": "aarch64-manylinux_2_35",
    "Windows x86-64": "x86_64-pc-windows-msvc",
    "Windows on Arm": "aarch64-pc-windows-msvc",
    "macOS 14 on Apple silicon": "aarch64-apple-darwin",
    "Android": "aarch64-linux-android",
}
"""uv's names of platforms."""

PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")

LACKING: Final = re.compile(
    r"(?:Because|and) (?:all versions of )?([\w-]+)(?:\{[^}]*\})?\S* (?:has|have) no[\w ]* wheels"
)
"""uv's words for a package without wheels."""


def answer(platform: str, python: str) -> str:
    """Return "all", or the package whose wheel is lacking first."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet", "--extra", "serve"]
    command += ["--only-binary", ":all:", "--python-platform", platform, "--python-version", python]
    environment = os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    ran = subprocess.run(  # noqa: S603 - a command of this file
        command, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if ran.returncode == 0:
        return "all"
    text = " ".join(ran.stderr.split())
    found = LACKING.search(text)
    if found is None:
        raise SystemExit(f"uv, for {platform} and Python {python}: {text}")
    return f"not {found[1]}"


def main() -> None:
    """Run the bench."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    lines = [f"| wheels for | {' | '.join(PYTHONS)} |", f"|---|{'---|' * len(PYTHONS)}"]
    for name, platform in PLATFORMS.items():
        lines.append(f"| {name} | {' | '.join(answer(platform, python) for python in PYTHONS)} |")
        print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()

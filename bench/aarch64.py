"""Installs heterollm for Linux aarch64 and runs it there, under QEMU's emulation of a program's processor.

    python bench/aarch64.py /tmp/aarch64 --out bench/results/aarch64.txt

Debian's packages give QEMU, Python and PoCL; all else comes as wheels for aarch64, as on a board. Needs a
Debian with apt on x86-64, and a network. Times are those of an emulation, and mean nothing.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from conditions import script_parser
from debian import unpack

ROOT: Final = Path(__file__).resolve().parents[1]

PYTHON: Final = "3.13"
"""Version of Python in that Debian."""

GLIBCS: Final = (34, 31, 28, 27, 26, 24, 17)
"""Minor versions of glibc whose wheels Debian's can take."""

COMMANDS: Final = (
    "devices",
    "generate tiny-python-lm 'def add(a, b):' --device host --plan gpu --max-new-tokens 16 --temperature 0",
    "doctor --device host",
)


def prepare(folder: Path) -> Path:
    """Install Python, PoCL and heterollm for aarch64, and return a program that runs that Python."""
    site, root = folder / "site", folder / "root"
    unpack(folder, "amd64", folder / "host", ["qemu-user"])
    unpack(folder, "arm64", root, ["python3", "pocl-opencl-icd", "binutils"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    # pip reads markers as of this machine: none excludes what a board needs.
    needed = [requirement.partition(";")[0].strip() for requirement in project["dependencies"]]
    platforms = [*(f"manylinux_2_{minor}_aarch64" for minor in GLIBCS), "manylinux2014_aarch64"]
    kinds = [f"--platform={name}" for name in platforms]
    kinds += [f"--abi={abi}" for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none")]
    pip = [sys.executable, "-m", "pip", "--quiet"]
    options = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *kinds]
    _run(*pip, "install", "--upgrade", f"--target={site}", *options, *needed)
    with tempfile.TemporaryDirectory() as wheels:
        _run(*pip, "wheel", "--no-deps", f"--wheel-dir={wheels}", str(ROOT))
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(site)
    program = folder / "python"
    libraries = root / "usr/lib"
    # By their own paths: QEMU does not map a library's questions for files beside it.
    loader = [libraries / "ld-linux-aarch64.so.1", "--library-path", libraries / "aarch64-linux-gnu"]
    emulator = [folder / "host/usr/bin/qemu-aarch64", "-L", root, *loader]
    linker = folder / "bin" / "ld"
    linker.parent.mkdir(exist_ok=True)
    for path, file in ((program, f"python{PYTHON}"), (linker, "aarch64-linux-gnu-ld.bfd")):
        words = map(str, [*emulator, root / "usr/bin" / file])
        path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        path.chmod(0o755)
    # Children of the emulated program are programs of this machine.
    (site / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(program)!r}\n")
    return program


def report(folder: Path, program: Path) -> Iterator[str]:
    """Run the commands, and yield them with what they print and their exit codes."""
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",  # PoCL calls the linker
        "PYTHONPATH": str(folder / "site"),
        "PYTHONHOME": str(folder / "root/usr"),
        "OCL_ICD_VENDORS": str(folder / "root/etc/OpenCL/vendors"),
        "HETEROLLM_CACHE": str(folder / "cache"),
        "COLUMNS": "110",
    }
    for words in COMMANDS:
        command = [str(program), "-m", "heterollm", *shlex.split(words)]
        ran = subprocess.run(  # noqa: S603 - commands of this file
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        yield f"$ heterollm {words}\n{ran.stdout.rstrip()}\nexit code {ran.returncode}\n"


def _run(*command: str) -> None:
    subprocess.run(command, check=True)  # noqa: S603 - commands of this file


def main() -> None:
    """Run the bench."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="file for the report")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for part in report(folder, prepare(folder)):
        print(part, flush=True)
        parts.append(part)
    if options.out is not None:
        options.out.write_text("\n".join(parts), "utf-8")


if __name__ == "__main__":
    main()

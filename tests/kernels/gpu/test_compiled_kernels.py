"""What clang makes of the kernels for GPUs: nothing in private memory, no slow index arithmetic, no growth.

clang with optimisation stands in for the vendors' compilers, which are built on LLVM. It optimises for no
device, so what it cannot keep in registers here, none of them can. Instruction counts of each program lie in
``tests/golden/kernel_instructions.json``; ``HETEROLLM_GOLDEN=write`` writes them again.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "kernel_instructions.json"
CLANG = "clang-15"
"""The version whose counts are kept; .ci/run installs it."""

TOLERANCE = 0.1
SLOW_INDEX = re.compile(r"= (?:[us]div|[us]rem|mul (?:nuw |nsw )*i64)\b")
DIVISION = re.compile(r"= [us](?:div|rem)\b")
DOT = "__opencl_c_integer_dot_product_input_4x8bit_packed"


def listed_programs():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        from adreno_programs import programs
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return programs()


def compiled(source, kernel, options=()):
    """Return the lines of a kernel by basic block, each with the blocks that it jumps to."""
    if shutil.which(CLANG) is None:
        pytest.skip(f"needs {CLANG}, such as `apt install {CLANG}`")
    command = [CLANG, "-x", "cl", "-cl-std=CL3.0", "-target", "spir64", "-O2", "-S", "-emit-llvm", "-o", "-"]
    command += ["-Xclang", "-finclude-default-header", f"-D{DOT}=1", *options, "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    body = (
        re.search(rf"^define [^\n]*@{kernel}\(.*?^\}}", done.stdout, re.M | re.S).group().splitlines()[1:-1]
    )
    blocks, name = {"entry": []}, "entry"
    for line in body:
        if label := re.match(r"([\w.]+):", line):
            name = label.group(1)
            blocks[name] = []
        elif line.startswith("  "):
            blocks[name].append(line.strip())
    return blocks


def loop_lines(blocks):
    """Return the lines of all blocks that lie in a loop."""
    jumps = {
        name: {
            label
            for line in lines
            if line.startswith(("br ", "switch ", "i32 "))
            for label in re.findall(r"label %([\w.]+)", line)
        }
        for name, lines in blocks.items()
    }
    found = []
    for name, lines in blocks.items():
        seen, reached = set(), list(jumps[name])
        while reached:
            block = reached.pop()
            if block not in seen:
                seen.add(block)
                reached += jumps.get(block, ())
        if name in seen:
            found += lines
    return found


@pytest.fixture(scope="module")
def every_kernel():
    return {
        program.name: compiled(program.source, program.kernel, program.options.split())
        for program in listed_programs()
    }


def test_no_kernel_keeps_anything_in_private_memory(every_kernel):
    for name, blocks in every_kernel.items():
        assert not [line for lines in blocks.values() for line in lines if "= alloca" in line], name


def test_no_kernel_divides_integers(every_kernel):
    """Power-of-two divisors are shifts; the listed programs have no others, as models have none."""
    for name, blocks in every_kernel.items():
        assert not [line for lines in blocks.values() for line in lines if DIVISION.search(line)], name


def test_loops_multiply_no_64_bit_integers(every_kernel):
    for name, blocks in every_kernel.items():
        assert not [line for line in loop_lines(blocks) if SLOW_INDEX.search(line)], name


def test_no_kernel_grows_unnoticed(every_kernel):
    counts = {name: sum(map(len, blocks.values())) for name, blocks in every_kernel.items()}
    if os.environ.get("HETEROLLM_GOLDEN") == "write":
        GOLDEN.write_text(json.dumps(counts, indent=1) + "\n")
    kept = json.loads(GOLDEN.read_text())
    assert counts.keys() == kept.keys()
    grown = {
        name: (kept[name], count) for name, count in counts.items() if count > (1 + TOLERANCE) * kept[name]
    }
    assert grown == {}


def test_what_the_checks_look_for_would_be_found():
    array = (
        "kernel void f(global float *a, int n) { float v[8] = {0}; v[n] = 1; a[0] = v[n / 2]; a[1] = v[1]; }"
    )
    lines = [line for block in compiled(array, "f").values() for line in block]
    assert any("= alloca" in line for line in lines)
    divides = "kernel void f(global int *a, int n) { for (int i = 0; i < n; i++) a[i] = a[i] / n; }"
    assert any(DIVISION.search(line) for line in loop_lines(compiled(divides, "f")))
    wide = "kernel void f(global int *a, int n, long m) { for (int i = 0; i < n; i++) a[a[i] * m] = i; }"
    assert any(SLOW_INDEX.search(line) for line in loop_lines(compiled(wide, "f")))
    once = "kernel void f(global int *a, int n) { a[0] = a[1] / n; }"
    assert loop_lines(compiled(once, "f")) == []

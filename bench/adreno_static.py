"""What Mesa's compiler makes of the kernels for an Adreno 740 or 750: registers, memory and issue slots.

Nothing runs and no time is measured. Mesa's rusticl and freedreno (arm64, from Debian trixie) compile under
qemu-user, with Mesa's shim in place of the kernel's driver. Qualcomm's own compiler is another one: what both
front ends show is to be believed first. `mesa` gives the source to rusticl, which hardly optimises before
code generation; `llvm` lets clang optimise it to SPIR-V first, as compilers built on LLVM do.

    python bench/adreno_static.py FOLDER                     # all programs, both front ends
    python bench/adreno_static.py FOLDER --only 'T64' --front llvm
    python bench/adreno_static.py FOLDER --stale --keep      # those without a row of the present source

FOLDER takes about 1.2 GB and is used again. The first run needs root: it installs qemu-user-static, and
unpacks Debian packages without installing them. A program takes 3 to 8 s on an idle core, RoPE a minute.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from conditions import script_parser

sys.path.insert(0, str(Path(__file__).parent))
from adreno_programs import Program, programs
from debian import unpack

DRIVER: Final = Path(__file__).with_name("adreno_driver.py")
RESULTS: Final = Path(__file__).parent / "results" / "adreno_static.json"
FRONTS: Final = ("mesa", "llvm")
SHIM: Final = "usr/lib/aarch64-linux-gnu/libfreedreno_noop_drm_shim.so"
TRANSLATOR: Final = "usr/bin/llvm-spirv-19"
ARM_PACKAGES: Final = [
    "mesa-opencl-icd",
    "mesa-drm-shim",
    "ocl-icd-libopencl1",
    "libpython3-stdlib",
    "python3-minimal",
]
HOST_PACKAGES: Final = ["clang-19", "llvm-spirv-19", "libclang-common-19-dev"]

REGISTER_FILE: Final = 96
"""Registers of four words for each lane of a wave of 64."""
LOCAL_MEMORY_BYTES: Final = 32768
MOST_WAVES: Final = 16

HALF_PRODUCTS: Final = {r"mad\.f16": 1, r"mul\.f hr": 1}
"""Multiply-adds of halves in one instruction; the first of a sum has nothing to add to."""

PRODUCTS: Final = HALF_PRODUCTS | {r"mad\.f32": 1, "dp4acc": 4}
"""Multiply-adds of one instruction."""


class StaticRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One program of the table.

    Args:
        registers: Registers of four 32-bit words.
        wave: Lanes of a wave.
        waves: Waves resident on a core, of 16: the lower of the limits by registers and by local memory.
        private_bytes: Private memory of a work-item.
        local_bytes: Local memory of a work-group.
        instructions: Instructions without the nops.
        loop_slots: Issue slots of the loop with most multiply-adds, inner loops left out.
        loop_products: Multiply-adds of that loop, of a tile's step at most its outputs times its inputs; half
            ones run at twice the rate, which slots do not show.
        loop_half_products: Those with half arithmetic.
        loop_private: Private loads and stores of that loop.
        loop_global: Its global loads and stores, and reads of images; older rows have none.
        loop_local: Its loads and stores of local memory.
        source: Hash of the program that the row was taken from, as :attr:`adreno_programs.Program.hash` makes
            it; it does not cover the compilers. The rows from before have none.
    """

    registers: int
    wave: int
    waves: int
    private_bytes: int
    local_bytes: int
    instructions: int
    loop_slots: int
    loop_products: int
    loop_half_products: int
    loop_private: int
    loop_global: int | None = None
    loop_local: int | None = None
    source: str = ""


class StaticTables(msgspec.Struct, forbid_unknown_fields=True):
    """The results file.

    Args:
        compiler: Name of the compiler, and that nothing ran.
        tables: Rows by front end and GPU (such as ``llvm 740``), then by program.
        before: The same of the kernels before they were made to suit Adreno.
    """

    compiler: str
    tables: dict[str, dict[str, StaticRow]]
    before: dict[str, dict[str, StaticRow]]


def _run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    return subprocess.run(list(command), check=True, text=True, **options)  # noqa: S603 - commands of this file


def is_prepared(folder: Path) -> bool:
    """Return whether the tool's folder has everything, so that no package is downloaded."""
    parts = folder / "root" / SHIM, folder / "root-llvm" / TRANSLATOR
    return shutil.which("qemu-aarch64-static") is not None and all(path.exists() for path in parts)


def prepare(folder: Path) -> None:
    """Download and unpack what is missing."""
    if shutil.which("qemu-aarch64-static") is None:
        _run(["apt-get", "install", "-y", "--no-install-recommends", "qemu-user-static"])
    if not (folder / "root" / SHIM).exists():
        unpack(folder, "arm64", folder / "root", ARM_PACKAGES)
    if not (folder / "root-llvm" / TRANSLATOR).exists():
        unpack(folder, "amd64", folder / "root-llvm", HOST_PACKAGES)


def _modules(program: Program, root: Path) -> list[str]:
    """Return a program as SPIR-V in base64 after clang's optimiser, of two versions."""
    dot = "__opencl_c_integer_dot_product_input_4x8bit_packed"
    # Combining would make integers of 256 bits of vectors that overlap; the translator refuses these.
    (root / "w/program.cl").write_text(program.source)
    commands = [
        "clang-19 -cc1 -triple spir64-unknown-unknown -O2 -cl-std=CL1.2 -finclude-default-header"
        f" -fdeclare-opencl-builtins -cl-ext=+cl_khr_fp16,+{dot} -D{dot}=1 -mllvm -vectorize-loops=false"
        f" -mllvm -vectorize-slp=false -mllvm -disable-vector-combine -emit-llvm-bc"
        f" -o /w/program.bc /w/program.cl {program.options}"
    ]
    # 1.2 has no selection of whole vectors; what the translator writes as 1.4 Mesa does not always take.
    versions = ("1.2", "1.4")
    commands += [
        f"llvm-spirv-19 --spirv-max-version={version} --spirv-ext=+SPV_KHR_integer_dot_product /w/program.bc"
        f" -o /w/program-{version}.spv"
        for version in versions
    ]
    for command in commands:
        _run(["chroot", str(root), *command.split()], stderr=subprocess.DEVNULL, timeout=300)
    return [
        base64.b64encode((root / f"w/program-{version}.spv").read_bytes()).decode() for version in versions
    ]


def compile_programs(folder: Path, wanted: Sequence[Program], front: str, gpu: int) -> dict[str, StaticRow]:
    """Return the table of programs for a GPU; one that does not build is left out, with a line."""
    root = folder / "root"
    listed = [
        {
            "name": program.name,
            "kernel": program.kernel,
            "source": program.source,
            "options": program.options,
            "modules": _modules(program, folder / "root-llvm") if front == "llvm" else [],
        }
        for program in wanted
    ]
    path = folder / f"programs-{front}-{gpu}.json"
    path.write_text(json.dumps(listed))
    # By the environment: qemu's own option would split values at commas.
    environment = os.environ | {
        "FD_GPU_ID": str(gpu),
        "RUSTICL_ENABLE": "freedreno",
        "RUSTICL_FEATURES": "fp16",
        "IR3_SHADER_DEBUG": "cs,disasm",
        "FD_MESA_DEBUG": "serialc",
        "OCL_ICD_VENDORS": str(root / "etc/OpenCL/vendors/rusticl.icd"),
        "MESA_SHADER_CACHE_DISABLE": "true",
    }
    python = next(path for path in sorted((root / "usr/bin").glob("python3.*")) if path.name[8:].isdigit())
    command = ["qemu-aarch64-static", "-L", str(root), "-E", f"LD_PRELOAD=/{SHIM}", str(python)]
    # The driver leaves by a fault at times, after everything is built.
    done = subprocess.run(  # noqa: S603
        [*command, str(DRIVER), str(path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    (folder / f"log-{front}-{gpu}.txt").write_text(done.stdout)
    return dict(read_log(done.stdout, {program.name: program for program in wanted}))


def read_log(log: str, wanted: dict[str, Program]) -> Iterator[tuple[str, StaticRow]]:
    """Yield the name and the row of each program that a log says was built."""
    for part in log.replace("MESA: info: ", "").split("@@PROGRAM ")[1:]:
        name, _, body = part.partition("\n")
        built = re.search(r"@@BUILT (.*)", body)
        if built:
            yield name, _row(body, json.loads(built.group(1)), wanted[name])
        else:
            print(f"{name}: {body[-200:].strip()}", file=sys.stderr)


def _row(body: str, answers: dict[str, int], program: Program) -> StaticRow:
    # The last dump of the kernel is for launches without a global offset.
    parts = re.split(r"NIR \(final form\)", body.partition("@@BUILT")[0])
    own = [part for part in parts if f"impl __wrapped_{program.kernel} {{" in part and "Native code" in part]
    before, _, dump = own[-1].partition("Native code")
    code, _, summary = dump.partition("; CL: outputs")

    def last(pattern: str, text: str) -> int:
        found = re.findall(pattern, text)
        return int(found[-1]) if found else 0

    registers = last(r"(\d+) full", summary) + (last(r"(\d+) half", summary) + 1) // 2
    sizes = re.findall(r"workgroup_size: (\d+), (\d+), (\d+)", before)
    items = 1
    for size in sizes[-1] if sizes else ("64",):
        items *= int(size)
    items = items or 64  # the kernel leaves the size to the launch
    pair = 2 if answers["wave"] == 128 else 1
    by_registers = REGISTER_FILE // (max(1, registers) * pair) * 2
    taken = -(-answers["local_bytes"] // 1024) * 1024
    groups = LOCAL_MEMORY_BYTES // taken if taken else MOST_WAVES
    by_memory = -(-items // (128 * pair)) * groups * 2
    loop = max(_loops(code), key=lambda lines: (_products(lines), len(lines)), default=[])
    tile = dict(program.defines)
    # What unpacks and scales multiplies, too.
    most = int(tile["ITEM_TOKENS"]) * 4 * int(tile["DEPTH"]) if "ITEM_TOKENS" in tile else sys.maxsize
    return StaticRow(
        registers=registers,
        wave=answers["wave"],
        waves=min(MOST_WAVES, by_registers, by_memory),
        private_bytes=last(r"scratch: (\d+)", before),
        local_bytes=answers["local_bytes"],
        instructions=last(r"(\d+) instr, ", summary) - last(r"(\d+) nops, ", summary),
        loop_slots=sum(1 + sum(map(int, re.findall(r"\((?:rpt|nop)(\d)\)", line))) for line in loop),
        loop_products=min(most, _products(loop)),
        loop_half_products=min(most, _products(loop, HALF_PRODUCTS)),
        loop_private=_accesses(loop, "ldp|stp"),
        loop_global=_accesses(loop, "ldg|stg|isam|ldib"),
        loop_local=_accesses(loop, "ldl|stl"),
        source=program.hash,
    )


def _repeats(line: str) -> int:
    return 1 + sum(map(int, re.findall(r"\(rpt(\d)\)", line)))


def _accesses(lines: Sequence[str], names: str) -> int:
    return sum(_repeats(line) for line in lines if re.search(rf"\b(?:{names})\b", line))


def _products(lines: Sequence[str], weights: Mapping[str, int] = PRODUCTS) -> int:
    return sum(
        weight * _repeats(line)
        for line in lines
        for name, weight in weights.items()
        if re.search(rf"(?:^|[\s)]){name}", line)
    )


def _loops(code: str) -> Iterator[list[str]]:
    """Yield the instructions of each loop without those of the loops inside it."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in map(str.strip, code.splitlines()):
        if label := re.match(r"(l\d+):$", line):
            labels[label.group(1)] = len(lines)
        elif re.match(r"(?:\([^)]*\))*\s*[a-z]", line):
            lines.append(line)
    spans: dict[int, int] = {}
    for at, line in enumerate(lines):
        jump = re.search(r"\b(?:jump|br)\b.*#(l\d+)", line)
        start = labels.get(jump.group(1), at + 1) if jump else at + 1
        if start <= at:
            spans[start] = max(at, spans.get(start, 0))
    for start, end in spans.items():
        inner = [
            span for span in spans.items() if start <= span[0] and span[1] <= end and span != (start, end)
        ]
        yield [
            lines[at] for at in range(start, end + 1) if not any(first <= at <= last for first, last in inner)
        ]


def read_results() -> StaticTables:
    """Return the tables that are kept."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=StaticTables)


def is_stale(row: StaticRow | None, program: Program) -> bool:
    """Return whether a program has no row, or one of another version of its source."""
    return row is None or row.source != program.hash


def print_table(rows: dict[str, StaticRow], before: dict[str, StaticRow]) -> None:
    """Print a table in Markdown, with the numbers before beside those of now."""
    names = [name for name in StaticRow.__struct_fields__ if name != "source"]
    print("| program | " + " | ".join(name.replace("_", " ") for name in names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for program, row in rows.items():
        old = before.get(program)
        cells: list[Any] = [
            getattr(row, name) if old is None else f"{getattr(old, name)} → {getattr(row, name)}"
            for name in names
        ]
        print(f"| {program} | " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    """Compile, print the tables, and keep them."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("folder", type=Path, help="working folder of the tool")
    parser.add_argument("--front", choices=FRONTS, action="append", help="front end; both by default")
    parser.add_argument("--gpu", type=int, choices=(740, 750), default=740, help="Adreno")
    parser.add_argument("--only", default="", help="regular expression of the programs' names")
    parser.add_argument(
        "--stale", action="store_true", help="only programs without a row of their present source"
    )
    parser.add_argument("--keep", action="store_true", help="write bench/results/adreno_static.json")
    given = parser.parse_args()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    kept = read_results()
    asked = [program for program in programs() if re.search(given.only, program.name)]
    for front in given.front or FRONTS:
        name = f"{front} {given.gpu}"
        table = kept.tables.get(name, {})
        wanted = [
            program for program in asked if not given.stale or is_stale(table.get(program.name), program)
        ]
        rows = compile_programs(folder, wanted, front, given.gpu)
        print(f"\n{name} (Mesa's compiler; nothing ran)\n")
        print_table(rows, kept.before.get(name, {}))
        # Programs that no longer exist go; those that were not asked for stay.
        names = {program.name for program in programs()}
        old = {program: row for program, row in table.items() if program in names}
        kept.tables[name] = old | rows
    if given.keep:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")


if __name__ == "__main__":
    main()

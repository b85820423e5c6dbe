"""The kept table of what Mesa's compiler makes of the kernels for an Adreno, and a fresh compile of a part.

``$HETEROLLM_ADRENO_TOOL`` names the folder that ``python bench/adreno_static.py FOLDER`` has set up.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FRESH = ("linear w4 f16 T1", "gated_activation f16")
SPREAD = 0.05
"""Mesa's scheduler may differ by so much between builds of a Debian package."""

OTHER_KERNEL = """NIR (final form)
workgroup_size: 8, 1, 1
scratch: 64
impl __wrapped_other {
Native code for unnamed compute shader
end
; CL: outputs:
; CL prog 1/1: 5 instr, 0 nops, 0 mov, 0 cov, 5 dwords
; CL prog 1/1: 0 last-baryf, 0 half, 40 full, 0 constlen
"""

LOG = f"""@@PROGRAM p
NIR (final form)
workgroup_size: 64, 2, 1
scratch: 0
impl __wrapped_p {{
Native code for unnamed compute shader p
; CL: outputs:
{OTHER_KERNEL}NIR (final form)
workgroup_size: 64, 2, 1
scratch: 0
impl __wrapped_p {{
Native code for unnamed compute shader p
l1:
(sy)(rpt3)mad.f32 r0.x, r1.x, r2.x, r0.x
(nop2) add.f r0.x, r0.x, r1.x
(ss)mad.f16 hr0.x, hr1.x, hr2.x, hr0.x
stp.f32 p[r0.x], r1.x, 1
l2:
dp4acc r0.x, r1.x, r2.x, r0.x
br p0.x, #l2
jump #l1
end
; CL: outputs:
; CL prog 1/1: 9 instr, 2 nops, 0 mov, 0 cov, 5 dwords
; CL prog 1/1: 0 last-baryf, 1 half, 12 full, 0 constlen
{OTHER_KERNEL}@@BUILT {{"wave": 128, "local_bytes": 5000}}
"""


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        import adreno_static
    finally:
        sys.path.remove(str(ROOT / "bench"))
    return adreno_static


def test_a_dump_is_read(bench):
    ((name, row),) = bench.read_log(LOG, {"p": bench.Program("p", "p", (), ())})
    assert name == "p"
    # The inner loop is not counted with the outer one, whose products are four floats and a half.
    assert (row.loop_slots, row.loop_products, row.loop_half_products, row.loop_private) == (10, 5, 1, 1)
    assert (row.loop_global, row.loop_local) == (0, 0)
    assert (row.registers, row.wave, row.instructions) == (13, 128, 7)
    # 96 registers hold three pairs of waves, 32 KiB six groups of a pair.
    assert (row.waves, row.local_bytes, row.private_bytes) == (6, 5000, 0)


def test_every_row_is_of_a_program_with_a_hash(bench):
    names = {program.name for program in bench.programs()}
    for table in bench.read_results().tables.values():
        assert table.keys() <= names
        assert all(len(row.source) == 12 for row in table.values())


def test_a_row_is_stale_once_what_a_compiler_sees_differs(bench):
    program = bench.Program("p", "p", ("glue.h", "pointwise.cl"), (("WG", 64),))
    ((_, row),) = bench.read_log(LOG, {"p": program})
    assert not bench.is_stale(row, program)
    assert not bench.is_stale(
        row, bench.Program("p", "p", ("glue.h", "pointwise.cl"), (("OTHER", 1), ("WG", 64)))
    )
    assert bench.is_stale(row, bench.Program("p", "p", ("glue.h", "pointwise.cl"), (("WG", 32),)))
    assert bench.is_stale(row, bench.Program("p", "q", ("glue.h", "pointwise.cl"), (("WG", 64),)))
    assert bench.is_stale(None, program)


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ("// words\n#define UNUSED 1\n#if BITS == 4\nint  a;\n#else\nint b;\n#endif\n", True),
        ("#ifndef BITS\nint c;\n#elif BITS > 8 || !defined(BITS)\nint b;\n#else\nint a;\n#endif", True),
        ("#define WORD (32 / BITS)\n#if WORD / 2 == 4 && defined WORD\nint a;\n#endif", True),
        ("#define PAIR_2 1\n#define PASTE(n) PAIR_##n\nint a;", False),
        ("int a; int b;", False),
        ("int b;", False),
    ],
)
def test_only_what_a_compiler_sees_counts(bench, source, same):
    from_live = sys.modules["live_text"].live_text
    assert (from_live(source, {"BITS": "4"}) == "int a;") is same


@pytest.mark.slow
def test_the_live_text_preprocesses_to_what_the_source_does(bench):
    if shutil.which("cpp") is None:
        pytest.skip("needs cpp, such as `apt install cpp`")
    for program in bench.programs():
        command = ["cpp", "-P", "-undef", "-D__clang__=1", *program.options.split()]
        live = sys.modules["live_text"].live_text(program.source, {k: str(v) for k, v in program.defines})
        made = [
            subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.split()
            for text in (program.source, live)
        ]
        assert made[0] == made[1] != [], program.name


SPILLS = {"rms_norm": (80, 3)}
"""Bytes of private memory, and its accesses in loops, of kernels that still have some."""


def test_the_kept_tables_show_no_private_memory(bench):
    kept = bench.read_results()
    assert {name.split()[0] for name in kept.tables} == set(bench.FRONTS)
    for table in kept.tables.values():
        assert table
        for name, row in table.items():
            private_bytes, in_loop = SPILLS.get(name.split()[0], (0, 0))
            assert row.private_bytes <= private_bytes, name
            # A larger tile than the default may spill registers.
            assert row.loop_private <= in_loop or "tile" in name, name
    # What the kernels had before shows that the columns can tell.
    assert kept.before["mesa 740"]["linear w4 f16 T64"].loop_private == 128


@pytest.mark.parametrize(
    ("program", "slots_a_product"),
    [("w4 f16 T64", 1.3), ("w4a8 f16 T64", 0.7), ("w4 f16 T8", 3.5), ("w4 f16 T1", 9.0)],
)
def test_the_kept_tables_meet_the_aims(bench, program, slots_a_product):
    for table in bench.read_results().tables.values():
        row = table[f"linear {program}"]
        assert row.loop_slots <= slots_a_product * row.loop_products
        assert row.waves >= 6


def test_half_products_and_a_single_token_take_few_slots(bench):
    for table in bench.read_results().tables.values():
        half, one = table["linear w4 f16 T64 half"], table["linear w4 f16 T1"]
        # A half product takes half a slot.
        assert half.loop_slots - half.loop_half_products / 2 <= 0.75 * half.loop_products
        assert half.loop_half_products == half.loop_products
        assert one.loop_slots <= 9 * 32
        # A block's four words and its scale; eight vectors of inputs.
        assert (one.loop_global, one.loop_local) <= (5, 8)


@pytest.mark.slow
@pytest.mark.parametrize("front", ["mesa", "llvm"])
def test_a_fresh_compile_gives_the_kept_rows(bench, front):
    folder = Path(os.environ.get("HETEROLLM_ADRENO_TOOL", "/nowhere"))
    if not bench.is_prepared(folder):
        pytest.skip("needs $HETEROLLM_ADRENO_TOOL, a folder that bench/adreno_static.py has set up")
    kept = bench.read_results().tables[f"{front} 740"]
    wanted = [program for program in bench.programs() if program.name in FRESH]
    rows = bench.compile_programs(folder, wanted, front, 740)
    assert set(rows) == set(FRESH)
    for name in set(FRESH) & kept.keys():
        assert rows[name].private_bytes == kept[name].private_bytes == 0
        assert rows[name].instructions <= (1 + SPREAD) * kept[name].instructions, name
        assert rows[name].loop_slots <= (1 + SPREAD) * kept[name].loop_slots, name

"""Writes tables of README.md and docs from bench/results, and holds prose to its rows.

    python bench/figures.py          writes the tables, and says which phrases are not what the rows say
    python bench/figures.py --check  writes nothing; exit code 1 if a table or a phrase differs
    python bench/figures.py --run    simulates the rows behind README.md and docs/simulation.md again; exit
                                     code 1 if a figure of them or a cell of a table differs
    python bench/figures.py --run all            all files of simulated rows, which takes much longer
    python bench/figures.py --run simulated_path one file or several

A table stands between two marks, ``<!-- NAME: written by bench/figures.py -->`` and ``<!-- end of NAME -->``.
A phrase is prose with its figures filled in from rows; its page must hold it, wherever its lines end.
``tests/test_docs.py`` checks the same.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import ablation_table
import accuracy_table
import adreno_programs
import aims
import expert_tables
import figures_run
import llm_npu_tables
import mixture_tables
import shadow_attention_tables
import sparse_tables
import speculation_tables
import what_if

from heterollm.benchmarks import BenchRow, best_of, read_rows
from heterollm.benchmarks.verdict import compare_rows
from heterollm.kernels.threads import allowed_cores
from heterollm.report import console
from heterollm.simulate import SimulatedRow

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = "README.md"
LIMITS: Final = "docs/limits.md"
MEASURED: Final = "docs/measured.md"
SIMULATION: Final = "docs/simulation.md"
FLIGHTS: Final = "docs/chunks-in-flight.md"
PAPER_MAP: Final = "docs/paper-map.md"
DEVICES: Final = "docs/devices-and-drivers.md"
INTEGERS: Final = "docs/integer-activations.md"
LLM_NPU: Final = "docs/llm-npu.md"
SPARSE: Final = "docs/shadow-attention.md"
CHECKPOINTS: Final = "docs/checkpoints.md"
MIXTURES: Final = "docs/mixture-of-experts.md"
SPECULATIVE: Final = "docs/speculative.md"
KV_CACHE: Final = "docs/kv-cache.md"

Row = Mapping[str, Any]

FRESH: Final[dict[str, tuple[Row, ...]]] = {}
"""Rows that were taken again, in place of those of the files."""


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """Return the rows of a file in bench/results."""
    if name in FRESH:
        return FRESH[name]
    path = ROOT / "bench" / "results" / f"{name}.jsonl"
    return tuple(json.loads(line) for line in path.read_text("utf-8").splitlines())


def of_kind(name: str, kind: str) -> list[Row]:
    """Return the rows of a file that are of a kind."""
    return [row for row in rows_of(name) if row["kind"] == kind]


def one(rows: Sequence[Row], **asked: object) -> Row:
    """Return the last row that has these values; a bench that was run again appends."""
    found = [row for row in rows if all(row[key] == value for key, value in asked.items())]
    if not found:
        raise SystemExit(f"No row has {asked}.")
    return found[-1]


def table(head: str, right: str, lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        head: Its titles, with bars between them.
        right: A letter for each column: ``l`` or ``r``.
        lines: Its cells.
    """
    rule = "|".join("---:" if side == "r" else "---" for side in right)
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(cells)} |" for cells in lines)])


# -- the split on host ---------------------------------------------------------------------------------


@cache
def split_rows() -> tuple[BenchRow, ...]:
    """Return the rows of bench/ablation.py."""
    return tuple(ablation_table.latest(read_rows(ROOT / "bench" / "results" / "ablation.jsonl")))


def large() -> list[BenchRow]:
    """Return those of TinyLlama's shape."""
    return [row for row in split_rows() if row.usable and not aims.is_of_waits(row)]


def measured_table() -> str:
    """The table of rates on ``host``."""
    lines = ablation_table.table([row for row in split_rows() if not aims.is_of_waits(row)])
    return "\n".join(line.replace("|  |", "| |") for line in lines[: lines.index("")])


def fastest(test: str, precision: str, chosen: Callable[[BenchRow], bool]) -> BenchRow:
    """Return the fastest of the rows that are chosen; ``tg`` is any decode."""
    runs = ablation_table.precisions_of_runs(split_rows())
    found = [
        row
        for row in large()
        if row.phase != "both"
        and (row.test == test or (test == "tg" and row.phase == "decode"))
        and runs.get(row.run) == precision
        and chosen(row)
    ]
    best = best_of(found)
    assert best is not None, (test, precision)
    return best


def gain(test: str, precision: str, over: Callable[[BenchRow], bool]) -> str:
    """Return the ratio of the best split and its 95 % interval."""
    change = compare_rows(fastest(test, precision, over), fastest(test, precision, aims.split))
    return f"{change.ratio:.2f} ({change.low:.2f} to {change.high:.2f})"


def ratio(gained: str) -> str:
    """Return a gain without its interval."""
    return gained.partition(" ")[0]


def interval(gained: str) -> str:
    """Return the interval alone, as `0.89 to 1.37`."""
    return gained.partition("(")[2].rstrip(")")


def shown(gained: str) -> bool:
    """Whether an interval does not hold 1."""
    low, high = (float(end) for end in interval(gained).split(" to "))
    return not low <= 1.0 <= high


def odd_gains(
    precision: str, over: Callable[[BenchRow], bool], lengths: Sequence[int]
) -> tuple[float, float]:
    """Return the least and the most that the best split gains at lengths without a graph."""
    gains = []
    for length in lengths:
        if precision == "w4a8" and length == 1000:
            continue
        rows = (fastest(f"pp{length}", precision, chosen) for chosen in (over, aims.split))
        gains.append(compare_rows(*rows).ratio)
    return min(gains), max(gains)


def fraction_of_padding(precision: str, level: str) -> str:
    """Return the time of 300 tokens at a level over padding's."""
    ours = fastest("pp300", precision, lambda row: aims.split(row) and row.plan_level == level)
    theirs = fastest("pp300", precision, aims.padding)
    return f"{theirs.times.median_ts / ours.times.median_ts:.2f}"


def predicted() -> Mapping[str, Any]:
    """Return how far predicted times were from measured ones."""

    def off(row: BenchRow) -> float:
        return row.account.predicted_ms / row.times.measured_ms - 1

    found = [row for row in split_rows() if row.account.predicted_ms and row.times.measured_ms]
    errors = [off(row) for row in found]
    cuts = [row for row in found if aims.split(row)]
    slow = [row for row in cuts if off(row) < -aims.PREDICTION_FRACTION]
    odd = [row for row in slow if row.asked.n_prompt in aims.ODD_LENGTHS]
    return {
        "rows": len(found),
        "median": f"{statistics.median(map(abs, errors)):.0%}".replace("%", " %"),
        "least": f"{-100 * min(errors):.0f} %",
        "most": f"{100 * max(errors):.0f} %",
        "most_large": f"{100 * max(off(row) for row in found if not aims.is_of_waits(row)):.0f} %",
        "cuts": len(cuts),
        "slow": len(slow),
        "where": "all at lengths without a graph"
        if len(odd) == len(slow)
        else "some at lengths with a graph",
    }


def whole_wins() -> str:
    """Return in how many rows of that table `gpu` on both cores is no slower than the splits."""
    cells = [line.strip("|").split("|") for line in measured_table().splitlines()]
    titles = [title.strip() for title in cells[0]]
    at = {name: titles.index(name) for name in ("`tensor`", "`block`", "`gpu`, both cores")}
    rates = [[float(line[column]) for column in at.values()] for line in cells[2:]]
    return f"{sum(whole >= max(cuts) for *cuts, whole in rates)} of {len(rates)} rows"


# -- other benches ---------------------------------------------------------------------------------------


def perplexity_table() -> str:
    """Perplexity of the bundled model."""
    values = {row["name"]: f"{row['perplexity']:.3f}" for row in rows_of("perplexity")}
    lines = [("`fp16` (FP32 on `host`)", values["fp16"])]
    for block in (32, 64, 128):
        both = " / ".join(values[f"w4a16 block {block} {kind}"] for kind in ("symmetric", "asymmetric"))
        lines.append((f"`w4a16`, block {block}: symmetric / asymmetric", both))
    return table("weights | perplexity", "lr", lines)


@cache
def published() -> Mapping[tuple[str, int, str], BenchRow]:
    """Return the rows of a published model by test, depth and precision or engine."""
    rows = read_rows(ROOT / "bench" / "results" / "published.jsonl")
    return {
        (
            row.test.partition(" ")[0],
            row.asked.n_depth,
            row.precision if row.engine == "self" else row.engine,
        ): row
        for row in rows
    }


def over_llama_cpp(test: str, depth: int, precision: str) -> str:
    """Return the ratio to llama.cpp of a published model's rate, and its 95 % interval."""
    rows = published()
    change = compare_rows(rows[test, depth, "llama.cpp"], rows[test, depth, precision])
    return f"{change.ratio:.2f} ({change.low:.2f} to {change.high:.2f})"


def published_table(depths: Sequence[int]) -> str:
    """Rates of a published model beside llama.cpp."""
    engines = ("w4a16", "w4a8", "llama.cpp")
    lines = [
        (
            *(phase, str(depth)),
            *(f"{published()[test, depth, way].times.median_ts:.0f}" for way in engines),
            *(over_llama_cpp(test, depth, way) for way in engines[:2]),
        )
        for test, phase in (("pp256", "prefill 256"), ("tg64", "decode 64"))
        for depth in depths
    ]
    head = "depth | `w4a16` | `w4a8` | llama.cpp Q4_0 | `w4a16` / llama.cpp | `w4a8` / llama.cpp"
    return table(f"phase | {head}", "lrrrrrr", lines)


def ranks() -> tuple[int, int, int]:
    """Return how many rows at three depths show `w4a8` faster than llama.cpp, neither, and slower."""
    changes = [
        compare_rows(published()[test, depth, "llama.cpp"], published()[test, depth, "w4a8"])
        for test in ("pp256", "tg64")
        for depth in (0, 2048, 7680)
    ]
    faster = sum(change.low > 1 for change in changes)
    slower = sum(change.high < 1 for change in changes)
    return faster, len(changes) - faster - slower, slower


def llama_cpp_table(name: str, title: str) -> str:
    """Rates beside llama.cpp on random weights, in the rows of an earlier script."""
    engines = ("w4a16", "w4a8", "llama.cpp")
    lines = [
        (
            *(f"{row['phase']} {row['tokens']}", str(row["depth"])),
            *(f"{row[engine]['tokens_per_s']:.0f}" for engine in engines),
            *(f"{row['ratios'][engine]:.2f}" for engine in engines[:2]),
        )
        for row in sorted(rows_of(name), key=lambda row: (row["phase"] != "prefill", row["depth"]))
    ]
    head = "depth | `w4a16` | `w4a8` | llama.cpp Q4_0 | `w4a16` / llama.cpp | `w4a8` / llama.cpp"
    return table(f"{title} | {head}", "lrrrrrr", lines)


def attention_table() -> str:
    """Attention's share of the kernels' time."""
    lines = []
    for depth in (0, 512, 2048):
        cells = [str(depth)]
        for phase, digits, wall_digits in (("prefill", 0, 0), ("decode", 2, 1)):
            row = one(rows_of("overhead"), mode="classes", phase=phase, depth=depth)
            share = row["classes_us"]["attention"] / sum(row["classes_us"].values())
            cells += [
                f"{row['wall_us'] / 1e3:.{wall_digits}f}",
                f"{row['classes_us']['attention'] / 1e3:.{digits}f}",
            ]
            cells.append(f"{100 * share:.0f} %")
        lines.append(cells)
    head = "depth | prefill 256: wall ms | attention ms | share | decode: wall ms | attention ms | share"
    return table(head, "rrrrrrr", lines)


def outside_table() -> str:
    """Time outside of kernels and graphs."""
    lines = []
    for level in ("gpu", "npu"):
        traced, untraced = (
            one(rows_of("overhead"), level=level, mode=mode) for mode in ("traced", "untraced")
        )
        inside = sum(traced["classes_us"].values()) + traced["graphs_us"]
        assert abs(1 - inside / traced["wall_us"] - traced["overhead_fraction"]) < 1e-6
        walls = (traced["wall_us"], inside, untraced["wall_us"])
        wall, busy, alone = (f"{value / 1e3:.1f}" for value in walls)
        lines.append((f"`{level}`", wall, busy, f"{100 * traced['overhead_fraction']:.1f} %", alone))
    head = "level | traced wall ms | kernels and graphs ms | outside | untraced wall ms"
    return table(head, "lrrrr", lines)


def memory_table() -> str:
    """Memory beside its limits."""
    lines = []
    for row in (row for row in rows_of("memory") if row["precision"] == "w4a16"):
        other = one(rows_of("memory"), precision="w4a8", level=row["level"], cached=row["cached"])
        mib = [
            f"{of[f'{name}_bytes'] / 2**20:.0f} / {of[f'{name}_limit_bytes'] / 2**20:.0f}"
            for of in (row, other)
            for name in ("peak", "resident")
        ]
        lines.append((f"`{row['level']}`", "cached" if row["cached"] else "quantises", *mib))
    head = "level | load | `w4a16`: peak / limit | after / limit | `w4a8`: peak / limit | after / limit"
    return table(head, "llrrrr", lines)


def stored_formats_table() -> str:
    """The block types of GGUF: equality with gguf's values, and the error of the canonical tensor."""
    rows = {row["type"]: row for row in of_kind("checkpoint_formats", "blocks")}
    lines = [
        (
            name,
            "bit for bit" if row["same_values"] else "differ",
            row["held"],
            "none" if row["db"] is None else f"{row['db']:.0f} dB",
        )
        for name, row in rows.items()
    ]
    return table("type | values | kept as | error", "lllr", lines)


def published_file_table() -> str:
    """Logits and greedy text of published GGUF files against their own values."""
    files = of_kind("checkpoint_formats", "file")
    lines = [
        (
            f"`{name}`",
            f"`{plan}`",
            *("equal" if db is None else f"{db:.0f} dB" for db in (row["prompt_db"], row["decode_db"])),
            f"{row['top_1']:.1%}",
            "equal" if row["same_greedy_text"] else "differs",
        )
        for (name, plan), row in {(row["file"], row["plan"]): row for row in files}.items()
    ]
    return table("file | plan | prompt | decode | same top token | greedy text", "llrrrl", lines)


def startup_table() -> str:
    """From a process to its first token."""
    lines = [
        (
            f"`{row['level']}`",
            *(f"{row['median_s'][part]:.2f}" for part in ("import", "load", "first_token", "total")),
            f"{max(sample['total'] for sample in row['samples_s']):.2f}",
        )
        for row in rows_of("startup")
    ]
    head = "level | import s | load s | first token s | all s, median | worst of 5"
    return table(head, "lrrrrr", lines)


WITHOUT: Final = (
    ("merged launches", "tg", "gpu", 2, "decode, `gpu`, both cores"),
    ("merged launches", "tg", "gpu", 1, "decode, `gpu`, one core"),
    ("merged launches", "tg", "tensor", 1, "decode, `tensor`"),
    ("kernel tuning", "pp256", "gpu", 2, "prefill 256, `gpu`, both cores"),
    ("kernel tuning", "pp256", "gpu", 1, "prefill 256, `gpu`, one core"),
    ("kernel tuning", "pp256", "tensor", 1, "prefill 256, `tensor`"),
    ("kernel tuning", "tg", "tensor", 1, "decode, `tensor`"),
    *(
        ("re-solved lengths", f"pp{length}", "tensor", 1, f"prefill {length}")
        for length in (5, 33, 100, 135, 300)
    ),
)
"""Gain, test, plan, cores of the GPU's part, and what the table calls the last three."""


def gains_table() -> str:
    """What merged launches, tuning and solving at run time gain: the first time that each was measured."""
    lines = []
    for gained, test, plan, threads, words in WITHOUT:
        cells = [gained, words]
        for model in ("gains-four-layers", "tiny_python_lm"):
            row = next(
                row
                for row in rows_of("gains")
                if (row["gain"], row["model"], row["plan"], row["gpu_threads"])
                == (gained, model, plan, threads)
                and (row["test"] == test or (test == "tg" and row["test"].startswith("tg")))
            )
            cells.append(f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})")
        lines.append(cells)
    return table("gain of | test | TinyLlama-1.1B's shape, four layers | bundled model", "llrr", lines)


def pair(first: str, model: str, label: str, test: str) -> str:
    """Return a ratio of bench/pairs.py with the ends of its pairs."""
    found = [row for row in rows_of("pairs") if row["commands"][0].startswith(first)]
    row = one(found, model=model, label=label, test=test)
    return f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_largest']:.2f})"


def adreno_table() -> str:
    """Mesa's compiler on the kernels for an Adreno 740, by both front ends."""
    kept = json.loads((ROOT / "bench" / "results" / "adreno_static.json").read_text("utf-8"))["tables"]
    fronts = kept["mesa 740"], kept["llvm 740"]
    present = {program.name: program.hash for program in adreno_programs.programs()}
    lines = []
    for program in dict.fromkeys(program for front in reversed(fronts) for program in front):
        cells = [f"`{program}`"]
        # The other loops multiply and add for something else.
        counts = program.startswith(("linear", "attention ")) and "without" not in program
        for row in (rows.get(program) for rows in fronts):
            if row is None:
                cells += ["-"] * 4
                continue
            old = "" if row["source"] == present.get(program) else " †"
            cells += [f"{row['registers']}{old}", str(row["waves"]), str(row["private_bytes"])]
            cells.append(f"{row['loop_slots'] / row['loop_products']:.2f}" if counts else "-")
        lines.append(cells)
    columns = "registers | waves | private B | slots"
    return table(f"program | Mesa: {columns} | LLVM: {columns}", "lrrrrrrrr", lines)


# -- KV cache in 8 bits ------------------------------------------------------------------------------------


def kv_accuracy_table() -> str:
    """What a KV cache of 8 bits changes in logits."""
    lines = []
    for row in of_kind("kv_bits", "accuracy"):
        change = row["coded_perplexity"] / row["perplexity"] - 1
        lines.append(
            [
                f"{row['model']}, {row['text']}, {row['windows']} x {row['window_tokens']} tokens",
                f"{row['perplexity']:.3f}",
                f"{row['coded_perplexity']:.3f} ({change:+.3%})",
                f"{row['top_1_agreement']:.1%}",
                f"{row['divergence']:.5f}",
                f"{row['logits_db']:.1f}",
            ]
        )
    head = "model and text | perplexity, floats | 8 bits | same top token | KL, nats | logits, dB"
    return table(head, "lrrrrr", lines)


def kv_time_table() -> str:
    """What it gives in time and memory."""
    lines = []
    for row in of_kind("kv_bits", "time"):
        device = "host, FP32" if row["time"] == "measured" else "phone, FP16"
        spread, rounds = "", "-"
        if row["time"] == "measured":
            spread = f" ({row['gains'][0]:.2f} to {row['gains'][1]:.2f})"
            rounds = f"{sum(row['disturbed'])} of {len(row['disturbed'])}"
        lines.append(
            [
                f"{row['time']}, {device}, {row['model']}",
                f"{row['tokens']} behind {row['context']}",
                f"{row['ms']:.2f}",
                f"{row['coded_ms']:.2f}",
                f"{row['gain']:.2f}{spread}",
                rounds,
                f"{row['coded_session_bytes'] / row['session_bytes']:.3f}",
            ]
        )
    head = "where, floats of the cache, model | tokens | ms, floats | ms, 8 bits | gain | disturbed | memory"
    return table(head, "llrrrrr", lines)


# -- simulated -------------------------------------------------------------------------------------------


def simulated(level: str, prompt: int, **asked: object) -> Row:
    """Return a row of Llama-3-8B."""
    plain = {"sync": "predict", "resolve": False, "every_form": False, "left_out": [], "gpu_load": None}
    found = {"model": "llama-3-8b", "plan_level": level, "prompt_tokens": prompt, "length_policy": "padding"}
    return one(rows_of("simulated_paper"), **{**found, **plain, **asked})


def own_path(level: str, prompt: int) -> Row:
    """Return a row of Llama-3-8B on this program's own path; without limits of memory if it is refused."""
    asked = {"plan_level": level, "prompt_tokens": prompt}
    row = one(rows_of("simulated_path"), **asked, what_if={})
    return one(rows_of("simulated_path"), **asked, what_if=what_if.NO_LIMITS) if row["error"] else row


def refused(row: Row) -> bool:
    """Whether the modelled phone refuses the plan of a row, which was taken without limits of memory."""
    return dict(row["what_if"]) == what_if.NO_LIMITS


def simulated_table() -> str:
    """The table of simulated rates: the paper's conditions beside this program's path."""
    lines = []
    for name, level, asked in (
        ("`gpu`", "gpu", {}),
        ("`layer`", "layer", {}),
        ("`tensor`", "tensor", {}),
        ("`tensor`, driver's waits (`--sync finish`)", "tensor", {"sync": "finish"}),
        ("`block`, k-chunked graphs where they pay", "block", {"every_form": True}),
    ):
        driver = bool(asked.get("sync"))
        paper = [
            "" if driver and prompt != 256 else simulated(level, prompt, **asked)
            for prompt in (64, 256, 1024)
        ]
        own = ["" if driver else own_path(level, prompt) for prompt in (64, 256, 1024)]
        lines.append((name, *_rates(paper), *_rates(own)))
    phases = "64 | 256 | 1024 | decode"
    made = table(f"simulated | paper: {phases} | own path: {phases}", "lrrrrrrrr", lines)
    return made.replace("|  |", "| |").replace("|  |", "| |")


def three_rows_table() -> str:
    """GPU, NPU and both on this program's own path."""
    names = {"gpu": "GPU alone", "layer": "prompts on the NPU", "tensor": "both at once"}
    lines = []
    for level, name in names.items():
        rate, decode = (_rates([own_path(level, 256)] * 3)[at] for at in (0, 3))
        lines.append((f"{name} (`{level}`)", rate, decode))
    return table("simulated, Llama-3-8B | prompt of 256 | decode", "lrr", lines)


def _rates(rows: Sequence[Row | str]) -> list[str]:
    """Return the rates of prompts and of the decode behind 256; † where the phone refuses the plan."""
    cells = []
    for row in rows:
        dagger = "" if isinstance(row, str) or not refused(row) else " †"
        cells.append(row if isinstance(row, str) else f"{row['prefill_tokens_per_second']:.0f}{dagger}")
    middle = rows[1]
    decode = "" if isinstance(middle, str) else f"{middle['decode_tokens_per_second']:.1f}"
    return [*cells, decode]


def what_if_table() -> str:
    """The table of what each change to this program's path would be worth."""
    rows = [SimulatedRow.from_dict(row) for row in rows_of("simulated_path")]
    head = (
        "simulated, one change after the other | prefill 256, alone | decode, alone "
        "| prefill 256, with those above | decode, with those above"
    )
    return table(head, "lrrrr", what_if.what_if_table(rows))


def contexts_table() -> str:
    """The table of what contexts with shared weights would give."""
    lines = []
    for name, changed in (
        ("a copy for each length", {}),
        ("weights shared", {"npu.shared_contexts": 1.0}),
        ("weights shared, buffers counted once", {"npu.shared_contexts": 1.0, "npu.io_by_graph": 0.0}),
    ):
        found = [
            one(rows_of("simulated_contexts"), what_if=changed, prompt_tokens=prompt)
            for prompt in (64, 256, 300, 1024)
        ]
        rates = [f"{row['prefill_tokens_per_second']:.0f}" for row in found]
        lines.append(
            (name, str(found[1]["npu_graphs"]), *rates, f"{found[1]['decode_tokens_per_second']:.1f}")
        )
    return table("simulated, `block` | graphs | prefill 64 | 256 | 300 | 1024 | decode", "lrrrrrr", lines)


def flights_table() -> str:
    """The table of prompts in chunks one after the other, and with four at once."""
    rows = rows_of("simulated_flights")
    lines = []
    for model, level in product(("qwen1.5-1.8b", "llama-3.2-3b", "llama-3-8b"), ("tensor", "block")):
        cells = [f"{model}, `{level}`"]
        for soc, prompt in product(("snapdragon-8gen3-paper", "snapdragon-8gen3"), (1024, 2048)):
            asked = {"model": model, "plan_level": level, "soc": soc, "prompt_tokens": prompt}
            alone, flown = (
                one(rows, **asked, in_flight=count)["prefill_tokens_per_second"] for count in (1, 4)
            )
            cells += [f"{alone:.0f}", f"{flown:.0f} ({flown / alone:.2f})"]
        lines.append(cells)
    columns = (
        f"{soc}: {n}, one by one | four at once" for soc in ("paper", "own path") for n in (1024, 2048)
    )
    return table(f"simulated | {' | '.join(columns)}", "lrrrrrrrr", lines)


def guessed_passes_table() -> str:
    """Simulated decode passes of several tokens under each plan level."""
    rows, lengths = rows_of("speculation_simulated"), (1, 2, 3, 4, 6, 8, 12, 16)
    lines = []
    for level in ("gpu", "tensor", "block"):
        found = [one(rows, kind="pass", level=level, tokens=tokens) for tokens in lengths]
        lines.append((f"`{level}`, ms", *(f"{row['ms']:.0f}" for row in found)))
        lines.append(("predicted", *(f"{row['predicted_ms']:.0f}" for row in found)))
        lines.append(("runs graphs", *("yes" if row["npu"] else "no" for row in found)))
    return table(f"simulated, tokens of the pass | {' | '.join(map(str, lengths))}", "lrrrrrrrr", lines)


def simulated_guesses_table() -> str:
    """Simulated gains of guesses by their assumed acceptance."""
    rows, shares = rows_of("speculation_simulated"), (0.3, 0.5, 0.7, 0.8, 0.9)
    lines = []
    for by, level in product(("lookup", "llama-3.2-1b"), ("gpu", "tensor", "block")):
        asked = {"kind": "gain", "guesses_by": by, "level": level}
        found = [one(rows, **asked, assumed_acceptance=share) for share in shares]
        plain = f"{found[0]['plain_tokens_per_s']:.2f}"
        lines.append((f"{by}, `{level}`", plain, *(f"{row['gain']:.2f} ({row['guesses']})" for row in found)))
    columns = " | ".join(f"{share:.0%} right" for share in shares)
    return table(f"simulated | plain, tokens/s | {columns}", "lrrrrrr", lines)


def measured_guesses_table() -> str:
    """Plain decoding on ``host``, and the gains of guesses by lookup and by a draft."""
    lines = list(speculation_tables.answer_lines(rows_of("speculation")))
    return table(speculation_tables.ANSWERS_HEAD, "llrrrrrrrr", lines)


def measured_passes_table() -> str:
    """Decode passes of several tokens on ``host``, relative to one token."""
    lengths = speculation_tables.LENGTHS
    lines = list(speculation_tables.pass_lines(rows_of("speculation")))
    head = f"model, plan, threads; tokens of the pass | {' | '.join(map(str, lengths))}"
    return table(head, "l" + "r" * len(lengths), lines)


def llm_npu_table(name: str) -> str:
    """The tables of the technique llm.npu."""
    head, right = llm_npu_tables.HEADS[name]
    return table(head, right, getattr(llm_npu_tables, name)(one, rows_of("simulated_llm_npu")))


def shadow_attention_table(name: str) -> str:
    """The simulated tables of the technique shadowattn."""
    head, right = shadow_attention_tables.HEADS[name]
    rows = rows_of("simulated_shadow_attention")
    return table(head, right, getattr(shadow_attention_tables, name)(one, rows))


def chunk_gain(limit: int) -> str:
    """Return what `block` with k-chunked graphs gains over `tensor`, by where rows begin to spill."""
    found = [
        row for row in rows_of("simulated_prior") if row["what_if"] == {"npu.row_limit_columns": float(limit)}
    ]
    block, tensor = (
        one(found, plan_level=level)["prefill_tokens_per_second"] for level in ("block", "tensor")
    )
    return f"{block / tensor:.2f}"


def driver_gains() -> str:
    """Return the range of the gain of fast synchronisation in decode of the other three models."""
    gains = []
    for model in ("llama-2-7b", "llama-3.2-3b", "internlm2-1.8b"):
        fast, driver = (
            simulated("tensor", 256, model=model, sync=sync)["decode_tokens_per_second"]
            for sync in ("predict", "finish")
        )
        gains.append(fast / driver)
    return f"{min(gains):.1f} to {max(gains):.1f}"


def emulated(form: str, tokens: int) -> float:
    """Return the least CPU time of emulation, in microseconds."""
    return min(
        min(row["cpu_us"])
        for row in rows_of("emulator_stages")
        if (row["form"], row["tokens"]) == (form, tokens)
    )


INTEGER_FORMS: Final = {
    "MatMulNBits": "matmul_nbits",
    "static, float edges": "integer, static, float edges",
    "static": "integer, static",
    "a scale for each token": "integer, a scale for each token",
}


def integer_forms_table() -> str:
    """Accuracy and emulated cost of the forms of a linear."""
    rows = of_kind("integer_forms", "emulated linear")
    lines = []
    for weights in ("normal", "student t3"):
        for activations in dict.fromkeys(row["activations"] for row in rows):
            own: dict[str, Any] = {"weights": weights, "activations": activations, "tokens": 128}
            found = [one(rows, form=form, **own) for form in INTEGER_FORMS.values()]
            lines.append((f"{weights}, {activations}", *(f"{row['sqnr_db']:.1f}" for row in found)))
    for tokens in (32, 128, 256):
        least = [
            min(row["cpu_ms"] for row in rows if (row["form"], row["tokens"]) == (form, tokens))
            for form in INTEGER_FORMS.values()
        ]
        lines.append((f"CPU ms, {tokens} tokens", *(f"{value:.0f}" for value in least)))
    return table(" | ".join(("weights, activations", *INTEGER_FORMS)), "lrrrr", lines)


def codes_table() -> str:
    """Times of the kernels that write and read codes."""
    rows = [row for row in rows_of("integer_forms") if row["kind"].startswith("codes on")]
    lengths = sorted({row["tokens"] for row in rows})
    lines = [
        (name, *(f"{one(rows, kernel=name, tokens=tokens)['least_us']:.0f}" for tokens in lengths))
        for name in dict.fromkeys(row["kernel"] for row in rows)
    ]
    head = " | ".join(("kernel, rows of 4096", *(f"m = {tokens}" for tokens in lengths)))
    return table(head, "l" + "r" * len(lengths), lines)


def integer_perplexity_table() -> str:
    """Perplexity of models with float and integer graphs."""
    rows = of_kind("integer_forms", "perplexity")
    kinds = list(dict.fromkeys(row["weights"] for row in rows))
    lines = []
    for model, device in dict.fromkeys((row["model"], row["device"]) for row in rows):
        found = [one(rows, model=model, device=device, weights=kind) for kind in kinds]
        last = found[-1]
        kept = f"{len(last['failed'])} of {last['calibrated']}"
        values = (f"{row['perplexity']:.3f}" for row in found)
        lines.append((model, f"`{device}`", str(last["windows"]), *values, kept))
    head = " | ".join(("model", "device", "windows", *kinds, "linears that kept floats"))
    return table(head, "llr" + "r" * (len(kinds) + 1), lines)


def w8a8_table() -> str:
    """Perplexity of models at precision w8a8."""
    rows = of_kind("integer_forms", "w8a8 perplexity")
    kinds = list(dict.fromkeys(row["weights"] for row in rows))
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = [one(rows, model=model, weights=kind) for kind in kinds]
        first = found[0]["perplexity"]
        values = (
            f"{row['perplexity']:.3f} ({100 * (row['perplexity'] / first - 1):+.2f} %)" for row in found
        )
        lines.append((model, str(found[0]["windows"]), *values, str(found[-1]["operators in 16 bits"])))
    head = " | ".join(("model", "windows", *kinds, "of them in 16 bits"))
    return table(head, "lr" + "r" * (len(kinds) + 1), lines)


# -- mixtures of experts ----------------------------------------------------------------------------------


def mixture_table(lines: Callable[..., tuple[list[str], list[tuple[str, ...]]]], right: str) -> str:
    """Return a table of the trained mixture."""
    columns, found = lines(rows_of("experts"))
    return table(" | ".join(columns), right, found)


def expert_table(name: str) -> str:
    """The simulated tables of the technique npumoe."""
    head, right = expert_tables.HEADS[name]
    return table(head, right, getattr(expert_tables, name)(one, rows_of("simulated_experts")))


def parity_table() -> str:
    """Logits of mixtures against transformers."""
    rows = [row for row in rows_of("parity") if row["level"] == "gpu"]
    names = dict.fromkeys(row["family"] for row in rows)
    cells = tuple(f"{one(rows, family=name)['sqnr_db']:.0f}" for name in names)
    return table(" | ".join(f"`{name}`" for name in names), "r" * len(names), [cells])


# -- 8-bit activations ------------------------------------------------------------------------------------

PUBLISHED: Final = "SmolLM2-135M-Instruct"


def accuracy_tables(model: str) -> Callable[[], str]:
    """Return a table of the perplexity of a model with 8-bit activations, made when it is called."""

    def made() -> str:
        own = [row for row in rows_of("accuracy") if row["model"] == model]
        columns, lines = accuracy_table.accuracy_lines(own)
        return table(" | ".join(columns), "l" + "r" * (len(columns) - 1), lines)

    return made


def outlier_table() -> str:
    """Outlier channels of the published model."""
    own = [row for row in rows_of("accuracy") if row["model"] == PUBLISHED]
    head = "operators | inputs | outlier channels of 512 tokens | that ever have one | hot channels (most)"
    return table(head, "lrrrr", accuracy_table.outlier_lines(own))


def loss_table() -> str:
    """The published model's operators that lose most without their shadow."""
    own = [row for row in rows_of("accuracy") if row["model"] == PUBLISHED]
    head = "operator | perplexity | median deviations | place by importance | place by error"
    return table(head, "lrrrr", accuracy_table.loss_lines(own))


def importance_table() -> str:
    """Importance of the published model's outliers by layer."""
    own = [row for row in rows_of("accuracy") if row["model"] == PUBLISHED]
    columns, lines = accuracy_table.importance_lines(own)
    return table(" | ".join(columns), "l" + "r" * (len(columns) - 1), lines)


def sparse_table(name: str, *asked: object) -> Callable[[], str]:
    """Return a table of sparse attention's accuracy by the name of its lines, made when it is called."""

    def made() -> str:
        columns, lines = getattr(sparse_tables, f"{name}_lines")(rows_of("sparse_accuracy"), *asked)
        return table(" | ".join(columns), "l" + "r" * (len(columns) - 1), lines)

    return made


def prefill_table() -> str:
    """Attention's share of a prompt on ``host``, dense and sparse."""
    lines = [
        (
            f"{row['tokens']}",
            row["attention"],
            f"{row['prefill_ms']:.0f}",
            f"{row['attention_ms']:.0f}",
            f"{row['share']:.0%}",
            f"{row['overlap_ms']:.0f}",
        )
        for row in rows_of("sparse_prefill")
    ]
    head = "tokens | attention | prompt, ms | its attention, ms | share | both processors, ms"
    return table(head, "rlrrrr", lines)


def sparse_kernels_table() -> str:
    """The kernels of one layer's attention on ``host``, dense and sparse."""
    found = [row for row in rows_of("sparse_attention") if row["keep"] == 0.2]
    parts = ("dense", "codes", "estimate", "selection", "attention")
    lines = [
        [
            row["heads"],
            f"{row['context']}",
            *(f"{row[f'{part}_us'] / 1e3:.1f}" for part in parts),
            f"{row['sparse_over_dense']:.2f}",
            f"{row['without_estimate_over_dense']:.2f}",
        ]
        for row in found
    ]
    head = "heads of | keys | dense | codes | estimate | selection | attention"
    return table(f"{head} | all four / dense | without the estimate / dense", "lrrrrrrrr", lines)


def schedules_table() -> str:
    """How much longer than the shortest the orders of chunks in flight are."""
    lines = [
        [
            f"{row['chunks']}",
            f"{row['stages']}",
            *(
                f"{row[f'{order}_mean_percent']:.1f} ({row[f'{order}_worst_percent']:.1f})"
                for order in ("in_order", "out_of_order")
            ),
            f"{row['optimal']:.0%}",
        ]
        for row in rows_of("schedule")
        if row["kind"] == "quality"
    ]
    head = "chunks | stages of each | chunk after chunk, % longer (most) | as taken, % longer (most)"
    return table(f"{head} | shortest found", "rrrrr", lines)


HOST_EXPERTS: Final = {
    "gpu w4a16, 1+1": "`gpu`, one core",
    "tensor w4a16, 1+1": "`tensor`, experts on the GPU, one core each",
    "tensor npumoe:groups w4a16, 1+1": "`npumoe:groups`, one core each",
    "tensor npumoe w4a16, 1+1": "`npumoe`, one core each",
    "gpu w4a16, 2+0": "`gpu`, both cores",
}
HOST_PASSES: Final = {
    "gpu w8a8, 1+1": "`gpu`, one core",
    "layer padding w8a8, 1+1": "`layer`, one core each",
    "auto llm.npu:shadow w8a8, 1+1": "`llm.npu:shadow`, one core each",
    "auto llm.npu w8a8, 1+1": "`llm.npu`, one core each",
    "gpu w8a8, 2+0": "`gpu`, both cores",
}


def host_table(name: str, words: Mapping[str, str]) -> str:
    """Configurations on ``host`` beside the first one: rates, and ratios of rounds.

    Args:
        name: The file of the rows.
        words: What the table calls each configuration, by its label.
    """
    times = {row["label"]: row["times"] for row in rows_of(name)}
    base = times[next(iter(words))]["samples_ns"]
    lines = []
    for label, called in words.items():
        own = times[label]
        ratios = [first / one for first, one in zip(base, own["samples_ns"], strict=True)]
        gain = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append([called, f"{own['median_ts']:.0f}", gain])
    return table("configuration | tokens/s | over `gpu` on one core", "lrr", lines)


# -- what is written and what is held ----------------------------------------------------------------------

BLOCKS: Final[Mapping[tuple[str, str], Callable[[], str]]] = {
    (MEASURED, "rates"): measured_table,
    (README, "three rows"): three_rows_table,
    (SIMULATION, "simulated rates"): simulated_table,
    (SIMULATION, "what-ifs"): what_if_table,
    (SIMULATION, "shared contexts"): contexts_table,
    (FLIGHTS, "chunks in flight"): flights_table,
    (FLIGHTS, "schedules"): schedules_table,
    (MEASURED, "perplexity"): perplexity_table,
    (MEASURED, "published model"): lambda: published_table((0, 256, 512, 2048, 7680)),
    (MEASURED, "llama.cpp, AVX2"): lambda: llama_cpp_table("llama_cpp_avx2", "phase, AVX2 only"),
    (MEASURED, "attention"): attention_table,
    (MEASURED, "overhead"): outside_table,
    (MEASURED, "memory"): memory_table,
    (MEASURED, "startup"): startup_table,
    (MEASURED, "gains"): gains_table,
    (CHECKPOINTS, "stored formats"): stored_formats_table,
    (CHECKPOINTS, "published GGUF file"): published_file_table,
    (DEVICES, "Adreno"): adreno_table,
    (KV_CACHE, "accuracy of 8 bits"): kv_accuracy_table,
    (KV_CACHE, "time of 8 bits"): kv_time_table,
    (LLM_NPU, "llm.npu, steps"): lambda: llm_npu_table("steps"),
    (LLM_NPU, "llm.npu, lengths"): lambda: llm_npu_table("lengths"),
    (LLM_NPU, "llm.npu, splits"): lambda: llm_npu_table("splits"),
    (LLM_NPU, "llm.npu, published"): lambda: llm_npu_table("published"),
    (INTEGERS, "integer forms"): integer_forms_table,
    (INTEGERS, "codes"): codes_table,
    (LLM_NPU, "w8a8 perplexity"): w8a8_table,
    (INTEGERS, "integer perplexity"): integer_perplexity_table,
    (LLM_NPU, "accuracy of the bundled model"): accuracy_tables("tiny_python_lm"),
    (LLM_NPU, "accuracy of a published model"): accuracy_tables(PUBLISHED),
    (LLM_NPU, "outlier channels"): outlier_table,
    (LLM_NPU, "importance"): importance_table,
    (SPARSE, "needed keys"): sparse_table("needed"),
    (SPARSE, "loss of the published model"): sparse_table("loss", PUBLISHED, 2048),
    (SPARSE, "loss at 4096 tokens"): sparse_table("loss", PUBLISHED, 4096),
    (SPARSE, "loss at 8192 tokens"): sparse_table("loss", PUBLISHED, 8192),
    (SPARSE, "loss of the bundled model"): sparse_table("loss", "tiny_python_lm", 512),
    (SPARSE, "agreement"): sparse_table("agreement"),
    (SPARSE, "simulated lengths"): lambda: shadow_attention_table("lengths"),
    (SPARSE, "simulated steps"): lambda: shadow_attention_table("steps"),
    (SPARSE, "retrieval"): sparse_table("retrieval"),
    (LLM_NPU, "losses"): loss_table,
    (SPARSE, "share of a prompt"): prefill_table,
    (SPARSE, "kernels of a layer"): sparse_kernels_table,
    (LLM_NPU, "the pass on host"): lambda: host_table("llm_npu_host", HOST_PASSES),
    (MIXTURES, "mixture on host"): lambda: host_table("experts_host", HOST_EXPERTS),
    (MIXTURES, "popularity of experts"): lambda: mixture_table(mixture_tables.popularity_lines, "llllr"),
    (MIXTURES, "overlap of experts"): lambda: mixture_table(mixture_tables.overlap_lines, "lrrrr"),
    (MIXTURES, "padding and overflow"): lambda: mixture_table(mixture_tables.capacity_lines, "lrrrr"),
    (MIXTURES, "perplexity under overflow"): lambda: mixture_table(mixture_tables.overflow_lines, "lrrrrrr"),
    (MIXTURES, "bytes of a decoded token"): lambda: mixture_table(mixture_tables.bytes_lines, "lrrrrrrl"),
    (MIXTURES, "parity of mixtures"): parity_table,
    (SPECULATIVE, "passes of several tokens"): guessed_passes_table,
    (SPECULATIVE, "simulated gains of guesses"): simulated_guesses_table,
    (SPECULATIVE, "measured gains of guesses"): measured_guesses_table,
    (SPECULATIVE, "measured passes of several tokens"): measured_passes_table,
    (MIXTURES, "simulated steps"): lambda: expert_table("phone"),
    (MIXTURES, "simulated steps, unlimited"): lambda: expert_table("unlimited"),
    (MIXTURES, "simulated imbalance"): lambda: expert_table("imbalances"),
}
"""Tables by page and name."""

PICTURES: Final[Mapping[str, Callable[[], str]]] = {
    "docs/kept_keys.svg": lambda: sparse_tables.kept_picture(rows_of("sparse_accuracy"), PUBLISHED, 2048),
}
"""Pictures by path."""


@cache
def phrases() -> tuple[tuple[str, str], ...]:
    """Return pages and the prose that they must hold, with figures from the rows."""
    return (*_split_phrases(), *_other_phrases())


@cache
def tables() -> Mapping[tuple[str, str], str]:
    """Return the tables by page and name."""
    return {place: made() for place, made in BLOCKS.items()}


def _split_phrases() -> Iterator[tuple[str, str]]:
    prefill, decode = (
        {way: gain(test, way, aims.one_part) for way in ("w4a16", "w4a8")} for test in ("pp256", "tg")
    )
    not_shown = [decode["w4a16"], prefill["w4a8"], decode["w4a8"]]
    assert shown(prefill["w4a16"])
    assert not any(map(shown, not_shown))
    rates = [
        fastest("pp256", "w4a8", chosen).times.median_ts for chosen in (aims.gpu_alone, aims.npu_lengths)
    ]
    odd = {way: odd_gains(way, aims.npu_lengths, aims.ODD_LENGTHS) for way in ("w4a16", "w4a8")}
    yield MEASURED, f"prefill of 256 tokens at `w4a16` {prefill['w4a16']}. The other three are **not shown**"
    yield (
        MEASURED,
        (
            f"decode at `w4a16` {not_shown[0]}, prefill at `w4a8` {not_shown[1]}, decode at `w4a8` "
            f"{not_shown[2]};"
        ),
    )
    yield MEASURED, f"the NPU's stand-in, is {rates[0] / rates[1]:.1f} times slower than the GPU's kernels"
    yield MEASURED, f"Lengths without a graph gain {odd['w4a16'][0]:.1f} to {odd['w4a8'][1]:.1f} times over"
    yield MEASURED, f"as fast as the split or faster in {whole_wins()}**"
    yield README, f"gains {prefill['w4a16']} over the better processor"
    yield README, f"as fast or faster in {whole_wins()}"
    yield (
        MEASURED,
        (
            f"**Prefill, `w4a16`**: {ratio(prefill['w4a16'])} times the better row without a split "
            f"(95 % interval {interval(prefill['w4a16'])})"
        ),
    )
    yield (
        MEASURED,
        f"**Prefill, `w4a8`**: {ratio(not_shown[1])} times ({interval(not_shown[1])}): a gain is not shown.",
    )
    yield (
        MEASURED,
        f"ONNX Runtime reaches {rates[1]:.0f} tokens a second on rounded inputs where the OpenCL "
        f"kernels reach {rates[0]:.0f}, so that {1 + rates[1] / rates[0]:.2f} would be the limit",
    )
    yield (
        MEASURED,
        (
            f"**Decode**: {ratio(not_shown[0])} times at `w4a16` ({interval(not_shown[0])}), "
            f"{ratio(not_shown[2])} at "
            f"`w4a8` ({interval(not_shown[2])}): neither gain is shown."
        ),
    )
    slow = [
        fastest("tg", way, chosen) for way in ("w4a8", "w4a16") for chosen in (aims.padding, aims.gpu_alone)
    ]
    yield (
        MEASURED,
        (
            f"({slow[0].times.median_ts:.1f} against {slow[1].times.median_ts:.1f} tokens a second at "
            f"`w4a8`, "
            f"{slow[2].times.median_ts:.1f} against {slow[3].times.median_ts:.1f} at `w4a16`)"
        ),
    )
    past = [odd_gains(way, aims.padding, [n for n in aims.ODD_LENGTHS if aims.just_past(n)]) for way in odd]
    yield (
        MEASURED,
        (
            f"{odd['w4a16'][0]:.1f} to {odd['w4a16'][1]:.1f} times the better of padding and pipe at "
            f"`w4a16`, "
            f"{odd['w4a8'][0]:.1f} to {odd['w4a8'][1]:.1f} times at `w4a8`; {min(past)[0]:.1f} to "
            f"{max(past)[1]:.1f} "
            "times padding just past a graph"
        ),
    )
    theirs = {(test, way): gain(test, way, aims.llama_cpp) for test in ("pp256", "tg") for way in odd}
    yield (
        MEASURED,
        (
            f"prefill {theirs['pp256', 'w4a16']} at `w4a16`, not shown, and {theirs['pp256', 'w4a8']} "
            f"at `w4a8`; "
            f"decode {theirs['tg', 'w4a16']} at `w4a16` and {theirs['tg', 'w4a8']} at `w4a8`."
        ),
    )
    whole = {(test, way): gain(test, way, aims.gpu_whole) for test in ("pp256", "tg") for way in odd}
    yield (
        MEASURED,
        (
            f"prefill {whole['pp256', 'w4a16']} and decode {whole['tg', 'w4a16']} at `w4a16`, neither "
            f"shown; "
            f"{whole['pp256', 'w4a8']} and {whole['tg', 'w4a8']} at `w4a8`: there the split is slower."
        ),
    )
    told = predicted()
    yield (
        MEASURED,
        (
            f"{told['rows']} rows have one. The median error is {told['median']}; predicted over "
            f"measured runs from "
            f"{told['least']} below to {told['most']} above, and without the bundled model's two rows to "
            f"{told['most_large']} above. Of the {told['cuts']} rows of `tensor` and `block` with "
            f"fast waits, "
            f"{told['slow']} take more than 15 % longer than predicted, {told['where']}."
        ),
    )
    overlap = f"{100 * fastest('pp256', 'w4a16', aims.split).trace.overlap_fraction:.0f} %"
    yield MEASURED, f"the processors overlap for {overlap} of the shorter shard's time"
    disturbed = [sample for row in large() for sample in row.times.samples_disturbed]
    yield MEASURED, f"other programs computed during {sum(disturbed)} of {len(disturbed)}; each is marked."
    waits = {row.asked.sync: row for row in split_rows() if aims.is_of_waits(row)}
    change = compare_rows(waits["operator"], waits["auto"])
    yield (
        MEASURED,
        (
            f"fast waits against clFinish after every operator: {change.ratio:.2f} times "
            f"({change.low:.2f} to {change.high:.2f})."
        ),
    )
    yield PAPER_MAP, f"reproduced: {change.ratio:.2f} times ({change.low:.2f} to {change.high:.2f}) in decode"
    yield (
        PAPER_MAP,
        (
            f"a gain is not shown: {ratio(not_shown[0])} times the better processor alone "
            f"({interval(not_shown[0])}) at "
            f"`w4a16`, {ratio(not_shown[2])} ({interval(not_shown[2])}) at `w4a8`"
        ),
    )
    tensor, block = ({way: fraction_of_padding(way, level) for way in odd} for level in ("tensor", "block"))
    yield (
        PAPER_MAP,
        (
            f"take {tensor['w4a16']} of padding's time at `tensor` and {block['w4a16']} at `block` "
            f"(`w4a16`), "
            f"{tensor['w4a8']} and {block['w4a8']} at `w4a8`"
        ),
    )


def _other_phrases() -> Iterator[tuple[str, str]]:
    yield (
        LIMITS,
        "prefill at `w4a16` without context is "
        f"{ratio(over_llama_cpp('pp256', 0, 'w4a16'))} times as fast as llama.cpp",
    )
    wins, ties, losses = ranks()
    yield MEASURED, f"`w4a8` is faster in {wins} of {wins + ties + losses} rows and slower in {losses}"
    yield (
        MEASURED,
        f"transformers in float32: "
        f"{one(rows_of('perplexity'), name='transformers float32')['perplexity']:.3f})",
    )
    tuned, shape = "env HETEROLLM_TUNING=off", "heterollm-614b141"
    yield (
        MEASURED,
        (
            f"tuned over untuned in six pairs: {pair(tuned, 'tinyllama', 'gpu w4a16, 2+0', 'pp256')} "
            f"at `w4a16` and "
            f"{pair(tuned, 'tinyllama', 'gpu w4a8, 2+0', 'pp256')} at `w4a8`"
        ),
    )
    changed = [
        pair(shape, model, "gpu w4a16, 2+0", test)
        for model, test in (
            ("tinyllama", "pp256"),
            ("tinyllama", "tg32"),
            ("tiny_python_lm", "pp256"),
            ("tiny_python_lm", "tg128"),
        )
    ]
    yield (
        MEASURED,
        (
            f"five pairs, prefill 256 {changed[0]}, decode of 32 tokens {changed[1]}; the bundled "
            f"model, thirty pairs, "
            f"prefill {changed[2]}, decode of 128 tokens {changed[3]}."
        ),
    )
    yield (
        MEASURED,
        f'"After" includes the KV cache of {rows_of("memory")[0]["kv_cache_bytes"] / 2**20:.0f} MiB.',
    )
    yield (
        SIMULATION,
        (
            f"With a limit of 14336 the 256 tokens gain {chunk_gain(14336)} times over `tensor` "
            f"instead of {chunk_gain(4096)}."
        ),
    )
    yield PAPER_MAP, f"2.2 times of the other models come out as {driver_gains()} |"
    yield "docs/soc-model.md", f"fast synchronisation, and simulated as {driver_gains()} times."
    decision = one(rows_of("schedule"), kind="decision")
    yield FLIGHTS, f"A decision takes {decision['decision_us']:.0f} µs of processor time in Python"
    own = of_kind("accuracy", "runtime")
    kept, gone = (one(own, method="shadow", pruned=share) for share in (0, 100))
    yield (
        LLM_NPU,
        f"the perplexity of {kept['windows']} windows rises by {kept['change_percent']:.1f} % with all "
        f"shadows, and by {gone['change_percent']:.1f} % with none.",
    )
    own = of_kind("sparse_accuracy", "runtime")
    mass, uniform = (one(own, rule=rule, estimator="npu") for rule in ("mass", "uniform"))
    yield (
        SPARSE,
        (
            f"the loss of {mass['windows']} windows rises by {mass['rise_nats']:.3f} "
            f"({mass['standard_error_nats']:.3f}) nats with ratios by attention mass, and by "
            f"{uniform['rise_nats']:.3f} "
            f"({uniform['standard_error_nats']:.3f}) with the same ratio in all heads."
        ),
    )
    most = emulated("activation_first", 32) / emulated("weight_first", 32)
    yield PAPER_MAP, f"reproduced in the emulator at `fp16` ({most:.0f} times at 32 tokens)"


def flat(text: str) -> str:
    """Return a text with single spaces, so that line ends do not count."""
    return " ".join(text.split())


def marks(name: str) -> tuple[str, str]:
    """Return what stands before and behind a table."""
    return f"<!-- {name}: written by bench/figures.py -->\n\n", f"\n\n<!-- end of {name} -->"


def written(page: str, text: str) -> str:
    """Return a page with its tables as the rows have them.

    Args:
        page: Its name.
        text: The page.
    """
    for (where, name), made in tables().items():
        if where == page:
            begin, end = marks(name)
            if text.count(begin) != 1 or text.count(end) != 1:
                raise SystemExit(f"{page} has no place for {name}.")
            before, rest = text.split(begin)
            text = f"{before}{begin}{made}{end}{rest.split(end)[1]}"
    return text


def differences(texts: Mapping[str, str] | None = None) -> list[str]:
    """Return what is not as the rows say: tables by name, phrases as they should be.

    Args:
        texts: Pages in place of those in the repository.
    """
    pages = {page for page, _ in BLOCKS} | {page for page, _ in phrases()}
    found = {page: (ROOT / page).read_text("utf-8") for page in pages} | dict(texts or {})
    wrong = [
        f"{page}: a table differs" for page in sorted(pages) if written(page, found[page]) != found[page]
    ]
    wrong += [
        f"{path}: differs" for path, made in PICTURES.items() if (ROOT / path).read_text("utf-8") != made()
    ]
    wrong += [f"{page}: {phrase}" for page, phrase in phrases() if flat(found[page]).count(flat(phrase)) != 1]
    return wrong


def run(names: Sequence[str]) -> list[str]:
    """Take simulated rows again, and return the figures and cells that differ.

    Args:
        names: Files of ``bench/results`` without their ending; none for the fast ones, or ``all``.
    """
    chosen = figures_run.REPEATABLE if list(names) == ["all"] else names or figures_run.FAST
    wrong: list[str] = []
    for name in chosen:
        if name not in figures_run.REPEATABLE:
            raise SystemExit(f"{name} has no simulated rows: choose {', '.join(figures_run.REPEATABLE)}.")
        old = rows_of(name)
        with console.progress_bars() as progress:
            new = figures_run.rows_again(old, len(allowed_cores()), progress)
        wrong += figures_run.row_differences(name, old, new)
        FRESH[name] = tuple(new)
    rows_of.cache_clear()
    for (page, name), made in tables().items():
        begin, end = marks(name)
        shown = (ROOT / page).read_text("utf-8").partition(begin)[2].partition(end)[0]
        wrong += figures_run.cell_differences(f"{page}, {name}", shown, made)
    return wrong


def main() -> int:
    """Write, check or simulate again; return the exit code."""
    if "--run" in sys.argv[1:2]:
        wrong = run(sys.argv[2:])
        sys.stdout.writelines(f"{line}\n" for line in wrong)
        return int(bool(wrong))
    if "--check" not in sys.argv[1:]:
        for page in {page for page, _ in BLOCKS}:
            path = ROOT / page
            path.write_text(written(page, path.read_text("utf-8")), "utf-8")
        for name, made in PICTURES.items():
            (ROOT / name).write_text(made(), "utf-8")
    wrong = differences()
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

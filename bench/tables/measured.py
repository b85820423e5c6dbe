"""Tables of measured rows: rates on ``host``, checkpoints, kernels, memory, guesses."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Final

import adreno_programs

from heterollm.benchmarks import BenchRow, best_of, read_rows
from heterollm.benchmarks.verdict import compare_rows
from tables import host
from tables.table import ROOT, Lines, Row, having, last, plain_table, rows_of, table, values_of

# -- the split on host ---------------------------------------------------------------------------------


@cache
def split_rows() -> tuple[BenchRow, ...]:
    """Return the rows of the ablation."""
    return tuple(host.latest(read_rows(ROOT / "bench" / "results" / "ablation.jsonl")))


def large() -> list[BenchRow]:
    """Return those of TinyLlama's shape."""
    return [row for row in split_rows() if row.usable and not host.is_of_waits(row)]


@table("measured", "rates", tight=True)
def rates() -> Lines:
    """Yield the rates on ``host``."""
    titles, _, *lines = host.table([row for row in split_rows() if not host.is_of_waits(row)])
    for line in (titles, *lines):
        yield line.removeprefix("| ").removesuffix(" |").split(" | ")


def fastest(test: str, precision: str, chosen: Callable[[BenchRow], bool]) -> BenchRow:
    """Return the fastest of the rows that are chosen; ``tg`` is any decode."""
    runs = host.precisions_of_runs(split_rows())
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


def interval(one: BenchRow, other: BenchRow) -> str:
    """Return the speed of a row over that of another, with its 95 % interval."""
    change = compare_rows(one, other)
    return f"{change.ratio:.2f} ({change.low:.2f} to {change.high:.2f})"


# -- beside other engines ------------------------------------------------------------------------------

ENGINES: Final = ("w4a16", "w4a8", "llama.cpp")
BESIDE: Final = "depth | `w4a16` | `w4a8` | llama.cpp Q4_0 | `w4a16` / llama.cpp | `w4a8` / llama.cpp"


@cache
def published(file: str = "published") -> Mapping[tuple[str, int, str], BenchRow]:
    """Return the rows of a published model by test, depth and precision or engine."""
    rows = read_rows(ROOT / "bench" / "results" / f"{file}.jsonl")
    return {
        (
            row.test.partition(" ")[0],
            row.asked.n_depth,
            row.precision if row.engine == "self" else row.engine,
        ): row
        for row in rows
    }


def over_llama_cpp(test: str, depth: int, precision: str, file: str = "published") -> str:
    """Return the ratio to llama.cpp of a published model's rate, and its 95 % interval."""
    return interval(published(file)[test, depth, "llama.cpp"], published(file)[test, depth, precision])


def _beside_llama_cpp(file: str) -> Lines:
    """Yield the rates of a published model beside llama.cpp."""
    rows = published(file)
    for test, phase in (("pp256", "prefill 256"), ("tg64", "decode 64")):
        for depth in sorted({depth for own, depth, _ in rows if own == test}):
            rates = [f"{rows[test, depth, way].times.median_ts:.0f}" for way in ENGINES]
            ratios = (over_llama_cpp(test, depth, way, file) for way in ENGINES[:2])
            yield phase, str(depth), *rates, *ratios


table("measured", "published model", f"phase | {BESIDE}")(lambda: _beside_llama_cpp("published"))
table("measured", "published model, matrix unit", f"phase | {BESIDE}")(
    lambda: _beside_llama_cpp("published_matrix")
)


plain_table(
    "measured",
    "llama.cpp, AVX2",
    f"phase, AVX2 only | {BESIDE}",
    "{phase} {tokens} | {depth} | {w4a16[tokens_per_s]:.0f} | {w4a8[tokens_per_s]:.0f} | "
    "{llama[tokens_per_s]:.0f} | {ratios[w4a16]:.2f} | {ratios[w4a8]:.2f}",
    lambda: [
        row | {"llama": row["llama.cpp"]}
        for row in sorted(
            rows_of("llama_cpp_avx2"), key=lambda row: (row["phase"] != "prefill", row["depth"])
        )
    ],
)


# -- quality, checkpoints ------------------------------------------------------------------------------


@table("measured", "perplexity", "weights | perplexity")
def perplexity() -> Lines:
    """Yield the perplexity of the bundled model."""
    values = {row["name"]: f"{row['perplexity']:.3f}" for row in rows_of("perplexity")}
    yield "`fp16` (FP32 on `host`)", values["fp16"]
    for block in (32, 64, 128):
        both = " / ".join(values[f"w4a16 block {block} {kind}"] for kind in ("symmetric", "asymmetric"))
        yield f"`w4a16`, block {block}: symmetric / asymmetric", both


COMPARED: Final = {True: "bit for bit", False: "differ", None: "none in the package"}


@table("checkpoints", "stored formats", "type | values | kept as | error", "lll")
def stored_formats() -> Lines:
    """Yield the block types of GGUF: equality with gguf's values, and the error of the canonical tensor."""
    for name, row in {row["type"]: row for row in having("checkpoint_formats", kind="blocks")}.items():
        error = "none" if row["db"] is None else f"{row['db']:.0f} dB"
        yield name, COMPARED[row["same_values"]], row["held"], error


@table(
    "checkpoints",
    "published GGUF file",
    "file | plan | prompt | decode | same top token | greedy text",
    "llrrrl",
)
def published_file() -> Lines:
    """Yield logits and greedy text of published GGUF files against their own values."""
    files = having("checkpoint_formats", kind="file")
    for (name, plan), row in {(row["file"], row["plan"]): row for row in files}.items():
        errors = (row["prompt_db"], row["decode_db"])
        decibels = ("equal" if db is None else f"{db:.0f} dB" for db in errors)
        text = "equal" if row["same_greedy_text"] else "differs"
        yield f"`{name}`", f"`{plan}`", *decibels, f"{row['top_1']:.1%}", text


@table("mixture-of-experts", "parity of mixtures", sides="")
def parity() -> Lines:
    """Yield the logits of mixtures against transformers."""
    rows = having("parity", level="gpu")
    families = values_of(rows, "family")
    yield [f"`{name}`" for name in families]
    yield [f"{last(rows, family=name)['sqnr_db']:.0f}" for name in families]


# -- time and memory of a pass -------------------------------------------------------------------------


@table(
    "measured",
    "attention",
    "depth | prefill 256: wall ms | attention ms | share | decode: wall ms | attention ms | share",
    "",
)
def attention() -> Lines:
    """Yield attention's share of the kernels' time."""
    for depth in (0, 512, 2048):
        cells = [str(depth)]
        for phase, digits, wall_digits in (("prefill", 0, 0), ("decode", 2, 1)):
            row = last("overhead", mode="classes", phase=phase, depth=depth)
            own_us = row["classes_us"]["attention"]
            cells += [f"{row['wall_us'] / 1e3:.{wall_digits}f}", f"{own_us / 1e3:.{digits}f}"]
            cells.append(f"{100 * own_us / sum(row['classes_us'].values()):.0f} %")
        yield cells


@table("measured", "overhead", "level | traced wall ms | kernels and graphs ms | outside | untraced wall ms")
def overhead() -> Lines:
    """Yield the time outside of kernels and graphs."""
    for level in ("gpu", "npu"):
        traced, untraced = (last("overhead", level=level, mode=mode) for mode in ("traced", "untraced"))
        inside = sum(traced["classes_us"].values()) + traced["graphs_us"]
        assert abs(1 - inside / traced["wall_us"] - traced["overhead_fraction"]) < 1e-6
        wall, busy, alone = (f"{us / 1e3:.1f}" for us in (traced["wall_us"], inside, untraced["wall_us"]))
        yield f"`{level}`", wall, busy, f"{100 * traced['overhead_fraction']:.1f} %", alone


BLOCKS: Final = (
    ("decode", "gated delta net"),
    ("decode", "state space"),
    ("decode", "short convolution"),
    ("prefill", "gated delta net"),
    ("prefill", "state space"),
)
plain_table(
    "measured",
    "recurrent blocks",
    "phase | block | its operators, µs | beside, µs | share or ratio",
    "{phase} | {block} | {own_us:.0f} | {other_us:.0f} | {share:.2f}",
    lambda: (last("recurrent", phase=phase, block=block) for phase, block in BLOCKS),
    "ll",
)


@table(
    "measured",
    "memory",
    "level | load | `w4a16`: peak / limit | after / limit | `w4a8`: peak / limit | after / limit",
    "ll",
)
def memory() -> Lines:
    """Yield memory beside its limits."""
    for row in having("memory", precision="w4a16"):
        other = last("memory", precision="w4a8", level=row["level"], cached=row["cached"])
        mib = [
            f"{of[f'{name}_bytes'] / 2**20:.0f} / {of[f'{name}_limit_bytes'] / 2**20:.0f}"
            for of in (row, other)
            for name in ("peak", "resident")
        ]
        yield f"`{row['level']}`", "cached" if row["cached"] else "quantises", *mib


plain_table(
    "measured",
    "startup",
    "level | import s | load s | first token s | all s, median | worst of 5",
    "`{level}` | {median_s[import]:.2f} | {median_s[load]:.2f} | {median_s[first_token]:.2f} | "
    "{median_s[total]:.2f} | {worst_s:.2f}",
    lambda: (
        row | {"worst_s": max(sample["total"] for sample in row["samples_s"])} for row in rows_of("startup")
    ),
)

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
"""Gain, beginning of the test, plan, cores of the GPU's part, and their words in the table."""


@table("measured", "gains", "gain of | test | TinyLlama-1.1B's shape, four layers | bundled model", "ll")
def gains() -> Lines:
    """Yield the gains of merged launches, tuning and solving at run time, as first measured."""
    for gained, test, plan, threads, words in WITHOUT:
        cells = [gained, words]
        for model in ("gains-four-layers", "tiny_python_lm"):
            rows = having("gains", gain=gained, model=model, plan=plan, gpu_threads=threads)
            row = next(
                row for row in rows if row["test"] == test or (test == "tg" and row["test"][:2] == test)
            )
            cells.append(f"{row['ratio']:.2f} ({row['ratio_low']:.2f} to {row['ratio_high']:.2f})")
        yield cells


# -- kernels -------------------------------------------------------------------------------------------

OF_A_PROGRAM: Final = "registers | waves | private B | slots"


@table("device-findings", "Adreno", f"program | Mesa: {OF_A_PROGRAM} | LLVM: {OF_A_PROGRAM}")
def adreno() -> Lines:
    """Yield the results of Mesa's compiler on the kernels for an Adreno 740, by both front ends."""
    kept = json.loads((ROOT / "bench" / "results" / "adreno_static.json").read_text("utf-8"))["tables"]
    fronts = kept["mesa 740"], kept["llvm 740"]
    present = {program.name: program.hash for program in adreno_programs.programs()}
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
        yield cells


plain_table(
    "shadow-attention",
    "share of a prompt",
    "tokens | attention | prompt, ms | its attention, ms | share | both processors, ms",
    "{tokens} | {attention} | {prefill_ms:.0f} | {attention_ms:.0f} | {share:.0%} | {overlap_ms:.0f}",
    lambda: rows_of("sparse_prefill"),
    "rl",
)


@table(
    "shadow-attention",
    "kernels of a layer",
    "heads of | keys | dense | codes | estimate | selection | attention | all four / dense | "
    "without the estimate / dense",
)
def sparse_kernels() -> Lines:
    """Yield the times of the kernels of one layer's attention on ``host``, dense and sparse."""
    for row in having("sparse_attention", keep=0.2):
        parts = (row[f"{part}_us"] for part in ("dense", "codes", "estimate", "selection", "attention"))
        ratios = (row["sparse_over_dense"], row["without_estimate_over_dense"])
        times = (f"{part_us / 1e3:.1f}" for part_us in parts)
        yield row["heads"], f"{row['context']}", *times, *(f"{ratio:.2f}" for ratio in ratios)


plain_table(
    "chunks-in-flight",
    "schedules",
    "chunks | stages of each | chunk after chunk, % longer (most) | as taken, % longer (most) "
    "| shortest found",
    "{chunks} | {stages} | {in_order_mean_percent:.1f} ({in_order_worst_percent:.1f}) | "
    "{out_of_order_mean_percent:.1f} ({out_of_order_worst_percent:.1f}) | {optimal:.0%}",
    lambda: having("schedule", kind="quality"),
    "",
)


# -- bits of the KV cache --------------------------------------------------------------------------------


@table(
    "kv-cache",
    "accuracy of the cache",
    "model and text | bits | perplexity, 32 bits | perplexity | same top token | KL, nats | logits, dB",
)
def kv_accuracy() -> Lines:
    """Yield the changes of logits by a KV cache of fewer bits."""
    for row in having("kv_bits", kind="accuracy"):
        change = row["coded_perplexity"] / row["perplexity"] - 1
        yield (
            (
                "{model}, {text}, {windows} x {window_tokens} tokens | {bits} | {perplexity:.3f} | "
                "{coded_perplexity:.3f} ({change:+.3%}) | {top_1_agreement:.1%} | {divergence:.5f} | "
                "{logits_db:.1f}"
            )
            .format(change=change, **row)
            .split(" | ")
        )


@table(
    "kv-cache",
    "time of the cache",
    "where, model | tokens | bits | ms, floats | ms | gain | disturbed | memory",
    "llr",
)
def kv_time() -> Lines:
    """Yield the gains in time and memory."""
    for row in having("kv_bits", kind="time"):
        device, spread, rounds = "phone, 16 bits", "", "-"
        if row["time"] == "measured":
            device = "host, 32 bits"
            spread = f" ({row['gains'][0]:.2f} to {row['gains'][1]:.2f})"
            rounds = f"{sum(row['disturbed'])} of {len(row['disturbed'])}"
        cells = (
            f"{row['time']}, {device}, {row['model']}",
            f"{row['tokens']} behind {row['context']}",
            str(row["bits"]),
        )
        times = (f"{row[name]:.2f}" for name in ("ms", "coded_ms"))
        memory = f"{row['coded_session_bytes'] / row['session_bytes']:.3f}"
        yield *cells, *times, f"{row['gain']:.2f}{spread}", rounds, memory


# -- techniques on host --------------------------------------------------------------------------------

RUNG_PLANS: Final = {"shadow.plan.json": "auto llm.npu:shadow", "groups.plan.json": "tensor npumoe:groups"}
"""Rungs by the names that the pages give the files of their plans."""

PLANS: Final = re.compile("|".join(map(re.escape, RUNG_PLANS)))

HOST_EXPERTS: Final = {
    "gpu w4a16, 1+1": "`gpu`, one core",
    "tensor w4a16, 1+1": "`tensor`, experts on the GPU, one core each",
    "tensor npumoe:groups w4a16, 1+1": "`npumoe:groups`, one core each",
    "tensor npumoe w4a16, 1+1": "`npumoe`, one core each",
    "gpu w4a16, 2+0": "`gpu`, both cores",
}
HOST_TECHNIQUES: Final = {
    "gpu w8a8, 1+1": "`gpu`, one core",
    "layer padding w8a8, 1+1": "`layer`, one core each",
    "auto llm.npu:shadow w8a8, 1+1": "`llm.npu:shadow`, one core each",
    "auto llm.npu w8a8, 1+1": "`llm.npu`, one core each",
    "gpu w8a8, 2+0": "`gpu`, both cores",
}


def _on_host(page: str, name: str, file: str, words: Mapping[str, str]) -> None:
    """Declare a table of configurations beside the first one: rates, and ratios of rounds."""

    @table(page, name, "configuration | tokens/s | over `gpu` on one core")
    def lines() -> Lines:
        times = {
            PLANS.sub(lambda own: RUNG_PLANS[own[0]], row["label"]): row["times"] for row in rows_of(file)
        }
        base = times[next(iter(words))]["samples_ns"]
        for label, called in words.items():
            ratios = [first / one for first, one in zip(base, times[label]["samples_ns"], strict=True)]
            gain = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            yield called, f"{times[label]['median_ts']:.0f}", gain


_on_host("llm-npu", "the technique on host", "llm_npu_host", HOST_TECHNIQUES)
_on_host("mixture-of-experts", "mixture on host", "experts_host", HOST_EXPERTS)


# -- guesses -------------------------------------------------------------------------------------------

LENGTHS: Final = (1, 2, 3, 4, 6, 8, 12, 16)
LLAMA: Final = "llama.cpp"


@table(
    "speculative",
    "measured gains of guesses",
    "model, text | plan, threads | plain, tokens/s | lookup | tokens a pass | right | draft | tokens a pass "
    "| right | disturbed",
    "ll",
)
def guesses() -> Lines:
    """Yield a line for each model, text and configuration, and one for llama.cpp behind its neighbour."""
    found = _latest("answers", "model", "text", "configuration")
    # Texts of a model stay together, whichever configuration ran first.
    for group in dict.fromkeys(key[:2] for key in found):
        for key, own in found.items():
            if key[:2] == group:
                ways = {row["way"]: row for row in own}
                yield (", ".join(group), _configuration(own[0]), *_answers(ways, ""))
                if f"{LLAMA} plain" in ways:
                    threads = f"{LLAMA}, {own[0]['llama_threads']} threads"
                    yield (", ".join(group), threads, *_answers(ways, f"{LLAMA} "))


@table(
    "speculative",
    "measured passes of several tokens",
    f"model, plan, threads; tokens of the pass | {' | '.join(map(str, LENGTHS))}",
)
def guessed_passes() -> Lines:
    """Yield the times of passes by model and configuration, relative to one token, and their spread."""
    for (model, _), own in _latest("pass", "model", "configuration").items():
        of = {row["tokens"]: row for row in own}
        found = [of[length] for length in LENGTHS]
        name = f"{model}, {_configuration(own[0])}"
        yield (name, f"{found[0]['ms']:.2f} ms", *(f"{row['ratio']:.2f}" for row in found[1:]))
        spreads = (f"{min(row['over_base']):.2f} to {max(row['over_base']):.2f}" for row in found[1:])
        yield ("rounds", "", *spreads)
        if any(row["npu"] for row in found):
            yield ("runs graphs", *("yes" if row["npu"] else "no" for row in found))


REQUESTS: Final = (1, 2, 4, 8, 16)
TOGETHER: Final = f"{' | '.join(map(str, REQUESTS))} | 8 / 1"


def _together(title: str, **asked: object) -> list[str]:
    """Return a line of the rates of so many requests at once, of the newest rows that have these values."""
    rates = [last("shared_passes", requests=count, **asked)["tokens_per_s"] for count in REQUESTS]
    gain = rates[REQUESTS.index(8)] / rates[0]
    return [title, *(f"{rate:.1f}" for rate in rates), f"{gain:.2f}"]


@table("server-scheduling", "requests together, measured", f"plan | server | {TOGETHER}")
def together_measured() -> Lines:
    """Yield the tokens a second of this server and of llama.cpp's, from one run for each plan."""
    rows = having("shared_passes", model="tinyllama", repeated=0)
    for plan in values_of(rows, "plan"):
        for engine in ("heterollm", "llama.cpp"):
            yield [f"`{plan}`", *_together(engine, model="tinyllama", repeated=0, plan=plan, engine=engine)]


@table("server-scheduling", "requests together, simulated", f"plan, simulated | {TOGETHER}")
def together_simulated() -> Lines:
    """Yield the tokens a second of passes of Llama-3-8B on a simulated phone."""
    for plan in values_of([row for row in rows_of("shared_passes") if "soc" in row], "plan"):
        yield _together(f"`{plan}`", soc="snapdragon-8gen3", plan=plan)


def _latest(kind: str, *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of the last run of each combination of values; a bench that ran again appends."""
    own = having("speculation", kind=kind)
    runs = {tuple(row[key] for key in keys): row["run"] for row in own}
    return {
        values: having(own, run=run, **dict(zip(keys, values, strict=True))) for values, run in runs.items()
    }


def _configuration(row: Row) -> str:
    plan = row["configuration"].partition("@")[0]
    chosen = f": {row['level']}" if plan == "auto" else ""
    return f"`{plan}`{chosen}, {row['threads']}"


def _answers(ways: Mapping[str, Row], engine: str) -> Iterator[str]:
    plain = ways[f"{engine}plain"]
    yield f"{plain['tokens_per_s']:.0f}"
    for way in ("lookup", "draft"):
        row = ways.get(f"{engine}{way}")
        if row is None:
            yield from ("", "", "")
            continue
        gains = [1 / over for over in row["over_base"]]
        yield f"{row['gain']:.2f} ({min(gains):.2f} to {max(gains):.2f})"
        yield "" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}"
        yield "" if row["acceptance"] is None else f"{row['acceptance']:.0%}"
    yield f"{sum(plain['disturbed'])} of {len(plain['disturbed'])}"

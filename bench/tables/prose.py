"""Prose of README.md and docs whose figures come from rows."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from heterollm.benchmarks import BenchRow
from heterollm.benchmarks.verdict import compare_rows
from tables import host
from tables.measured import fastest, large, over_llama_cpp, published, rates, split_rows
from tables.simulated import simulated
from tables.table import having, last, page_path, rows_of

PHRASES: Final = """
measured: as fast as the split or faster in {whole_wins}**
README: gains {prefill[w4a16]} over the better processor
README: as fast or faster in {whole_wins}
measured: **Prefill, `w4a16`**: {prefill[w4a16].ratio} times the better row without a split (95 % interval
    {prefill[w4a16].interval})
measured: **Prefill, `w4a8`**: {prefill[w4a8].ratio} times ({prefill[w4a8].interval}): a gain is not shown.
measured: ONNX Runtime reaches {npu_rate:.0f} tokens a second on rounded inputs where the OpenCL kernels
    reach {gpu_rate:.0f}, so that {limit:.2f} would be the limit
measured: **Decode**: {decode[w4a16].ratio} times at `w4a16` ({decode[w4a16].interval}),
    {decode[w4a8].ratio} at `w4a8` ({decode[w4a8].interval}): neither gain is shown.
measured: ({slow[0]:.1f} against {slow[1]:.1f} tokens a second at `w4a8`, {slow[2]:.1f} against
    {slow[3]:.1f} at `w4a16`)
measured: {odd[w4a16][0]:.1f} to {odd[w4a16][1]:.1f} times the better of padding and pipe at `w4a16`,
    {odd[w4a8][0]:.1f} to {odd[w4a8][1]:.1f} times at `w4a8`; {past[0]:.1f} to {past[1]:.1f} times padding
    just past a graph
measured: prefill {llama[pp256 w4a16]} at `w4a16`, not shown, and {llama[pp256 w4a8]} at `w4a8`; decode
    {llama[tg w4a16]} at `w4a16` and {llama[tg w4a8]} at `w4a8`.
measured: prefill {whole[pp256 w4a16]} and decode {whole[tg w4a16]} at `w4a16`, neither shown; {whole[pp256
    w4a8]} and {whole[tg w4a8]} at `w4a8`: there the split is slower.
measured: {predicted[rows]} rows have one. The median error is {predicted[median]}; predicted over measured
    runs from {predicted[least]} below to {predicted[most]} above, and without the bundled model's two rows
    to {predicted[most_large]} above. Of the {predicted[cuts]} rows of `tensor` and `block` with fast waits,
    {predicted[slow]} take more than 15 % longer than predicted, {predicted[where]}.
measured: the processors overlap for {overlap} of the shorter shard's time
measured: other programs computed during {disturbed} of {samples}; each is marked.
measured: fast waits against clFinish after every operator: {waits.ratio} times ({waits.interval}).
paper-map: reproduced: {waits.ratio} times ({waits.interval}) in decode
paper-map: a gain is not shown: {decode[w4a16].ratio} times the better processor alone
    ({decode[w4a16].interval}) at `w4a16`, {decode[w4a8].ratio} ({decode[w4a8].interval}) at `w4a8`
paper-map: take {padded[tensor w4a16]} of padding's time at `tensor` and {padded[block w4a16]} at `block`
    (`w4a16`), {padded[tensor w4a8]} and {padded[block w4a8]} at `w4a8`
limits: prefill at `w4a16` without context is {over_llama} times as fast as llama.cpp
measured: `w4a8` is faster in {faster} of {compared} rows and slower in {slower_rows}
measured: transformers in float32: {float32[perplexity]:.3f})
measured: tuned over untuned in six pairs: {tuned[0]} at `w4a16` and {tuned[1]} at `w4a8`
measured: "After" includes the KV cache of {cache_mib:.0f} MiB.
soc-model: With a limit of 14336 a prompt of 256 tokens gains {chunks[14336]} times over `tensor` at
    `block` instead of {chunks[4096]}.
paper-map: 2.2 times of the other models come out as {driver} |
soc-model: fast synchronisation, and simulated as {driver} times.
chunks-in-flight: A decision takes {decision[decision_us]:.0f} µs of processor time in Python
llm-npu-tables: the perplexity of {shadows[windows]} windows rises by {shadows[change_percent]:.1f} % with all
    shadows, and by {static[change_percent]:.1f} % with none.
shadow-attention: the loss of {mass[windows]} windows rises by {mass[rise_nats]:.3f}
    ({mass[standard_error_nats]:.3f}) nats with ratios by attention mass, and by {uniform[rise_nats]:.3f}
    ({uniform[standard_error_nats]:.3f}) with the same ratio in all heads.
paper-map: reproduced in the emulator at `fp16` ({order:.0f} times at 32 tokens)
"""
"""Prose by page; figures are names of :func:`figures`, and further lines of a phrase are indented."""

PRECISIONS: Final = ("w4a16", "w4a8")
TESTS: Final = ("pp256", "tg")


class Gain:
    """The speed of a row over another's, which prints with its 95 % interval."""

    def __init__(self, over: BenchRow, row: BenchRow) -> None:
        self.change = compare_rows(over, row)
        self.ratio = f"{self.change.ratio:.2f}"
        self.interval = f"{self.change.low:.2f} to {self.change.high:.2f}"

    def __str__(self) -> str:
        return f"{self.ratio} ({self.interval})"

    @property
    def shown(self) -> bool:
        """Whether the interval does not hold 1."""
        low, high = (float(end) for end in self.interval.split(" to "))
        return not low <= 1.0 <= high


def gain(test: str, precision: str, over: Callable[[BenchRow], bool]) -> Gain:
    """Return the gain of the best split."""
    return Gain(fastest(test, precision, over), fastest(test, precision, host.split))


def flat(text: str) -> str:
    """Return a text with single spaces, so that line ends do not count."""
    return " ".join(text.split())


@cache
def phrases() -> tuple[tuple[str, str], ...]:
    """Return pages and the prose that they must hold, with figures from the rows."""
    values = {**split_figures(), **other_figures()}
    lines = (part.partition(": ") for part in re.split(r"\n(?! )", PHRASES.strip()))
    return tuple((page_path(page), flat(text).format_map(values)) for page, _, text in lines)


def odd_gains(
    precision: str, over: Callable[[BenchRow], bool], lengths: Sequence[int]
) -> tuple[float, float]:
    """Return the least and the most that the best split gains at lengths without a graph."""
    timed = [length for length in lengths if (precision, length) != ("w4a8", 1000)]
    gains = [gain(f"pp{length}", precision, over).change.ratio for length in timed]
    return min(gains), max(gains)


def fraction_of_padding(level: str, precision: str) -> str:
    """Return the time of 300 tokens at a level over padding's."""
    ours = fastest("pp300", precision, lambda row: host.split(row) and row.plan_level == level)
    theirs = fastest("pp300", precision, host.padding)
    return f"{theirs.times.median_ts / ours.times.median_ts:.2f}"


def predicted() -> Mapping[str, Any]:
    """Return how far predicted times were from measured ones."""

    def off(row: BenchRow) -> float:
        return row.account.predicted_ms / row.times.measured_ms - 1

    found = [row for row in split_rows() if row.account.predicted_ms and row.times.measured_ms]
    errors = [off(row) for row in found]
    cuts = [row for row in found if host.split(row)]
    slow = [row for row in cuts if off(row) < -0.15]
    odd = [row for row in slow if row.asked.n_prompt in host.ODD_LENGTHS]
    return {
        "rows": len(found),
        "median": f"{100 * statistics.median(map(abs, errors)):.0f} %",
        "least": f"{-100 * min(errors):.0f} %",
        "most": f"{100 * max(errors):.0f} %",
        "most_large": f"{100 * max(off(row) for row in found if not host.is_of_waits(row)):.0f} %",
        "cuts": len(cuts),
        "slow": len(slow),
        "where": f"{'all' if len(odd) == len(slow) else 'some'} at lengths "
        f"{'without' if len(odd) == len(slow) else 'with'} a graph",
    }


def whole_wins() -> str:
    """Return in how many rows of the rates `gpu` on both cores is no slower than the splits."""
    titles, *cells = map(list, rates())
    places = [titles.index(name) for name in ("`tensor`", "`block`", "`gpu`, both cores")]
    found = [[float(line[place]) for place in places] for line in cells]
    return f"{sum(whole >= max(cuts) for *cuts, whole in found)} of {len(found)} rows"


def split_figures() -> dict[str, Any]:
    """Return the figures of the split on ``host``."""
    prefill, decode = ({way: gain(test, way, host.one_part) for way in PRECISIONS} for test in TESTS)
    assert prefill["w4a16"].shown
    assert not any(one.shown for one in (prefill["w4a8"], *decode.values()))
    gpu_rate, npu_rate = (
        fastest("pp256", "w4a8", chosen).times.median_ts for chosen in (host.gpu_alone, host.npu_lengths)
    )
    just_past = [length for length in host.ODD_LENGTHS if host.just_past(length)]
    past = [odd_gains(way, host.padding, just_past) for way in PRECISIONS]
    disturbed = [sample for row in large() for sample in row.times.samples_disturbed]
    waits = {row.asked.sync: row for row in split_rows() if host.is_of_waits(row)}
    overlap = fastest("pp256", "w4a16", host.split).trace.overlap_fraction
    cases = [(test, way) for test in TESTS for way in PRECISIONS]
    return {
        "prefill": prefill,
        "decode": decode,
        "gpu_rate": gpu_rate,
        "npu_rate": npu_rate,
        "limit": 1 + npu_rate / gpu_rate,
        "odd": {way: odd_gains(way, host.npu_lengths, host.ODD_LENGTHS) for way in PRECISIONS},
        "past": (min(past)[0], max(past)[1]),
        "slow": [
            fastest("tg", way, chosen).times.median_ts
            for way in PRECISIONS[::-1]
            for chosen in (host.padding, host.gpu_alone)
        ],
        "llama": {f"{test} {way}": gain(test, way, host.llama_cpp) for test, way in cases},
        "whole": {f"{test} {way}": gain(test, way, host.gpu_whole) for test, way in cases},
        "padded": {
            f"{level} {way}": fraction_of_padding(level, way)
            for level in ("tensor", "block")
            for way in PRECISIONS
        },
        "predicted": predicted(),
        "whole_wins": whole_wins(),
        "overlap": f"{100 * overlap:.0f} %",
        "disturbed": sum(disturbed),
        "samples": len(disturbed),
        "waits": Gain(waits["operator"], waits["auto"]),
    }


def pair(model: str, label: str, test: str) -> str:
    """Return a ratio of bench/pairs.py with the ends of its pairs."""
    row = last("pairs", model=model, label=label, test=test)
    return f"{row['ratio']:.2f} ({row['ratio_least']:.2f} to {row['ratio_largest']:.2f})"


def chunk_gain(limit: int) -> str:
    """Return what `block` with k-chunked graphs gains over `tensor`, by where rows begin to spill."""
    asked = {"what_if": {"npu.row_limit_columns": float(limit)}}
    block, tensor = (
        last("simulated_prior", **asked, plan_level=level)["prefill_tokens_per_second"]
        for level in ("block", "tensor")
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
    return min(min(row["cpu_us"]) for row in having("emulator_stages", form=form, tokens=tokens))


def other_figures() -> dict[str, Any]:
    """Return all other figures."""
    changes = [
        compare_rows(published()[test, depth, "llama.cpp"], published()[test, depth, "w4a8"])
        for test in ("pp256", "tg64")
        for depth in (0, 512, 2048)
    ]
    shadows, static = (last("accuracy", kind="runtime", method="shadow", pruned=share) for share in (0, 100))
    mass, uniform = (
        last("sparse_accuracy", kind="runtime", rule=rule, estimator="npu") for rule in ("mass", "uniform")
    )
    return {
        "over_llama": over_llama_cpp("pp256", 0, "w4a16").partition(" ")[0],
        "faster": sum(change.low > 1 for change in changes),
        "slower_rows": sum(change.high < 1 for change in changes),
        "compared": len(changes),
        "float32": last("perplexity", name="transformers float32"),
        "tuned": [pair("tinyllama", f"gpu {way}, 2+0", "pp256") for way in PRECISIONS],
        "cache_mib": rows_of("memory")[0]["kv_cache_bytes"] / 2**20,
        "chunks": {limit: chunk_gain(limit) for limit in (14336, 4096)},
        "driver": driver_gains(),
        "decision": last("schedule", kind="decision"),
        "shadows": shadows,
        "static": static,
        "mass": mass,
        "uniform": uniform,
        "order": emulated("activation_first", 32) / emulated("weight_first", 32),
    }
